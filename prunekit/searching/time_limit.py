"""The time that a search may take."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TimeLimit:
    """When a search, or a part of it, ends.

    Attributes:
        end: Seconds since 1970; infinite = no limit.
    """

    # Not of a clock that counts from the start of a machine: nodes of a cluster compare it with their own.
    end: float = math.inf

    @classmethod
    def after(cls, seconds: float) -> TimeLimit:
        """Returns the limit that is so many seconds away."""
        return cls(time.time() + seconds)

    @property
    def left(self) -> float:
        """Seconds that are left, 0 or more."""
        return max(self.end - time.time(), 0.0)

    def share(self, share: float) -> TimeLimit:
        """Returns the limit at which a share of what is left will have passed."""
        return self if math.isinf(self.end) else TimeLimit.after(share * self.left)


NO_LIMIT = TimeLimit()


class OutOfTime(Exception):
    """There is no time for something that has begun.

    Attributes:
        seconds: About how long it takes.
    """

    def __init__(self, message: str, seconds: float):
        super().__init__(message)
        self.seconds = seconds


class Pace:
    """Tells which measurements there is time for.

    Args:
        limit: When they end.
        costs: Name of a measurement -> about how long it takes, in any unit.
        values: Name of a measurement -> its value. The first one of the largest value is always made.
    """

    def __init__(self, limit: TimeLimit, costs: Mapping[str, float], values: Mapping[str, float]):
        self._limit, self._costs, self._values = limit, dict(costs), values
        self._start, self._done = time.time(), 0.0
        self._best = max(costs, key=lambda name: values[name], default=None)

    def has_time_for(self, name: str) -> bool:
        """Returns True if the more valuable ones that are not made yet leave time for this one."""
        if name == self._best or math.isinf(self._limit.end):
            return True
        if not self._done:
            return self._limit.left > 0
        seconds = (time.time() - self._start) / self._done
        first = sum(cost for other, cost in self._costs.items() if self._values[other] > self._values[name])
        return seconds * (first + self._costs[name]) <= self._limit.left

    def note_finished(self, name: str, *, made: bool) -> None:
        """Notes that a measurement was made, or will not be."""
        cost = self._costs.pop(name)
        self._done += cost if made else 0.0

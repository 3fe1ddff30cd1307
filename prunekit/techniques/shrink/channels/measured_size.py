"""Measured sizes of models, such as the bytes of a file: how they are measured, and the search for a wanted one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from prunekit.anatomy.channels.channel_order import Order
from prunekit.anatomy.records.plain_data import Record
from prunekit.core.layerwise.layerwise import Progress
from prunekit.techniques.shrink.channels.options import SizeTarget

# A secant step usually reaches a file's size at the second model; a noisy measure may need several halvings.
_TRIES = 7
# A share is reached at this difference, relative to it; a larger one is noted, and beyond the tolerance refused.
NEAR = 0.02


@dataclass(frozen=True)
class Measured(Record):
    """A size of a model and of a smaller one.

    Attributes:
        name: "bytes" or "latency".
        before: Size of the model.
        after: Size of the smaller model.
        unit: Unit of both, such as "ms".
        share: What is left: after / before, or an estimate from pairs that were measured at the same time.
        interval: Bounds of the share with a confidence of 95 %; both are the share for a size without noise.
        setting: What was measured and how.
        models: Number of smaller models that were measured until this one was found.
    """

    name: str
    before: float
    after: float
    unit: str
    share: float
    interval: tuple[float, float]
    setting: str
    models: int = 1

    @property
    def noise(self) -> float:
        """Half of the interval's width."""
        return (self.interval[1] - self.interval[0]) / 2

    def __str__(self) -> str:
        before, after = (f"{one:,}" if isinstance(one, int) else f"{one:.4g}" for one in (self.before, self.after))
        between = f", between {self.interval[0]:.3f} and {self.interval[1]:.3f}" if self.noise else ""
        kind = "" if self.unit == self.name else f" of {self.name}"
        return f"{after} of {before} {self.unit}{kind} ({self.share:.3f}{between})"


@dataclass(frozen=True)
class Measure:
    """A size that is measured on models.

    Attributes:
        follows: The calculated size that it nearly follows, with which the search begins: "parameters" or "macs".
        compare: Measures a smaller model beside the model for which it was made.
    """

    follows: str
    compare: Callable[[Any], Measured]


@dataclass(frozen=True, eq=False)
class _Tried:
    """A model that was measured, and the share of the predicted size that it has."""

    counts: np.ndarray
    predicted: float
    measured: Measured

    @property
    def share(self) -> float:
        return self.measured.share


def slack(tolerance: float | None) -> float:
    """Returns the difference, relative to the share, at which calculated sizes are near; 0 takes the nearest."""
    return min(NEAR, tolerance or 0.0)


@dataclass(eq=False)
class Search:
    """The search along the order of removal for the model whose measured share is nearest to the target.

    The first model is the one that a proportional size would have. Each further one lies on the straight line between
    two measured ones, or halves their distance: an exact size takes two or three models, a noisy one that does not fall
    evenly seven at most.

    Args:
        order: The order of removal.
        target: Measure and share that is left.
        tolerance: Largest difference from the share, relative to it; None takes the nearest model.
        predict: Function of the removed channels: the size that the measure follows.
        compare: Function of the removed channels: makes the model without them, and measures it.
        progress: Told of each measured model: (done, most, text).
    """

    order: Order
    target: SizeTarget
    tolerance: float | None
    predict: Callable[[np.ndarray], float]
    compare: Callable[[np.ndarray], Measured]
    progress: Progress
    _tried: dict[bytes, _Tried] = field(default_factory=dict, init=False)

    def nearest(self) -> tuple[np.ndarray, Measured]:
        """Returns (how many units each group loses, the measured size) of the nearest model.

        Raises:
            ValueError: The target is out of reach: below the measured share of the smallest model.
        """
        self._measure_models()
        if self.tolerance is not None and not self._is_near(self._best()):
            smallest = self.order.first(self.order.length)
            if self._key(smallest) not in self._tried and not self._may_take_nearest():
                self._try(smallest)
            self._check_reach(self.tolerance)
        best = self._best()
        return best.counts, replace(best.measured, models=len(self._tried))

    def _measure_models(self) -> None:
        """Measures models until one is within the tolerance, none is left to try, or the tries are used up."""
        guesses = [self.target.share]
        while len(self._tried) < _TRIES:
            counts = next((found for found in map(self._at, guesses) if self._key(found) not in self._tried), None)
            if counts is None or self._is_near(self._try(counts)):
                return
            guesses = self._guesses()

    def _check_reach(self, tolerance: float) -> None:
        """Raises for a target below all models, or one that an exact size jumps over."""
        target, best = self.target, self._best()
        lowest = min(self._tried.values(), key=lambda one: one.share)
        if lowest.share <= target.share and self.order.multiple > 1:
            # Rounded up to a multiple, the steps may be larger than the tolerance.
            return
        if self._distance(best) <= tolerance * target.share or self._may_take_nearest():
            return
        raise ValueError(
            f"{target.measure}={target.share:g} cannot be reached within {tolerance:.0%}. Received: a model of which "
            f"{best.share:.3f} is left at the nearest ({best.measured.setting}). The reachable range is "
            f"{lowest.share:.3f} to 1; channels that cannot be removed are in `prunekit inspect --groups` "
            "(pk.channel_groups)."
        )

    def _may_take_nearest(self) -> bool:
        """Returns True for a noisy size, unless the target is certainly below all models that were measured."""
        return any(one.measured.noise and one.measured.interval[0] <= self.target.share for one in self._tried.values())

    def _best(self) -> _Tried:
        return min(self._tried.values(), key=self._distance)

    @cached_property
    def _whole(self) -> float:
        return self.predict(np.zeros(0, int))

    def _try(self, counts: np.ndarray) -> _Tried:
        removed, name = self.order.removed(counts), self.target.measure
        self.progress(len(self._tried), _TRIES, f"measuring {name}")
        measured = self.compare(removed)
        self._tried[self._key(counts)] = one = _Tried(counts, self.predict(removed) / self._whole, measured)
        self.progress(len(self._tried), max(_TRIES, len(self._tried)), f"measured {measured.share:.3f} of the {name}")
        return one

    def _at(self, predicted: float) -> np.ndarray:
        wanted = predicted * self._whole
        return self.order.nearest(self.predict, wanted, slack(self.tolerance) * wanted)

    def _key(self, counts: np.ndarray) -> bytes:
        return self.order.rounded(counts).tobytes()

    def _distance(self, one: _Tried) -> float:
        return abs(one.share - self.target.share)

    def _is_near(self, one: _Tried) -> bool:
        return self._distance(one) <= min(NEAR, self.tolerance or NEAR) * self.target.share

    def _guesses(self) -> list[float]:
        """Returns predicted shares to try next, the best guess first."""
        wanted = self.target.share
        points = sorted([*((one.predicted, one.share) for one in self._tried.values()), (1.0, 1.0)])
        # The pair of neighbours with the largest models between which the share falls below the target.
        pairs = list(zip(points, points[1:], strict=False))
        for (low, below), (high, above) in reversed(pairs):
            if below <= wanted < above:
                line, middle = low + (high - low) * (wanted - below) / (above - below), (low + high) / 2
                # Of a curved size, lines alone end on the same side again and again.
                sides = [one.share > wanted for one in self._tried.values()][-2:]
                return [middle, line] if len(sides) == 2 and sides[0] == sides[1] else [line, middle]
        smallest = self.predict(self.order.removed(self.order.first(self.order.length))) / self._whole
        (low, below), (high, above) = pairs[0]
        slope = (above - below) / (high - low) if high > low else 0.0
        further = low - (below - wanted) / slope if slope > 0 else smallest
        return [max(further, smallest), smallest]

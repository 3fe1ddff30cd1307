"""Finds the file that answers a question: makes files of mixtures, and moves the bounds of the choice."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from prunekit.core.layerwise.layerwise import Progress
from prunekit.searching.building import Built
from prunekit.searching.choice import Unreachable
from prunekit.searching.costs import Costs, Mixture
from prunekit.sparsity.shorthands import SearchProfile

# What each profile minimises: a cost.
MINIMISED = {"small": "bytes", "balanced": "balanced", "fast": "latency"}
# Most files that are made, and most that are trained; the factor between the errors that are tried, and the ratio of
# errors that is near enough.
FILES, TRAINED = 9, 3
_FACTOR, _NEAR = 3.0, 1.2
# First error that is tried, for each unit of the drop.
_START = 4.0
# Share of a bound that may be left unused.
_UNUSED = 0.03
# Least and most seconds of a file for each second that is counted.
_SCALES = (0.5, 2.0)


@dataclass(frozen=True)
class Question:
    """What is asked for.

    Attributes:
        drop: By how much the metric may become worse; None: the drop is what is minimised.
        bytes: Most bytes of the file, or None.
        latency: Most seconds of a call, or None.
        profile: What is minimised within a drop.
    """

    drop: float | None = None
    bytes: int | None = None
    latency: float | None = None
    profile: SearchProfile = "small"

    @property
    def costs(self) -> dict[str, float]:
        """The bounds besides the drop: "bytes" and "latency" -> the most."""
        given = {"bytes": self.bytes, "latency": self.latency}
        return {name: float(most) for name, most in given.items() if most is not None}

    @property
    def is_timed(self) -> bool:
        """True if latencies count."""
        return self.latency is not None or self.profile != "small"

    def __str__(self) -> str:
        found = [] if self.drop is None else [f"drop={self.drop:g}"]
        found += [] if self.bytes is None else [f"bytes={self.bytes:,}"]
        found += [] if self.latency is None else [f"latency={1000 * self.latency:.3g} ms"]
        return " and ".join(found)


@dataclass(frozen=True, eq=False)
class Made:
    """A mixture whose file was made, run and measured.

    Attributes:
        mixture: What was chosen.
        built: The file.
        drops: By how much the metric is worse: on the examples for the choice, and on those that judge.
        error: Squared error of its outputs on the examples for the choice.
        seconds: Of a call; None if they were not measured.
        is_trained: True if the mixture was trained.
    """

    mixture: Mixture
    built: Built
    drops: tuple[float, float]
    error: float
    seconds: float | None = None
    is_trained: bool = False

    @property
    def costs(self) -> dict[str, float]:
        """The measured costs."""
        found = {"bytes": float(self.built.bytes)}
        return found if self.seconds is None else found | {"latency": self.seconds}

    def meets(self, bounds: dict[str, float]) -> bool:
        """Returns True if no measured cost is above its bound."""
        return all(self.costs[name] <= most for name, most in bounds.items())


@dataclass(eq=False)
class Finder:
    """The search for the file.

    Args:
        question: The question.
        costs: Errors, bytes and latencies of all mixtures.
        make: Returns the file of a mixture.
        train: Returns the file of a mixture after training, from its file before; None trains nothing.
        progress: Told of each file: (done, total, text).

    Attributes:
        made: All files that were made.
    """

    question: Question
    costs: Costs
    make: Callable[[Mixture], Made]
    train: Callable[[Made], Made] | None
    progress: Progress
    made: list[Made] = field(default_factory=list, init=False)

    def found(self) -> Made:
        """Returns the file that answers the question.

        Raises:
            ValueError: No file that was made does.
        """
        if self.question.drop is None:
            return self._best()
        low, high = self.costs.errors
        low = max(low * (1 + 1e-6), 1e-12)
        holds = self._along(low, high, min(max(_START * self.question.drop, low), high))
        if self.train is not None:
            self._along(low, high, min((holds or low) * _FACTOR, high), holds, self.train)
        if not self._proven():
            self._back(low, holds or low)
        proven = self._proven()
        if not proven:
            raise ValueError(self._missed())
        return min(proven, key=self.goal)

    def _proven(self) -> list[Made]:
        """Returns the files that hold all bounds, the drop on both parts of the examples."""
        most = self.question.drop or 0.0
        return [one for one in self.made if max(one.drops) <= most and one.meets(self.question.costs)]

    def _back(self, low: float, bound: float) -> None:
        """Makes files of less and less error until one holds the drop on the examples that judge, too."""
        for _ in range(FILES):
            if bound <= low or self._proven():
                break
            bound = max(bound / _FACTOR, low)
            self._within(bound, None)

    def goal(self, made: Made) -> float:
        """Returns the measured cost that is minimised within a drop."""
        name = MINIMISED[self.question.profile]
        if name != "balanced":
            return made.costs[name]
        whole = self.costs.whole
        return sum(value / whole[cost] for cost, value in made.costs.items())

    def _file(self, mixture: Mixture, train: Callable[[Made], Made] | None = None) -> Made:
        """Returns the file of a mixture, which is made once, and trained once."""
        same = [one for one in self.made if (one.mixture.levels, one.mixture.kept) == (mixture.levels, mixture.kept)]
        found = next((one for one in same if one.is_trained is (train is not None)), None)
        if found is not None:
            return found
        untrained = next((one for one in same if not one.is_trained), None) or self.make(mixture)
        found = untrained if train is None else train(untrained)
        self.made.append(found)
        trained = sum(one.is_trained for one in self.made)
        after, done, most = (" after training", trained, TRAINED) if train else ("", len(self.made) - trained, FILES)
        text = f"a file of {found.built.bytes:,} bytes{after}, drop {found.drops[0]:.4g}"
        self.progress(min(done, most), most, text)
        return found

    # ---- within a drop -----------------------------------------------------------------------------------------------

    def _along(
        self,
        low: float,
        high: float,
        bound: float,
        holds: float | None = None,
        train: Callable[[Made], Made] | None = None,
    ) -> float | None:
        """Makes files along the bound of the error; returns the largest bound whose file holds the drop.

        Args:
            low: The least bound that can be met.
            high: The bound that everything meets.
            bound: The first bound that is tried.
            holds: A lower one whose file is known to hold the drop; None = none is.
            train: Trains the files.
        """
        fails = None
        for _ in range(FILES if train is None else TRAINED):
            one = self._within(bound, train)
            # Without a file, more error is allowed, until others of the bounds can be met.
            if one is None or one.drops[0] <= (self.question.drop or 0.0):
                holds = bound
            else:
                fails = bound
            if fails is None:
                if bound >= high:
                    break
                bound = min(bound * _FACTOR, high)
            elif holds is None:
                if bound <= low:
                    break
                bound = max(bound / _FACTOR, low)
            elif fails / holds < _NEAR:
                break
            else:
                bound = math.sqrt(holds * fails)
        return holds

    def _within(self, error: float, train: Callable[[Made], Made] | None) -> Made | None:
        """Returns the file of least cost within an error and the bounds of the question; None if there is none."""
        for _ in range(2):
            count = len(self.made)
            bounds = {"error": error} | self._counted(self.question.costs)
            try:
                found = self._file(self.costs.least(MINIMISED[self.question.profile], bounds), train)
            except Unreachable:
                return None
            # What a file has besides the counted costs is known after the first one.
            if found.meets(self.question.costs) or len(self.made) == count:
                break
        return found

    def _counted(self, bounds: dict[str, float]) -> dict[str, float]:
        """Returns bounds of counted costs, from those of files."""
        files = [one for one in self.made if not one.is_trained]
        if not files:
            # Layers as files of their own take longer than in one file: nothing is known before the first one.
            return {name: most for name, most in bounds.items() if name == "bytes"}
        found = {}
        for name, most in bounds.items():
            near = min(files, key=lambda one: abs(one.costs[name] - most))
            found[name] = near.mixture.costs[name] + (most - near.costs[name]) / self.scale(name)
        return found

    def scale(self, name: str) -> float:
        """Returns how much a measured cost rises with the counted one."""
        pairs = {(one.mixture.costs[name], one.costs[name]) for one in self.made if not one.is_trained}
        counted, measured = np.array(sorted(pairs)).T
        if name == "bytes" or len(pairs) < 2 or np.ptp(counted) < 0.02 * counted.max():
            return 1.0
        return float(np.clip(np.polyfit(counted, measured, 1)[0], *_SCALES))

    def _missed(self) -> str:
        question, drop = self.question, self.question.drop
        nearest = min(self.made, key=lambda one: max(one.drops), default=None)
        if nearest is None:
            return f"No mixture meets the bounds. Received: {question}. Allow more of one of them."
        also = "" if question.latency is None else f" in {1000 * (nearest.seconds or 0):.3g} ms"
        remedy = "Allow more, or train the mixture: training={'epochs': 3}." if self.train is None else "Allow more."
        held = [one for one in self.made if max(one.drops) <= (drop or 0.0)]
        if held and question.costs:
            best = min(held, key=self.goal)
            also = "" if best.seconds is None else f" and takes {1000 * best.seconds:.3g} ms"
            return (
                f"No file meets all bounds. Received: {question}; the best file with this drop has "
                f"{best.built.bytes:,} bytes{also}. Allow more of one of them."
            )
        return (
            f"No file holds the drop{'' if self.train else ' without training'}. Received: {question}; the nearest of "
            f"{len(self.made)} files loses {max(nearest.drops):.4g} and has {nearest.built.bytes:,} bytes{also}. "
            f"{remedy}"
        )

    # ---- within bytes and latency ------------------------------------------------------------------------------------

    def _best(self) -> Made:
        """Returns the file of least error within the bounds of its costs."""
        bounds = self.question.costs
        counted = self._counted(bounds)
        for _ in range(FILES):
            count = len(self.made)
            try:
                one = self._file(self.costs.least("error", counted))
            except Unreachable:
                if not self.made:
                    self._least()
                break
            used = max(one.costs[name] / most for name, most in bounds.items())
            if len(self.made) == count or 1 - _UNUSED <= used <= 1:
                break
            nearer = self._counted(bounds)
            fits = one.meets(bounds)
            counted = {
                name: most if fits else min(most, 0.98 * counted.get(name, most)) for name, most in nearer.items()
            }
        found = [one for one in self.made if one.meets(bounds)]
        if not found:
            self._least()
            found = [one for one in self.made if one.meets(bounds)]
        if not found:
            raise ValueError(self._too_small())
        best = min(found, key=lambda one: one.error)
        if self.train is None:
            return best
        trained = self._file(best.mixture, self.train)
        return trained if trained.meets(bounds) and trained.drops[0] <= best.drops[0] else best

    def _least(self) -> None:
        """Makes the file of least cost."""
        name = next(iter(self.question.costs))
        self._file(self.costs.least(name, {"error": self.costs.errors[1] * 2}))

    def _too_small(self) -> str:
        smallest = min(self.made, key=lambda one: sum(one.costs[name] for name in self.question.costs))
        has = f"{smallest.built.bytes:,} bytes"
        if self.question.latency is not None:
            has += f" and takes {1000 * (smallest.seconds or 0.0):.3g} ms"
        return (
            f"No file is so small without training. Received: {self.question}; the smallest of {len(self.made)} files "
            f"has {has}. Allow more."
        )

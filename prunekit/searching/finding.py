"""Finds the file that answers a question: makes files of mixtures, and moves the bounds of the choice."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from prunekit.core.layerwise.layerwise import Progress
from prunekit.delivery.integers.integer_report import IntegerExportError
from prunekit.delivery.litert.isolated_run import ScriptFailed
from prunekit.searching.choice import Unreachable
from prunekit.searching.costs import Costs, Mixture
from prunekit.searching.question import MINIMISED, Made, Question, cost_text
from prunekit.searching.time_limit import NO_LIMIT, OutOfTime, TimeLimit
from prunekit.techniques.factorize.new_model import UnequalOutputsError

# Most files that are made, and most that are trained, and of these most before the examples that judge are asked; the
# factor between the errors that are tried; and the ratio of the errors of two files between which no more are made,
# before and after an answer is known.
FILES, TRAINED, _STEPS = 9, 5, 4
# Most files of fewer techniques that are made, and most that are trained; by what shares they are to be smaller than
# the answer; and how many times its error they may have.
FEWER, FEWER_TRAINED = 6, 4
_SMALLER, _SMALLER_TRAINED, _FAR = (0.04, 0.08), (0.08,), 2.5
# Mixtures whose errors differ by a smaller share are taken as the same.
_SAME = 0.02
_FACTOR, _NEAR, _NEAREST = 3.0, 1.2, 1.05
# First error that is tried, for each unit of the drop.
_START = 4.0
# Share of a bound that may be left unused.
_UNUSED = 0.03
# Least and most seconds of a file for each second that is counted.
_SCALES = (0.5, 2.0)
# What a file fails with that cannot be made.
_FAILURES = (IntegerExportError, UnequalOutputsError, ScriptFailed, TimeoutError, FloatingPointError)


def _between(holds: float, fails: float) -> float:
    """Returns a bound between two; where nothing is known of a wide gap, one not far below the larger."""
    return max(math.sqrt(holds * fails), fails / _FACTOR**2)


@dataclass(eq=False)
class Finder:
    """The search for the file.

    Args:
        question: The question.
        costs: Errors, bytes and latencies of all mixtures.
        make: Returns the file of a mixture.
        train: Returns the file of a mixture after training, from its file before, or raises OutOfTime; None trains
            nothing.
        progress: Told of each file: (done, total, text).
        limit: No file is begun for which there is no time, unless none answers the question.
        fewer: Functions that return the costs of the mixtures of some of the techniques.
        known: Files that were made before, without their models; they are not made again.
        answered: The drops that were answered from them; a search begins with them if there are any.

    Attributes:
        made: All files that were made.
        notes: Files that could not be made, and why.
    """

    question: Question
    costs: Costs
    make: Callable[[Mixture], Made]
    train: Callable[[Made], Made] | None
    progress: Progress
    limit: TimeLimit = NO_LIMIT
    fewer: Sequence[Callable[[], Costs]] = ()
    known: Sequence[Made] = ()
    answered: Collection[float | None] = ()
    made: list[Made] = field(default_factory=list, init=False)
    notes: list[str] = field(default_factory=list, init=False)
    _unmet: Mapping[str, float] = field(default_factory=dict, init=False)
    # The longest that it took to make a file and to train one.
    _making: float = field(default=0.0, init=False)
    _training: float = field(default=0.0, init=False)
    _is_noted: bool = field(default=False, init=False)
    # ids of the files that the search began with.
    _before: Collection[int] = field(default=(), init=False)

    def found(self) -> Made:
        """Returns the file that answers the question, with its model.

        Raises:
            ValueError: No file that was made does.
        """
        drop = self.question.drop
        self.made = list(self.known) if self.answered else []
        self._before = {id(one) for one in self.made}
        is_known = self.train is None and drop in self.answered
        while True:
            found = self._answer() if is_known else None
            found = found or (self._within_costs() if drop is None else self._within_drop(drop))
            if found.built is not None:
                return found
            # It is made again, and may differ in the last digits.
            self.made[self.made.index(found)] = self.make(found.mixture)
            is_known = True

    def _within_drop(self, drop: float) -> Made:
        """Returns the file of least cost within a drop."""
        low, high = self.costs.errors
        low = max(low * (1 + 1e-6), 1e-12)
        holds = self._along(low, high, min(max(_START * drop, low), high), *self._bracket(low))
        if self.train is not None:
            if holds is not None and holds >= high:
                # Nothing is bolder, and a training may give back what it lost.
                self._holds(high, self.train)
            else:
                self._along(low, high, min(low * _FACTOR, high), holds, train=self.train)
            self._refine_trained(low)
            self._among_fewer(_SMALLER_TRAINED, FEWER_TRAINED, self.train)
        if any(self._is_liked(one) for one in self.made):
            self._refine(low)
        answer = self._answer()
        if answer is not None and not answer.is_trained:
            self._among_fewer(_SMALLER, FEWER)
        if self._answer() is None and not self._has_time(trains=False):
            # After the limit, the file of least error is made if none holds the drop.
            self._holds(low, None)
        found = self._answer()
        if found is None:
            raise ValueError(self._missed())
        return found

    @property
    def is_complete(self) -> bool:
        """True if no file was left out for want of time."""
        return not self._is_noted

    def _has_time(self, *, trains: bool) -> bool:
        """Returns True if there is time for one more file, as long as the others took; else adds a note."""
        if self.limit.left > self._making + self._training * trains:
            return True
        if not self._is_noted:
            self.notes.append("The time was over before all files were made.")
            self._is_noted = True
        return False

    # ---- which file is the answer ------------------------------------------------------------------------------------

    def _is_liked(self, one: Made) -> bool:
        """Returns True for a file that meets all bounds on the examples for the choice."""
        drop = self.question.drop
        return (drop is None or one.drops[0] <= drop) and one.meets(self.question.costs)

    def _answer(self) -> Made | None:
        """Returns the best file so far that meets all bounds, the drop on the examples that judge, too."""
        drop = self.question.drop
        if drop is None:
            return min(filter(self._is_liked, self.made), key=lambda one: (one.drops[0], one.error), default=None)
        proven = [one for one in self.made if self._is_liked(one) and one.drops[1] <= drop]
        return min(proven, key=lambda one: (self._goal(one), one.drops[0]), default=None)

    def _goal(self, made: Made) -> float:
        """Returns the measured cost that is minimised within a drop."""
        name = MINIMISED[self.question.profile]
        if name != "balanced":
            return made.costs[name]
        return sum(made.costs[cost] / (value * self._scale(cost)) for cost, value in self.costs.whole.items())

    # ---- files -------------------------------------------------------------------------------------------------------

    def _file(self, mixture: Mixture, train: Callable[[Made], Made] | None = None) -> Made:
        """Returns the file of a mixture, which is made once, and trained once."""
        same = [one for one in (*self.made, *self.known) if one.mixture.is_as(mixture)]
        found = next((one for one in same if one.is_trained is (train is not None)), None)
        if found is not None:
            self.made += [] if found in self.made else [found]
            return found
        kept = next((one for one in same if one.built is not None and not one.is_trained), None)
        start = time.monotonic()
        untrained = kept or self.make(mixture)
        middle = time.monotonic()
        self._making = max(self._making, middle - start)
        found = untrained
        if train is not None:
            try:
                found = train(untrained)
                self._training = max(self._training, time.monotonic() - middle)
            except OutOfTime as late:
                self._training, self._is_noted = max(self._training, late.seconds), True
                self.notes.append(str(late))
        if found not in self.made:
            # One that was known without its model was made again.
            again = [one for one in same if one.is_trained is found.is_trained]
            self.made = [*(one for one in self.made if one not in again), found]
        answer = self._answer()
        for one in self.made:
            # Models are large, and one is delivered.
            one.built = one.built if one is answer or one is found else None
        trained = sum(one.is_trained for one in self.made)
        more = (FEWER_TRAINED if found.is_trained else FEWER) if self.fewer else 0
        done, most = (trained, TRAINED + more) if found.is_trained else (len(self.made) - trained, FILES + more)
        after = " after training" if found.is_trained else ""
        self.progress(min(done, most), most, f"a file of {found}{after}, drop {found.drops[0]:.4g}")
        return found

    # ---- within a drop -----------------------------------------------------------------------------------------------

    def _along(
        self,
        low: float,
        high: float,
        first: float,
        holds: float | None = None,
        fails: float | None = None,
        *,
        train: Callable[[Made], Made] | None = None,
    ) -> float | None:
        """Makes files along the bound of the error; returns the largest bound whose file holds the drop.

        Args:
            low: The least bound that can be met.
            high: The bound that everything meets.
            first: The first bound that is tried, if nothing is known.
            holds: One whose file is known to hold the drop; None = none is.
            fails: A larger one whose file is known to fail; None = none is.
            train: Trains the files.
        """
        for _ in range(FILES if train is None else _STEPS):
            if holds is None:
                if fails is not None and fails <= low:
                    break
                bound = first if fails is None else max(fails / _FACTOR, low)
            elif fails is None:
                if holds >= high:
                    break
                bound = min(max(holds * _FACTOR, first / _FACTOR**3), high)
            elif fails / holds < _NEAR:
                break
            else:
                bound = _between(holds, fails)
            if not self._has_time(trains=train is not None):
                break
            if self._holds(bound, train):
                holds = bound
            else:
                fails = bound
        return holds

    def _bracket(self, low: float) -> tuple[float | None, float | None]:
        """Returns the largest error of a known file that holds the drop, and that of the next one, which fails."""
        known = [one for one in self.made if self._has_all(one)]
        holds = max((max(one.mixture.error, low) for one in known if self._is_liked(one)), default=None)
        above = [one.mixture.error for one in known if one.mixture.error > (holds or 0.0) and not self._is_liked(one)]
        return holds, min(above, default=None)

    def _has_all(self, one: Made) -> bool:
        """Returns True for a file whose mixture was chosen among all techniques."""
        return one.mixture.techniques == self.costs.techniques

    def _refine(self, low: float) -> None:
        """Makes the files that are left between the answer and the next bolder one, or of less error without an answer.

        Files that held the drop on the examples for the choice alone leave gaps.
        """
        for _ in range(FILES):
            count, answer = len(self.made), self._answer()
            others = [one for one in self.made if self._has_all(one)]
            if answer is None:
                bound = max(min((one.mixture.error for one in others), default=low) / _FACTOR, low)
            elif sum(id(one) not in self._before for one in others) < FILES and not answer.is_trained:
                least = max(answer.mixture.error, low)
                bolder = [one.mixture.error for one in others if one.mixture.error > least]
                if not bolder or min(bolder) < _NEAREST * least:
                    break
                bound = _between(least, min(bolder))
            else:
                break
            if not self._has_time(trains=False):
                break
            self._holds(bound, None)
            if len(self.made) == count:
                break

    def _refine_trained(self, low: float) -> None:
        """Trains mixtures between the answer and the next bolder one that held the drop after a training.

        They held it on the examples for the choice alone.
        """
        while sum(one.is_trained for one in self.made) < TRAINED:
            count, answer = len(self.made), self._answer()
            least = low if answer is None else answer.mixture.error
            bolder = [
                one.mixture.error
                for one in self.made
                if one.is_trained and self._is_liked(one) and one.mixture.error > least
            ]
            if not bolder or min(bolder) < _NEAR * least or not self._has_time(trains=True):
                break
            self._holds(max(math.sqrt(min(bolder) * least), min(bolder) / _FACTOR), self.train)
            if len(self.made) == count:
                break

    def _holds(self, error: float, train: Callable[[Made], Made] | None) -> bool:
        """Returns True if the file of least cost within an error holds the drop on the examples for the choice."""
        with self._noted():
            one = self._within(error, train)
            # Without a file, more error is allowed, until others of the bounds can be met.
            return one is None or one.drops[0] <= (self.question.drop or 0.0)
        return False

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Adds a note for a file that cannot be made."""
        try:
            yield
        except _FAILURES as failure:
            self.notes.append(f"A file was not made: {failure}")

    # ---- fewer techniques --------------------------------------------------------------------------------------------

    def _among_fewer(self, shares: Sequence[float], most: int, train: Callable[[Made], Made] | None = None) -> None:
        """Makes files of fewer techniques that are smaller than the answer, by shares of it.

        Files of equal error lose more or less of the metric, and the sum of the errors does not tell which.
        """
        begun = self._count(train)
        for share in shares:
            for costs in self._kinds(share):
                less = share
                while self._count(train) - begun < most and self._has_time(trains=train is not None):
                    answer = self._answer()
                    mixture = None if answer is None else self._below(costs, answer.mixture, less)
                    if mixture is None:
                        break
                    with self._noted():
                        self._file(mixture, train)
                    if self._answer() is answer:
                        break
                    less *= 2

    def _count(self, train: Callable[[Made], Made] | None) -> int:
        """Returns how many files were trained, or were not."""
        return sum(one.is_trained is (train is not None) for one in self.made)

    def _kinds(self, less: float) -> list[Costs]:
        """Returns the costs of fewer techniques whose mixtures differ, those of the least error first."""
        answer = self._answer()
        found: list[tuple[float, Costs]] = []
        # The first one has all techniques, and was tried.
        for counted in (lambda: self.costs, *self.fewer):
            # Choices take time, too.
            if answer is None or not self._has_time(trains=False):
                break
            costs = counted()
            mixture = self._below(costs, answer.mixture, less)
            if mixture is not None and all(abs(mixture.error - error) > _SAME * error for error, _ in found):
                found.append((mixture.error, costs))
        return [costs for _, costs in sorted(found, key=lambda one: one[0]) if costs is not self.costs]

    def _below(self, costs: Costs, mixture: Mixture, less: float) -> Mixture | None:
        """Returns the mixture of least error that is smaller by a share; None if its error is far from the other's."""
        name = MINIMISED[self.question.profile]
        minimised = self.costs.whole if name == "balanced" else (name,)
        bounds = self._counted(self.question.costs)
        for cost in minimised:
            bounds[cost] = min((1 - less) * mixture.costs[cost], bounds.get(cost, math.inf))
        try:
            found = costs.least("error", bounds)
        except (Unreachable, TimeoutError):
            return None
        return found if found.error <= _FAR * mixture.error else None

    def _within(self, error: float, train: Callable[[Made], Made] | None) -> Made | None:
        """Returns the file of least cost within an error and the bounds of the question; None if there is none."""
        for _ in range(2):
            count = len(self.made)
            bounds = {"error": error} | self._counted(self.question.costs)
            try:
                found = self._file(self.costs.least(MINIMISED[self.question.profile], bounds), train)
            except Unreachable:
                self._unmet = bounds
                return None
            # What a file has besides the counted costs is known after the first one.
            if found.meets(self.question.costs) or len(self.made) == count:
                break
        return found

    def _counted(self, bounds: Mapping[str, float]) -> dict[str, float]:
        """Returns bounds of counted costs, from those of files."""
        files = [one for one in self.made if not one.is_trained]
        if not files:
            # Layers as files of their own take longer than in one file: nothing is known before the first one.
            return {name: most for name, most in bounds.items() if name != "latency" and name in self.costs.counted}
        found = {}
        for name, most in bounds.items():
            if name not in self.costs.counted:
                continue
            near = min(files, key=lambda one: abs(one.costs[name] - most))
            found[name] = near.mixture.costs[name] + (most - near.costs[name]) / self._scale(name)
        return found

    def _scale(self, name: str) -> float:
        """Returns how much a measured cost rises with the counted one."""
        pairs = {(one.mixture.costs[name], one.costs[name]) for one in self.made if not one.is_trained}
        if name == "bytes" or len(pairs) < 2:
            return 1.0
        counted, measured = np.array(sorted(pairs)).T
        if np.ptp(counted) < 0.02 * counted.max():
            return 1.0
        return float(np.clip(np.polyfit(counted, measured, 1)[0], *_SCALES))

    def _missed(self) -> str:
        question, drop = self.question, self.question.drop or 0.0
        why = f" {self.notes[0]}" if self.notes else ""
        held = [one for one in self.made if max(one.drops) <= drop]
        if question.costs and (held or not self.made):
            if held:
                reach = f"the best file with this drop has {min(held, key=self._goal)}"
            else:
                least = self.costs.least_of_each(self._unmet)
                told = [
                    cost_text(name, value, "counted ")
                    for name, value in least.items()
                    if name != "error" and value is not None
                ]
                reach = f"the least that is possible at all is {' and '.join(told) or 'more'}"
            return f"No file meets all bounds. Received: {question}; {reach}. Allow more of one of them.{why}"
        nearest = min(self.made, key=lambda one: max(one.drops), default=None)
        reach = (
            f"; the nearest of {len(self.made)} files loses {max(nearest.drops):.4g} and has {nearest}"
            if nearest
            else ""
        )
        remedy = "Allow more, or train the mixtures (`training`)." if self.train is None else "Allow more."
        if nearest and question.bytes is not None:
            # What a file has besides its weights is that of the nearest one.
            besides = nearest.bytes - nearest.mixture.costs["bytes"]
            smallest = besides + self.costs.least("bytes", {}).costs["bytes"]
            if smallest > question.bytes:
                reach += f"; the smallest possible one has about {smallest:,.0f} bytes"
                remedy = "Allow more bytes."
        without = " without training" if self.train is None else ""
        return f"No file holds the drop{without}. Received: {question}{reach}. {remedy}{why}"

    # ---- within bytes, latency and arena -----------------------------------------------------------------------------

    def _within_costs(self) -> Made:
        """Returns the file of least drop within the bounds of its costs, among those of least predicted error."""
        bounds = self.question.costs
        counted = self._counted(bounds)
        for _ in range(FILES):
            if self._answer() is not None and not self._has_time(trains=False):
                break
            count, one = len(self.made), None
            with contextlib.suppress(Unreachable), self._noted():
                one = self._file(self.costs.least("error", counted))
            if one is None:
                break
            used = max(one.costs[name] / most for name, most in bounds.items())
            if len(self.made) == count or 1 - _UNUSED <= used <= 1:
                break
            nearer = self._counted(bounds)
            if not one.meets(bounds):
                nearer = {name: min(most, 0.98 * counted.get(name, most)) for name, most in nearer.items()}
            counted = nearer
        self._fewer_within(counted)
        if self._answer() is None:
            # The least of what the bounds are about.
            known = [name for name in bounds if name in self.costs.counted] or ["bytes"]
            with self._noted():
                self._file(self.costs.least("balanced" if {"bytes", "latency"} <= set(known) else known[0], {}))
        best = self._answer()
        if best is None and not self.made:
            raise ValueError(f"No file could be made. Received: {self.question}. {' '.join(self.notes)}")
        if best is None:
            smallest = min(self.made, key=lambda one: max(one.costs[name] / most for name, most in bounds.items()))
            raise ValueError(
                f"No file meets all bounds without training. Received: {self.question}; the nearest of "
                f"{len(self.made)} files has {smallest}. Allow more."
            )
        if self.train is not None and self._has_time(trains=True):
            with self._noted():
                self._file(best.mixture, self.train)
        return self._answer() or best

    def _fewer_within(self, counted: Mapping[str, float]) -> None:
        """Makes files of fewer techniques within counted bounds."""
        begun = self._count(None)
        for costs in self.fewer:
            best = self._answer()
            if best is None or self._count(None) - begun == FEWER or not self._has_time(trains=False):
                break
            with contextlib.suppress(Unreachable), self._noted():
                mixture = costs().least("error", counted)
                if mixture.error <= _FAR * best.mixture.error:
                    self._file(mixture)

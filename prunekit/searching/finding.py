"""Finds the file that answers a question: which mixtures are made, trained, and compared."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence

from prunekit.core.layerwise.layerwise import Progress
from prunekit.searching.choice import Unreachable
from prunekit.searching.costs import Costs, Mixture
from prunekit.searching.made_files import MadeFiles
from prunekit.searching.question import MINIMISED, Made, Question, cost_text
from prunekit.searching.time_limit import NO_LIMIT, TimeLimit

# Most files that are made, most that are trained, and most trainings of the first bisection, which the examples for the
# choice alone decide.
FILES, TRAINED, _STEPS = 9, 5, 4
# Most files of fewer techniques that are made, and most that are trained; by what shares they are to be smaller than
# the answer; and how many times its error they may have.
FEWER, FEWER_TRAINED = 6, 4
_SMALLER, _SMALLER_TRAINED, _FAR = (0.04, 0.08), (0.08,), 2.5
# Mixtures whose errors differ by a smaller share are taken as the same.
_SAME = 0.02
# The factor between the errors that are tried; and the ratio of the errors of two files between which no more are made,
# before and after an answer is known.
_FACTOR, _NEAR, _NEAREST = 3.0, 1.2, 1.05
# First error that is tried, for each unit of the drop.
_START = 4.0
# Share of a bound that may be left unused; and the factor of bounds after a file that exceeds them, or cannot be made.
_UNUSED, _LESS = 0.03, 0.98


class Finder:
    """The search for the file.

    Args:
        question: The question.
        costs: Errors, bytes and latencies of all mixtures.
        make: As for `MadeFiles`.
        train: As for `MadeFiles`.
        progress: As for `MadeFiles`.
        limit: No file is begun for which there is no time, unless none answers the question.
        fewer: Functions that return the costs of the mixtures of some of the techniques.
        known: As for `MadeFiles`.
        answered: The drops that were answered from the known files; a search begins with them if there are any.

    Attributes:
        files: The files.
    """

    def __init__(  # noqa: PLR0913
        self,
        question: Question,
        costs: Costs,
        make: Callable[[Mixture], Made],
        train: Callable[[Made], Made] | None,
        progress: Progress,
        limit: TimeLimit = NO_LIMIT,
        fewer: Sequence[Callable[[], Costs]] = (),
        known: Sequence[Made] = (),
        answered: Collection[float | None] = (),
    ):
        self._question, self._costs, self._fewer, self._answered = question, costs, fewer, answered
        more = (FEWER, FEWER_TRAINED) if fewer else (0, 0)
        most = FILES + more[0], TRAINED + more[1]
        self.files = MadeFiles(question, costs, make, train, progress, limit, known, most)
        # ids of the files that the search begins with.
        self._first: Collection[int] = ()
        # Bounds that no mixture meets.
        self._unmet: Mapping[str, float] = {}

    @property
    def _trains(self) -> bool:
        return self.files.train is not None

    def found(self) -> Made:
        """Returns the file that answers the question, with its model.

        Raises:
            ValueError: No file that was made does.
        """
        drop, files = self._question.drop, self.files
        files.made = list(files.known) if self._answered else []
        self._first = {id(one) for one in files.made}
        is_known = not self._trains and drop in self._answered
        while True:
            found = files.answer if is_known else None
            found = found or (self._within_costs() if drop is None else self._within_drop(drop))
            if found.built is not None:
                return found
            files.make_again(found)
            is_known = True

    # ---- within a drop -----------------------------------------------------------------------------------------------

    def _within_drop(self, drop: float) -> Made:
        """Returns the file of least cost within a drop."""
        files = self.files
        low, high = self._costs.errors
        low = max(low * (1 + 1e-6), 1e-12)
        holds = self._bisect(low, high, min(max(_START * drop, low), high), *self._bracket(drop, low))
        if self._trains:
            if holds is not None and holds >= high:
                # No mixture has a larger error; a training may give back what this one lost.
                if files.has_time(trains=True):
                    self._holds(high, trains=True)
            else:
                self._bisect(low, high, min(low * _FACTOR, high), holds, trains=True)
            self._refine_trained(low)
            self._try_fewer(_SMALLER_TRAINED, FEWER_TRAINED, trains=True)
        if any(files.is_chosen(one) for one in files.made):
            self._refine(low)
        answer = files.answer
        if answer is not None and not answer.is_trained:
            self._try_fewer(_SMALLER, FEWER)
        if files.answer is None and not files.has_time(trains=False):
            # After the limit, the file of least error is made if none holds the drop.
            with contextlib.suppress(Unreachable), files.noting_failures():
                files.file_of(self._costs.least("error", files.counted(self._question.costs)))
        found = files.answer
        if found is None:
            raise ValueError(self._refusal())
        return found

    def _bisect(
        self,
        low: float,
        high: float,
        first: float,
        holds: float | None = None,
        fails: float | None = None,
        *,
        trains: bool = False,
    ) -> float | None:
        """Makes files of several bounds of the error; returns the largest bound whose file holds the drop.

        Args:
            low: The least bound that can be met.
            high: The bound that every mixture meets.
            first: The first bound that is tried, if nothing is known.
            holds: A bound whose file is known to hold the drop; None = no such file is known.
            fails: A larger bound whose file is known to fail; None = no such file is known.
            trains: True trains the files.
        """
        for _ in range(_STEPS if trains else FILES):
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
            if not self.files.has_time(trains=trains):
                break
            if self._holds(bound, trains=trains):
                holds = bound
            else:
                fails = bound
        return holds

    def _bracket(self, drop: float, low: float) -> tuple[float | None, float | None]:
        """Returns the largest error of a known file that holds the drop, and that of the next one, which fails.

        Files that hold the drop and exceed another bound count as well: `_holds` allows more error after them.
        """
        known = [one for one in self.files.made if self._has_all(one)]
        held = [one for one in known if one.drops[0] <= drop]
        holds = max((max(one.mixture.error, low) for one in held), default=None)
        above = [one.mixture.error for one in known if one not in held and one.mixture.error > (holds or 0.0)]
        return holds, min(above, default=None)

    def _has_all(self, file: Made) -> bool:
        """Returns True for a file whose mixture was chosen among all techniques."""
        return file.mixture.techniques == self._costs.techniques

    def _refine(self, low: float) -> None:
        """Makes the files that are left between the answer and the next bolder one, or of less error without an answer.

        Files that held the drop on the examples for the choice alone leave gaps.
        """
        files = self.files
        for _ in range(FILES):
            count, answer = len(files.made), files.answer
            others = [one for one in files.made if self._has_all(one)]
            if answer is None:
                bound = max(min((one.mixture.error for one in others), default=low) / _FACTOR, low)
            elif sum(id(one) not in self._first for one in others) < FILES and not answer.is_trained:
                least = max(answer.mixture.error, low)
                bolder = [one.mixture.error for one in others if one.mixture.error > least]
                if not bolder or min(bolder) < _NEAREST * least:
                    break
                bound = _between(least, min(bolder))
            else:
                break
            if not files.has_time(trains=False):
                break
            self._holds(bound)
            if len(files.made) == count:
                break

    def _refine_trained(self, low: float) -> None:
        """Trains mixtures between the answer and the next bolder one that held the drop after a training.

        The bolder one held it on the examples for the choice alone.
        """
        files = self.files
        while files.count(trained=True) < TRAINED:
            count, answer = len(files.made), files.answer
            least = low if answer is None else answer.mixture.error
            bolder = [
                one.mixture.error
                for one in files.made
                if one.is_trained and files.is_chosen(one) and one.mixture.error > least
            ]
            if not bolder or min(bolder) < _NEAR * least or not files.has_time(trains=True):
                break
            self._holds(max(math.sqrt(min(bolder) * least), min(bolder) / _FACTOR), trains=True)
            if len(files.made) == count:
                break

    def _holds(self, error: float, *, trains: bool = False) -> bool:
        """Returns True if the file of least cost within an error holds the drop on the examples for the choice."""
        with self.files.noting_failures():
            file = self._file_within(error, trains=trains)
            # No mixture meets the other bounds at this error: True makes the next bound of the error larger.
            return file is None or file.drops[0] <= (self._question.drop or 0.0)
        return False

    def _file_within(self, error: float, *, trains: bool) -> Made | None:
        """Returns the file of least cost within an error and the bounds of the question; None if there is none."""
        files, question = self.files, self._question
        for _ in range(2):
            count = len(files.made)
            bounds = {"error": error} | files.counted(question.costs)
            try:
                found = files.file_of(self._costs.least(MINIMISED[question.profile], bounds), trains=trains)
            except Unreachable:
                self._unmet = bounds
                return None
            # What a file has besides the counted costs is known after the first one.
            if found.meets(question.costs) or len(files.made) == count:
                break
        return found

    def _refusal(self) -> str:
        """Returns why no file answers the question, and what is reachable."""
        files, question, drop = self.files, self._question, self._question.drop or 0.0
        why = f" {files.notes[0]}" if files.notes else ""
        held = [one for one in files.made if max(one.drops) <= drop]
        if question.costs and (held or not files.made):
            if held:
                reach = f"the best file with this drop has {min(held, key=files.cost)}"
            else:
                least = self._costs.least_of_each(self._unmet or files.counted(question.costs))
                told = [
                    cost_text(name, value) for name, value in least.items() if name != "error" and value is not None
                ]
                reach = f"the least possible sum over the layers is {' and '.join(told) or 'larger'}"
            return f"No file meets all bounds. Received: {question}; {reach}. Allow more of one of them.{why}"
        nearest = min(files.made, key=lambda one: max(one.drops), default=None)
        reach = (
            f"; the nearest of {len(files.made)} files loses {max(nearest.drops):.4g} and has {nearest}"
            if nearest
            else ""
        )
        remedy = "Allow more." if self._trains else "Allow more, or train the mixtures (`training`)."
        if nearest and question.bytes is not None:
            # What a file has besides its weights is that of the nearest one.
            besides = nearest.bytes - nearest.mixture.costs["bytes"]
            smallest = besides + self._costs.least("bytes", {}).costs["bytes"]
            if smallest > question.bytes:
                reach += f"; the smallest possible one has about {smallest:,.0f} bytes"
                remedy = "Allow more bytes."
        without = "" if self._trains else " without training"
        return f"No file holds the drop{without}. Received: {question}{reach}. {remedy}{why}"

    # ---- fewer techniques --------------------------------------------------------------------------------------------

    def _try_fewer(self, shares: Sequence[float], most: int, *, trains: bool = False) -> None:
        """Makes files of fewer techniques that are smaller than the answer, by shares of it.

        Files of equal error lose more or less of the metric, and the sum of the errors does not tell which.
        """
        files = self.files
        begun = files.count(trained=trains)
        for share in shares:
            for costs in self._different_costs(share):
                less = share
                while files.count(trained=trains) - begun < most and files.has_time(trains=trains):
                    answer = files.answer
                    mixture = None if answer is None else self._smaller(costs, answer.mixture, less)
                    if mixture is None:
                        break
                    with files.noting_failures():
                        files.file_of(mixture, trains=trains)
                    if files.answer is answer:
                        break
                    less *= 2

    def _different_costs(self, less: float) -> list[Costs]:
        """Returns the costs of fewer techniques whose mixtures differ, those of the least error first."""
        answer = self.files.answer
        found: list[tuple[float, Costs]] = []
        # The first one has all techniques, and was tried.
        for counted in (lambda: self._costs, *self._fewer):
            # Choices take time, too.
            if answer is None or not self.files.has_time(trains=False):
                break
            costs = counted()
            mixture = self._smaller(costs, answer.mixture, less)
            if mixture is not None and all(abs(mixture.error - error) > _SAME * error for error, _ in found):
                found.append((mixture.error, costs))
        return [costs for _, costs in sorted(found, key=lambda one: one[0]) if costs is not self._costs]

    def _smaller(self, costs: Costs, mixture: Mixture, less: float) -> Mixture | None:
        """Returns the mixture of least error that is smaller by a share; None if its error is far from the other's."""
        name = MINIMISED[self._question.profile]
        minimised = self._costs.whole if name == "balanced" else (name,)
        bounds = self.files.counted(self._question.costs)
        for cost in minimised:
            bounds[cost] = min((1 - less) * mixture.costs[cost], bounds.get(cost, math.inf))
        try:
            found = costs.least("error", bounds)
        except (Unreachable, TimeoutError):
            return None
        return found if found.error <= _FAR * mixture.error else None

    # ---- within bytes, latency and arena -----------------------------------------------------------------------------

    def _within_costs(self) -> Made:
        """Returns the file of least drop within the bounds of its costs, among those of least predicted error."""
        files, bounds = self.files, self._question.costs
        self._try_fewer_within(self._approach(bounds))
        if files.answer is None:
            # The least of what the bounds are about.
            known = [name for name in bounds if name in self._costs.counted] or ["bytes"]
            with files.noting_failures():
                files.file_of(self._costs.least("balanced" if {"bytes", "latency"} <= set(known) else known[0], {}))
        best = files.answer
        if best is None and not files.made:
            raise ValueError(f"No file could be made. Received: {self._question}. {' '.join(files.notes)}")
        if best is None:
            smallest = min(files.made, key=lambda one: max(one.costs[name] / most for name, most in bounds.items()))
            raise ValueError(
                f"No file meets all bounds without training. Received: {self._question}; the nearest of "
                f"{len(files.made)} files has {smallest}. Allow more."
            )
        if self._trains and files.has_time(trains=True):
            with files.noting_failures():
                files.file_of(best.mixture, trains=True)
        return files.answer or best

    def _approach(self, bounds: Mapping[str, float]) -> dict[str, float]:
        """Makes files until one uses the bounds up; returns the bounds of counted costs that it had."""
        files = self.files
        counted = files.counted(bounds)
        for _ in range(FILES):
            if files.answer is not None and not files.has_time(trains=False):
                break
            count, mixture, file = len(files.made), None, None
            with contextlib.suppress(Unreachable), files.noting_failures():
                mixture = self._costs.least("error", counted)
                file = files.file_of(mixture)
            if mixture is None or not (file or counted):
                break
            if file is None:
                # It could not be made; the next smaller mixture may be.
                counted = {name: _LESS * most for name, most in counted.items()}
                continue
            used = max(file.costs[name] / most for name, most in bounds.items())
            if len(files.made) == count or 1 - _UNUSED <= used <= 1:
                break
            nearer = files.counted(bounds)
            if not file.meets(bounds):
                nearer = {name: min(most, _LESS * counted.get(name, most)) for name, most in nearer.items()}
            counted = nearer
        return counted

    def _try_fewer_within(self, counted: Mapping[str, float]) -> None:
        """Makes files of fewer techniques within counted bounds."""
        files = self.files
        begun = files.count(trained=False)
        for costs in self._fewer:
            best = files.answer
            if best is None or files.count(trained=False) - begun == FEWER or not files.has_time(trains=False):
                break
            with contextlib.suppress(Unreachable), files.noting_failures():
                mixture = costs().least("error", counted)
                if mixture.error <= _FAR * best.mixture.error:
                    files.file_of(mixture)


def _between(holds: float, fails: float) -> float:
    """Returns a bound between two; where nothing is known of a wide gap, one not far below the larger."""
    return max(math.sqrt(holds * fails), fails / _FACTOR**2)

"""The files of a search: each is made once and trained once, and the best one that meets all bounds is the answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from prunekit.core.layerwise.layerwise import Progress
from prunekit.delivery.integers.integer_report import IntegerExportError
from prunekit.delivery.litert.isolated_run import ScriptFailed
from prunekit.searching.costs import Costs, Mixture
from prunekit.searching.question import MINIMISED, Made, Question
from prunekit.searching.time_limit import NO_LIMIT, OutOfTime, TimeLimit
from prunekit.techniques.factorize.new_model import UnequalOutputsError

# Least and most seconds of a file for each second that is counted.
_SCALES = (0.5, 2.0)
# Errors of files that cannot be made.
_FAILURES = (IntegerExportError, UnequalOutputsError, ScriptFailed, TimeoutError, FloatingPointError)


@dataclass(eq=False)
class MadeFiles:
    """Makes and trains the files of a search.

    Args:
        question: The question.
        costs: Errors, bytes and latencies of all mixtures.
        make: Returns the file of a mixture.
        train: Returns the file of a mixture after training, from its file before, or raises OutOfTime; None trains
            nothing.
        progress: Told of each file: (done, total, text).
        limit: No file is begun for which there is no time.
        known: Files that were made before, without their models; they are not made again.
        most: Most files that are made, and most that are trained, as `progress` shows them.

    Attributes:
        made: All files of the search.
        notes: Files that could not be made, with the reasons.
    """

    question: Question
    costs: Costs
    make: Callable[[Mixture], Made]
    train: Callable[[Made], Made] | None
    progress: Progress
    limit: TimeLimit = NO_LIMIT
    known: Sequence[Made] = ()
    most: tuple[int, int] = (1, 1)
    made: list[Made] = field(default_factory=list, init=False)
    notes: list[str] = field(default_factory=list, init=False)
    # The longest that it took to make a file and to train one.
    _making: float = field(default=0.0, init=False)
    _training: float = field(default=0.0, init=False)
    _is_late: bool = field(default=False, init=False)

    @property
    def is_complete(self) -> bool:
        """True if no file was left out for want of time."""
        return not self._is_late

    def has_time(self, *, trains: bool) -> bool:
        """Returns True if there is time for one more file, as long as the others took; else adds a note."""
        if self.limit.left > self._making + self._training * trains:
            return True
        if not self._is_late:
            self.notes.append("The time was over before all files were made.")
            self._is_late = True
        return False

    def count(self, *, trained: bool) -> int:
        """Returns the number of trained files, or of the others."""
        return sum(one.is_trained is trained for one in self.made)

    # ---- the answer --------------------------------------------------------------------------------------------------

    def is_chosen(self, file: Made) -> bool:
        """Returns True for a file that meets all bounds on the examples for the choice."""
        drop = self.question.drop
        return (drop is None or file.drops[0] <= drop) and file.meets(self.question.costs)

    @property
    def answer(self) -> Made | None:
        """The best file that meets all bounds, the drop on the examples that judge, too; None without such a file."""
        drop = self.question.drop
        if drop is None:
            return min(filter(self.is_chosen, self.made), key=lambda one: (one.drops[0], one.error), default=None)
        proven = [one for one in self.made if self.is_chosen(one) and one.drops[1] <= drop]
        return min(proven, key=lambda one: (self.cost(one), one.drops[0]), default=None)

    def cost(self, file: Made) -> float:
        """Returns the measured cost that is minimised within a drop."""
        name = MINIMISED[self.question.profile]
        if name != "balanced":
            return file.costs[name]
        return sum(file.costs[cost] / (value * self.scale(cost)) for cost, value in self.costs.whole.items())

    # ---- one file ----------------------------------------------------------------------------------------------------

    def file_of(self, mixture: Mixture, *, trains: bool = False) -> Made:
        """Returns the file of a mixture, before or after its training.

        Raises:
            Exception: The file cannot be made; see `noting_failures`.
        """
        same = [one for one in (*self.made, *self.known) if one.mixture.equals(mixture)]
        found = next((one for one in same if one.is_trained is trains), None)
        if found is not None:
            self.made += [] if found in self.made else [found]
            return found
        kept = next((one for one in same if one.built is not None and not one.is_trained), None)
        start = time.monotonic()
        found = untrained = kept or self.make(mixture)
        self._making = max(self._making, time.monotonic() - start)
        if trains:
            found = self._trained(untrained)
        if found not in self.made:
            # The file of a known one without its model was made again.
            again = [one for one in same if one.is_trained is found.is_trained]
            self.made = [*(one for one in self.made if one not in again), found]
        answer = self.answer
        for one in self.made:
            # Models are large, and only that of the answer is delivered.
            one.built = one.built if one is answer or one is found else None
        self._tell(found)
        return found

    def make_again(self, file: Made) -> None:
        """Makes a file without its model again, with its training; a file that cannot be made again is forgotten."""
        self.made = [one for one in self.made if one is not file]
        self.known = [one for one in self.known if one is not file]
        with self.noting_failures():
            # It may differ in the last digits.
            again = self.make(file.mixture)
            self.made.append(self._trained(again) if file.is_trained else again)

    def _trained(self, file: Made) -> Made:
        """Returns the file after its training; the same one if the training would end too late."""
        if self.train is None:
            raise ValueError("A search without `training` trains no file.")
        start = time.monotonic()
        try:
            found = self.train(file)
            self._training = max(self._training, time.monotonic() - start)
        except OutOfTime as late:
            self._training, self._is_late = max(self._training, late.seconds), True
            self.notes.append(str(late))
            return file
        return found

    def _tell(self, file: Made) -> None:
        done, most = self.count(trained=file.is_trained), self.most[file.is_trained]
        after = " after training" if file.is_trained else ""
        self.progress(min(done, most), most, f"a file of {file}{after}, drop {file.drops[0]:.4g}")

    @contextlib.contextmanager
    def noting_failures(self) -> Iterator[None]:
        """Adds a note for a file that cannot be made."""
        try:
            yield
        except _FAILURES as failure:
            self.notes.append(f"A file was not made: {failure}")

    # ---- counted and measured costs ----------------------------------------------------------------------------------

    def counted(self, bounds: Mapping[str, float]) -> dict[str, float]:
        """Returns bounds of counted costs, from bounds of measured ones."""
        files = [one for one in self.made if not one.is_trained]
        if not files:
            # Layers as files of their own take longer than in one file: nothing is known before the first one.
            return {name: most for name, most in bounds.items() if name != "latency" and name in self.costs.counted}
        found = {}
        for name, most in bounds.items():
            if name not in self.costs.counted:
                continue
            near = min(files, key=lambda one: abs(one.costs[name] - most))
            found[name] = near.mixture.costs[name] + (most - near.costs[name]) / self.scale(name)
        return found

    def scale(self, name: str) -> float:
        """Returns by how much a measured cost rises with the counted one."""
        pairs = {(one.mixture.costs[name], one.costs[name]) for one in self.made if not one.is_trained}
        if name == "bytes" or len(pairs) < 2:
            return 1.0
        counted, measured = np.array(sorted(pairs)).T
        if np.ptp(counted) < 0.02 * counted.max():
            return 1.0
        return float(np.clip(np.polyfit(counted, measured, 1)[0], *_SCALES))

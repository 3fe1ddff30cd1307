"""RunLog: the state of a run, the step that runs, and what the step tells: notes for the report, and progress."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prunekit.anatomy.files.digests import weight_arrays
from prunekit.recipe.state.checkpoint import CheckpointState
from prunekit.recipe.state.progress import Listener, Progress, TimeLeft
from prunekit.recipe.state.run_inputs import RunInputs, inspected
from prunekit.recipe.state.run_state import RunState

# Fraction of a step after its last layer; 1 is the end of the step.
_NEARLY_DONE = 0.99


@dataclass
class CurrentStep:
    """The step that runs.

    Attributes:
        index: Index of the step in the recipe.
        kind: Name of the step's kind.
        seed: Random seed of the step.
        resumed: Checkpoint from which the step resumes, or the start of the step.
        started: Time at which the step began, minus its duration before a resumption, by `time.monotonic`.
    """

    index: int = 0
    kind: str = ""
    seed: int = 0
    resumed: CheckpointState = field(default_factory=CheckpointState)
    started: float = 0.0


class RunLog:
    """Notes and progress of a run.

    Args:
        run: Model, data and settings of the run.
        listener: Function that receives the progress.

    Attributes:
        run: Model, data and settings at the start of the run; `run.model` is the recipe's model.
        state: Results of earlier steps, and the masks that outlive a step.
        step: The step that runs.
    """

    def __init__(self, run: RunInputs, listener: Listener | None = None):
        self.run = run
        self.state = RunState(before=inspected(run.model, run.data), weights_before=weight_arrays(run.model))
        self.step = CurrentStep()
        self._listener = listener

    def note(self, text: str) -> None:
        """Adds a note to the report; a note that is there already is not repeated."""
        if text not in self.state.notes:
            self.state.notes.append(text)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Context manager that records prunekit's own warnings as notes of the report."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            yield
        for warning in caught:
            if issubclass(warning.category, UserWarning):
                self.note(str(warning.message))

    def report_progress(
        self, fraction: float, text: str, epoch: int | None = None, seconds_left: float | None = None
    ) -> None:
        """Reports the completed fraction of the step, in [0, 1], and its status in one line."""
        if self._listener is not None:
            index, steps = self.step.index + 1, len(self.run.recipe.steps)
            self._listener(
                Progress(index, steps, self.step.kind, fraction, text, epoch=epoch, seconds_left=seconds_left)
            )

    def step_progress(self, text: str, start: float = 0.0, end: float = 1.0) -> Callable[[int, int, str], None]:
        """Returns the progress function of an operation that goes from layer to layer.

        Args:
            text: What is done, with {} for the name.
            start: Completed fraction of the step at the operation's begin.
            end: At its end.
        """
        left = TimeLeft()

        def progress(done: int, total: int, name: str) -> None:
            fraction = min(start + (end - start) * done / total, _NEARLY_DONE)
            status = f"{text.format(name)}, {done} of {total}"
            self.report_progress(fraction, status, seconds_left=left.after(done, total))

        return progress

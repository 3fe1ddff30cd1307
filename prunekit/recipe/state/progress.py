"""Reports the progress of a run to a listener function; prints nothing."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from prunekit.delivery.reports.metrics import Metric

# Minimum seconds between two reports inside an epoch.
_PAUSE = 0.1
# Number of epochs whose median duration is that of the next ones.
_RECENT = 5


@dataclass(frozen=True)
class Progress:
    """Progress of a run at one moment.

    Attributes:
        step: Number of the step, from 1.
        steps: Number of steps.
        kind: Name of the step's kind, such as "train".
        fraction: Completed fraction of the step, in [0, 1]; 1.0 only at the end of the last epoch and of the step.
        text: Status in one line, such as "epoch 3/12, accuracy 0.971, loss 0.0931, sparsity 0.62".
        epoch: Number of the epoch that just ended, from 1; None inside an epoch.
        finished: True in the last progress event of a run.
        seconds_left: Estimated seconds until all epochs of the run have ended, from the time of the last epoch, or, in
            a step that goes from layer to layer, until all layers are done; None before the first epoch or the second
            layer, and elsewhere.
    """

    step: int
    steps: int
    kind: str
    fraction: float
    text: str
    epoch: int | None = None
    finished: bool = False
    seconds_left: float | None = None


class TimeLeft:
    """Estimates how long an operation still takes that reports how many of its parts are done."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def after(self, done: int, total: int) -> float | None:
        """Returns the seconds that are left, as if all parts took the mean time; None before the second part.

        The time until the first report is left out: it has the preparation of all parts.

        Args:
            done: Number of parts that are done; fewer than before begin a new operation.
            total: Number of parts.
        """
        now = time.monotonic()
        if self._first is None or done <= self._first[0]:
            self._first = done, now
            return None
        parts, began = self._first
        return (now - began) / (done - parts) * (total - done)


Listener = Callable[[Progress], None]
Tell = Callable[[float, str, int | None, float | None], None]


class EpochProgress(keras.callbacks.Callback):
    """Reports the progress of one `fit` at the end of each epoch, and at most ten times a second inside epochs.

    Args:
        tell: Function of (fraction, text, epoch number at the end of an epoch, else None, seconds left or None).
        metrics: Metrics whose values on the validation data are shown, in this order.
        later_epochs: Number of epochs of later steps, for the estimate of the time left.
        epochs: Number of epochs of the step, which may train in several calls of `fit`; 0 = those of this call.
    """

    def __init__(self, tell: Tell, metrics: Sequence[Metric], later_epochs: int = 0, epochs: int = 0):
        super().__init__()
        self._tell = tell
        self._metrics = metrics
        self._later = later_epochs
        self._epochs_of_step = epochs
        self._began = 0.0
        self._durations: list[float] = []
        self._ends: float | None = None
        self._epoch = 0
        self._last = 0.0

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._epoch, self._began = epoch, time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        now, batches = time.monotonic(), self.params.get("steps") or 0
        # `on_epoch_end` reports after the last batch; a report here could give fraction 1.0 before the epoch's end.
        if now - self._last < _PAUSE or batch + 1 >= batches:
            return
        self._last = now
        done = self._epoch + (batch + 1) / batches
        self._tell(done / self._epochs, f"epoch {self._epoch + 1}/{self._epochs}", None, self._seconds_left(now))

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        now = time.monotonic()
        self._durations.append(now - self._began)
        # The first epoch of a step includes its compilation.
        recent = self._durations[1:][-_RECENT:] or self._durations
        self._ends = now + (self._epochs - epoch - 1 + self._later) * statistics.median(recent)
        summary = self._summary(epoch + 1, logs or {})
        self._tell((epoch + 1) / self._epochs, summary, epoch + 1, self._seconds_left(now))

    def _seconds_left(self, now: float) -> float | None:
        return None if self._ends is None else max(self._ends - now, 0.0)

    @property
    def _epochs(self) -> int:
        return self._epochs_of_step or self.params.get("epochs") or 1

    def _summary(self, epoch: int, logs: Mapping[str, Any]) -> str:
        parts = [f"epoch {epoch}/{self._epochs}"]
        parts += metric_texts(self._metrics, {metric.name: logs.get(f"val_{metric.name}") for metric in self._metrics})
        if "sparsity" in logs:
            parts.append(f"sparsity {logs['sparsity']:.4f}")
        return ", ".join(parts)


def metric_texts(metrics: Sequence[Metric], values: Mapping[str, Any]) -> list[str]:
    """Returns "name value" for each metric that has a value."""
    return [f"{one.name} {one.text(values[one.name])}" for one in metrics if values.get(one.name) is not None]

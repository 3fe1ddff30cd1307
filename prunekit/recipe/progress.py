"""What a run says while it works: values for whoever draws them; nothing is printed here."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras

# Seconds between two reports from inside an epoch.
_PAUSE = 0.1


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    Attributes:
        step: Number of the step, from 1.
        steps: Number of steps.
        kind: train, prune, finetune, export or expect.
        fraction: How much of the step is behind, in [0, 1]; 1.0 at the end of its last epoch and at its own end alone.
        text: One line: "epoch 3/12, accuracy 0.971, sparsity 0.62".
        epoch: The epoch just ended, from 1, where this is the end of one.
        finished: True once, when the run is over.
    """

    step: int
    steps: int
    kind: str
    fraction: float
    text: str
    epoch: int | None = None
    finished: bool = False


Listener = Callable[[Progress], None]


class EpochProgress(keras.callbacks.Callback):
    """Reports the progress of one `fit`, at the ends of epochs and about ten times a second in between.

    Args:
        tell: Takes fraction, text and, at the end of an epoch, its number.
        accuracy: The metric to show, if there is one.
    """

    def __init__(self, tell: Callable[[float, str, int | None], None], accuracy: str | None):
        super().__init__()
        self._tell = tell
        self._accuracy = accuracy
        self._epoch = 0
        self._last = 0.0

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        now, batches = time.monotonic(), self.params.get("steps") or 0
        # The last batch is the end of the epoch, which tells itself: 1.0 is for the end of the step alone.
        if now - self._last < _PAUSE or batch + 1 >= batches:
            return
        self._last = now
        done = self._epoch + (batch + 1) / batches
        self._tell(done / self._epochs, f"epoch {self._epoch + 1}/{self._epochs}", None)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._tell((epoch + 1) / self._epochs, self._summary(epoch + 1, logs or {}), epoch + 1)

    @property
    def _epochs(self) -> int:
        return self.params.get("epochs") or 1

    def _summary(self, epoch: int, logs: Mapping[str, Any]) -> str:
        parts = [f"epoch {epoch}/{self._epochs}"]
        accuracy = logs.get(f"val_{self._accuracy}")
        if accuracy is not None:
            parts.append(f"accuracy {accuracy:.4f}")
        elif "val_loss" in logs:
            parts.append(f"loss {logs['val_loss']:.4g}")
        if "sparsity" in logs:
            parts.append(f"sparsity {logs['sparsity']:.4f}")
        return ", ".join(parts)

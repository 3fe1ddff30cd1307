"""SavedFiles: the sparsity of the files that ModelCheckpoints write during a `fit`."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras


class _Saved(NamedTuple):
    """A file written by a ModelCheckpoint: its path, epoch, and the sparsity of the pruned weights in it."""

    path: str
    epoch: int
    sparsity: float


class SavedFiles:
    """Records the last file of each ModelCheckpoint of a `fit`, with the sparsity of the pruned weights in it.

    Compares the files on disk before and after a batch or an epoch ends, so that no class of Keras is patched.

    Args:
        callbacks: The callbacks of the `fit`. A ModelCheckpoint inside another callback, such as `AtFinalSparsity`, is
            not among them.
    """

    def __init__(self, callbacks: Sequence[Any]):
        found = [one for one in callbacks if isinstance(one, keras.callbacks.ModelCheckpoint)]
        self._at_batches = [one for one in found if one.save_freq != "epoch"]
        self._at_epochs = [one for one in found if one.save_freq == "epoch"]
        self._saved: dict[int, _Saved] = {}
        # Files that may be written as this batch or epoch ends: (ModelCheckpoint, entry to record, file stamp before).
        self._pending: list[tuple[Any, _Saved, Any]] = []

    def expect_after_batch(self, epoch: int, sparsity: Callable[[], float], values: Mapping[str, Any]) -> None:
        """Records the stamps of the files that may be written when this batch ends.

        Args:
            epoch: Number of the epoch, from 1.
            sparsity: Returns the sparsity of the pruned weights now; called only if a file may be written.
            values: The logs, by which file names are formatted.
        """
        self._expect(self._at_batches, epoch, sparsity, values)

    def expect_after_epoch(self, epoch: int, sparsity: Callable[[], float], values: Mapping[str, Any]) -> None:
        """Records the stamps of the files that may be written when this epoch ends; arguments as for a batch."""
        self._expect(self._at_epochs, epoch, sparsity, values)

    def _expect(self, checkpoints, epoch: int, sparsity: Callable[[], float], values: Mapping[str, Any]) -> None:
        self._pending = []
        for one in checkpoints:
            path = _formatted(one.filepath, {"epoch": epoch, **values})
            self._pending.append((one, _Saved(path, epoch, sparsity()), _stamp(path)))

    def note_saved(self, sparsity_of: Callable[[Any], float | None]) -> None:
        """Records which pending files were written; called after all other callbacks ended the batch or epoch.

        Args:
            sparsity_of: Returns the sparsity of the weights that a ModelCheckpoint saved, or None if the sparsity has
                not changed since the file was expected.
        """
        pending, self._pending = self._pending, []
        for one, saved, before in pending:
            if _stamp(saved.path) != before:
                changed = sparsity_of(one)
                self._saved[id(one)] = saved if changed is None else saved._replace(sparsity=changed)

    def less_sparse(self, sparsity: float) -> list[str]:
        """Returns a message for each file whose weights are less sparse than `sparsity`, which the model has now."""
        return [
            f"{saved.path}, which ModelCheckpoint wrote last in epoch {saved.epoch}, has sparsity {saved.sparsity:.4f} "
            f"in the pruned weights; the model now has {sparsity:.4f}. Save the model after fit, or use "
            "pk.AtFinalSparsity(ModelCheckpoint(...)), which saves only epochs at the final sparsity."
            for saved in self._saved.values()
            if saved.sparsity < sparsity
        ]


def _formatted(path: str, values: Mapping[str, Any]) -> str:
    try:
        return path.format(**values)
    except (KeyError, ValueError, IndexError):
        # ModelCheckpoint raises its own error for an invalid path.
        return path


def _stamp(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size

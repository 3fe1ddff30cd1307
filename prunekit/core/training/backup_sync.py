"""Completes the backups of `keras.callbacks.BackupAndRestore`: consistent copies of its files, and callbacks' states.

Keras overwrites its weights file in place, then the file with the epoch number. A process killed between the two writes
resumes with weights and number of different epochs; a process killed during a write loses the backup.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import keras
import numpy as np

from prunekit.core.runtime.random_state import random_state, restore_random_state
from prunekit.core.runtime.snapshot import Snapshot, Snapshots, arrays_under, lacking, write_bytes
from prunekit.core.training import distribution

_WEIGHTS, _POSITION = "latest.weights.h5", "training_metadata.json"
_STEM = "prunekit"


@runtime_checkable
class ResumableCallback(Protocol):
    """A callback with a state besides weights and optimizer, from which an interrupted `fit` goes on."""

    def snapshot(self) -> Snapshot:
        """Returns the state at the end of an epoch."""

    def resume(self, snapshot: Snapshot) -> None:
        """Lets the next `fit` go on from a state; called before it."""


class BackedUpCallback(ResumableCallback, Protocol):
    """A callback whose state is saved with the backups of a `BackupAndRestore`."""

    model: Any
    resumption: Resumption

    def start(self) -> None:
        """Begins the training of this callback, where there is no saved state."""

    def restore(self, snapshot: Snapshot) -> None:
        """Takes up a state, instead of `start`; weights and optimizer are restored already."""


class Backup:
    """Copies the files of a `BackupAndRestore` within its folder, together with the states of callbacks.

    Create the Backup before Keras reads its files: the constructor restores them from the newest complete copy.

    Args:
        folder: The `backup_dir` of the callback.
        writes: Whether this process writes; only one of the processes that share the folder may write.

    Raises:
        ValueError: Keras's files belong to a later training than the newest copy, or the copy is of another version.
        OSError: The folder cannot be read or written.
    """

    def __init__(self, folder: str | os.PathLike[str], *, writes: bool = True):
        self._folder, self._writes = Path(folder), writes
        self._snapshots = Snapshots(self._folder, _STEM)
        #: Saved state of each callback, in list order; None if the backup contains none.
        self.states: list[Snapshot] | None = None
        #: Saved state of the random generators; None if the backup contains none, and after it was restored.
        self.random: dict[str, Any] | None = None
        found = self._snapshots.newest()
        if found is not None:
            self._check(found)
            self._take(found)
        if writes:
            # Other processes wait for this one at the creation of the mask variables, before Keras reads its files.
            self._mend(found)
        self._marked = found is not None or self._stamp() is not None
        self._seen = self._stamp()

    @classmethod
    def beside(cls, callbacks: Sequence[Any], *, writes: bool = True) -> Backup | None:
        """Returns the Backup of the `BackupAndRestore` in `callbacks`, or None if there is none on a local folder."""
        for one in callbacks:
            if isinstance(one, keras.callbacks.BackupAndRestore):
                if "://" not in str(one.backup_dir):
                    return cls(one.backup_dir, writes=writes)
                warnings.warn(
                    f"The state of prunekit's callbacks is saved with backups in local folders only. Received: "
                    f"{one.backup_dir}. A training resumed from this backup derives its masks from the zeros of the "
                    "weights.",
                    stacklevel=4,
                )
        return None

    def mark(self) -> None:
        """Records the start of a training: from here on, Keras's files are valid only once they were copied."""
        if self._writes and not self._marked:
            self._marked = True
            self._snapshots.write(Snapshot({"epoch": 0, "states": None}, {}))

    @property
    def changed(self) -> bool:
        """Whether this process writes and Keras has saved since the last copy."""
        return self._writes and self._stamp() not in (None, self._seen)

    def keep(self, states: Sequence[Snapshot], random: dict[str, Any]) -> None:
        """Copies Keras's files, with the states of the callbacks and of the random generators.

        Args:
            states: State of each callback, in list order.
            random: `random_state` of the model.

        Raises:
            OSError: The copy cannot be written, for example because the disk is full; earlier copies are kept.
        """
        stamp = self._stamp()
        # Memory maps, so that the files are not loaded into memory.
        arrays: dict[str, np.ndarray] = {
            f"file/{name}": np.memmap(self._folder / name, np.uint8, "r") for name in (_WEIGHTS, _POSITION)
        }
        for number, state in enumerate(states):
            arrays |= {f"{number}/{name}": array for name, array in state.arrays.items()}
        values = {"epoch": self._epoch(), "states": [state.values for state in states], "random": random}
        self._snapshots.write(Snapshot(values, arrays))
        self._seen = stamp

    def _check(self, found: Snapshot) -> None:
        wrong = lacking(found.values, {"epoch": int, "states": list | None})
        if wrong is not None:
            raise ValueError(
                f"The backup in {self._folder} lacks {wrong}, or holds it as another version of prunekit wrote it. "
                f"Delete {_STEM}-* there, or begin in another folder."
            )
        saved, epoch = found.values["epoch"], self._epoch()
        if epoch is not None and epoch > saved + 1:
            raise ValueError(
                f"{self._folder} holds a backup after epoch {epoch} that was made without prunekit, and one with it "
                f"after epoch {saved}. Delete {_STEM}-* there to continue from the later backup, or the "
                "other files to continue from the earlier backup."
            )

    def _mend(self, found: Snapshot | None) -> None:
        if found is not None:
            self._put_back(found)
        elif self._torn():
            self._set_aside()

    def _put_back(self, found: Snapshot) -> None:
        for name in (_WEIGHTS, _POSITION):
            if f"file/{name}" in found.arrays:
                write_bytes(self._folder / name, found.arrays[f"file/{name}"].data)
            else:
                (self._folder / name).unlink(missing_ok=True)

    def _take(self, found: Snapshot) -> None:
        if found.values["states"] is not None:
            self.random = found.values["random"]
            self.states = [
                Snapshot(values, arrays_under(found.arrays, f"{number}/"))
                for number, values in enumerate(found.values["states"])
            ]

    def _torn(self) -> bool:
        """Returns True if Keras's backup is inconsistent: one of its files is missing, or the epoch is unreadable."""
        here = [(self._folder / name).exists() for name in (_WEIGHTS, _POSITION)]
        return any(here) and not (all(here) and self._epoch() is not None)

    def _set_aside(self) -> None:
        for name in (_WEIGHTS, _POSITION):
            if (self._folder / name).exists():
                os.replace(self._folder / name, self._folder / f"{name}.torn")
        warnings.warn(
            f"The backup in {self._folder} is incomplete: it needs both {_WEIGHTS} and {_POSITION}. Its files are "
            "renamed to *.torn, and training starts from the beginning.",
            stacklevel=5,
        )

    def _epoch(self) -> int | None:
        try:
            return int(json.loads((self._folder / _POSITION).read_text(encoding="utf-8"))["epoch"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def _stamp(self) -> tuple[int, ...] | None:
        try:
            # Keras writes this file last.
            found = os.stat(self._folder / _POSITION)
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


class Resumption:
    """Resumes a callback from a backup, and adds its state to the backups of its `fit`.

    Attributes:
        state: Saved state to resume from; None = a new training.
    """

    def __init__(self) -> None:
        self.state: Snapshot | None = None
        self._backup: Backup | None = None
        self._together: list[BackedUpCallback] = []

    def find_backup(self, callback: BackedUpCallback, found: keras.callbacks.CallbackList | None) -> None:
        """Finds the backup in the callback's list; the first callback with a resumption opens it for all of them.

        Raises:
            ValueError: As for `Backup`; the backup belongs to a fit with another number of such callbacks.
        """
        self._backup = None
        if found is None:
            return
        self._together = [one for one in found.callbacks if isinstance(getattr(one, "resumption", None), Resumption)]
        first = self._together[0]
        # The states of all callbacks are saved together, in one file.
        if first is callback:
            self._backup = Backup.beside(found.callbacks, writes=distribution.speaks_for(callback.model))
        else:
            self._backup = first.resumption._backup
        states = None if self._backup is None else self._backup.states
        if states is None:
            return
        if len(states) != len(self._together):
            kinds = " or ".join(dict.fromkeys(f"{type(one).__name__}s" for one in self._together))
            raise ValueError(
                f"The backup is of a fit with {len(states)} {kinds}. Received: {len(self._together)}. Resume with the "
                "callbacks of the first run, or begin in another folder."
            )
        self.state = states[self._together.index(callback)]

    def begin(self, callback: BackedUpCallback) -> None:
        """Resumes the callback from the backup, or starts it if there is none."""
        if self.restore_pending(callback):
            return
        callback.start()
        if self._backup is not None:
            self._backup.mark()

    def restore_pending(self, callback: BackedUpCallback) -> bool:
        """Restores the saved state into the callback; returns False if there is none."""
        if self.state is None:
            return False
        state, self.state = self.state, None
        callback.restore(state)
        if self._backup is not None and self._backup.random is not None:
            restore_random_state(callback.model, self._backup.random)
            self._backup.random = None
        return True

    def keep(self) -> None:
        """Copies a backup that Keras has just saved, with the states of all callbacks, once per backup."""
        if self._backup is not None and self._together[0].resumption is self and self._backup.changed:
            self._backup.keep([one.snapshot() for one in self._together], random_state(self._together[0].model))

"""Makes what `keras.callbacks.BackupAndRestore` saves whole: its two files and the pruners' state, of one moment.

Keras overwrites its file of weights in place, and then the file that says after which epoch they were: killed in
between, a training goes on with the weights of one epoch and the number of another; killed inside, with nothing.
"""

import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from prunekit.core import distribution
from prunekit.core.random_state import random_state, restore_random_state
from prunekit.core.snapshot import Snapshot, Snapshots, lacking, write_bytes
from prunekit.techniques.pruning.pruner import Pruner
from prunekit.techniques.pruning.pruner_state import pruner_state, restore_pruner

_WEIGHTS, _POSITION = "latest.weights.h5", "training_metadata.json"
_STEM = "prunekit"


class Backup:
    """Copies of a `BackupAndRestore`'s files, in its folder, each with the state of the pruners at that moment.

    Made before Keras reads its files: the newest whole copy is put back in their place.

    Args:
        folder: The `backup_dir` of the callback.
        writes: Whether this process does; of several that share the folder, one does.

    Raises:
        ValueError: Keras's files are those of a later training.
        OSError: The folder cannot be read or written.
    """

    def __init__(self, folder: str | os.PathLike[str], *, writes: bool = True):
        self._folder, self._writes = Path(folder), writes
        self._snapshots = Snapshots(self._folder, _STEM)
        #: One for each pruner, in their order; None where nothing was saved with them.
        self.states: list[Snapshot] | None = None
        #: Of the generators; None likewise, and once it was restored.
        self.random: dict[str, Any] | None = None
        found = self._snapshots.newest()
        if found is not None:
            self._check(found)
            self._take(found)
        if writes:
            # The others wait for it where the masks become variables, which is before Keras reads.
            self._mend(found)
        self._marked = found is not None or self._stamp() is not None
        self._seen = self._stamp()

    @classmethod
    def beside(cls, callbacks: Sequence[Any], *, writes: bool = True) -> "Backup | None":
        """That of the `BackupAndRestore` among the callbacks of a fit; None without one."""
        for one in callbacks:
            if isinstance(one, keras.callbacks.BackupAndRestore):
                if "://" not in str(one.backup_dir):
                    return cls(one.backup_dir, writes=writes)
                warnings.warn(
                    f"The state of pruning is kept with backups on local folders only. Received: {one.backup_dir}. "
                    "A training that is resumed from there takes zeros for its masks.",
                    stacklevel=4,
                )
        return None

    def mark(self) -> None:
        """Notes that a training begins here: what Keras saves counts once it was copied."""
        if self._writes and not self._marked:
            self._marked = True
            self._snapshots.write(Snapshot({"epoch": 0, "states": None}, {}))

    @property
    def changed(self) -> bool:
        """Whether Keras has saved since the last copy, and this process makes copies."""
        return self._writes and self._stamp() not in (None, self._seen)

    def keep(self, states: Sequence[Snapshot], random: dict[str, Any]) -> None:
        """Copies what Keras has saved, with what Keras does not save.

        Args:
            states: Of the pruners.
            random: `random_state` of the model.

        Raises:
            OSError: The disk is full, say; earlier copies are still there.
        """
        stamp = self._stamp()
        # Maps of the files, and so no copy in memory.
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
                f"The backup in {self._folder} holds no {wrong} that this version of prunekit reads. Delete {_STEM}-* "
                "there, or begin in another folder."
            )
        saved, epoch = found.values["epoch"], self._epoch()
        if epoch is not None and epoch > saved + 1:
            raise ValueError(
                f"{self._folder} holds a backup after epoch {epoch} that was made without PruningCallback, and one "
                f"with it after epoch {saved}. Delete {_STEM}-* there to go on from the later one, or the other files "
                "to go on from the earlier one."
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
                Snapshot(values, _part(found.arrays, f"{number}/"))
                for number, values in enumerate(found.values["states"])
            ]

    def _torn(self) -> bool:
        """Whether Keras's files cannot be of one moment: one of them alone, or a position that cannot be read."""
        here = [(self._folder / name).exists() for name in (_WEIGHTS, _POSITION)]
        return any(here) and not (all(here) and self._epoch() is not None)

    def _set_aside(self) -> None:
        for name in (_WEIGHTS, _POSITION):
            if (self._folder / name).exists():
                os.replace(self._folder / name, self._folder / f"{name}.torn")
        warnings.warn(
            f"The backup in {self._folder} is not whole: {_WEIGHTS} and {_POSITION} belong together. What was there "
            "is renamed to *.torn, and training starts from the beginning.",
            stacklevel=5,
        )

    def _epoch(self) -> int | None:
        try:
            return int(json.loads((self._folder / _POSITION).read_text(encoding="utf-8"))["epoch"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def _stamp(self) -> tuple[int, ...] | None:
        try:
            # Keras writes it last.
            found = os.stat(self._folder / _POSITION)
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


class Resumption:
    """Where a pruning callback goes on instead of beginning, and what it adds to the backups of its fit.

    Attributes:
        state: What to go on from; None begins.
    """

    def __init__(self) -> None:
        self.state: Snapshot | None = None
        self._backup: Backup | None = None
        self._together: list[Any] = []

    def look(self, callback: Any, found: keras.callbacks.CallbackList | None) -> None:
        """Finds the backup beside a callback in its list; the first pruning callback there finds it for all.

        Raises:
            ValueError: As `Backup`; the backup is of a fit with more or fewer pruning callbacks.
        """
        self._backup = None
        if found is None:
            return
        self._together = [one for one in found.callbacks if isinstance(getattr(one, "resumption", None), Resumption)]
        first = self._together[0]
        # Their states are of one moment, and so in one file.
        if first is callback:
            self._backup = Backup.beside(found.callbacks, writes=distribution.speaks_for(callback.model))
        else:
            self._backup = first.resumption._backup
        states = None if self._backup is None else self._backup.states
        if states is None:
            return
        if len(states) != len(self._together):
            raise ValueError(
                f"The backup is of a fit with {len(states)} PruningCallbacks. Received: {len(self._together)}. Resume "
                "with the callbacks of the first run, or begin in another folder."
            )
        self.state = states[self._together.index(callback)]

    def begin(self, pruner: Pruner) -> None:
        """Begins, or goes on where the backup was made."""
        if self.take_up(pruner):
            return
        pruner.begin()
        if self._backup is not None:
            self._backup.mark()

    def take_up(self, pruner: Pruner) -> bool:
        """Whether there was a state to go on from; the pruner has it now."""
        if self.state is None:
            return False
        state, self.state = self.state, None
        restore_pruner(pruner, state)
        if self._backup is not None and self._backup.random is not None:
            restore_random_state(pruner.model, self._backup.random)
            self._backup.random = None
        return True

    def keep(self) -> None:
        """Where Keras has just saved a backup: adds the states of all pruning callbacks, once for all of them."""
        if self._backup is not None and self._together[0].resumption is self and self._backup.changed:
            pruners = [one.pruner for one in self._together]
            self._backup.keep([pruner_state(one) for one in pruners], random_state(pruners[0].model))


def _part(arrays: Any, prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}

"""Keeps the outputs of a teacher from the first epoch on, for the examples that come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.core.runtime import backend
from prunekit.core.runtime.snapshot import Snapshot
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.distill.fingerprints import WORDS, can_be_told_apart, fingerprints

OFF, RECORDING, READING = "off", "recording", "reading"
# Rows between two transfers to the host while outputs are recorded, and the bytes that these may take.
_ROWS, _BYTES = 16_384, 2**24
# Share of the examples of an epoch that must be found, else nothing is looked up any more.
_WORTHWHILE = 0.5
# Largest number of bytes of outputs that are saved with the state of a training.
SAVED = 64 * 2**20


@dataclass(frozen=True)
class Row:
    """The outputs of one example: the shape and dtype of each."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the outputs and of the fingerprint."""
        sizes = [
            int(np.prod(shape)) * np.dtype(dtype).itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]
        return sum(sizes) + 4 * WORDS


class OutputCache:
    """Outputs by the fingerprints of the examples; what is not found is calculated.

    In the first epoch outputs are recorded. At its end they are sorted by the first word of the fingerprints, which a
    binary search finds in the next epochs; the whole fingerprint must agree. If one example of a batch is missing, the
    outputs of the batch are calculated.

    Args:
        row: Shapes and dtypes of the outputs; None keeps nothing.
        memory: Largest number of bytes that are kept.

    Attributes:
        mode: "recording", "reading" or "off": what a training step has to be traced for.
        variables: The variables that a step reads and assigns.
    """

    def __init__(self, row: Row | None, memory: float):
        self._row, self._memory = row, memory
        self.mode = OFF
        self.variables: list[Any] = []
        self._recorded: list[list[np.ndarray]] = []
        self._room, self._largest, self._pending = 0, 0, 0
        if row is not None:
            self.record()

    @property
    def examples(self) -> int:
        """Number of examples that are found."""
        return int(self.variables[1].shape[0]) if self.mode == READING else 0

    @property
    def bytes(self) -> int:
        """Bytes of the kept outputs, fingerprints included."""
        return self.examples * (0 if self._row is None else self._row.bytes)

    # ---- inside a step -----------------------------------------------------------------------------------------------

    def outputs(self, inputs: Any, compute: Callable[[], Sequence[Any]]) -> list[Any]:
        """Returns the outputs for a batch.

        Args:
            inputs: Inputs of the teacher.
            compute: Calculates the outputs, in the dtypes in which they are kept.
        """
        if self.mode == OFF or not can_be_told_apart(inputs):
            return list(compute())
        keys = fingerprints(inputs)
        if self.mode == READING:
            return self._read(keys, compute)
        found = list(compute())
        self._write([keys, *found])
        return found

    def _write(self, values: Sequence[Any]) -> None:
        count, *stored = self.variables
        before = backend.value_now(count)
        added = ops.shape(values[0])[0]
        # Rows beyond the room are all written to the last place, which is never read.
        places = ops.expand_dims(ops.minimum(before + ops.arange(added, dtype="int32"), self._room), -1)
        for variable, value in zip(stored, values, strict=True):
            variable.assign(ops.scatter_update(backend.value_now(variable), places, ops.cast(value, variable.dtype)))
        count.assign(before + added)

    def _read(self, keys: Any, compute: Callable[[], Sequence[Any]]) -> list[Any]:
        counts, first, others, *kept = self.variables
        last = int(first.shape[0]) - 1
        # A copy: PyTorch warns of columns.
        searched = ops.copy(keys[:, 0])
        places = ops.minimum(ops.cast(ops.searchsorted(backend.value_now(first), searched), "int32"), last)
        found = ops.all(ops.take(backend.value_now(others), places, axis=0) == keys, axis=1)
        seen = ops.stack([ops.sum(ops.cast(found, "int32")), ops.cast(ops.shape(keys)[0], "int32")])
        counts.assign(backend.value_now(counts) + seen)
        return list(
            ops.cond(
                ops.all(found),
                lambda: [ops.take(backend.value_now(one), places, axis=0) for one in kept],
                lambda: list(compute()),
            )
        )

    # ---- between steps -----------------------------------------------------------------------------------------------

    def record(self) -> None:
        """Begins to record."""
        if self._row is None:
            return
        self._room = max(1, min(_ROWS, _BYTES // self._row.bytes))
        self.mode, self._recorded, self._largest, self._pending = RECORDING, [], 0, 0
        shapes, dtypes = ((WORDS,), *self._row.shapes), ("int32", *self._row.dtypes)
        self.variables = [
            _variable(np.zeros((), "int32")),
            *(
                _variable(np.zeros((self._room + 1, *shape), dtype))
                for shape, dtype in zip(shapes, dtypes, strict=True)
            ),
        ]

    def stop(self) -> None:
        """Keeps nothing any more."""
        self.mode, self.variables, self._recorded = OFF, [], []

    def after_batch(self) -> None:
        """Takes recorded rows to the host before the next batch would not fit."""
        if self.mode != RECORDING:
            return
        count = int(backend.number(self.variables[0]))
        self._largest = max(self._largest, count - self._pending)
        self._pending = count
        if count + self._largest > self._room:
            self._take()

    def _take(self) -> None:
        count, *stored = self.variables
        rows = min(int(backend.number(count)), self._room)
        if rows:
            self._recorded.append([np.array(array_of(variable)[:rows]) for variable in stored])
        count.assign(np.zeros((), "int32"))
        self._pending = 0
        if self._row is not None and sum(len(part[0]) for part in self._recorded) * self._row.bytes > self._memory:
            self.stop()

    def after_epoch(self) -> None:
        """Reads from now on what was recorded; or gives up if most examples of the epoch were not found."""
        if self.mode == RECORDING:
            self._take()
            if self.mode == RECORDING and self._recorded:
                keys, *values = (np.concatenate(parts) for parts in zip(*self._recorded, strict=True))
                self.read(keys, values)
            elif self.mode == RECORDING:
                self.stop()
        elif self.mode == READING:
            found, seen = (int(one) for one in array_of(self.variables[0]))
            self.variables[0].assign(np.zeros(2, "int32"))
            if found < _WORTHWHILE * seen:
                self.stop()

    def read(self, keys: np.ndarray, values: Sequence[np.ndarray]) -> None:
        """Reads these outputs from now on.

        Args:
            keys: Fingerprints, int32, shape (examples, 4).
            values: The outputs of the examples, in their dtypes.
        """
        # Of two examples that share the first word, one is found: the search looks at one place.
        _, rows = np.unique(keys[:, 0], return_index=True)
        keys, values = keys[rows], [one[rows] for one in values]
        self.mode, self._recorded = READING, []
        self.variables = [_variable(one) for one in (np.zeros(2, "int32"), keys[:, 0], keys, *values)]

    # ---- what an interrupted training goes on from -------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Returns the mode, and the kept outputs unless they are too many bytes; these are then recorded anew."""
        arrays = {}
        if self.mode == READING and self.bytes <= SAVED:
            arrays = {str(place): array_of(one) for place, one in enumerate(self.variables[2:])}
        return Snapshot({"mode": self.mode}, arrays)

    def restore(self, snapshot: Snapshot) -> None:
        """Takes up a state that `snapshot` returned."""
        if self._row is None or snapshot.values["mode"] == OFF:
            self.stop()
        elif snapshot.arrays:
            keys, *values = (np.array(snapshot.arrays[str(place)]) for place in range(len(self._row.dtypes) + 1))
            self.read(keys, values)
        else:
            self.record()


def _variable(value: np.ndarray) -> Any:
    return keras.Variable(value, dtype=value.dtype.name, trainable=False, autocast=False)

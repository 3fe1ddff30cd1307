"""Compares every tensor of an integer file with the simulation of the model."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.delivery.integers.integer_file import FileRounding, IntegerFile
from prunekit.delivery.litert import tensor_probe
from prunekit.delivery.litert.isolated_run import run_script
from prunekit.delivery.litert.litert import InputSpec
from prunekit.techniques.quantize.placement.units import SharedGrid
from prunekit.techniques.quantize.quantization_state import QuantizationState
from prunekit.techniques.quantize.rounding.calibration import GridRounding
from prunekit.techniques.quantize.rounding.simulation import simulating


@dataclass(frozen=True)
class TensorDifference:
    """Codes of one tensor in a file against those of the simulation, both computed from the file's own inputs.

    Attributes:
        name: Name of the range.
        largest: Largest difference, in steps; None for a tensor that the converter merged with another one, or moved.
        share: Share of the codes that differ.
        allowed: How many steps LiteRT's kernels may be off.
    """

    name: str
    largest: int | None
    share: float
    allowed: int = 1

    @property
    def is_too_large(self) -> bool:
        """True if the difference is larger than kernels explain."""
        return (self.largest or 0) > self.allowed


def tensor_differences(
    made: IntegerFile, path: Path, quantized: QuantizationState, specs: Sequence[InputSpec], sample: Any
) -> list[TensorDifference]:
    """Returns the difference of every rounded tensor.

    The simulation continues after each tensor with what the file computed, so that differences do not add up.

    Args:
        made: The file, with its roundings.
        path: Where it was written.
        quantized: The model on the TensorFlow backend.
        specs: The inputs of the file.
        sample: Examples in the model's input structure.

    Raises:
        ScriptFailed: The file does not load or run.
    """
    tensors = _tensors(made, path, specs, sample)
    following = _Following(quantized, [(one, tensors.get(one.index)) for one in made.roundings])
    with simulating(quantized.placement, following):
        quantized.model(keras.tree.map_structure(ops.convert_to_tensor, sample), training=False)
    if len(following.differences) < len(made.roundings):
        raise ValueError(
            f"The file has {len(made.roundings)} roundings. Received: {len(following.differences)} in the simulation."
        )
    return following.differences


def file_inputs(made: IntegerFile, specs: Sequence[InputSpec], arrays: Sequence[Any]) -> dict[str, np.ndarray]:
    """Returns the inputs of a file by name: codes for its inputs of integers.

    Args:
        made: The file.
        specs: The model's inputs.
        arrays: Their values, in the same order.
    """
    found = {}
    for spec, one in zip(specs, arrays, strict=True):
        values, grid = np.asarray(one).astype(spec.dtype), made.grids.get(spec.name)
        found[spec.name] = values if grid is None else grid.codes(values.astype("float32")).astype(grid.format.dtype)
    return found


def _tensors(made: IntegerFile, path: Path, specs: Sequence[InputSpec], sample: Any) -> Mapping[int | None, np.ndarray]:
    flat = file_inputs(made, specs, keras.tree.flatten(sample))
    indices = sorted({one.index for one in made.roundings if one.index is not None})
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "inputs.npz", Path(folder) / "tensors.npz"
        np.savez(source, allow_pickle=False, **flat)
        run_script(tensor_probe.__file__, [str(path), str(source), str(target), *map(str, indices)])
        with np.load(target) as stored:
            return {int(name): stored[name] for name in stored.files}


class _Following(GridRounding):
    """Rounds as the simulation, and then continues with what the file computed."""

    def __init__(self, quantized: QuantizationState, codes: Sequence[tuple[FileRounding, np.ndarray | None]]):
        super().__init__(quantized.formats, quantized.ranges, quantized.weights)
        self._codes = codes
        self.differences: list[TensorDifference] = []

    def tensor(self, value: Any, place: SharedGrid) -> Any:
        """See `Rounding`."""
        result = super().tensor(value, place)
        if len(self.differences) == len(self._codes):
            raise ValueError(f"The file has {len(self._codes)} roundings. Received: another one, of {place.name!r}.")
        rounding, theirs = self._codes[len(self.differences)]
        grid = rounding.grid
        if theirs is None:
            self.differences.append(TensorDifference(place.name, None, 0.0))
            return result
        mine = grid.codes(ops.convert_to_numpy(result))
        found = _in_layout(theirs.astype("int32"), mine)
        apart = np.abs(mine - found)
        if apart.max(initial=0) > rounding.steps:
            # The converter may round behind a shuffle of channels: the values are the same in another order.
            ordered = np.abs(np.sort(mine, axis=None) - np.sort(found, axis=None))
            if ordered.max(initial=0) <= rounding.steps:
                self.differences.append(TensorDifference(place.name, None, 0.0))
                return result
        share = float((apart > 0).mean())
        self.differences.append(TensorDifference(place.name, int(apart.max(initial=0)), share, rounding.steps))
        return ops.cast(ops.convert_to_tensor(grid.values(found)), value.dtype)


def _in_layout(theirs: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """Returns an array in the layout of another one: the converter rounds before or after it moves axes.

    Raises:
        ValueError: The arrays have different sizes.
    """
    if theirs.size != mine.size:
        raise ValueError(f"Tensors of one rounding have one size. Received: {theirs.shape} and {mine.shape}.")
    if theirs.ndim != mine.ndim or theirs.shape == mine.shape:
        return theirs.reshape(mine.shape)
    orders = [axes for axes in itertools.permutations(range(mine.ndim)) if theirs.transpose(axes).shape == mine.shape]
    found = [*(theirs.transpose(axes) for axes in orders), theirs.reshape(mine.shape)]
    return min(found, key=lambda one: np.abs(one - mine).sum())

"""Ranges that are trained with the weights of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.core.runtime.variable_values import full_value
from prunekit.core.training.joined_variables import exchange
from prunekit.sparsity.array_ops import array_of, split_at
from prunekit.techniques.quantize.grids.fake_quantization import fake_quantized
from prunekit.techniques.quantize.grids.grids import SMALLEST_SCALE, Grid, IntegerFormat
from prunekit.techniques.quantize.placement.units import RoundedWeight, SharedGrid
from prunekit.techniques.quantize.rounding.calibration import Formats, GridRounding

# Scales change by factors up to e to the power of this, either way.
_REACH = 10.0


class LearnedRanges:
    """Scales of weights and tensors that are trained, in one variable.

    A scale is its value at the start times exp(v), and v is trained: an update of a given size changes small and large
    scales by the same factor, and no scale becomes negative. Zero points stay as they are, so that zero is a value of
    every grid. The grids that kernels prescribe are not trained.

    All v are entries of one variable: a model has hundreds of scales, and an optimizer takes as many operations to
    update one of them as to update all.

    Args:
        formats: The codes.
        grids: The grid of each range, from calibration.
        weights: id of a variable -> its grid.

    Attributes:
        starts: The grids at the start: those of the trained ranges, then those of the weights.
        trainer: The optimizer of the variable, which the owner of this object sets.

    Source: Esser et al. 2020, arXiv:1902.08153 (the gradient of a scale); Jain et al. 2020, arXiv:1903.08066, section
        3.3 (trained in the logarithm, with Adam).
    """

    def __init__(self, formats: Formats, grids: Mapping[SharedGrid, Grid], weights: Mapping[int, Grid]):
        self._formats, self._grids = formats, dict(grids)
        self._places = [place for place in grids if place.signed is None] if formats.activations is not None else []
        self._weights = list(weights)
        self.starts = [*(grids[place] for place in self._places), *weights.values()]
        self._ends = np.cumsum([grid.scale.size for grid in self.starts]).tolist()
        starts = _flat([grid.scale for grid in self.starts])
        zero_points = _flat([grids[place].zero_point for place in self._places])
        self.trainer: Any = None
        self._changes = keras.Variable(np.zeros_like(starts), dtype="float32", name="logarithms_of_scales")
        self._starts = keras.Variable(starts, trainable=False, dtype="float32", name="scales_at_the_start")
        self._zero_points = keras.Variable(zero_points, trainable=False, dtype="float32", name="zero_points")

    @property
    def variables(self) -> list[Any]:
        """The trained variable, if there is a scale: one number for each range, one for each scale of each weight."""
        return [self._changes] if self.starts else []

    def exchange_variables(self, other: LearnedRanges) -> None:
        """Gives this object and another one the variables of each other, trainers included; values stay in place.

        So what was traced with the variables of one serves the other.

        Args:
            other: Ranges of the same number of scales, with a trainer of the same kind.
        """
        exchange(self, other, ("_changes", "_starts", "_zero_points"))

    def for_pass(self) -> GridRounding:
        """Returns what rounds in one forward pass, differentiable with respect to the variable."""
        change = ops.exp(ops.clip(ops.convert_to_tensor(full_value(self._changes)), -_REACH, _REACH))
        scales = change * ops.convert_to_tensor(full_value(self._starts))
        count = len(self._places)
        of_ranges = _numbers(scales[:count], count)
        zero_points = _numbers(ops.convert_to_tensor(full_value(self._zero_points)), count)
        of_weights = split_at(scales[count:], [end - count for end in self._ends[count:]])
        rows = list(zip(self._weights, of_weights, self.starts[count:], strict=True))
        return _Pass(
            self._formats,
            self._grids,
            dict(zip(self._places, zip(of_ranges, zero_points, strict=True), strict=True)),
            {key: (ops.reshape(scale, grid.scale.shape), grid.format) for key, scale, grid in rows},
        )

    def steps(self, weight: RoundedWeight, value: Any) -> Any:
        """Returns the value of a weight divided by its present scales, differentiable with respect to both."""
        place = len(self._places) + self._weights.index(id(weight.variable))
        own = slice(self._ends[place] - self.starts[place].scale.size, self._ends[place])
        change = ops.convert_to_tensor(full_value(self._changes))[own]
        scale = ops.exp(ops.clip(change, -_REACH, _REACH)) * ops.convert_to_tensor(full_value(self._starts))[own]
        scale = ops.reshape(scale, self.starts[place].scale.shape)
        return value / weight.granularity.spread(scale, tuple(value.shape))

    def grids(self) -> tuple[dict[SharedGrid, Grid], dict[int, Grid]]:
        """Returns the present grid of each range, and of each weight by the id of its variable."""
        change = np.exp(np.clip(array_of(self._changes).astype("float64"), -_REACH, _REACH))
        changes = np.split(change, self._ends[:-1])
        found = [_grid(grid, change) for grid, change in zip(self.starts, changes, strict=True)]
        count = len(self._places)
        ranges = self._grids | dict(zip(self._places, found[:count], strict=True))
        return ranges, dict(zip(self._weights, found[count:], strict=True))


class _Pass(GridRounding):
    """Rounds weights and tensors on trained grids in one forward pass.

    Args:
        formats: The codes.
        grids: The grid of each range.
        of_ranges: (scale, zero point) of each trained range, as scalar tensors.
        of_weights: id of a variable -> (its scales as a tensor, its codes).
    """

    def __init__(
        self,
        formats: Formats,
        grids: Mapping[SharedGrid, Grid],
        of_ranges: Mapping[SharedGrid, tuple[Any, Any]],
        of_weights: Mapping[int, tuple[Any, IntegerFormat]],
    ):
        super().__init__(formats, grids)
        self._of_ranges, self._of_weights = of_ranges, of_weights

    def _on_range(self, value: Any, place: SharedGrid) -> Any:
        # The step of a cell state stays a power of two.
        if place not in self._of_ranges or place.is_cell:
            return super()._on_range(value, place)
        return fake_quantized(value, *self._of_ranges[place], self._grids[place].format)

    def weight(self, value: Any, weight: RoundedWeight) -> Any:
        """See `Rounding`."""
        scale, form = self._of_weights[id(weight.variable)]
        return fake_quantized(value, weight.granularity.spread(scale, tuple(value.shape)), np.int32(0), form)


def _flat(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, "float32"), *(np.ravel(one).astype("float32") for one in arrays)])


def _numbers(tensor: Any, count: int) -> list[Any]:
    """Returns the entries of a vector as tensors."""
    return list(ops.unstack(tensor, count)) if count else []


def _grid(start: Grid, change: np.ndarray) -> Grid:
    scale = np.maximum(start.scale * change.reshape(start.scale.shape), SMALLEST_SCALE).astype("float32")
    return replace(start, scale=scale)

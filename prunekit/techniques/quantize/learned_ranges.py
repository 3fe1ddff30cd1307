"""Ranges that are trained with the weights of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.core.variable_values import full_value
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.quantize.calibration import Formats, GridRounding
from prunekit.techniques.quantize.fake_quantization import on_grid
from prunekit.techniques.quantize.grids import SMALLEST_SCALE, Grid
from prunekit.techniques.quantize.units import Range, RoundedWeight

# Scales change by factors up to e to the power of this, either way.
_REACH = 10.0


class LearnedRanges(GridRounding):
    """Rounds weights and tensors on grids whose scales are trained.

    A scale is its value at the start times exp(v), and the variable v is trained: an update of a given size changes
    small and large scales by the same factor, and no scale becomes negative. Zero points stay as they are, so that zero
    is a value of every grid. The grids that kernels prescribe are not trained.

    Args:
        formats: The codes.
        grids: The grid of each range, from calibration.
        weights: id of a variable -> (its name, its grid).

    Source: Esser et al. 2020, arXiv:1902.08153 (the gradient of a scale); Jain et al. 2020, arXiv:1903.08066, section
        3.3 (trained in the logarithm, with Adam).
    """

    def __init__(self, formats: Formats, grids: Mapping[Range, Grid], weights: Mapping[int, tuple[str, Grid]]):
        super().__init__(formats, grids)
        chosen = [place for place in grids if place.signed is None] if formats.activations is not None else []
        self._of_ranges = {place: LearnedScale(f"range_of_{place.name}", grids[place]) for place in chosen}
        self._of_weights = {key: LearnedScale(f"scale_of_{name}", grid) for key, (name, grid) in weights.items()}

    @property
    def scales(self) -> list[LearnedScale]:
        """The trained scales of the ranges, and those of the weights."""
        return [*self._of_ranges.values(), *self._of_weights.values()]

    @property
    def variables(self) -> list[Any]:
        """The trained variables: for each range one number, for each weight one for each of its scales."""
        return [one.variable for one in self.scales]

    def tensor(self, value: Any, place: Range) -> Any:
        """See `Rounding`."""
        scale = self._of_ranges.get(place)
        return super().tensor(value, place) if scale is None else scale.rounded(value)

    def weight(self, value: Any, weight: RoundedWeight) -> Any:
        """See `Rounding`."""
        return self._of_weights[id(weight.variable)].rounded(value)

    def grids(self) -> tuple[dict[Range, Grid], dict[int, Grid]]:
        """Returns the present grid of each range, and of each weight by the id of its variable."""
        ranges = self._grids | {place: scale.grid() for place, scale in self._of_ranges.items()}
        return ranges, {key: scale.grid() for key, scale in self._of_weights.items()}


class LearnedScale:
    """The trained scale of one grid.

    Attributes:
        start: The grid at the start.
        variable: Logarithm of the factor between the scale and that at the start.
    """

    def __init__(self, name: str, grid: Grid):
        self.start = grid
        # A slash would be a scope of names.
        name = name.replace("/", "_")
        self.variable = keras.Variable(np.zeros(grid.scale.shape, "float32"), dtype="float32", name=name)

    def rounded(self, value: Any) -> Any:
        """Returns a tensor on the grid, differentiable with respect to the variable."""
        change = ops.exp(ops.clip(ops.convert_to_tensor(full_value(self.variable)), -_REACH, _REACH))
        scale = change * ops.convert_to_tensor(self.start.scale)
        return on_grid(value, self.start, scale)

    def grid(self) -> Grid:
        """Returns the present grid."""
        change = np.exp(np.clip(array_of(self.variable).astype("float64"), -_REACH, _REACH))
        scale = np.maximum(self.start.scale * change, SMALLEST_SCALE).astype("float32")
        return replace(self.start, scale=scale)

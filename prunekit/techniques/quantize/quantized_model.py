"""QuantizedModel: a model whose weights lie on grids, and the grids of its tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras

from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.quantize.calibration import Formats, GridRounding
from prunekit.techniques.quantize.grids import Grid
from prunekit.techniques.quantize.placement import Placement
from prunekit.techniques.quantize.quantization_report import QuantizationReport
from prunekit.techniques.quantize.simulation import simulating
from prunekit.techniques.quantize.units import Range, RoundedWeight

# Relative error of a variable in half precision.
_PRECISION = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True, eq=False)
class QuantizedModel:
    """A model whose weights lie on grids, and the grids of its tensors.

    Attributes:
        model: The model.
        placement: Where tensors are rounded.
        formats: The codes.
        ranges: The grid of each range; empty where tensors stay in floating point.
        weights: id of a variable -> its grid.
        report: What was quantized and how.
        whole: True if nothing may stay in floating point unasked: the option `misfits` is "error".
    """

    model: Any
    placement: Placement
    formats: Formats
    ranges: dict[Range, Grid]
    weights: dict[int, Grid]
    report: QuantizationReport
    whole: bool = False

    @contextlib.contextmanager
    def simulating(self) -> Iterator[Any]:
        """Inside this context the model computes as the integer file will, in `fit`, `predict` and your own loops."""
        with simulating(self.placement, GridRounding(self.formats, self.ranges, self.weights)):
            yield self.model

    def check_unchanged(self) -> None:
        """Raises if weights do not lie on their grids any more.

        Raises:
            ValueError: A weight was changed.
        """
        moved = []
        for weight in unique_weights(self.placement):
            grid = self.weights.get(id(weight.variable))
            if grid is None:
                continue
            precision = _PRECISION.get(keras.backend.standardize_dtype(weight.variable.dtype), 0.0)
            if not grid.holds(array_of(weight.variable), precision):
                moved.append(weight.name)
        if moved:
            raise ValueError(
                f"The weights of a quantized model lie on grids. Received: {', '.join(moved[:5])} with other values, "
                "as after a training. Call pk.quantize on the model again."
            )


def unique_weights(placement: Placement) -> list[RoundedWeight]:
    """Returns the weights that are rounded, each once."""
    return list({id(weight.variable): weight for weight in placement.weights()}.values())

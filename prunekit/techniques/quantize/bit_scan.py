"""Measures what fewer bits for one weight at a time do to a model's outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import ops

from prunekit.core.layerwise import Progress
from prunekit.core.weight_scan import WeightScan
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.quantize.bit_allocation import Options
from prunekit.techniques.quantize.grids import IntegerFormat
from prunekit.techniques.quantize.preparation import Preparation
from prunekit.techniques.quantize.stored_bytes import FLOAT_BYTES, bytes_in_file
from prunekit.techniques.quantize.units import RoundedWeight
from prunekit.techniques.quantize.weight_rounding import grid_of_weight


@dataclass(frozen=True)
class WeightLevels:
    """One weight at several numbers of bits.

    Attributes:
        name: Its path in the model.
        shape: Its shape.
        bits: Numbers of bits; None = floating point.
        bytes: Bytes of the weight in a LiteRT file at each of them, with its scales.
        errors: Squared change of the model's outputs on the data, relative to the squared outputs, with the nearest
            values for this weight alone.
    """

    name: str
    shape: tuple[int, ...]
    bits: tuple[int | None, ...]
    bytes: tuple[int, ...]
    errors: tuple[float, ...]

    @property
    def options(self) -> Options:
        """Costs and errors, for `least_error`."""
        return Options(np.array(self.bytes), np.array(self.errors))


def level_bytes(preparation: Preparation, weight: RoundedWeight, bits: int | None) -> int:
    """Returns the bytes of a weight in a LiteRT file with so many bits."""
    target = preparation.selection.targets[id(weight.variable)]
    return bytes_in_file(target, bits, weight.granularity, preparation.options.activations)


def other_bytes(preparation: Preparation) -> int:
    """Returns the bytes of a model's weights that are not rounded, in float32."""
    rounded = sum(math.prod(one.variable.shape) for one in preparation.weights)
    return FLOAT_BYTES * (int(preparation.model.count_params()) - rounded)


def weight_levels(
    preparation: Preparation, levels: Sequence[int | None], memory: float, progress: Progress
) -> list[WeightLevels]:
    """Returns each weight with its error at each number of bits, in the model's order.

    Args:
        preparation: Model, weights, calibration data and options.
        levels: Numbers of bits; None = floating point.
        memory: Largest number of bytes of activations to keep; see `SuffixRuns`.
        progress: Told of each weight.

    Raises:
        ValueError: A weight is not finite.
    """
    weights, found = preparation.weights, {}
    batches = [(inputs, None, None) for inputs in preparation.inputs()]
    scan = WeightScan(preparation.model, batches, [one.variable for one in weights], memory)
    ordered = sorted(weights, key=lambda one: scan.runs.position(one.variable) or 0)
    for done, weight in enumerate(ordered, 1):
        sizes = tuple(level_bytes(preparation, weight, bits) for bits in levels)
        found[id(weight.variable)] = _measured(preparation, scan, weight, levels, sizes)
        progress(done, len(ordered), weight.name)
    return [found[id(weight.variable)] for weight in weights]


def _measured(
    preparation: Preparation,
    scan: WeightScan,
    weight: RoundedWeight,
    levels: Sequence[int | None],
    sizes: tuple[int, ...],
) -> WeightLevels:
    shape, rule = tuple(weight.variable.shape), preparation.options.weight_rule
    value = array_of(weight.variable).astype("float32")
    rounded = [bits for bits in levels if bits is not None]
    grids = [
        grid_of_weight(weight.name, value, IntegerFormat(bits), weight.granularity, rule(bits)) for bits in rounded
    ]

    def changed(_: Any) -> Iterator[Any]:
        return (ops.convert_to_tensor(grid.nearest(value)) for grid in grids)

    # What no call reads changes nothing.
    read = scan.runs.position(weight.variable) is not None
    effects = scan.measure(weight.variable, changed) if read else []
    errors: dict[int | None, float] = dict(zip(rounded, (one.output_error**2 for one in effects), strict=False))
    wrong = [bits for bits, error in errors.items() if not math.isfinite(error)]
    if wrong:
        raise ValueError(
            f"Errors of the outputs are finite. Received: outputs that are NaN or infinite with {wrong[0]} bits for "
            f"{weight.name}, and that are not with its own values. Check the data, or leave the weight out."
        )
    return WeightLevels(weight.name, shape, tuple(levels), sizes, tuple(errors.get(bits, 0.0) for bits in levels))

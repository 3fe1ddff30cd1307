"""Measures what fewer bits for one weight at a time do to a model's outputs."""

from __future__ import annotations

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
from prunekit.techniques.quantize.units import RoundedWeight
from prunekit.techniques.quantize.weight_rounding import grid_of_weight

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class WeightLevels:
    """One weight at several numbers of bits.

    Attributes:
        name: Its path in the model.
        shape: Its shape.
        bits: Numbers of bits; None = floating point.
        bytes: Bytes of the weight in a LiteRT file at each of them, with its scales: codes of up to 4 bits take half a
            byte, others one.
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


def bytes_in_file(shape: Sequence[int], bits: int | None, scales: int) -> int:
    """Returns the bytes of a weight in a LiteRT file, with its scales."""
    size = int(np.prod(shape))
    if bits is None:
        return _FLOAT_BYTES * size
    return (-(-size // 2) if bits <= 4 else size) + _FLOAT_BYTES * scales


def weight_levels(
    preparation: Preparation, levels: Sequence[int | None], memory: float, progress: Progress | None = None
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
        found[id(weight.variable)] = _measured(preparation, scan, weight, levels)
        if progress is not None:
            progress(done, len(ordered), weight.name)
    return [found[id(weight.variable)] for weight in weights]


def _measured(
    preparation: Preparation, scan: WeightScan, weight: RoundedWeight, levels: Sequence[int | None]
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
    sizes: dict[int | None, int] = {bits: grid.scale.size for bits, grid in zip(rounded, grids, strict=True)}
    return WeightLevels(
        weight.name,
        shape,
        tuple(levels),
        tuple(bytes_in_file(shape, bits, sizes.get(bits, 0)) for bits in levels),
        tuple(errors.get(bits, 0.0) for bits in levels),
    )

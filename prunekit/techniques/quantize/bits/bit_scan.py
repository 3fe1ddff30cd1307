"""Measures what fewer bits for one weight at a time do to a model's outputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import ops

from prunekit.anatomy.layers.targets import Target
from prunekit.anatomy.records.reports import Skipped
from prunekit.core.layerwise.layerwise import Progress
from prunekit.core.outputs.output_metrics import Batch
from prunekit.core.outputs.weight_scan import Measured, WeightScan
from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.sensitivity_table import damages_of, read_table
from prunekit.techniques.quantize.bits.bit_allocation import KnapsackItem
from prunekit.techniques.quantize.grids.grids import IntegerFormat
from prunekit.techniques.quantize.options import QuantizationOptions
from prunekit.techniques.quantize.placement.placement import place
from prunekit.techniques.quantize.placement.stored_bytes import (
    FLOAT_BYTES,
    StoredWeight,
    stored_weight,
    zero_point_bytes,
)
from prunekit.techniques.quantize.preparation import Preparation
from prunekit.techniques.quantize.quantization_state import unique_weights
from prunekit.techniques.quantize.rounding.weight_rounding import grid_of_weight
from prunekit.techniques.quantize.targeting import Selection


@dataclass(frozen=True)
class WeightLevels:
    """One weight at several numbers of bits.

    Attributes:
        name: Its path in the model.
        shape: Its shape.
        bits: Numbers of bits; None = floating point.
        stored: What a LiteRT file holds of the weight at each of them.
        errors: Squared change of the model's outputs on the data, relative to the squared outputs, with the nearest
            values for this weight alone.
    """

    name: str
    shape: tuple[int, ...]
    bits: tuple[int | None, ...]
    stored: tuple[StoredWeight, ...]
    errors: tuple[float, ...]

    @property
    def bytes(self) -> tuple[int, ...]:
        """Bytes of the weight in a LiteRT file at each number of bits, with its scales."""
        return tuple(one.bytes for one in self.stored)


def costs_of(weights: Sequence[WeightLevels]) -> tuple[list[KnapsackItem], int]:
    """Returns costs and errors of the weights, for `least_error`, and the bytes that no choice changes.

    Weights with as many zero points share them. Their bytes count whatever is chosen; if all of these weights stay in
    floating point, a file is that much smaller than counted.
    """
    lengths = [{one.zero_points for one in weight.stored} - {0} for weight in weights]
    users = Counter(length for found in lengths for length in found)
    shared = {length for length, count in users.items() if count > 1}
    options = []
    for weight in weights:
        own = [zero_point_bytes([one]) if one.zero_points not in shared else 0 for one in weight.stored]
        options.append(KnapsackItem(np.array(weight.bytes) + np.array(own), np.array(weight.errors)))
    return options, zero_point_bytes(StoredWeight(0, zero_points=length) for length in shared)


def other_bytes(preparation: Preparation) -> int:
    """Returns the bytes of a model's weights that are not rounded, in float32."""
    rounded = sum(math.prod(one.variable.shape) for one in preparation.weights)
    return FLOAT_BYTES * (int(preparation.model.count_params()) - rounded)


class BitScan:
    """Rounds one weight at a time to the nearest values of several numbers of bits, measures, and restores the weight.

    Args:
        model: A built Keras model.
        batches: The data. Without labels, or with a model that is not compiled, only output errors are measured.
        selection: The weights that may be rounded, and those that are left out.
        options: The rules of the ranges of weights.
        levels: Numbers of bits, ascending.
        memory: Largest number of bytes of activations to keep; see `SuffixRuns`.

    Attributes:
        model: The model.
        levels: The numbers of bits.
        targets: The weights, in the order in which the model calls them.
        skipped: The weights that are left out, with reasons.
        scan: Measures the model.
        notes: Remarks on the scan.
    """

    def __init__(
        self,
        model: Any,
        batches: Sequence[Batch],
        selection: Selection,
        options: QuantizationOptions,
        levels: Sequence[int],
        memory: float,
    ):
        self.model, self.levels = model, tuple(levels)
        self.notes: tuple[str, ...] = ()
        self._rule = options.weight_rule
        placement = place(model, selection.kept_float, options.group_size)
        self._weights = {id(one.variable): one for one in unique_weights(placement)}
        targets = [selection.targets[key] for key in self._weights]
        self.scan = WeightScan(model, batches, [target.variable for target in targets], memory)
        position = self.scan.runs.position
        unread = [target for target in targets if position(target.variable) is None]
        self.targets = tuple(
            sorted((one for one in targets if one not in unread), key=lambda one: position(one.variable) or 0)
        )
        self.skipped = (*selection.skipped, *(Skipped(one.name, "no call in inference reads it") for one in unread))

    def measure(self, target: Target) -> list[Measured]:
        """Returns what each number of bits of a weight does; weights are taken in the order of `targets`.

        The weight has its own value again when this returns or raises.
        """
        weight = self._weights[id(target.variable)]
        value = array_of(target.variable).astype("float32")
        moved: list[int] = []

        def rounded(_: Any) -> Iterator[Any]:
            for bits in self.levels:
                grid = grid_of_weight(weight.name, value, IntegerFormat(bits), weight.granularity, self._rule(bits))
                nearest = grid.nearest(value)
                moved.append(int(np.count_nonzero(nearest != value)))
                yield ops.convert_to_tensor(nearest)

        effects = self.scan.measure(target.variable, rounded)
        return [Measured(*one) for one in zip(self.levels, moved, effects, strict=True)]


def weight_levels(
    preparation: Preparation, levels: Sequence[int | None], errors: Mapping[str, Mapping[int, float]]
) -> list[WeightLevels]:
    """Returns each weight with its bytes and its error at each number of bits, in the model's order.

    Args:
        preparation: Model, weights and options.
        levels: Numbers of bits; None = floating point.
        errors: Name of a weight -> {bits: squared relative change of the outputs}.
    """
    found, activations = [], preparation.options.activation_width
    for weight in preparation.weights:
        target = preparation.selection.targets[id(weight.variable)]
        # What no call reads changes nothing.
        known = errors.get(target.name, {})
        found.append(
            WeightLevels(
                target.name,
                tuple(target.shape),
                tuple(levels),
                tuple(stored_weight(preparation.placement, weight, bits, activations) for bits in levels),
                tuple(0.0 if bits is None else known.get(bits, 0.0) for bits in levels),
            )
        )
    return found


def measured_errors(
    preparation: Preparation, levels: Sequence[int], memory: float, progress: Progress
) -> dict[str, dict[int, float]]:
    """Returns {name of a weight: {bits: squared relative change of the outputs}}, measured on the calibration data.

    Args:
        preparation: Model, weights, calibration data and options.
        levels: Numbers of bits, ascending.
        memory: Largest number of bytes of activations to keep; see `SuffixRuns`.
        progress: Told of each weight.

    Raises:
        ValueError: A change is not finite.
    """
    batches = [(inputs, None, None) for inputs in preparation.inputs()]
    scan = BitScan(preparation.model, batches, preparation.selection, preparation.options, levels, memory)
    found = {}
    for done, target in enumerate(scan.targets, 1):
        found[target.name] = {int(one.level): one.effect.output_error**2 for one in scan.measure(target)}
        wrong = [bits for bits, error in found[target.name].items() if not math.isfinite(error)]
        if wrong:
            raise ValueError(
                f"Errors of the outputs are finite. Received: outputs that are NaN or infinite with {wrong[0]} bits "
                f"for {target.name}, and that are not with its own values. Check the data, or leave the weight out."
            )
        progress(done, len(scan.targets), target.name)
    return found


def scanned_errors(preparation: Preparation, levels: Sequence[int], file: Any) -> dict[str, dict[int, float]]:
    """Returns what `measured_errors` returns, from a scan of `pk.sensitivity` at numbers of bits.

    Args:
        preparation: Model, weights and options.
        levels: Numbers of bits.
        file: A sensitivity.json file, a `SensitivityReport`, or its `to_dict()`.

    Raises:
        ValueError: The scan lacks a weight or a number of bits, or is of other weights.
    """
    known = {one.name: one for one in damages_of(read_table(file), "quantize")}
    found = {}
    for weight in preparation.weights:
        target = preparation.selection.targets[id(weight.variable)]
        one = known.get(target.name)
        if one is None or one.size != target.size:
            came = "none of that name" if one is None else f"{one.size:,} entries"
            raise ValueError(
                f"The scan measured the weights that get bits. Received: {target.name!r} with {target.size:,} entries, "
                f"and {came} in the scan. Scan this model again, or leave the weight out with `exclude`."
            )
        found[target.name] = {int(bits): error for bits, _, error in one.points}
        missing = [bits for bits in levels if bits not in found[target.name]]
        if missing:
            raise ValueError(
                f"The scan measured {', '.join(map(str, found[target.name]))} bits. Received: `bits` with "
                f"{missing[0]}. Scan again with these `bits`, or choose among those."
            )
    return found

"""The report of a quantization: bits, granularity and range of each tensor, and what stays in floating point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from prunekit.anatomy.records.damage import Damage
from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.plain_data import Record
from prunekit.anatomy.records.reports import Skipped, skipped_section
from prunekit.anatomy.records.sections import Column, Section
from prunekit.techniques.quantize.grids.grids import Granularity, Grid
from prunekit.techniques.quantize.placement.placement import Placement
from prunekit.techniques.quantize.placement.stored_bytes import FLOAT_BYTES, StoredWeight, zero_point_bytes
from prunekit.techniques.quantize.placement.units import RoundedWeight, SharedGrid
from prunekit.techniques.quantize.report_pictures import errors_picture, ranges_picture
from prunekit.techniques.quantize.rounding.calibration import Formats, grid_at


@dataclass(frozen=True)
class QuantizedWeight(Record):
    """One weight on a grid.

    Attributes:
        name: Its path in the model.
        shape: Its shape.
        bits: Bits of a code.
        granularity: Which entries share a scale, in words.
        scales: Number of scales.
        zeros: Number of entries that are exactly zero.
        error: With calibration data in use for the weights: squared change of the layer's outputs on them, relative to
            the squared outputs, with the errors of the layers before it. Without: squared change of the weight,
            relative to its squares.
        stored: What a LiteRT file holds of the weight.
        group_size: Number of consecutive inputs of an output that share a scale; None = all of them.
    """

    derived: ClassVar = ("bytes",)

    name: str
    shape: tuple[int, ...]
    bits: int
    granularity: str
    scales: int
    zeros: int
    error: float
    stored: StoredWeight
    group_size: int | None = None

    @property
    def size(self) -> int:
        """Number of entries."""
        return int(np.prod(self.shape))

    @property
    def bytes(self) -> int:
        """Bytes of its entries and scales in a LiteRT file."""
        return self.stored.bytes


@dataclass(frozen=True)
class TensorRange:
    """Tensors between layers that are rounded on one grid.

    Attributes:
        name: Name of the layer or input that computes the first of them.
        tensors: Number of tensors.
        bits: Bits of a code.
        low: Lowest value of the grid.
        high: Highest value.
        scale: Distance of neighbouring values.
        zero_point: Code of the value 0.
        chosen: "data", or "kernel" for a grid that the integer kernel prescribes.
    """

    name: str
    tensors: int
    bits: int
    low: float
    high: float
    scale: float
    zero_point: int
    chosen: str


@dataclass(frozen=True)
class QuantizationReport(Displayed):
    """What `pk.quantize` did.

    Attributes:
        model_name: Name of the model.
        method: How the codes of weights were chosen: "nearest", "gptq", "awq" or "training".
        weights: The weights on grids.
        ranges: The grids of tensors between layers; empty where these stay in floating point.
        skipped: Layers, operations and weights that stay in floating point, with reasons.
        parameters: Number of all weights of the model.
        notes: Remarks.
        damage: What the integers change on the calibration data: the metrics of a compiled model, if these have labels,
            and the outputs, against the model with the weights that were rounded; None without data.
    """

    derived: ClassVar = ("bytes",)
    main_items: ClassVar = "weights"

    model_name: str
    method: str
    weights: tuple[QuantizedWeight, ...]
    ranges: tuple[TensorRange, ...]
    skipped: tuple[Skipped, ...]
    parameters: int
    notes: tuple[str, ...] = ()
    damage: Damage | None = None

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of all weights in float32, and in a LiteRT file with scales and zero points; biases count as floats."""
        stored = [one.stored for one in self.weights]
        integers = sum(one.bytes for one in stored) + zero_point_bytes(stored)
        others = self.parameters - sum(one.size for one in self.weights)
        return FLOAT_BYTES * self.parameters, integers + FLOAT_BYTES * others

    def sections(self) -> tuple[Section, ...]:
        """Returns the report as sections: change of the outputs, weights, ranges, what stays in floating point."""
        found = [] if self.damage is None else [self.damage.section()]
        found.append(_weights_section(self))
        if self.ranges:
            found.append(_ranges_section(self.ranges))
        return (*found, _float_section(self))

    def verdict(self) -> str:
        """Returns one sentence: weights, bits, bytes, and what stays in floating point."""
        before, after = self.bytes
        bits = " and ".join(map(str, sorted({one.bits for one in self.weights}))) or "no"
        text = f"{len(self.weights)} weights on grids of {bits} bits ({self.method}): {before:,} -> {after:,} bytes"
        if self.ranges:
            text += f"; {len(self.ranges)} ranges of tensors"
        left = len(self.skipped)
        return f"{text}; {left} {'layer or weight stays' if left == 1 else 'layers or weights stay'} in floating point."

    def __str__(self) -> str:
        lines = [f"{self.model_name}: {self.verdict()}"]
        lines += [] if self.damage is None else [f"  on {self.damage.examples:,} examples of the data: {self.damage}"]
        lines += [f"  in floating point: {one.name}: {one.reason}" for one in self.skipped]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


@dataclass(frozen=True)
class PlannedQuantization:
    """What a quantization would do to a model.

    Attributes:
        weights: Name, shape, bits, granularity and range rule of each weight that is quantized.
        ranges: Name of each range of tensors, and how it is chosen.
        skipped: Layers, operations and weights that stay in floating point, with reasons.
        bits: Bits of the tensors; None if they stay in floating point.
        not_pruned: Weights that the pattern of further zeros does not fit, with reasons.
        joined: Name of each operation whose inputs share one grid, and the names of what computes these.
    """

    weights: tuple[tuple[str, tuple[int, ...], str, str, str], ...]
    ranges: tuple[tuple[str, str], ...]
    skipped: tuple[Skipped, ...]
    bits: int | None
    not_pruned: tuple[Skipped, ...] = ()
    joined: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def sections(self) -> tuple[Section, ...]:
        """Returns tables: weights, tensors, what stays in floating point."""
        weights = Section(
            "Weights to quantize",
            (
                Column("Weight", "name"),
                Column("Shape", "shape", keep=4),
                Column("Bits", "label"),
                Column("Scales", "label", keep=5),
                Column("Range", "label", keep=5),
            ),
            self.weights,
        )
        tensors = Section(
            "Tensors to round",
            (Column("Computed by", "name"), Column("Bits", "count"), Column("Scales", "label"), Column("Range")),
            tuple((name, self.bits, "per tensor", rule) for name, rule in self.ranges),
        )
        left = skipped_section("In floating point", "Layer or weight", self.skipped)
        whole = skipped_section("Rounded and not pruned", "Weight", self.not_pruned)
        joined = Section(
            "Tensors that share a grid",
            (Column("Joined by", "name"), Column("Computed by", "names")),
            self.joined,
            notes=(
                "Where their values differ much in size, the smaller ones keep few steps, which the report names after "
                "calibration. Then use activations of 16 bits, separate outputs, or `exclude` the operation.",
            ),
        )
        return tuple(one for one in (weights, tensors, joined, left, whole) if one.rows)


def in_floating_point(layers: Sequence[Skipped], weights: Sequence[Skipped]) -> tuple[Skipped, ...]:
    """Returns what stays in floating point: layers and operations, and weights whose layer does not tell the reason."""
    told = {(one.name, one.reason) for one in layers}
    return (*layers, *(one for one in weights if (one.name.rpartition("/")[0], one.reason) not in told))


def report_of(
    placement: Placement,
    formats: Formats,
    ranges: Mapping[SharedGrid, Grid],
    weights: Sequence[QuantizedWeight],
    skipped: Sequence[Skipped],
    method: str,
    notes: tuple[str, ...] = (),
) -> QuantizationReport:
    """Returns the report of a quantization.

    Args:
        placement: Where tensors are rounded.
        formats: The codes.
        ranges: The grid of each range.
        weights: The quantized weights.
        skipped: Weights that are not quantized.
        method: How the codes of weights were chosen.
        notes: Remarks.
    """
    model, form = placement.graphs.main.model, formats.activations
    found = [] if form is None else [_range(place, grid_at(place, ranges, form)) for place in placement.ranges]
    left = placement.float_layers(None if form is None else form.bits)
    return QuantizationReport(
        model.name,
        method,
        tuple(weights),
        tuple(found),
        in_floating_point(left, skipped),
        int(model.count_params()),
        notes,
    )


def weight_row(
    weight: RoundedWeight, value: np.ndarray, grid: Grid, error: float, stored: StoredWeight
) -> QuantizedWeight:
    """Returns the row of a weight.

    Args:
        weight: The weight.
        value: Its rounded values.
        grid: Its grid.
        error: As `QuantizedWeight.error`.
        stored: What a LiteRT file holds of the weight.
    """
    zeros = int(value.size - np.count_nonzero(value))
    return QuantizedWeight(
        weight.name,
        tuple(value.shape),
        grid.format.bits,
        granularity_words(grid.granularity),
        int(grid.scale.size),
        zeros,
        error,
        stored,
        grid.granularity.group_size,
    )


def granularity_words(granularity: Granularity) -> str:
    """Returns in words which entries share a scale."""
    axes = granularity.axes
    of_axes = f"per index of {_listed(axes)}" if axes else "per tensor"
    if granularity.run > 1:
        return f"per {granularity.run} indices of {_listed(axes)}"
    return of_axes if granularity.group_size is None else f"{of_axes} and {granularity.group_size} entries"


def _listed(axes: Sequence[int]) -> str:
    return f"axis {axes[0]}" if len(axes) == 1 else f"axes {', '.join(map(str, axes))}"


def _range(place: SharedGrid, grid: Grid) -> TensorRange:
    scale, zero = float(grid.scale), int(grid.zero_point)
    low, high = (scale * (code - zero) for code in (grid.format.lowest, grid.format.highest))
    chosen = "data" if place.signed is None else "kernel"
    return TensorRange(place.name, max(len(place.tensors), 1), grid.format.bits, low, high, scale, zero, chosen)


def _weights_section(report: QuantizationReport) -> Section:
    columns = (
        Column("Weight", "name"),
        Column("Shape", "shape", keep=4),
        Column("Bits", "count"),
        Column("Scales", "label", keep=2),
        Column("Zeros", "count", keep=3),
        Column("Bytes", "bytes", keep=5),
        Column("Error", "number"),
    )
    rows = tuple(
        (one.name, one.shape, one.bits, one.granularity, one.zeros, one.bytes, one.error) for one in report.weights
    )
    drawn = [{"name": one.name, "error": one.error, "bits": one.bits} for one in report.weights]
    return Section(
        "Quantized weights",
        columns,
        rows,
        explanation="Error: squared change of the layer's outputs on the calibration data relative to the squared "
        "outputs, where the weights were chosen with data; else the squared change of the weight relative to its "
        "squares. Bytes: of entries and scales in a LiteRT file.",
        notes=() if rows else ("No weight is quantized.",),
        pictures=(errors_picture(drawn),) if drawn else (),
    )


def _ranges_section(ranges: Sequence[TensorRange]) -> Section:
    columns = (
        Column("Computed by", "name"),
        Column("Bits", "count", keep=5),
        Column("from", "number", group="Range"),
        Column("to", "number", group="Range"),
        Column("Step", "number"),
        Column("Zero point", "count", keep=3),
        Column("Chosen by", "label", keep=4),
        Column("Tensors", "count", keep=2),
    )
    rows = tuple(
        (one.name, one.bits, one.low, one.high, one.scale, one.zero_point, one.chosen, one.tensors) for one in ranges
    )
    drawn = [{"name": one.name, "low": one.low, "high": one.high, "chosen": one.chosen} for one in ranges]
    return Section(
        "Ranges of tensors",
        columns,
        rows,
        explanation="Tensors that share a range are rounded on one grid, as kernels that move or join values need it. "
        "A range that a kernel prescribes does not depend on data.",
        pictures=(ranges_picture(drawn),),
    )


def _float_section(report: QuantizationReport) -> Section:
    notes = () if report.skipped else ("All layers compute with integers, and all kernels are integers.",)
    return skipped_section("In floating point", "Layer or weight", report.skipped, notes)

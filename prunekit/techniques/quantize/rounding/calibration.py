"""Chooses the grids of a model's tensors from data, and rounds on them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.core.data.batch_parts import in_parts
from prunekit.core.runtime.model_function import ModelFunction
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.quantize.grids.fake_quantization import fake_quantized, on_grid
from prunekit.techniques.quantize.grids.grids import (
    PER_TENSOR,
    Granularity,
    Grid,
    IntegerFormat,
    grid_between,
    usable_scale,
)
from prunekit.techniques.quantize.grids.histogram import Histogram, extract_of
from prunekit.techniques.quantize.grids.ranges import MinMax, RangeRule, Sample
from prunekit.techniques.quantize.placement.placement import Placement
from prunekit.techniques.quantize.placement.rules import fixed_grid
from prunekit.techniques.quantize.placement.spans import Spans
from prunekit.techniques.quantize.placement.units import RoundedWeight, SharedGrid, Unit
from prunekit.techniques.quantize.rounding.rounding import NoRounding
from prunekit.techniques.quantize.rounding.simulation import simulating

# Most channels of an output whose extremes are kept.
_CHANNELS = 1024
# Bytes of the largest output of a layer that is in memory at once; what is counted of the others waits beside it.
_AT_ONCE = 1 << 25
# Codes inside of kernels.
_INSIDE = IntegerFormat(16)
# The kernel of an LSTM knows cell states up to 2 ** 0, 2 ** 1 and so on to 2 ** 6, and computes nothing for other ends.
_LARGEST_CELL = 6
# More than the highest value of a grid, and still a number, where that is another one than in float32.
_ABOVE_GRIDS = {"float16": 6e4}


@dataclass(frozen=True)
class Formats:
    """The codes of weights, and of the tensors between layers.

    Attributes:
        weights: The codes of weights with the most bits.
        activations: The codes of tensors; None: these stay in floating point.
        fewer: Codes of weights with fewer bits, where the weights of a model have different ones.
    """

    weights: IntegerFormat = IntegerFormat(8)
    activations: IntegerFormat | None = IntegerFormat(8, symmetric=False)
    fewer: tuple[IntegerFormat, ...] = ()

    @property
    def of_weights(self) -> tuple[IntegerFormat, ...]:
        """All codes of weights, those with the fewest bits first."""
        return tuple(sorted({*self.fewer, self.weights}, key=lambda form: form.bits))


def calibrated(  # noqa: PLR0913
    model: Any,
    placement: Placement,
    batches: Iterable[Any],
    form: IntegerFormat,
    rule: RangeRule,
    spans: Spans | None = None,
) -> dict[SharedGrid, Grid]:
    """Returns the grid of each range, chosen from what the model computes in floating point.

    Args:
        model: The model of the placement.
        placement: Where tensors are rounded.
        batches: Inputs of the model.
        form: The codes.
        rule: Chooses the ranges.
        spans: Is given the extremes of each tensor.

    Raises:
        ValueError: There is no batch, or a tensor is not finite; the message names its layer.
    """
    histograms = {place: Histogram() for place in placement.ranges if place.signed is None}
    spans = spans or Spans(placement)
    # Python values of the last trace; the traces of a model differ in the number of examples alone.
    names: dict[SharedGrid, list[str]] = {}
    run = ModelFunction(model, lambda inputs: _extracts(model, placement, list(histograms), inputs, names))
    for batch in itertools.chain.from_iterable(in_parts(model, [one], _AT_ONCE) for one in batches):
        found, channels = run(keras.tree.map_structure(ops.convert_to_tensor, batch))
        for (place, histogram), extracts in zip(histograms.items(), found, strict=True):
            for name, extract in zip(names.get(place, ()), extracts, strict=True):
                _count(histogram, extract, place)
                spans.add_source(place, name, array_of(extract[0]), array_of(extract[1]))
        for index, (low, high) in channels.items():
            spans.add_channels(int(index), array_of(low), array_of(high))
    if histograms and not any(histogram.count for histogram in histograms.values()):
        raise ValueError("Calibration needs at least one batch of inputs. Received: none.")
    grids = {place: fixed_grid(place.signed, form) for place in placement.ranges if place.signed is not None}
    for place, histogram in histograms.items():
        if place.is_cell:
            grids[place] = grid_of_cell(histogram.sample())
            continue
        (low,), (high,) = rule(histogram.sample(), form)
        # A tensor that is zero on these data may be another number on others, and the bias that is added to its product
        # with weights is stored in steps of its grid.
        grids[place] = grid_between(low, high, form) if low or high else grid_between(-1.0, 1.0, form)
    return grids


def grid_of_cell(sample: Sample) -> Grid:
    """Returns the grid of an LSTM's cell state: the smallest of those of its kernel that holds all values.

    Its end is a power of two from 1 to 64. Larger values are limited to it.
    """
    (low,), (high,) = MinMax()(sample, IntegerFormat(16))
    largest = max(-float(low), float(high), 1.0)
    scale = 2.0 ** (min(math.ceil(math.log2(largest)), _LARGEST_CELL) - 15)
    return Grid(IntegerFormat(16), PER_TENSOR, np.asarray(scale, "float32"), np.asarray(0, "int32"))


def _extracts(
    model: Any, placement: Placement, chosen: Sequence[SharedGrid], inputs: Any, names: dict[SharedGrid, list[str]]
) -> tuple[list[list[tuple[Any, Any, Any, Any]]], dict[str, tuple[Any, Any]]]:
    """Returns what histograms read of the tensors of each range in inference, and the extremes of outputs' channels.

    Args:
        model: The model.
        placement: Where tensors are rounded.
        chosen: The ranges.
        inputs: Inputs of the model.
        names: Is given the names of what computes the tensors of each range.
    """
    observed = _Observing()
    with simulating(placement, observed):
        outputs = keras.tree.flatten(model(inputs, training=False))
    names |= observed.names
    channels = {
        str(index): (
            ops.min(ops.reshape(one, (-1, one.shape[-1])), 0),
            ops.max(ops.reshape(one, (-1, one.shape[-1])), 0),
        )
        for index, one in enumerate(outputs)
        if len(one.shape) > 1
        and 1 < (one.shape[-1] or 0) <= _CHANNELS
        and "float" in keras.backend.standardize_dtype(one.dtype)
    }
    return [observed.extracts.get(place, []) for place in chosen], channels


def _count(histogram: Histogram, extract: tuple[Any, Any, Any, Any], place: SharedGrid) -> None:
    try:
        histogram.observe(*extract)
    except ValueError as error:
        raise ValueError(
            f"The outputs of {place.name!r}, and of layers that share its grid, must be finite on the data for "
            "calibration. Received: NaN or infinity among them. Check these data and the model's weights."
        ) from error


class _Observing(NoRounding):
    """Keeps what histograms read, and rounds nothing.

    Whole tensors never leave the compiled function, so that calibration needs the memory of inference.
    """

    def __init__(self) -> None:
        self.extracts: dict[SharedGrid, list[tuple[Any, Any, Any, Any]]] = {}
        # Names of what computes these tensors.
        self.names: dict[SharedGrid, list[str]] = {}
        self._unit: Unit | None = None
        # id of a tensor on a prescribed grid, which others may read on another one -> (tensor, name).
        self._prescribed: dict[int, tuple[Any, str]] = {}

    def running(self, unit: Unit) -> AbstractContextManager[Any]:
        """Keeps the unit: its results are rounded behind this scope."""
        self._unit = unit
        return super().running(unit)

    def tensor(self, value: Any, place: SharedGrid) -> Any:
        """Keeps what is read of a tensor."""
        self._keep(value, place, place.name if self._unit is None else self._unit.name)
        return value

    def argument(self, value: Any, place: SharedGrid) -> Any:
        """Keeps what is read of a tensor on another grid."""
        self._keep(value, place, self._prescribed.get(id(value), (value, place.name))[1])
        return value

    def inside(self, value: Any, place: SharedGrid) -> Any:
        """Keeps what is read of a cell state."""
        if place.is_cell:
            self._keep(value, place, place.name)
        return value

    def _keep(self, value: Any, place: SharedGrid, name: str) -> None:
        if place.signed is not None:
            self._prescribed[id(value)] = value, name
        elif 0 not in value.shape:
            self.extracts.setdefault(place, []).append(extract_of(value))
            self.names.setdefault(place, []).append(name)


def grid_at(place: SharedGrid, grids: Mapping[SharedGrid, Grid], form: IntegerFormat) -> Grid:
    """Returns the grid of a range: one of `grids`, which were chosen from data, or one that a kernel prescribes."""
    return grids[place] if place.signed is None else fixed_grid(place.signed, form, place.highest)


class GridRounding(NoRounding):
    """Rounds tensors on grids that were chosen from data.

    Args:
        formats: The codes.
        grids: The grid of each range that has no prescribed one.
        weights: id of a variable -> its grid; other weights are rounded on grids of their present values.
    """

    def __init__(self, formats: Formats, grids: Mapping[SharedGrid, Grid], weights: Mapping[int, Grid] | None = None):
        self._formats, self._grids, self._weights = formats, dict(grids), dict(weights or {})

    def tensor(self, value: Any, place: SharedGrid) -> Any:
        """See `Rounding`."""
        return value if self._formats.activations is None else self._on_range(value, place)

    def _on_range(self, value: Any, place: SharedGrid) -> Any:
        grid = grid_at(place, self._grids, place.codes(self._formats.activations or _INSIDE))
        return fake_quantized(value, grid.scale, grid.zero_point, grid.format)

    def inside(self, value: Any, place: SharedGrid) -> Any:
        """See `Rounding`."""
        if self._formats.activations is None:
            return value
        if place.signed is None:
            return self._on_range(value, place)
        grid = fixed_grid(place.signed, _INSIDE, place.highest)
        return fake_quantized(value, grid.scale, grid.zero_point, grid.format)

    def argument(self, value: Any, place: SharedGrid) -> Any:
        """See `Rounding`."""
        return self.tensor(value, place)

    def constant(self, value: Any) -> Any:
        """See `Rounding`."""
        if self._formats.activations is None:
            return value
        values = array_of(value).astype("float32")
        grid = grid_between(values.min(initial=0.0), values.max(initial=0.0), self._formats.activations)
        return ops.cast(grid.nearest(values), keras.backend.standardize_dtype(value.dtype))

    def reciprocal_root(self, value: Any) -> Any:
        """See `Rounding`; without a gradient at 0, where it is no number."""
        above = _ABOVE_GRIDS.get(keras.backend.standardize_dtype(value.dtype), 1e30)
        is_zero = ops.equal(value, 0)
        roots = ops.rsqrt(ops.where(is_zero, ops.ones_like(value), value))
        return ops.where(is_zero, ops.cast(above, value.dtype), roots)

    def weight(self, value: Any, weight: RoundedWeight) -> Any:
        """See `Rounding`."""
        grid = self._weights.get(id(weight.variable))
        if grid is not None:
            return on_grid(value, grid)
        form, granularity = self._formats.weights, weight.granularity
        scale = granularity.spread(scale_of(value, form, granularity), tuple(value.shape))
        return fake_quantized(value, ops.stop_gradient(scale), np.int32(0), form)


def scale_of(weight: Any, form: IntegerFormat, granularity: Granularity) -> Any:
    """Returns the scales of the smallest symmetric grid that a weight lies on, as `grid_of` with `MinMax`."""
    bound = ops.cast(ops.max(granularity.rows(ops.abs(weight)), axis=1), "float32")
    return ops.reshape(usable_scale(bound / form.highest), granularity.parameter_shape(tuple(weight.shape)))

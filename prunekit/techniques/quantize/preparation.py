"""Preparation: what a quantization works on, and its arithmetic that needs no training."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.layers.layers import weights_of
from prunekit.anatomy.layers.linear_kinds import TRANSPOSED
from prunekit.anatomy.layers.model_weights import places
from prunekit.anatomy.records.reports import LayerError
from prunekit.core.data.calibration import CheckedData, batches_of
from prunekit.core.runtime.kept_grids import note_grids
from prunekit.core.statistics.input_scale import scale_problem
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.quantize.grids.grids import FEW_BITS, Grid, IntegerFormat
from prunekit.techniques.quantize.options import QuantizationOptions
from prunekit.techniques.quantize.placement.placement import Placement, place
from prunekit.techniques.quantize.placement.spans import Spans
from prunekit.techniques.quantize.placement.stored_bytes import stored_weight
from prunekit.techniques.quantize.placement.text_inputs import text_notes
from prunekit.techniques.quantize.placement.units import RoundedWeight, SharedGrid
from prunekit.techniques.quantize.quantization_report import report_of, weight_row
from prunekit.techniques.quantize.quantization_state import QuantizationState, unique_weights
from prunekit.techniques.quantize.rescaling.gamma_migration import Migration, migrations
from prunekit.techniques.quantize.rounding.calibration import Formats, calibrated
from prunekit.techniques.quantize.rounding.simulation import check_computes_in_floats
from prunekit.techniques.quantize.rounding.weight_rounding import grid_of_weight
from prunekit.techniques.quantize.targeting import Selection, selected

# Most layers and weights that an error or a note names.
_LISTED = 8
# Bits of the kernels that take factors of normalizations.
_MIGRATED = 8


@dataclass(frozen=True, eq=False)
class RoundedWeights:
    """Rounded weights.

    Attributes:
        values: (variable, new value).
        grids: id of a variable -> its grid.
        errors: Relative squared error of each weight's layer, or of the weight itself, by the weight's name.
    """

    values: list[tuple[Any, Any]]
    grids: dict[int, Grid]
    errors: dict[str, LayerError]


def selected_and_placed(model: Any, options: QuantizationOptions) -> tuple[Selection, Placement]:
    """Returns what is quantized of a model, and where its tensors are rounded.

    Args:
        model: A built model.
        options: What becomes integers, and how.

    Raises:
        TypeError, ValueError: As for `selected` and `place`; a part of the model stays in floating point unasked, where
            the option `misfits` is "error", or at all where `full_integer` is True.
    """
    selection = selected(model, options.include, options.exclude, options.patterns)
    placement = _placed(model, options, selection)
    _check_misfits(model, options, selection, placement)
    return selection, placement


def _placed(model: Any, options: QuantizationOptions, selection: Selection, plain: Collection[int] = ()) -> Placement:
    return place(
        model,
        _float_tables(model, selection, options) | selection.kept_float,
        options.group_size,
        full_integer=options.full_integer,
        fused_lstm=options.activation_bits == 8,
        plain=plain,
    )


def migrated(
    model: Any, options: QuantizationOptions, selection: Selection, placement: Placement
) -> tuple[Placement, tuple[Migration, ...]]:
    """Returns the placement without the factors and offsets that readers of 8 bits can take, and what they take.

    Args:
        model: A built model.
        options: What becomes integers, and how.
        selection: What is quantized.
        placement: Where tensors are rounded.
    """

    def may_change(weight: RoundedWeight) -> bool:
        bits = selection.bits.get(id(weight.variable), options.default_bits)
        value = array_of(weight.variable).astype("float32")
        # Of fewer bits, the rounding of weights costs more than that of tensors.
        return bits == _MIGRATED and not (value.any() and _grid_of(options, bits, weight, value).holds(value))

    if not options.full_integer or options.method == "awq":
        return placement, ()
    found = tuple(migrations(placement, selection.targets, may_change))
    plain = [id(one.gamma) for one in found]
    return (_placed(model, options, selection, plain) if found else placement), found


def _check_misfits(model: Any, options: QuantizationOptions, selection: Selection, placement: Placement) -> None:
    """Refuses a model with parts that stay in floating point, where all is to become integers.

    With the option `misfits` that is all but what was asked for; with `full_integer` it is all.
    """
    if options.misfits != "error" and not options.full_integer:
        return
    unsupported, form = selected(model).skipped, options.activation_format
    asked = set() if options.full_integer else set(selection.kept_float.values()) - {one.reason for one in unsupported}
    found = [one for one in selection.skipped if one in unsupported or options.full_integer]
    if form is not None:
        found += [one for one in placement.float_layers(form.bits) if one.reason not in asked]
    if not found:
        return
    parts = [f"{one.name}, since {one.reason}" for one in found]
    listed = "; ".join(parts[:_LISTED]) + (f" and {len(parts) - _LISTED} others" if len(parts) > _LISTED else "")
    if options.full_integer:
        raise ValueError(
            "With full_integer=True nothing computes in floating point. Received: a model with parts that would: "
            f"{listed}. Replace them, or leave full_integer out, with which they compute in floating point."
        )
    raise ValueError(
        f'With misfits="error" all of a model becomes integers. Received: parts in floating point: {listed}. '
        "Replace them, or allow them with `exclude`."
    )


def _float_tables(model: Any, selection: Selection, options: QuantizationOptions) -> dict[int, str]:
    """Returns {id of a layer: reason} for the tables that take fewer bytes where their rows are read as floats.

    On the grid of activations an entry takes 8 or 16 bits, on that of its row those of the weight.
    """
    found = {}
    for spot in places(model):
        for variable, _, spec in weights_of(spot.layer):
            bits = selection.bits.get(id(variable), options.default_bits)
            if spec.role == "embedding" and (bits <= FEW_BITS or options.activation_bits == 16):
                found[id(spot.layer)] = f"its table has codes of {bits} bits, and a scale for each row"
    return found


def few_bits_notes(bits: Iterable[int]) -> tuple[str, ...]:
    """Returns a note where weights have fewer bits than files store.

    Args:
        bits: Bits of each weight.
    """
    fewer = " or ".join(map(str, sorted({one for one in bits if one < FEW_BITS})))
    if not fewer:
        return ()
    return (
        f"Weights of {fewer} bits: a LiteRT file stores each code with {FEW_BITS} bits, so that it has the bytes of "
        f"{FEW_BITS} bits and less accuracy. Fewer bits pay where the file is compressed, as by gzip.",
    )


class Preparation:
    """What a quantization works on: a model, its tensors and weights, calibration data, and options.

    Args:
        model: A built model.
        options: What becomes integers, and how.
        data: Calibration data, as `pk.prune` takes them.

    Attributes:
        model: The model.
        options: The options.
        selection: What is quantized and what is not.
        placement: Where tensors are rounded.
        weights: The weights that are rounded, each once.
        bits: id of a variable -> bits of its codes.
        migrations: The normalizations whose factors and offsets other layers took.
        data_problems: What makes the calibration data doubtful, once ranges were chosen from them.

    Raises:
        TypeError, ValueError: As for `pk.quantize`.
    """

    def __init__(self, model: Any, options: QuantizationOptions, data: Any):
        self.model, self.options = model, options
        options.with_data(data)
        check_computes_in_floats(model)
        self._data = None if data is None else CheckedData(model, data)
        if data is not None:
            _check_states(model)
        check_dilations(model, options)
        if options.activation_format is not None:
            _check_random(model, self.inputs())
        self.selection, self.placement = selected_and_placed(model, options)
        self.data_problems: tuple[str, ...] = ()
        self._span_notes: tuple[str, ...] = ()
        self.weights = unique_weights(self.placement)
        self.migrations: tuple[Migration, ...] = ()
        bits = self.selection.bits
        self.bits = {id(one.variable): bits.get(id(one.variable), options.default_bits) for one in self.weights}

    @property
    def formats(self) -> Formats:
        """The codes."""
        *fewer, widest = sorted(set(self.bits.values()) or {self.options.default_bits})
        return Formats(IntegerFormat(widest), self.options.activation_format, tuple(map(IntegerFormat, fewer)))

    def inputs(self) -> Iterator[Any]:
        """Yields the inputs of the calibration data in batches."""
        for inputs, _ in batches_of(self._data) if self._data is not None else ():
            yield inputs

    def calibrated_ranges(self) -> dict[SharedGrid, Grid]:
        """Returns the grid of each range, on the calibration data; {} where tensors stay in floating point."""
        form = self.options.activation_format
        if form is None:
            return {}
        spans = Spans(self.placement)
        grids = calibrated(self.model, self.placement, self.inputs(), form, self.options.activation_rule, spans)
        self.data_problems += tuple(spans.data_problems())
        self._span_notes = tuple(spans.notes(grids))
        return grids

    def check_scale(self) -> None:
        """Compares the calibration data with what the layers expect, before weights change; see `data_problems`."""
        first = next(self.inputs(), None)
        problem = None if first is None else scale_problem(self.model, first)
        self.data_problems = () if problem is None else (problem,)

    def grid_of(self, weight: RoundedWeight, value: np.ndarray | None = None) -> Grid:
        """Returns the grid of a weight: of a value, or of its present one."""
        value = array_of(weight.variable).astype("float32") if value is None else value
        return _grid_of(self.options, self.bits[id(weight.variable)], weight, value)

    def nearest(self, weights: Sequence[RoundedWeight], grids: Mapping[int, Grid] | None = None) -> RoundedWeights:
        """Returns the nearest values of weights on their grids.

        Args:
            weights: The weights.
            grids: id of a variable -> its grid; None chooses grids of the present values, and leaves weights that lie
                on them as they are.
        """
        found = RoundedWeights([], {}, {})
        for weight in weights:
            value = array_of(weight.variable).astype("float32")
            grid = self.grid_of(weight, value) if grids is None else grids[id(weight.variable)]
            # A scale that is found again from the values may differ in the last bit.
            nearest = value if grids is None and grid.holds(value) else grid.nearest(value)
            found.values.append((weight.variable, nearest))
            found.grids[id(weight.variable)] = grid
            size = float(np.square(value, dtype="float64").sum())
            error = float(np.square(nearest - value, dtype="float64").sum())
            found.errors[weight.name] = LayerError(weight.name, error / size if size else 0.0)
        return found

    def result(
        self, rounded: RoundedWeights, ranges: dict[SharedGrid, Grid], method: str, notes: tuple[str, ...]
    ) -> QuantizationState:
        """Returns the quantized model, once its weights have their rounded values.

        Args:
            rounded: The rounded weights.
            ranges: The grid of each range.
            method: How the codes of weights were chosen.
            notes: Remarks for the report.
        """
        rows = []
        for one in self.weights:
            grid, error = rounded.grids[id(one.variable)], rounded.errors[one.name].error
            stored = stored_weight(self.placement, one, self.bits[id(one.variable)], self.options.activation_width)
            rows.append(weight_row(one, array_of(one.variable), grid, error, stored))
        notes = (
            *self.data_problems,
            *notes,
            *self._span_notes,
            *self._ungrouped(),
            *few_bits_notes(self.bits.values()),
            *text_notes(self.model),
        )
        note_grids(
            self.model, [(one.name, one.variable, rounded.grids[id(one.variable)].holds) for one in self.weights]
        )
        report = report_of(self.placement, self.formats, ranges, rows, self.selection.skipped, method, notes)
        whole = self.options.misfits == "error" or self.options.full_integer
        return QuantizationState(
            self.model,
            self.placement,
            self.formats,
            ranges,
            rounded.grids,
            report,
            whole,
            self.data_problems,
            self.migrations,
        )

    def _ungrouped(self) -> list[str]:
        """Returns a note about the weights with one scale for each output, where groups of inputs were wanted."""
        size = self.options.group_size
        found = [] if size is None else [one.name for one in self.weights if one.granularity.group_size is None]
        if not found:
            return []
        more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        return [f"One scale for each output, which has at most {size} inputs: {', '.join(found[:_LISTED])}{more}."]


def _grid_of(options: QuantizationOptions, bits: int, weight: RoundedWeight, value: np.ndarray) -> Grid:
    return grid_of_weight(weight.name, value, IntegerFormat(bits), weight.granularity, options.weight_rule(bits))


def check_dilations(model: Any, options: QuantizationOptions) -> None:
    """Raises ValueError if tensors become integers, and a layer has no integer form for its dilation."""
    if options.activation_format is None:
        return
    found = [
        one.name
        for one in model._flatten_layers()
        if isinstance(one, TRANSPOSED) and max(_sizes(one.dilation_rate)) > 1
    ]
    if found:
        raise ValueError(
            "LiteRT has no transposed convolution with a dilation. Received: the layers "
            f"{', '.join(found)} with dilation_rate above 1. Build them with dilation_rate=1, or "
            'pass activation_bits="float".'
        )


def _sizes(value: Any) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _check_random(model: Any, batches: Iterator[Any]) -> None:
    """Refuses layers that draw random numbers in inference, as the sampling of a variational autoencoder does."""
    # Keras's own layers (dropout, noise, augmentation) draw in training only.
    own = [one for one in model._flatten_layers() if not type(one).__module__.startswith("keras.")]
    seeds = [(one.name, seed.state) for one in own for seed in getattr(one, "_seed_generators", ())]
    if not seeds:
        return
    before = [np.array(array_of(state)) for _, state in seeds]
    model(next(batches), training=False)
    drawn = []
    for (name, state), value in zip(seeds, before, strict=True):
        if not np.array_equal(array_of(state), value):
            drawn.append(name)
            state.assign(value)
    if drawn:
        raise ValueError(
            "An integer file computes the same outputs from the same inputs. Received: the layers "
            f"{', '.join(dict.fromkeys(drawn))}, which draw random numbers in inference. Quantize the parts before and "
            "after them as models of their own, keras.Model(inputs, outputs)."
        )


def _check_states(model: Any) -> None:
    stateful = [one.name for one in model._flatten_layers() if isinstance(one, keras.layers.RNN) and one.stateful]
    if stateful:
        raise ValueError(
            "Calibration data are independent examples, in batches of any size. Received: a model with the stateful "
            f"layers {', '.join(stateful)}. Build the model with stateful=False; its weights are the same."
        )

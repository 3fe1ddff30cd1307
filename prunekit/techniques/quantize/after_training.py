"""Quantizes a trained model without training: grids of weights and tensors, and weights on their grids."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.reports import LayerError, Skipped
from prunekit.anatomy.targets import Target
from prunekit.core.calibration import CheckedData, batches_of
from prunekit.core.layer_products import product_of
from prunekit.core.layerwise import LayerwiseRepair, Progress
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.quantize.calibration import Formats, GridRounding, calibrated
from prunekit.techniques.quantize.equalization import Equalization, equalized
from prunekit.techniques.quantize.grids import Grid, IntegerFormat
from prunekit.techniques.quantize.options import QuantizationOptions, as_range_rule, rule_name
from prunekit.techniques.quantize.placement import Placement, place
from prunekit.techniques.quantize.quantization_report import (
    PlannedQuantization,
    QuantizationReport,
    granularity_words,
    report_of,
)
from prunekit.techniques.quantize.ranges import grid_of
from prunekit.techniques.quantize.simulation import simulating
from prunekit.techniques.quantize.targeting import Selection, selected
from prunekit.techniques.quantize.units import Range, RoundedWeight
from prunekit.techniques.quantize.weight_rounding import WeightRounder

# Largest distance of a weight from its grid, in steps, and for variables in half precision also relative to the weight.
_ON_GRID = 1e-3
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
    """

    model: Any
    placement: Placement
    formats: Formats
    ranges: dict[Range, Grid]
    weights: dict[int, Grid]
    report: QuantizationReport

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
            values = array_of(ops.convert_to_tensor(weight.variable)).astype("float32")
            scale = grid.granularity.spread(grid.scale, values.shape)
            precision = _PRECISION.get(keras.backend.standardize_dtype(weight.variable.dtype), 0.0)
            if (np.abs(grid.nearest(values) - values) > _ON_GRID * scale + precision * np.abs(values)).any():
                moved.append(weight.name)
        if moved:
            raise ValueError(
                f"The weights of a quantized model lie on grids. Received: {', '.join(moved[:5])} with other values, "
                "as after a training. Call pk.quantize on the model again."
            )


def unique_weights(placement: Placement) -> list[RoundedWeight]:
    """Returns the weights that are rounded, each once."""
    return list({id(weight.variable): weight for weight in placement.weights()}.values())


def quantized(
    model: Any, options: QuantizationOptions, data: Any = None, progress: Progress | None = None
) -> QuantizedModel:
    """Puts the weights of a model on grids, in place, and chooses the grids of its tensors.

    Zeros stay zero. An interruption or an error leaves the model as it was.

    Args:
        model: A built model.
        options: What becomes integers, and how.
        data: Calibration data, as `pk.prune` takes them.
        progress: Told of each step: (done, total, name).

    Raises:
        TypeError, ValueError: As for `pk.quantize`.
    """
    method, corrects = options.with_data(data)
    selection = selected(model, options.include, options.exclude)
    placement = place(model, selection.kept_float)
    equalization = equalized(placement) if options.equalize else None
    changed = [] if equalization is None else equalization.values
    with _assigned(changed):
        return _rounded(model, options, data, progress, method, corrects, selection, placement, equalization)


def planned_quantization(model: Any, options: QuantizationOptions) -> PlannedQuantization:
    """Returns what `quantized` would do, without data and without changing the model.

    Args:
        model: A built model.
        options: What becomes integers, and how.

    Raises:
        TypeError, ValueError: As for `quantized`, except for what is wrong with data.
    """
    selection = selected(model, options.include, options.exclude)
    placement = place(model, selection.kept_float)
    form = options.activation_format
    weights = tuple(
        (one.name, tuple(one.variable.shape), options.weight_format.bits, granularity_words(one.granularity))
        for one in unique_weights(placement)
    )
    rule = rule_name(options.activation_ranges)
    ranges = (
        ()
        if form is None
        else tuple((one.name, rule if one.signed is None else "prescribed by the kernel") for one in placement.ranges)
    )
    left = (*(Skipped(one.name, one.reason) for one in placement.left_float), *selection.skipped)
    return PlannedQuantization(
        weights, ranges, left, None if form is None else form.bits, rule_name(options.weight_ranges)
    )


def _rounded(  # noqa: PLR0913
    model: Any,
    options: QuantizationOptions,
    data: Any,
    progress: Progress | None,
    method: str,
    corrects: bool,
    selection: Selection,
    placement: Placement,
    equalization: Equalization | None,
) -> QuantizedModel:
    weights = unique_weights(placement)
    formats = Formats(options.weight_format, options.activation_format)
    targets = [selection.targets[id(weight.variable)] for weight in weights]
    checked = None if data is None else CheckedData(model, data)
    if method == "nearest" and not corrects:
        work = _nearest(weights, targets, options)
    else:
        work = _on_data(model, weights, targets, options, method, corrects, list(_inputs(checked)), progress)
    with _assigned(work.values):
        ranges: dict[Range, Grid] = {}
        if formats.activations is not None:
            rule = as_range_rule(options.activation_ranges, "activation_ranges")
            ranges = calibrated(model, placement, _inputs(checked), formats.activations, rule)
        values = [(weight, array_of(ops.convert_to_tensor(weight.variable))) for weight in weights]
        report = report_of(
            model, placement, values, formats, ranges, work.grids, work.errors, selection.skipped, method
        )
        if equalization is not None:
            report = replace(report, notes=(_equalization_note(equalization),))
    return QuantizedModel(model, placement, formats, ranges, work.grids, report)


def _equalization_note(equalization: Equalization) -> str:
    changed = equalization.layers
    text = f"Equalization changed the channels of {len(changed)} of {equalization.pairs} layers"
    return (
        f"{text}: {', '.join(one.producer for one in changed[:8])}{' ...' * (len(changed) > 8)}." if changed else text
    )


def _inputs(data: CheckedData | None) -> Iterator[Any]:
    for inputs, _ in batches_of(data) if data is not None else ():
        yield inputs


@dataclass(frozen=True, eq=False)
class _Rounded:
    """Rounded weights.

    Attributes:
        values: (variable, new value).
        grids: id of a variable -> its grid.
        errors: Relative squared error of each weight's layer, or of the weight itself, by the weight's name.
    """

    values: list[tuple[Any, Any]]
    grids: dict[int, Grid]
    errors: dict[str, LayerError]


def _nearest(weights: Sequence[RoundedWeight], targets: Sequence[Target], options: QuantizationOptions) -> _Rounded:
    rule = as_range_rule(options.weight_ranges or "minmax", "weight_ranges")
    found = _Rounded([], {}, {})
    for weight, target in zip(weights, targets, strict=True):
        value = array_of(ops.convert_to_tensor(weight.variable)).astype("float32")
        grid = _grid_of(weight, value, options.weight_format, rule)
        nearest = grid.nearest(value)
        found.values.append((weight.variable, nearest))
        found.grids[id(weight.variable)] = grid
        size = float(np.square(value, dtype="float64").sum())
        error = float(np.square(nearest - value, dtype="float64").sum())
        found.errors[target.name] = LayerError(target.name, error / size if size else 0.0)
    return found


def _grid_of(weight: RoundedWeight, value: np.ndarray, form: IntegerFormat, rule: Any) -> Grid:
    try:
        return grid_of(value, form, weight.granularity, rule)
    except ValueError as error:
        raise ValueError(f"The weight {weight.name} cannot be quantized. {error}") from error


def _on_data(  # noqa: PLR0913
    model: Any,
    weights: Sequence[RoundedWeight],
    targets: Sequence[Target],
    options: QuantizationOptions,
    method: str,
    corrects: bool,
    batches: Sequence[Any],
    progress: Progress | None,
) -> _Rounded:
    """Rounds layer after layer, each on the inputs that the rounded layers before it compute."""
    fitted, others = [], []
    for weight, target in zip(weights, targets, strict=True):
        try:
            product_of(target)
            fitted.append(target)
        except ValueError:
            # No product of rows with a matrix is known for this weight.
            others.append((weight, target))
    rest = _nearest([weight for weight, _ in others], [target for _, target in others], options)
    rounder = WeightRounder(
        fitted,
        {id(weight.variable): weight.granularity for weight in weights},
        options.weight_format,
        as_range_rule(options.weight_ranges or "minmax", "weight_ranges"),
        method=method,
        corrects_biases=corrects,
        damping=options.damping,
    )
    work = LayerwiseRepair(model, fitted, rounder, progress, rest.values)
    work.run(batches)
    return _Rounded(work.values, {**rest.grids, **rounder.grids}, {**rest.errors, **work.errors})


@contextlib.contextmanager
def _assigned(pairs: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Assigns values to variables; if the block fails, the variables get their former values again."""
    before = [(variable, np.array(array_of(ops.convert_to_tensor(variable)))) for variable, _ in pairs]
    try:
        for variable, value in pairs:
            variable.assign(value)
        yield
    except BaseException:
        for variable, value in before:
            variable.assign(value)
        raise

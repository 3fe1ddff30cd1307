"""Quantizes a trained model without training: grids of weights and tensors, and weights on their grids."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.reports import LayerError, Skipped
from prunekit.core.calibration import CheckedData, batches_of
from prunekit.core.layer_products import product_of
from prunekit.core.layerwise import LayerwiseRepair, Progress
from prunekit.core.variable_values import assigned
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.quantize.calibration import Formats, GridRounding, calibrated
from prunekit.techniques.quantize.equalization import Equalization, equalized
from prunekit.techniques.quantize.grids import Grid
from prunekit.techniques.quantize.options import QuantizationOptions, rule_name
from prunekit.techniques.quantize.placement import Placement, place
from prunekit.techniques.quantize.quantization_report import (
    PlannedQuantization,
    QuantizationReport,
    granularity_words,
    report_of,
    weight_row,
)
from prunekit.techniques.quantize.simulation import simulating
from prunekit.techniques.quantize.targeting import selected
from prunekit.techniques.quantize.units import Range, RoundedWeight
from prunekit.techniques.quantize.weight_rounding import WeightRounder, grid_of_weight

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
    return _Quantization(model, options, data, progress).run()


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
    form, rule = options.activation_format, rule_name(options.activation_rule)
    weights = tuple(
        (one.name, tuple(one.variable.shape), options.weight_format.bits, granularity_words(one.granularity))
        for one in unique_weights(placement)
    )
    chosen = [(one.name, rule if one.signed is None else "prescribed by the kernel") for one in placement.ranges]
    return PlannedQuantization(
        weights=weights,
        ranges=() if form is None else tuple(chosen),
        left_float=(*(Skipped(one.name, one.reason) for one in placement.left_float), *selection.skipped),
        bits=None if form is None else form.bits,
        weight_rule=rule_name(options.weight_rule),
    )


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


class _Quantization:
    """One quantization of a model; the arguments are those of `quantized`."""

    def __init__(self, model: Any, options: QuantizationOptions, data: Any, progress: Progress | None):
        self._model, self._options, self._progress = model, options, progress
        self._method, self._corrects_biases = options.with_data(data)
        self._data = None if data is None else CheckedData(model, data)
        if data is not None:
            _check_states(model)
        self._selection = selected(model, options.include, options.exclude)
        self._placement = place(model, self._selection.kept_float)
        self._weights = unique_weights(self._placement)

    def run(self) -> QuantizedModel:
        """Quantizes the model."""
        equalization = equalized(self._placement) if self._options.equalize else None
        with assigned([] if equalization is None else equalization.values):
            rounded = self._rounded()
            with assigned(rounded.values):
                return self._calibrated(rounded, () if equalization is None else (_note(equalization),))

    def _calibrated(self, rounded: _Rounded, notes: tuple[str, ...]) -> QuantizedModel:
        options, placement = self._options, self._placement
        formats = Formats(options.weight_format, options.activation_format)
        ranges: dict[Range, Grid] = {}
        if formats.activations is not None:
            ranges = calibrated(self._model, placement, self._inputs(), formats.activations, options.activation_rule)
        rows = [
            weight_row(one, array_of(one.variable), rounded.grids[id(one.variable)], rounded.errors[one.name].error)
            for one in self._weights
        ]
        report = report_of(placement, formats, ranges, rows, self._selection.skipped, self._method, notes)
        return QuantizedModel(self._model, placement, formats, ranges, rounded.grids, report)

    def _inputs(self) -> Iterator[Any]:
        for inputs, _ in batches_of(self._data) if self._data is not None else ():
            yield inputs

    def _rounded(self) -> _Rounded:
        if self._method == "nearest" and not self._corrects_biases:
            return self._nearest(self._weights)
        return self._on_data()

    def _nearest(self, weights: Sequence[RoundedWeight]) -> _Rounded:
        options, found = self._options, _Rounded([], {}, {})
        for weight in weights:
            value = array_of(weight.variable).astype("float32")
            grid = grid_of_weight(weight.name, value, options.weight_format, weight.granularity, options.weight_rule)
            nearest = grid.nearest(value)
            found.values.append((weight.variable, nearest))
            found.grids[id(weight.variable)] = grid
            size = float(np.square(value, dtype="float64").sum())
            error = float(np.square(nearest - value, dtype="float64").sum())
            found.errors[weight.name] = LayerError(weight.name, error / size if size else 0.0)
        return found

    def _on_data(self) -> _Rounded:
        """Rounds layer after layer, each on the inputs that the rounded layers before it compute."""
        fitted, others = [], []
        for weight in self._weights:
            target = self._selection.targets[id(weight.variable)]
            try:
                product_of(target)
                fitted.append(target)
            except ValueError:
                # No product of rows with a matrix is known for this weight.
                others.append(weight)
        options, rest = self._options, self._nearest(others)
        rounder = WeightRounder(
            fitted,
            {id(weight.variable): weight.granularity for weight in self._weights},
            options.weight_format,
            options.weight_rule,
            method=self._method,
            corrects_biases=self._corrects_biases,
            damping=options.damping,
        )
        work = LayerwiseRepair(self._model, fitted, rounder, self._progress, rest.values)
        work.run(list(self._inputs()))
        return _Rounded(work.values, rest.grids | rounder.grids, rest.errors | work.errors)


def _note(equalization: Equalization) -> str:
    changed = equalization.layers
    named = f": {', '.join(one.producer for one in changed)}" if changed else ""
    return f"Equalization changed the channels of {len(changed)} of {equalization.pairs} layers{named}."


def _check_states(model: Any) -> None:
    stateful = [one.name for one in model._flatten_layers() if isinstance(one, keras.layers.RNN) and one.stateful]
    if stateful:
        raise ValueError(
            "Calibration data are independent examples, in batches of any size. Received: a model with the stateful "
            f"layers {', '.join(stateful)}. Build the model with stateful=False; its weights are the same."
        )

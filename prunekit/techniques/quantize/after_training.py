"""Quantizes a trained model without training: grids of weights and tensors, and weights on their grids."""

from __future__ import annotations

from typing import Any

from prunekit.anatomy.reports import Skipped
from prunekit.core.layer_products import product_of
from prunekit.core.layerwise import LayerwiseRepair, Progress
from prunekit.core.variable_values import assigned
from prunekit.techniques.quantize.equalization import Equalization, equalized
from prunekit.techniques.quantize.options import QuantizationOptions, rule_name
from prunekit.techniques.quantize.placement import place
from prunekit.techniques.quantize.preparation import Preparation, RoundedWeights
from prunekit.techniques.quantize.quantization_report import PlannedQuantization, granularity_words
from prunekit.techniques.quantize.quantized_model import QuantizedModel, unique_weights
from prunekit.techniques.quantize.targeting import selected
from prunekit.techniques.quantize.weight_rounding import WeightRounder


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


class _Quantization(Preparation):
    """One quantization of a model; the arguments are those of `quantized`."""

    def __init__(self, model: Any, options: QuantizationOptions, data: Any, progress: Progress | None):
        super().__init__(model, options, data)
        self._progress = progress
        self._method, self._corrects_biases = options.with_data(data)

    def run(self) -> QuantizedModel:
        """Quantizes the model."""
        equalization = equalized(self.placement) if self.options.equalize else None
        notes = () if equalization is None else (_note(equalization),)
        with assigned([] if equalization is None else equalization.values):
            rounded = self._rounded()
            with assigned(rounded.values):
                return self.result(rounded, self.calibrated_ranges(), self._method, notes)

    def _rounded(self) -> RoundedWeights:
        if self._method == "nearest" and not self._corrects_biases:
            return self.nearest(self.weights)
        return self._on_data()

    def _on_data(self) -> RoundedWeights:
        """Rounds layer after layer, each on the inputs that the rounded layers before it compute."""
        fitted, others = [], []
        for weight in self.weights:
            target = self.selection.targets[id(weight.variable)]
            try:
                product_of(target)
                fitted.append(target)
            except ValueError:
                # No product of rows with a matrix is known for this weight.
                others.append(weight)
        options, rest = self.options, self.nearest(others)
        rounder = WeightRounder(
            fitted,
            {id(weight.variable): weight.granularity for weight in self.weights},
            options.weight_format,
            options.weight_rule,
            method=self._method,
            corrects_biases=self._corrects_biases,
            damping=options.damping,
        )
        work = LayerwiseRepair(self.model, fitted, rounder, self._progress, rest.values)
        work.run(list(self.inputs()))
        return RoundedWeights(work.values, rest.grids | rounder.grids, rest.errors | work.errors)


def _note(equalization: Equalization) -> str:
    changed = equalization.layers
    named = f": {', '.join(one.producer for one in changed)}" if changed else ""
    return f"Equalization changed the channels of {len(changed)} of {equalization.pairs} layers{named}."

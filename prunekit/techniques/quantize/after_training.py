"""Quantizes a trained model without training: grids of weights and tensors, and weights on their grids."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from prunekit.anatomy.layers.linear_kinds import is_table
from prunekit.anatomy.layers.targets import Target
from prunekit.anatomy.records.reports import Skipped
from prunekit.core.data.synthetic_inputs import stand_in
from prunekit.core.layerwise.layerwise import LayerwiseRepair, Progress
from prunekit.core.runtime.variable_values import assigned
from prunekit.core.statistics.layer_products import product_of
from prunekit.sparsity.arguments import MEMORY
from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.schedules import OneShot
from prunekit.sparsity.selection import pruned_count
from prunekit.techniques.pruning.after_training.one_shot import OneShotPruning
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.training.targeting import ResolvedTargets, resolved_targets
from prunekit.techniques.quantize.options import QuantizationOptions, rule_name
from prunekit.techniques.quantize.placement.spans import joined
from prunekit.techniques.quantize.preparation import Preparation, RoundedWeights, migrated, selected_and_placed
from prunekit.techniques.quantize.quantization_report import PlannedQuantization, granularity_words, in_floating_point
from prunekit.techniques.quantize.quantization_state import QuantizationState, unique_weights
from prunekit.techniques.quantize.rescaling.activation_scaling import activation_scaled
from prunekit.techniques.quantize.rescaling.channel_scaling import ChannelScaling, output_kernel
from prunekit.techniques.quantize.rescaling.equalization import equalized
from prunekit.techniques.quantize.rescaling.rescaling import rescalable
from prunekit.techniques.quantize.rounding.weight_rounding import WeightRounder


def quantize_model(
    model: Any,
    options: QuantizationOptions,
    data: Any = None,
    progress: Progress | None = None,
    memory: float = MEMORY,
    rates: Mapping[str, float] | None = None,
) -> QuantizationState:
    """Puts the weights of a model on grids, in place, and chooses the grids of its tensors.

    Zeros stay zero. An interruption or an error leaves the model as it was.

    Args:
        model: A built model.
        options: What becomes integers, and how.
        data: Calibration data, as `pk.prune` takes them.
        progress: Told of each step: (done, total, name).
        memory: Largest number of bytes of activations that are kept between layers.
        rates: Prices of bits by the names of weights, in the place of that of the options.

    Raises:
        TypeError, ValueError: As for `pk.quantize`.
    """
    return _Quantization(model, options, data, progress, memory, rates or {}).run()


def planned_quantization(model: Any, options: QuantizationOptions) -> PlannedQuantization:
    """Returns what `quantized` would do, without data and without changing the model.

    Args:
        model: A built model.
        options: What becomes integers, and how.

    Raises:
        TypeError, ValueError: As for `quantized`, except for what is wrong with data.
    """
    selection, placement = selected_and_placed(model, options)
    placement, _ = migrated(model, options, selection, placement)
    rounded = unique_weights(placement)
    bits = {id(one.variable): selection.bits.get(id(one.variable), options.default_bits) for one in rounded}
    pruned = _to_prune(model, options)
    form, rule = options.activation_format, rule_name(options.activation_rule)
    weights = tuple(
        (
            one.name,
            tuple(one.variable.shape),
            str(bits[id(one.variable)]),
            granularity_words(one.granularity),
            rule_name(options.weight_rule(bits[id(one.variable)])),
        )
        for one in rounded
    )
    chosen = [(one.name, rule if one.signed is None else "prescribed by the kernel") for one in placement.ranges]
    left = placement.float_layers(None if form is None else form.bits)
    return PlannedQuantization(
        weights=weights,
        ranges=() if form is None else tuple(chosen),
        skipped=in_floating_point(left, selection.skipped),
        not_pruned=() if pruned is None else tuple(_misfits(pruned)),
        joined=() if form is None else tuple((unit.name, tuple(names)) for unit, _, names in joined(placement)),
        bits=None if form is None else form.bits,
    )


class _Quantization(Preparation):
    """One quantization of a model; the arguments are those of `quantized`."""

    def __init__(  # noqa: PLR0913
        self,
        model: Any,
        options: QuantizationOptions,
        data: Any,
        progress: Progress | None,
        memory: float,
        rates: Mapping[str, float],
    ):
        self._rates = rates
        self._stand_in = stand_in(model) if data is None and options.may_stand_in else None
        data = data if self._stand_in is None else self._stand_in.inputs
        super().__init__(model, options, data)
        self._progress, self._memory = progress, memory
        self._notes: list[str] = []
        self._method, self._corrects_biases = options.with_data(data)

    def run(self) -> QuantizationState:
        """Quantizes the model."""
        if self._stand_in is None:
            self.check_scale()
        with contextlib.ExitStack() as scope:
            pruned = _to_prune(self.model, self.options)
            if pruned is not None and self._lacks_zeros(pruned):
                # Restores the model if anything fails.
                scope.enter_context(assigned([(one, one.value) for one in self.model.weights]))
                self._prune(pruned)
            scope.enter_context(assigned(self._migrated()))
            if self.options.equalize:
                equalization = equalized(self.placement, wanted=self._changes_rounding)
                self._note_scaling("Equalization", [one.producer for one in equalization.layers], equalization.pairs)
                scope.enter_context(assigned(equalization.values))
            if self._method == "awq":
                rule, targets = self.options.weight_rule, self.selection.targets
                scaling = activation_scaled(
                    self.placement, targets, self.inputs, self.bits, rule, wanted=self._changes_rounding
                )
                self._note_scaling("Activation-aware scaling", scaling.layers, scaling.examined)
                scope.enter_context(assigned(scaling.values))
            rounded = self._rounded()
            scope.enter_context(assigned(rounded.values))
            if self._stand_in is not None:
                self._notes.append(self._stand_in.note)
            return self.result(rounded, self.calibrated_ranges(), self._method, tuple(self._notes))

    def _migrated(self) -> list[tuple[Any, Any]]:
        """Leaves factors and offsets of normalizations to the layers behind; returns the new values of the weights."""
        self.placement, self.migrations = migrated(self.model, self.options, self.selection, self.placement)
        self.weights = unique_weights(self.placement)
        found = [one for one in self.migrations if one.values]
        if found:
            names = ", ".join(one.gamma.path.rpartition("/")[0] for one in found)
            self._notes.append(f"The layers behind took the factors and offsets of {names}.")
        return [pair for one in found for pair in one.values]

    @functools.cached_property
    def _on_grids(self) -> dict[int, bool]:
        """id of a variable that is rounded -> True if the weight lies on its grid before anything is changed."""
        found = {}
        for weight in self.weights:
            value = array_of(weight.variable).astype("float32")
            # A weight of zeros lies on every grid, whatever it is multiplied by.
            found[id(weight.variable)] = bool(value.any()) and self.grid_of(weight, value).holds(value)
        return found

    def _changes_rounding(self, scaling: ChannelScaling) -> bool:
        """Returns True if factors of channels change how a weight is rounded, and take none off its grid.

        A kernel whose output channels are multiplied stays on its grid, because each output has a scale of its own.
        Kernels that are divided leave their grids, and so do tables, whose rows have a scale each.
        """
        stays = None if is_table(scaling.producer.first.operation) else output_kernel(scaling.producer.first)
        kept = [] if stays is None else [id(stays.variable)]
        others = [id(one.variable) for one in (*scaling.written, *scaling.kernels) if id(one.variable) not in kept]
        if any(self._on_grids.get(key, False) for key in others):
            return False
        return not all(self._on_grids.get(key, True) for key in (*kept, *others))

    def _note_scaling(self, what: str, changed: Sequence[str], examined: int) -> None:
        if examined:
            named = f": {', '.join(changed)}" if changed else ""
            text = f"the channels of {len(changed)} of {examined} layers{named}"
        elif all(self._changes_rounding(scaling) for scaling in rescalable(self.placement)):
            text = "nothing: no channels between the model's layers can be multiplied"
        else:
            text = "nothing: the weights lie on their grids already"
        self._notes.append(f"{what} changed {text}.")

    def _rounded(self) -> RoundedWeights:
        if self._method != "gptq" and not self._corrects_biases:
            return self.nearest(self.weights)
        if self._stand_in is None:
            return self._on_data()
        try:
            with self._stand_in.renormalization(self.model) as statistics:
                found = self._on_data()
                moved = [(variable, statistics.on_data(id(variable), value)) for variable, value in found.values]
                return replace(found, values=moved)
        except ValueError as error:
            # Nobody asked for synthetic inputs: what cannot be fitted to them is rounded to the nearest values.
            self._stand_in, self._method = self._stand_in.failed(error), "nearest"
            return self.nearest(self.weights)

    def _on_data(self) -> RoundedWeights:
        """Rounds layer after layer, each on the inputs that the rounded layers before it compute."""
        fitted, others = [], []
        weights = {id(weight.variable): weight for weight in self.weights}
        for weight in self.weights:
            target = self.selection.targets[id(weight.variable)]
            try:
                product_of(target)
                fitted.append(target)
            except ValueError:
                # No product of rows with a matrix is known for this weight.
                others.append(weight)
        rest = self.nearest(others)
        rounder = WeightRounder(
            fitted,
            lambda target, value: self.grid_of(weights[id(target.variable)], value),
            method="gptq" if self._method == "gptq" else "nearest",
            corrects_biases=self._corrects_biases,
            damping=self.options.damping,
            rates=[self._rates.get(target.name, self.options.rate) for target in fitted],
        )
        work = LayerwiseRepair(self.model, fitted, rounder, self._progress, rest.values, self._memory)
        work.run(list(self.inputs()))
        return RoundedWeights(work.values, rest.grids | rounder.grids, rest.errors | work.errors)

    def _rounds(self, target: Target) -> bool:
        return id(target.variable) in self.bits

    def _lacks_zeros(self, pruned: ResolvedTargets) -> bool:
        """Returns True if the weights that are rounded have fewer zeros than `sparsity` asks for."""
        values = [array_of(target.variable) for target in pruned.targets if self._rounds(target)]
        zeros = sum(value.size - int(np.count_nonzero(value)) for value in values)
        return zeros < pruned_count(pruned.schedule.final_sparsity, sum(value.size for value in values))

    def _prune(self, pruned: ResolvedTargets) -> None:
        """Prunes the weights that are rounded, as `pk.prune` does with the calibration data."""
        left = [target.name for target in pruned.targets if not self._rounds(target)]
        options = PruningOptions(
            pattern=self.options.pattern,
            include=self.options.include,
            exclude=[*pruned.options.exclude, *left],
            misfits="skip",
        )
        pruning = OneShotPruning(
            self.model, pruned.schedule, options, self._data, memory=self._memory, progress=self._progress
        )
        pruning.run()
        taken = ", ".join(f"{choice.option} {choice.value}" for choice in pruning.pruner.run.options.choices)
        self._notes.append(f"Pruned to {pruned.schedule.final_sparsity:g} before the rounding, by pk.prune: {taken}.")
        self._notes += pruning.notes
        self._notes += [f"Not pruned: {one.name}, since {one.reason}." for one in _misfits(pruned)]


def _to_prune(model: Any, options: QuantizationOptions) -> ResolvedTargets | None:
    """Returns which weights are pruned before they are rounded; None where no zeros are wanted."""
    if options.sparsity is None:
        return None
    # Criterion and allocation change nothing in the choice of the weights.
    chosen = PruningOptions("magnitude", options.pattern, "uniform", options.include, options.exclude, misfits="skip")
    return resolved_targets(model, OneShot(sparsity=options.sparsity), chosen, training=False)


def _misfits(pruned: ResolvedTargets) -> list[Skipped]:
    """Returns the weights that the pattern does not fit, with reasons."""
    start = f"the pattern {pruned.calculator.pattern} does not fit"
    return [one for one in pruned.skipped if one.reason.startswith(start)]

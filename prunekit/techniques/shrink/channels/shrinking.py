"""Removes channels from a model: selection, new layers, comparison, repair, report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prunekit.anatomy.channels.channels import Channels, Group, find_channels
from prunekit.anatomy.channels.weight_entries import cut
from prunekit.anatomy.layers.model_weights import weights_in
from prunekit.core.layerwise.layerwise import Progress
from prunekit.core.runtime.backend import native
from prunekit.core.runtime.kept_grids import on_grids
from prunekit.sparsity.arguments import MEMORY
from prunekit.sparsity.scores import get_criterion
from prunekit.techniques.shrink.channels.budget import SizeModel
from prunekit.techniques.shrink.channels.measured_size import NEAR, Measure, Measured
from prunekit.techniques.shrink.channels.optimizer_state import carry_over, class_notes
from prunekit.techniques.shrink.channels.options import KeptChannels, ShrinkOptions, SizeTarget
from prunekit.techniques.shrink.channels.repair import Repair, RepairError
from prunekit.techniques.shrink.channels.selection import Selection, Selector
from prunekit.techniques.shrink.channels.shrink_report import ShrinkReport, ShrunkGroup
from prunekit.techniques.shrink.channels.trials import Picked, pick
from prunekit.techniques.shrink.channels.verification import (
    TOLERANCE,
    NotComparedError,
    outputs_error,
    probe_inputs,
    verify,
)
from prunekit.techniques.shrink.graph.adjustments import Adjustment
from prunekit.techniques.shrink.graph.constants import NO_CONSTANTS, Constants, fold_constants
from prunekit.techniques.shrink.graph.kept_statistics import affected, approximation_errors
from prunekit.techniques.shrink.graph.layer_copies import Variables
from prunekit.techniques.shrink.graph.rebuild import assign_cut, without_channels

# Largest relative difference of outputs that is rounding, in float32.
OUTPUTS_ROUNDING = 1e-4
_GRIDS = (
    "The model was quantized by pk.quantize: the kept weights have the values of its grids, and the ranges of its "
    "tensors do not belong to the smaller model. Call pk.quantize on the smaller model before an export."
)


@dataclass(frozen=True, eq=False)
class ChannelRemoval:
    """A smaller model, and what led to it.

    Attributes:
        model: The smaller model.
        report: Its report.
        channels: The channels of the former model.
        removed: Those that were removed.
        variables: The smaller model's variable of each former one.
    """

    model: Any
    report: ShrinkReport
    channels: Channels
    removed: np.ndarray
    variables: Variables


def remove_channels(  # noqa: PLR0913
    model: Any,
    target: SizeTarget | KeptChannels | None,
    options: ShrinkOptions,
    data: Any = None,
    *,
    inputs: Any = None,
    measure: Measure | None = None,
    progress: Progress | None = None,
    memory: float = MEMORY,
) -> ChannelRemoval:
    """Returns the smaller model of `pk.shrink`, with the channels that were removed.

    Args:
        model: A built Keras model.
        target: How much is left, of the model or of each group; None removes the channels whose kernels are zero, and
            no others.
        options: Which channels are removed, and the repair.
        data: Calibration data, or None.
        inputs: As for `pk.shrink`.
        measure: How models are measured, for a target that is not calculated.
        progress: As for `pk.shrink`.
        memory: As for `pk.shrink`.

    Raises:
        ValueError, TypeError: As for `pk.shrink`.
    """
    found = find_channels(model, options.approximate)
    repair = Repair(model, options, data, stands_in=target is not None)
    selector = Selector(found, options, repair.data, inputs=inputs, measure=measure, progress=progress)
    if target is None:
        picked = Picked(selector.zero_channels())
    elif isinstance(target, KeptChannels):
        picked = Picked(selector.keeping(target.counts, get_criterion(options.criterion)))
        target = None
    else:
        picked = pick(found, selector, repair, options, target, progress, memory)
    selection, budget, zero = picked.selection, selector.budget, selector.zero
    removed, measured = selection.removed, selection.measured
    if not np.setdiff1d(removed, zero).size:
        repair.leave_out()
    constant = np.intersect1d(removed, zero) if repair.kind == "none" else zero[:0]
    built = _build_and_fold(found, removed, constant, repair.data)
    notes = [*_rounding_notes(selection, options), *_note_missed(target, budget, removed, options)]
    if on_grids(model):
        notes.append(_GRIDS)
    notes += [*built.notes, *_unused_layers(found.model, built.variables)]
    new_values, errors = picked.repaired or repair.run(found, removed, _told_of_repair(progress), memory)
    assign_cut(found, removed, built.variables, new_values)
    if measure is not None and measured is not None and target is not None:
        # Equal weights may share their place in a file, and repaired ones are no longer equal.
        measured = replace(measure.compare(built.model), models=measured.models) if errors else measured
        notes += _measured_notes(measured, target, options)
    notes += carry_over(found.model, built.model, built.variables, _cut(found, removed))
    notes = [*repair.notes, *notes]
    choices = (*picked.choices, *repair.choices)
    report = replace(_report(found, removed, selector.reasons, budget, built, errors, notes), choices=choices)
    return ChannelRemoval(built.model, replace(report, measured=measured), found, removed, built.variables)


def _cut(found: Channels, removed: np.ndarray) -> Callable[[Any, np.ndarray], np.ndarray]:
    """Returns a function that cuts a weight's slot to the kept channels."""
    kept = found.kept_numbers(removed)
    weights = {id(native(axes.variable)): axes for axes in found.links.weights.values()}
    return lambda weight, value: cut(value, weights.get(id(native(weight))), kept)


def _told_of_repair(progress: Progress | None) -> Progress | None:
    return None if progress is None else lambda done, total, name: progress(done, total, f"repaired {name}")


def _measured_notes(measured: Measured, target: SizeTarget, options: ShrinkOptions) -> list[str]:
    tolerance, name = min(NEAR, options.tolerance or NEAR), target.measure
    low, high = measured.interval
    if measured.noise > tolerance * target.share:
        return [
            f"The {name} varies too much on this machine to tell {tolerance:.0%}: between {low:.3f} and {high:.3f} is "
            "left, with a confidence of 95 %. Stop other programs, and try again."
        ]
    if abs(measured.share - target.share) > tolerance * target.share:
        return [
            f"{name}={target.share:g} is not reached within {tolerance:.0%}: {measured.share:.3f} is left in the "
            f"nearest of {measured.models} measured models, after the repair if there is one."
        ]
    return []


@dataclass(frozen=True, eq=False)
class _Built:
    """A smaller model before the repair, with the adjustments that were needed, and remarks."""

    model: Any
    variables: Variables
    constants: Constants
    adjustments: tuple[Adjustment, ...]
    notes: tuple[str, ...]


def _build_and_fold(found: Channels, removed: np.ndarray, constant: np.ndarray, data: Any) -> _Built:
    """Builds the smaller model, compares it with the model, and folds the constants of channels that no input reaches.

    Args:
        found: The channels of the model.
        removed: The removed channels.
        constant: Those of them whose constants are folded.
        data: Calibration data, or None.
    """
    smaller, variables = without_channels(found, removed)
    notes = class_notes(found.model, smaller)
    try:
        inputs = probe_inputs(found, data)
        verify(found, removed, smaller, inputs)
    except NotComparedError as reason:
        notes.insert(0, f"The smaller model was not compared with the model: {reason}.")
        if constant.size:
            notes.insert(1, f"The constants of {constant.size} removed channels, if any, were not folded: pass `data`.")
        return _Built(smaller, variables, NO_CONSTANTS, (), tuple(notes))
    kept, zero = found.kept_numbers(removed), np.setdiff1d(removed, constant)
    constants, adjustments = NO_CONSTANTS, []
    if affected(found, kept):
        adjustments += approximation_errors(found, kept, zero, inputs)
    if constant.size:
        constants = fold_constants(found, removed, constant, inputs)
        adjustments += constants.adjustments
    if constants.biases:
        smaller, variables = without_channels(found, removed, constants)
    elif constants.values:
        assign_cut(found, removed, variables, constants.values)
    if constant.size or adjustments:
        adjustments += _output_error(found.model, adjustments, outputs_error(found, zero, smaller, inputs))
    return _Built(smaller, variables, constants, tuple(adjustments), tuple(notes))


def _output_error(model: Any, adjustments: Sequence[Adjustment], error: float) -> list[Adjustment]:
    """Returns the error of the outputs if something was approximated."""
    if any(one.error is not None for one in adjustments):
        return [Adjustment("outputs", "all approximations together", error)]
    half = any("16" in str(layer.compute_dtype) for layer in model._flatten_layers())
    if error <= (TOLERANCE if half else OUTPUTS_ROUNDING):
        return []
    return [Adjustment("outputs", "constants dropped that are read by other layers than matrix products", error)]


def _unused_layers(model: Any, variables: Variables) -> list[str]:
    """Names the layers whose weights the smaller model does not have, since no call uses them."""
    left = [weight.name for weight in weights_in(model) if id(weight.variable) not in variables]
    names = list(dict.fromkeys(name.rpartition("/")[0] for name in left))
    listed = ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")
    return [f"Layers that no call uses are not in the smaller model: {listed}."] if names else []


def _rounding_notes(selection: Selection, options: ShrinkOptions) -> list[str]:
    order, counts = selection.order, selection.counts
    if options.multiple == 1:
        return []
    if not order.rounded(counts).any():
        return [
            f"No channel is removed: the kept channels of each group, rounded up to a multiple of {options.multiple}, "
            "are all it has. Pass a smaller `multiple`."
        ]
    more = int((counts - order.rounded(counts)).sum())
    left = 1 - order.rounded(counts).sum() / order.total
    return [
        f"The kept channels of each group are rounded up to a multiple of {options.multiple}: {more} more are kept, "
        f"{left:.3f} of all."
    ]


def _note_missed(
    target: SizeTarget | None, budget: SizeModel, removed: np.ndarray, options: ShrinkOptions
) -> list[str]:
    """Returns a note if the model has another share of parameters or multiply-accumulates than was asked for."""
    measures = {"parameters": budget.parameters_without, "macs": budget.macs_without}
    if target is None or target.measure not in measures:
        return []
    measure, tolerance = measures[target.measure], min(NEAR, options.tolerance or NEAR)
    left = measure(removed) / measure(np.zeros(0, int))
    if abs(left - target.share) <= tolerance * target.share:
        return []
    return [f"{target.measure}={target.share:g} is not reached within {tolerance:.0%}: {left:.3f} is left."]


def _report(
    found: Channels,
    removed: np.ndarray,
    reasons: Sequence[str],
    budget: SizeModel,
    built: _Built,
    errors: Sequence[RepairError],
    notes: Sequence[str],
) -> ShrinkReport:
    gone = np.zeros(found.channel_of.size, bool)
    gone[removed] = True
    groups = tuple(_row(group, gone, reason) for group, reason in zip(found.groups, reasons, strict=True))
    kept: dict[str, dict[int, np.ndarray]] = {}
    for group in found.groups:
        for member in group.members:
            if gone[member.channels].any():
                left = [np.flatnonzero(~row) for row in np.atleast_2d(gone[member.channels])]
                kept.setdefault(member.weight, {})[member.axis] = (
                    left[0] if member.channels.ndim == 1 else np.stack(left)
                )
    added = sum(bias.size for bias in built.constants.biases.values())
    return ShrinkReport(
        model_name=found.model.name,
        parameters=(budget.parameters, budget.parameters_without(removed) + added),
        macs=(budget.macs(np.zeros(0, int)), budget.macs(removed)),
        groups=groups,
        skipped=found.stops,
        errors=tuple(errors),
        adjustments=built.adjustments,
        notes=tuple(notes),
        kept=kept,
    )


def _row(group: Group, gone: np.ndarray, reason: str) -> ShrunkGroup:
    left = np.flatnonzero(~gone[group.channels])
    return ShrunkGroup(group.name, group.channels.size, left.size, len(group.members), tuple(left.tolist()), reason)

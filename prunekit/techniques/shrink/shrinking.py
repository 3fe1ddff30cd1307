"""shrink: removes channels from a model and returns a smaller model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Unpack

import numpy as np

from prunekit.anatomy.channel_order import Order
from prunekit.anatomy.channels import Channels, Group, find_channels
from prunekit.anatomy.model_weights import weights_in
from prunekit.core.calibration import batches_of, check_inputs
from prunekit.core.channel_importance import GroupImportance, entry_scores, reasons_to_stay
from prunekit.core.layerwise import Progress
from prunekit.sparsity.scores import get_criterion
from prunekit.suggestions import check_names
from prunekit.techniques.shrink.adjustments import Adjustment
from prunekit.techniques.shrink.budget import Budget
from prunekit.techniques.shrink.constants import NO_CONSTANTS, Constants, fold_constants
from prunekit.techniques.shrink.kept_statistics import affected, approximation_errors
from prunekit.techniques.shrink.layer_copies import takes_a_graph
from prunekit.techniques.shrink.optimizer_state import carry_over
from prunekit.techniques.shrink.options import Options, ShrinkOptions, Target
from prunekit.techniques.shrink.rebuild import Variables, assign_cut, without_channels
from prunekit.techniques.shrink.repair import RepairError, repaired
from prunekit.techniques.shrink.shrink_report import ShrinkReport, ShrunkGroup
from prunekit.techniques.shrink.verification import (
    TOLERANCE,
    NotComparedError,
    outputs_error,
    probe_inputs,
    verify,
)
from prunekit.techniques.shrink.zero_channels import zero_channels

# Largest relative difference of outputs that is rounding, in float32.
OUTPUTS_ROUNDING = 1e-4


@dataclass(frozen=True, eq=False)
class Shrunk:
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


def shrink(
    model: Any,
    *,
    channels: float | None = None,
    parameters: float | None = None,
    macs: float | None = None,
    data: Any = None,
    inputs: Any = None,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> tuple[Any, ShrinkReport]:
    """Removes channels; returns (a smaller model, its report). The given model is not changed.

    A channel is removed from every weight in which it occurs: the filter that computes it, the normalization after it,
    and the inputs of the layers that read it. The new model computes what the model computes with zeros in all these
    entries. If all kernels that compute a channel are zero, the channel is a constant, which is folded into the layers
    that read it; only with a repair this is left to the repair. The new model has the same inputs and outputs, loads
    without prunekit, and keeps names, compile settings and the optimizer's state, so that training goes on.

    Args:
        model: A built Keras model.
        channels: Share of the removable channels that is left, in (0, 1].
        parameters: Share of the model's parameters that is left.
        macs: Share of the multiply-accumulates of one example that is left. Exactly one of the three is given.
        data: Calibration data, as `pk.prune` takes them. With data the kept weights are repaired.
        inputs: Example inputs, or their shapes, for a target in `macs` of a model without declared inputs.
        progress: Told of each repaired layer: (done, total, name).
        **options: `criterion`, `reduction`, `normalize`, `allocation`, `minimum`, `multiple`, `include`, `exclude`,
            `repair`, `tolerance`, `approximate`: see `prunekit.techniques.shrink.options.ShrinkOptions`.

    Raises:
        ValueError: No target, or several; the target cannot be reached: the message has the reachable range; the
            criterion needs data; no channel can be removed; the model cannot be followed.
        TypeError: `model` is not a Keras 3 model; an option is unknown.
    """
    given = {"channels": channels, "parameters": parameters, "macs": macs}
    asked = {name: value for name, value in given.items() if value is not None}
    if len(asked) != 1:
        raise ValueError(
            f"One target says how small the model becomes: {', '.join(given)}. Received: {', '.join(asked) or 'none'}. "
            "Pass exactly one, as the share that is left: channels=0.5."
        )
    check_names(options, [field.name for field in fields(ShrinkOptions)])
    found = shrunk(model, Target(*asked.popitem()), ShrinkOptions(**options), data, inputs=inputs, progress=progress)
    return found.model, found.report


def remove_zero_channels(
    model: Any,
    *,
    minimum: int = 1,
    multiple: int = 1,
    include: Sequence[str] | str = (),
    exclude: Sequence[str] | str = (),
    approximate: Sequence[str] | str = (),
    data: Any = None,
) -> tuple[Any, ShrinkReport]:
    """Removes the channels whose kernels are zero; returns (a smaller model, its report). The given model stays.

    This follows a training in which whole channels were pruned by masks. A channel is removed if all kernels that
    compute it, those of all layers of a residual sum, are entirely zero. Biases and normalizations may have made it a
    constant, which is folded into the layers that read it, so that the outputs stay equal. Where that is not exact, as
    before a padded convolution, the report has the error: `report.approximations`.

    Args:
        model: A built Keras model.
        minimum: Smallest number of channels that a group keeps, in each part of a grouped convolution.
        multiple: Rounds the kept channels of each group up to a multiple, such as 8.
        include: Names, globs or `re:` patterns of layers whose channels may be removed; empty = all.
        exclude: Names, globs or `re:` patterns of layers whose channels stay; overrides `include`.
        approximate: Approximations that are allowed, as for `shrink`.
        data: Inputs on which constants are observed and errors are measured, as `pk.prune` takes calibration data.
            None = random inputs; axes of open length then have 16 entries.

    Raises:
        ValueError: The model has no channels that can be removed; the model cannot be followed.
        TypeError: `model` is not a Keras 3 model.
    """
    options = ShrinkOptions(
        minimum=minimum, multiple=multiple, include=include, exclude=exclude, repair="none", approximate=approximate
    )
    inputs = None if data is None else next(iter(batches_of(data)))[0]
    found = shrunk(model, None, options, data, inputs=inputs)
    return found.model, found.report


def shrunk(
    model: Any,
    target: Target | None,
    options: ShrinkOptions,
    data: Any = None,
    *,
    inputs: Any = None,
    progress: Progress | None = None,
) -> Shrunk:
    """Returns the smaller model of `shrink`, with the channels that were removed.

    Args:
        model: A built Keras model.
        target: How much is left; None removes the channels whose kernels are zero, and no others.
        options: Which channels are removed, and the repair.
        data: Calibration data, or None.
        inputs: As for `shrink`.
        progress: As for `shrink`.

    Raises:
        ValueError, TypeError: As for `shrink`.
    """
    repair = options.repair_with(data)
    found = find_channels(model, options.approximate)
    if data is not None:
        check_inputs(model, next(iter(batches_of(data)))[0])
    reasons = reasons_to_stay(found, options.include, options.exclude)
    free = [index for index in range(len(found.groups)) if not reasons[index]]
    zero = zero_channels(found)
    if target is None:
        values = [(~np.isin(group.channels, zero)).astype("float64") for group in found.groups]
    else:
        criterion = get_criterion(options.criterion)
        scores = entry_scores(found, criterion, data if criterion.needs else None)
        values = GroupImportance(options.reduction, options.normalize).of(found, scores)
    groups, given = [found.groups[i] for i in free], [values[i] for i in free]
    order = Order(groups, given, options.allocation, minimum=options.minimum, multiple=options.multiple)
    budget = Budget(found, inputs)
    counts = _zero_counts(groups, given, options) if target is None else _counts(order, budget, target, options)
    removed = order.removed(counts)
    built = _built(found, removed, np.intersect1d(removed, zero) if repair == "none" else zero[:0], data)
    notes = [*_rounding_notes(order, counts, options), *built.notes, *_unused_layers(found.model, built.variables)]
    errors: list[RepairError] = []
    if repair != "none" and removed.size:
        repaired_values, errors = repaired(found, removed, data, repair, progress)
        assign_cut(found, removed, built.variables, repaired_values)
    notes += carry_over(found, found.kept_numbers(removed), built.model, built.variables)
    report = _report(found, removed, reasons, budget, built, errors, notes)
    return Shrunk(built.model, report, found, removed, built.variables)


@dataclass(frozen=True, eq=False)
class _Built:
    """A smaller model before the repair, with the adjustments that were needed, and remarks."""

    model: Any
    variables: Variables
    constants: Constants
    adjustments: tuple[Adjustment, ...]
    notes: tuple[str, ...]


def _built(found: Channels, removed: np.ndarray, constant: np.ndarray, data: Any) -> _Built:
    """Builds the smaller model, compares it with the model, and folds the constants of channels that no input reaches.

    Args:
        found: The channels of the model.
        removed: The removed channels.
        constant: Those of them whose constants are folded.
        data: Calibration data, or None.
    """
    smaller, variables = without_channels(found, removed)
    kind, notes = type(found.model), []
    if kind.train_step is not type(smaller).train_step:
        notes.append(f"The smaller model is a {type(smaller).__name__}, without the train_step of {kind.__name__}.")
    elif not takes_a_graph(kind) and type(smaller) is not kind:
        notes.append(f"The smaller model is a keras.Model of layers, without the methods of {kind.__name__}.")
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
        adjustments += _of_outputs(found.model, adjustments, outputs_error(found, zero, smaller, inputs))
    return _Built(smaller, variables, constants, tuple(adjustments), tuple(notes))


def _of_outputs(model: Any, adjustments: Sequence[Adjustment], error: float) -> list[Adjustment]:
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


def _zero_counts(groups: Sequence[Group], values: Sequence[np.ndarray], options: ShrinkOptions) -> np.ndarray:
    """Returns how many units of each group have zero channels only, and may be removed."""
    matrices = [(one == 0).reshape(group.parts, -1) for group, one in zip(groups, values, strict=True)]
    return np.array([min(one.sum(axis=1).min(), max(one.shape[1] - options.minimum, 0)) for one in matrices], int)


def _counts(order: Order, budget: Budget, target: Target, options: ShrinkOptions) -> np.ndarray:
    """Returns how many units each group loses."""
    name, share = target.measure, target.share
    if name == "channels":
        asked = round((1 - share) * order.total)
        if asked > order.length and options.tolerance is not None:
            raise ValueError(
                f"The groups have {order.total} channels, and {order.total - order.length} of them stay at least "
                f"(minimum={options.minimum}). Received: channels={share:g}. The reachable range is "
                f"{1 - order.length / order.total:.3f} to 1."
            )
        return order.first(min(asked, order.length))
    measure = {"parameters": budget.parameters_without, "macs": budget.macs_without}[name]
    whole = measure(np.zeros(0, int))
    tolerance = options.tolerance
    counts = order.nearest(measure, share * whole, (tolerance or 0.0) * share * whole)
    reached = measure(order.removed(counts)) / whole
    # Rounded up to a multiple, the steps may be larger than the tolerance.
    coarse = options.multiple > 1 and counts.sum() < order.length
    if tolerance is not None and abs(reached - share) > tolerance * share and not coarse:
        least = measure(order.removed(order.first(order.length))) / whole
        raise ValueError(
            f"{name}={share:g} cannot be reached within {tolerance:.0%}. Received: a model of which {reached:.3f} is "
            f"left at the nearest. The reachable range is {least:.3f} to 1; channels that cannot be removed are in "
            "`prunekit inspect --groups`."
        )
    return counts


def _rounding_notes(order: Order, counts: np.ndarray, options: ShrinkOptions) -> list[str]:
    if options.multiple == 1:
        return []
    more = int((counts - order.rounded(counts)).sum())
    left = 1 - order.rounded(counts).sum() / order.total
    return [
        f"The kept channels of each group are rounded up to a multiple of {options.multiple}: {more} more are kept, "
        f"{left:.3f} of all."
    ]


def _report(
    found: Channels,
    removed: np.ndarray,
    reasons: Sequence[str],
    budget: Budget,
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
        macs=_macs(budget, removed),
        groups=groups,
        stops=found.stops,
        errors=tuple(errors),
        adjustments=built.adjustments,
        notes=tuple(notes),
        kept=kept,
    )


def _row(group: Group, gone: np.ndarray, reason: str) -> ShrunkGroup:
    left = np.flatnonzero(~gone[group.channels])
    return ShrunkGroup(group.name, group.channels.size, left.size, len(group.members), tuple(left.tolist()), reason)


def _macs(budget: Budget, removed: np.ndarray) -> tuple[int | None, int | None]:
    try:
        return budget.macs_without(np.zeros(0, int)), budget.macs_without(removed)
    except ValueError:
        return None, None

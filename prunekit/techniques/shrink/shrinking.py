"""Removes channels from a model: selection, new layers, comparison, repair, report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prunekit.anatomy.channels import Channels, Group, find_channels
from prunekit.core.calibration import batches_of, check_inputs
from prunekit.core.layerwise import Progress
from prunekit.sparsity.scores import get_criterion
from prunekit.techniques.shrink.budget import Budget
from prunekit.techniques.shrink.importance import importances, producing, ranked_weights
from prunekit.techniques.shrink.measured_size import Measure, Measured, Search
from prunekit.techniques.shrink.optimizer_state import carry_over
from prunekit.techniques.shrink.options import ShrinkOptions, Target
from prunekit.techniques.shrink.rebuild import Variables, assign_cut, without_channels
from prunekit.techniques.shrink.repair import RepairError, repaired
from prunekit.techniques.shrink.selection import Order
from prunekit.techniques.shrink.shrink_report import ShrinkReport, ShrunkGroup
from prunekit.techniques.shrink.verification import verify


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


def shrunk(
    model: Any,
    target: Target,
    options: ShrinkOptions,
    data: Any = None,
    *,
    inputs: Any = None,
    measure: Measure | None = None,
    progress: Progress | None = None,
) -> Shrunk:
    """Returns the smaller model of `pk.shrink`, with the channels that were removed.

    Args:
        model: A built Keras model.
        target: How much is left.
        options: Which channels are removed, and the repair.
        data: Calibration data, or None.
        inputs: As for `pk.shrink`.
        measure: How models are measured, for a target that is not calculated.
        progress: As for `pk.shrink`.

    Raises:
        ValueError, TypeError: As for `pk.shrink`.
    """
    repair = options.repair_with(data)
    found = find_channels(model)
    if data is not None:
        check_inputs(model, next(iter(batches_of(data)))[0])
    reasons = _reasons(found, options)
    free = [index for index in range(len(found.groups)) if not reasons[index]]
    if not free:
        raise ValueError(_nothing(found, reasons))
    values = importances(found, options, data if get_criterion(options.criterion).needs else None)
    order = Order([found.groups[i] for i in free], [values[i] for i in free], options)
    budget = Budget(found, inputs)
    counts, measured = _selected(found, order, budget, target, options, measure, progress)
    removed = order.removed(counts)
    smaller, variables = without_channels(found, removed)
    notes = [*_rounding_notes(order, counts, options), *_notes(found, removed, smaller, data)]
    errors: list[RepairError] = []
    if repair != "none" and removed.size:
        new_values, errors = repaired(found, removed, data, repair, _told_of_repair(progress))
        assign_cut(found, removed, variables, new_values)
    if measure is not None and measured is not None:
        # Equal weights may share their place in a file, and repaired ones are no longer equal.
        measured = replace(measure.compare(smaller), models=measured.models) if errors else measured
        notes += _measured_notes(measured, target, options)
    notes += carry_over(found, found.kept_numbers(removed), smaller, variables)
    report = _report(found, removed, reasons, budget, errors, notes)
    return Shrunk(smaller, replace(report, measured=measured), found, removed, variables)


def _selected(
    found: Channels,
    order: Order,
    budget: Budget,
    target: Target,
    options: ShrinkOptions,
    measure: Measure | None,
    progress: Progress | None,
) -> tuple[np.ndarray, Measured | None]:
    """Returns how many units each group loses, and the measured size for a target that is measured."""
    if measure is None:
        return _counts(order, budget, target, options), None
    compare = measure.compare
    predict = _predicted(budget, measure)
    return Search(
        order,
        target,
        options.tolerance,
        predict,
        lambda removed: compare(without_channels(found, removed)[0]),
        progress or (lambda done, total, text: None),
    ).nearest()


def _predicted(budget: Budget, measure: Measure) -> Callable[[np.ndarray], float]:
    """Returns the calculated size that the measured one follows."""
    if measure.follows == "macs" and _macs(budget, np.zeros(0, int))[0] is not None:
        return budget.macs_without
    return budget.parameters_without


def _told_of_repair(progress: Progress | None) -> Progress | None:
    return None if progress is None else lambda done, total, name: progress(done, total, f"repaired {name}")


def _measured_notes(measured: Measured, target: Target, options: ShrinkOptions) -> list[str]:
    tolerance, name = options.tolerance, target.measure
    if tolerance is None:
        return []
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


def _notes(found: Channels, removed: np.ndarray, smaller: Any, data: Any) -> list[str]:
    """Compares the smaller model with the former one; returns what the user has to know of it."""
    unverified, kind = verify(found, removed, smaller, data), type(found.model)
    notes = [f"The smaller model was not compared with the model: {unverified}."] if unverified else []
    if kind.train_step is not type(smaller).train_step:
        notes.append(f"The smaller model is a {type(smaller).__name__}, without the train_step of {kind.__name__}.")
    return notes


def _reasons(found: Channels, options: ShrinkOptions) -> list[str]:
    """Returns for each group why it stays whole, or ""."""
    if not options.include and not options.exclude:
        return [""] * len(found.groups)
    targets, _ = ranked_weights(found.model)
    selected, skipped = ranked_weights(found.model, options.include, options.exclude)
    chosen = {target.name for target in selected}
    excluded = {one.name: one.reason for one in skipped if one.reason.startswith("excluded")}
    reasons = []
    for group in found.groups:
        names = producing(group, targets) or [member.weight for member in group.members]
        named = [excluded[one] for one in names if one in excluded]
        others = [] if chosen.intersection(names) else ["not matched by include"]
        reasons.append(next(iter([*named, *others]), ""))
    return reasons


def _nothing(found: Channels, reasons: Sequence[str]) -> str:
    stops = [f"{stop.place or 'outputs'}: {stop.reason}" for stop in found.stops]
    listed = "; ".join(dict.fromkeys([*filter(None, reasons), *stops][:8])) or "the model has no hidden layers"
    return f"The model {found.model.name!r} has no channels that can be removed. Received: {listed}."


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
    parameters = budget.parameters, budget.parameters_without(removed)
    return ShrinkReport(
        found.model.name, parameters, _macs(budget, removed), groups, found.stops, tuple(errors), tuple(notes), kept
    )


def _row(group: Group, gone: np.ndarray, reason: str) -> ShrunkGroup:
    left = np.flatnonzero(~gone[group.channels])
    return ShrunkGroup(group.name, group.channels.size, left.size, len(group.members), tuple(left.tolist()), reason)


def _macs(budget: Budget, removed: np.ndarray) -> tuple[int | None, int | None]:
    try:
        return budget.macs_without(np.zeros(0, int)), budget.macs_without(removed)
    except ValueError:
        return None, None

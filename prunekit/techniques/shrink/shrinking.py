"""shrink: removes channels from a model and returns a smaller model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Unpack

import numpy as np

from prunekit.anatomy.channels import Channels, Group, find_channels
from prunekit.anatomy.model_weights import weights_in
from prunekit.core.calibration import batches_of, check_inputs
from prunekit.core.layerwise import Progress
from prunekit.sparsity.scores import get_criterion
from prunekit.suggestions import check_names
from prunekit.techniques.shrink.budget import Budget
from prunekit.techniques.shrink.importance import importances, producing, ranked_weights
from prunekit.techniques.shrink.layer_copies import takes_a_graph
from prunekit.techniques.shrink.optimizer_state import carry_over
from prunekit.techniques.shrink.options import Options, ShrinkOptions, Target
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
    entries. It has the same inputs and outputs, loads without prunekit, and keeps names, compile settings and the
    optimizer's state, so that training goes on.

    Args:
        model: A built Keras model.
        channels: Share of the removable channels that is left, in (0, 1].
        parameters: Share of the model's parameters that is left.
        macs: Share of the multiply-accumulates of one example that is left. Exactly one of the three is given.
        data: Calibration data, as `pk.prune` takes them. With data the kept weights are repaired.
        inputs: Example inputs, or their shapes, for a target in `macs` of a model without declared inputs.
        progress: Told of each repaired layer: (done, total, name).
        **options: `criterion`, `reduction`, `normalize`, `allocation`, `minimum`, `multiple`, `include`, `exclude`,
            `repair`, `tolerance`: see `prunekit.techniques.shrink.options.ShrinkOptions`.

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


def shrunk(
    model: Any,
    target: Target,
    options: ShrinkOptions,
    data: Any = None,
    *,
    inputs: Any = None,
    progress: Progress | None = None,
) -> Shrunk:
    """Returns the smaller model of `shrink`, with the channels that were removed.

    Args:
        model: A built Keras model.
        target: How much is left.
        options: Which channels are removed, and the repair.
        data: Calibration data, or None.
        inputs: As for `shrink`.
        progress: As for `shrink`.

    Raises:
        ValueError, TypeError: As for `shrink`.
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
    counts = _counts(order, budget, target, options)
    removed = order.removed(counts)
    smaller, variables = without_channels(found, removed)
    notes = [*_rounding_notes(order, counts, options), *_notes(found, removed, smaller, data)]
    notes += _unused_layers(found.model, variables)
    errors: list[RepairError] = []
    if repair != "none" and removed.size:
        repaired_values, errors = repaired(found, removed, data, repair, progress)
        assign_cut(found, removed, variables, repaired_values)
    notes += carry_over(found, found.kept_numbers(removed), smaller, variables)
    return Shrunk(smaller, _report(found, removed, reasons, budget, errors, notes), found, removed, variables)


def _notes(found: Channels, removed: np.ndarray, smaller: Any, data: Any) -> list[str]:
    """Compares the smaller model with the former one; returns what the user has to know of it."""
    unverified, kind = verify(found, removed, smaller, data), type(found.model)
    notes = [f"The smaller model was not compared with the model: {unverified}."] if unverified else []
    if kind.train_step is not type(smaller).train_step:
        notes.append(f"The smaller model is a {type(smaller).__name__}, without the train_step of {kind.__name__}.")
    elif not takes_a_graph(kind) and type(smaller) is not kind:
        notes.append(f"The smaller model is a keras.Model of layers, without the methods of {kind.__name__}.")
    return notes


def _unused_layers(model: Any, variables: Variables) -> list[str]:
    """Names the layers whose weights the smaller model does not have, since no call uses them."""
    left = [weight.name for weight in weights_in(model) if id(weight.variable) not in variables]
    names = list(dict.fromkeys(name.rpartition("/")[0] for name in left))
    listed = ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")
    return [f"Layers that no call uses are not in the smaller model: {listed}."] if names else []


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

"""shrink: removes channels from a model and returns a smaller model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from prunekit.anatomy.channels import Channels, Group, find_channels
from prunekit.anatomy.targets import Target, find_targets
from prunekit.sparsity.arguments import positive
from prunekit.sparsity.scores import get_criterion
from prunekit.techniques.shrink.budget import Budget
from prunekit.techniques.shrink.importance import Ranking, importances, producing
from prunekit.techniques.shrink.optimizer_state import carry_over
from prunekit.techniques.shrink.rebuild import Variables, assign_cut, without_channels
from prunekit.techniques.shrink.repair import REPAIRS, RepairError, repaired
from prunekit.techniques.shrink.selection import Limits, Order
from prunekit.techniques.shrink.shrink_report import ShrinkReport, ShrunkGroup
from prunekit.techniques.shrink.verification import verify

# How far the reached share may be from the asked one.
TOLERANCE = 0.02


def shrink(  # noqa: PLR0913  # one keyword for each decision
    model: Any,
    *,
    channels: float | None = None,
    parameters: float | None = None,
    macs: float | None = None,
    data: Any = None,
    criterion: Any = "magnitude",
    reduction: str = "mean",
    normalize: bool = True,
    allocation: str = "uniform",
    minimum: int = 1,
    multiple: int = 1,
    include: Sequence[str] | str = (),
    exclude: Sequence[str] | str = (),
    repair: str | None = None,
    inputs: Any = None,
    progress: Callable[[int, int, str], None] | None = None,
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
        criterion: Importance of single weights, as in `pk.prune`; a channel's is the mean over its entries.
        reduction: How the weights of a group are reduced to one importance: "mean", "sum" or "max".
        normalize: Whether each weight of a group counts alike, whatever its scale.
        allocation: "uniform": each group loses the same share; "alike": groups of the same kind compete; "global": all
            groups compete.
        minimum: Smallest number of channels that a group keeps.
        multiple: Rounds the kept channels of each group up to a multiple, such as 8.
        include: Names, globs or `re:` patterns of layers whose channels may be removed; empty = all.
        exclude: Names, globs or `re:` patterns of layers whose channels stay; overrides `include`.
        repair: With data: "weights" fits the kept weights of each layer to its former outputs, "outputs" a scale and a
            bias for each output; both update moving statistics. "none" changes nothing. None = "weights" with data.
        inputs: Example inputs, or their shapes, for a target in `macs` of a model without declared inputs.
        progress: Told of each repaired layer: (done, total, name).

    Raises:
        ValueError: No target, or several; the target cannot be reached: the message has the reachable range; the
            criterion needs data; no channel can be removed; the model cannot be followed.
        TypeError: `model` is not a Keras 3 model.
    """
    name, share = _target(channels=channels, parameters=parameters, macs=macs)
    ranking, limits = Ranking(criterion, reduction, normalize), Limits(minimum, multiple)
    repair = _repair(repair, data, criterion)
    found = find_channels(model)
    targets = find_targets(model, also=("depthwise_kernel",))[0]
    reasons = _reasons(found, targets, model, include, exclude)
    free = [index for index in range(len(found.groups)) if not reasons[index]]
    if not free:
        raise ValueError(_nothing(found, reasons))
    values = importances(found, ranking, data if get_criterion(criterion).needs else None)
    order = Order([found.groups[i] for i in free], [values[i] for i in free], allocation, limits)
    budget = Budget(found, inputs)
    counts = _counts(order, budget, name, share, limits)
    removed = order.removed(counts)
    smaller, variables = without_channels(found, removed)
    unverified = verify(found, removed, smaller, data)
    errors = _repair_weights(found, removed, variables, data, repair, progress)
    notes = [*_rounding_notes(order, counts, limits)]
    notes += [f"The smaller model was not compared with the model: {unverified}."] if unverified else []
    if type(model).train_step is not type(smaller).train_step:
        notes.append(
            f"The smaller model is a {type(smaller).__name__}, without the train_step of {type(model).__name__}."
        )
    notes += carry_over(found, found.kept_numbers(removed), smaller, variables)
    return smaller, _report(found, removed, reasons, budget, errors, notes)


def _target(**given: float | None) -> tuple[str, float]:
    asked = {name: value for name, value in given.items() if value is not None}
    if len(asked) != 1:
        raise ValueError(
            f"One target says how small the model becomes: {', '.join(given)}. Received: {', '.join(asked) or 'none'}. "
            "Pass exactly one, as the share that is left: channels=0.5."
        )
    ((name, value),) = asked.items()
    share = float(positive(name, value))
    if share > 1:
        hint = f" For {value:g} %, pass {share / 100:g}." if share <= 100 else ""
        raise ValueError(f"{name} is the share that is left, in (0, 1]. Received: {name}={value}.{hint}")
    return name, share


def _repair(repair: str | None, data: Any, criterion: Any) -> str:
    if repair not in (None, *REPAIRS):
        raise ValueError(f"`repair` is one of {', '.join(REPAIRS)}. Received: {repair!r}.")
    if data is None:
        if repair not in (None, "none"):
            raise ValueError(f"A repair reads calibration data. Received: repair={repair!r} without data. Pass `data`.")
        return "none"
    if repair is None:
        return "none" if get_criterion(criterion).before_training else "weights"
    return repair


def _reasons(found: Channels, targets: Sequence[Target], model: Any, include: Any, exclude: Any) -> list[str]:
    """Returns for each group why it stays whole, or ""."""
    if not include and not exclude:
        return [""] * len(found.groups)
    selected, skipped = find_targets(model, include, exclude, also=("depthwise_kernel",))
    chosen = {target.name for target in selected}
    excluded = {one.name: one.reason for one in skipped if one.reason.startswith("excluded")}
    reasons = []
    for group in found.groups:
        names = producing(found, group, targets) or [member.weight for member in group.members]
        named = [excluded[one] for one in names if one in excluded]
        others = [] if chosen.intersection(names) else ["not matched by include"]
        reasons.append(next(iter([*named, *others]), ""))
    return reasons


def _nothing(found: Channels, reasons: Sequence[str]) -> str:
    stops = [f"{stop.place or 'outputs'}: {stop.reason}" for stop in found.stops]
    listed = "; ".join(dict.fromkeys([*filter(None, reasons), *stops][:8])) or "the model has no hidden layers"
    return f"The model {found.model.name!r} has no channels that can be removed. Received: {listed}."


def _counts(order: Order, budget: Budget, name: str, share: float, limits: Limits) -> np.ndarray:
    """Returns how many units each group loses."""
    if name == "channels":
        asked = round((1 - share) * order.total)
        if asked > order.length:
            raise ValueError(
                f"The groups have {order.total} channels, and {order.total - order.length} of them stay at least "
                f"(minimum={limits.minimum}). Received: channels={share:g}. The reachable range is "
                f"{1 - order.length / order.total:.3f} to 1."
            )
        return order.first(asked)
    measure = {"parameters": budget.parameters_without, "macs": budget.macs_without}[name]
    whole = measure(np.zeros(0, int))
    counts = order.nearest(measure, share * whole, TOLERANCE * share * whole)
    reached = measure(order.removed(counts)) / whole
    # Rounded up to a multiple, the steps may be larger than the tolerance.
    coarse = limits.multiple > 1 and counts.sum() < order.length
    if abs(reached - share) > TOLERANCE * share and not coarse:
        least = measure(order.removed(order.first(order.length))) / whole
        raise ValueError(
            f"{name}={share:g} cannot be reached within {TOLERANCE:.0%}. Received: a model of which {reached:.3f} is "
            f"left at the nearest. The reachable range is {least:.3f} to 1; channels that cannot be removed are in "
            "`prunekit inspect --groups`."
        )
    return counts


def _repair_weights(  # noqa: PLR0913
    found: Channels, removed: np.ndarray, variables: Variables, data: Any, repair: str, progress: Any
) -> list[RepairError]:
    """Assigns the repaired weights to the smaller model; returns the errors of the layers."""
    if repair == "none" or not removed.size:
        return []
    values, errors = repaired(found, removed, data, repair, progress)
    assign_cut(found, removed, variables, values)
    return errors


def _rounding_notes(order: Order, counts: np.ndarray, limits: Limits) -> list[str]:
    if limits.multiple == 1:
        return []
    more = int((counts - order.rounded(counts)).sum())
    left = 1 - order.rounded(counts).sum() / order.total
    return [
        f"The kept channels of each group are rounded up to a multiple of {limits.multiple}: {more} more are kept, "
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
    gone = np.zeros(found.of.size, bool)
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

"""Chooses the criterion and the allocation that are "auto": by trial, where the kept weights are repaired."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from prunekit.anatomy.channels.channels import Channels
from prunekit.anatomy.records.reports import Choice
from prunekit.core.layerwise.layerwise import Progress
from prunekit.core.layerwise.trials import LARGEST, nearest, trial_progress
from prunekit.core.outputs.baseline import Baseline
from prunekit.core.runtime.variable_values import replaced
from prunekit.core.statistics.channel_importance import ranking_weights
from prunekit.core.statistics.layer_products import unfitted
from prunekit.sparsity.arguments import MEMORY
from prunekit.sparsity.automatic import AutomaticCriterion
from prunekit.sparsity.scores import Criterion, get_criterion
from prunekit.sparsity.shorthands import CALCULATED
from prunekit.techniques.shrink.channels.options import ShrinkOptions, SizeTarget
from prunekit.techniques.shrink.channels.repair import Repair, RepairError
from prunekit.techniques.shrink.channels.selection import Selection, Selector
from prunekit.techniques.shrink.graph.kept_statistics import kept_statistics

# How much more the error counts of channels that were selected on the synthetic inputs that measure it, by
# docs/measured/defaults.md.
_SAME_INPUTS = 1.25

NOT_REPAIRED = "since nothing is repaired"

Way = tuple[str | Criterion, str]


@dataclass(frozen=True, eq=False)
class Picked:
    """The channels that are removed, and what led to them.

    Attributes:
        selection: The channels.
        choices: What was taken for "auto".
        repaired: What `Repair.run` gives for them; None if it has not run.
    """

    selection: Selection
    choices: tuple[Choice, ...] = ()
    repaired: tuple[dict[int, np.ndarray], list[RepairError]] | None = None


def ways_to_select(found: Channels, options: ShrinkOptions, untried: str) -> tuple[list[Way], tuple[Choice, ...]]:
    """Returns the pairs (criterion, allocation) to try, and what is taken for "auto" where there is one pair.

    Args:
        found: The channels of the model.
        options: Criterion and allocation, which may be "auto".
        untried: Reason why nothing is tried, as a clause: there is one pair then. "" = several may be tried.
    """
    criteria: Sequence[str | Criterion] = (get_criterion(options.criterion),)
    allocations: Sequence[str] = (options.allocation,)
    choices = []
    if criteria == (AutomaticCriterion(),):
        lacking = next(iter(unfitted(ranking_weights(found))), None)
        criteria = ("l2", "output_error") if lacking is None else ("l2",)
        reason = untried or f"since the output error of {lacking} cannot be calculated"
        choices.append(Choice("criterion", "l2", reason))
    if options.allocation == "auto":
        allocations = ("uniform", "global")
        choices.append(Choice("allocation", "uniform", untried))
    ways = list(itertools.product(criteria, allocations))
    return ways[:1] if untried else ways, tuple(choices)


def reason_not_to_try(repair: str, target: SizeTarget, parameters: int) -> str:
    """Returns the reason why one selection is taken without a trial, as a clause; "" if several are tried.

    Args:
        repair: "weights", "outputs", or "none".
        target: How much is left.
        parameters: Number of the model's parameters.
    """
    if repair == "none":
        return NOT_REPAIRED
    if target.measure not in CALCULATED:
        return f"since {target.measure} is measured"
    return f"since the model has more than {LARGEST:,} parameters" if parameters > LARGEST else ""


def pick(
    found: Channels,
    selector: Selector,
    repair: Repair,
    options: ShrinkOptions,
    target: SizeTarget,
    progress: Progress | None = None,
    memory: float = MEMORY,
) -> Picked:
    """Returns the channels that are removed.

    Where criterion or allocation are "auto", each selection that may be taken is repaired, and the one is taken whose
    outputs on the inputs of the repair are nearest to the model's. Nothing is tried where nothing is repaired, for
    sizes that are measured, and on models of more than `LARGEST` parameters.

    Args:
        found: The channels of the model.
        selector: Selects channels.
        repair: The repair.
        options: Criterion and allocation, and others.
        target: How much is left.
        progress: Told of each repaired layer: (done, total, text).
        memory: As for `pk.shrink`.

    Raises:
        ValueError: The target cannot be reached.
    """
    untried = reason_not_to_try(repair.kind, target, selector.budget.parameters)
    ways, choices = ways_to_select(found, options, untried)
    if len(ways) == 1:
        return Picked(selector.select(target, *ways[0]), choices)
    baseline = Baseline(found.model, repair.data, with_metrics=False)
    tried: dict[bytes, tuple[float, tuple[Way, Picked]]] = {}
    for number, (way, selection) in enumerate(_selections(selector, target, ways)):
        removed = selection.removed
        if not np.setdiff1d(removed, selector.zero).size:
            return Picked(selection, _renamed(choices, way, "since it removes channels of zeros alone"))
        key = np.sort(removed).tobytes()
        if key in tried:
            continue
        told = trial_progress(progress, number, len(ways), "repaired ")
        repaired = repair.run(found, removed, told, memory)
        if repair.kind == "none":
            return Picked(selection, _renamed(choices, way, NOT_REPAIRED), repaired)
        error = _error(baseline, found, removed, repaired[0])
        judged = error * (_SAME_INPUTS if repair.is_synthetic and get_criterion(way[0]).needs else 1.0)
        tried[key] = judged, (way, Picked(selection, (), repaired))
    (way, picked), reason = nearest(list(tried.values()))
    return replace(picked, choices=_renamed(choices, way, reason))


def _selections(selector: Selector, target: SizeTarget, ways: Sequence[Way]) -> Iterator[tuple[Way, Selection]]:
    """Yields the selections that reach the target; raises ValueError if the first does not."""
    for way in ways:
        try:
            selection = selector.select(target, *way)
        except ValueError:
            if way == ways[0]:
                raise
            continue
        yield way, selection


def _renamed(choices: Sequence[Choice], way: Way, reason: str) -> tuple[Choice, ...]:
    values = dict(zip(("criterion", "allocation"), map(str, way), strict=True))
    return tuple(Choice(one.option, values[one.option], reason) for one in choices)


def _error(baseline: Baseline, found: Channels, removed: np.ndarray, values: dict[int, np.ndarray]) -> float:
    """Returns the error of the outputs of the model with the repaired values, which are zero at removed channels."""
    pairs = [(variable, values[id(variable)]) for variable in found.model.variables if id(variable) in values]
    with replaced(pairs), kept_statistics(found, found.kept_numbers(removed)):
        return baseline.error()

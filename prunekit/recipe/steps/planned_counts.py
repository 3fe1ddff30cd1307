"""The targets of a prune step with the counts of its final masks, calculated on the weights that the model has now."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from keras import ops

from prunekit.core.statistics.statistics import Collectors
from prunekit.recipe.steps.step_handler import PlannedTarget
from prunekit.sparsity.bounds import as_bounds
from prunekit.sparsity.scores import get_criterion
from prunekit.sparsity.selection import removed_count
from prunekit.sparsity.shorthands import sources_of
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.training.held_masks import without_zeros
from prunekit.techniques.pruning.training.targeting import ResolvedTargets

# Most prunable weights of a model for which a plan passes over data: at most some seconds.
MOST_WEIGHTS_WITH_DATA = 300_000


def unknown_counts(found: ResolvedTargets, options: PruningOptions, *, has_data: bool) -> str | None:
    """Returns the reason why a plan does not calculate the counts of the targets, or None if it does.

    Args:
        found: The targets and their calculator.
        options: The pruning options.
        has_data: Whether the recipe has data.
    """
    if found.calculator.shares_known:
        return None
    sources, criterion = sources_of(options.needs), get_criterion(options.criterion)
    named = ", ".join(sorted(options.needs))
    if "training" in sources:
        return f"the statistic {named} is measured during the training"
    if criterion.rounds > 1:
        return f"the criterion selects in {criterion.rounds} rounds"
    if "data" not in sources:
        return None
    if not has_data:
        return f"the statistic {named} is measured on data"
    size = sum(target.size for target in found.targets)
    if size > MOST_WEIGHTS_WITH_DATA:
        return (
            f"the statistic {named} is measured on data, which a plan does for up to {MOST_WEIGHTS_WITH_DATA:,} weights"
        )
    return None


def planned_targets(found: ResolvedTargets, options: PruningOptions, data: Any) -> tuple[PlannedTarget, ...]:
    """Returns the targets with their final counts.

    Args:
        found: The targets and their calculator.
        options: The pruning options.
        data: Calibration data for statistics that the masks need; None if the counts need no masks or no data.
    """
    calculator, final = found.calculator, found.schedule.final_sparsity
    if calculator.shares_known:
        counts = _entries(found, calculator.units_pruned(final))
        return _rows(found, options, found.fractions, counts)
    if unknown_counts(found, options, has_data=data is not None) is not None:
        # An even share, within bounds and overrides.
        even = [
            removed_count(share, target.size, keep_one=options.keep_one)
            for share, target in zip(found.fractions, found.targets, strict=True)
        ]
        return _rows(found, options, found.fractions, even)
    counts = _counts_now(found, options, data)
    shares = [count / target.size for count, target in zip(counts, found.targets, strict=True)]
    return _rows(found, options, shares, counts)


def _counts_now(found: ResolvedTargets, options: PruningOptions, data: Any) -> list[int]:
    """Returns the number of entries of each target that the final masks remove from the model's present weights."""
    masks: Sequence[Any] = [ops.ones(target.shape, "bool") for target in found.targets]
    if options.keep_zeros:
        masks, _ = without_zeros(masks, found.targets)
    statistics = Collectors(options.needs, found.model, found.calculator.scored, data).values()
    found.calculator.once = True
    kept = found.calculator.choose(found.schedule.final_sparsity, masks, statistics).kept
    return [target.size - int(number) for target, number in zip(found.targets, np.asarray(kept), strict=True)]


def _entries(found: ResolvedTargets, units: Sequence[int]) -> list[int]:
    """Returns numbers of entries for numbers of units; blocks cut off at an edge are smaller than the others."""
    pattern = found.calculator.pattern
    layouts = [(target.shape, target.in_axes, target.out_axes) for target in found.targets]
    rows = zip(units, found.targets, layouts, strict=True)
    return [round(number * target.size / pattern.units(*layout)) for number, target, layout in rows]


def _rows(
    found: ResolvedTargets, options: PruningOptions, shares: Collection[float], counts: Collection[int]
) -> tuple[PlannedTarget, ...]:
    rows = []
    for target, share, count in zip(found.targets, shares, counts, strict=True):
        bounds = found.options.bounds.get(target.name)
        within = None if bounds is None else as_bounds(target.name, bounds)
        rows.append(
            PlannedTarget(
                name=target.name,
                shape=target.shape,
                size=target.size,
                sparsity=share,
                pruned=count,
                minimum=None if within is None else within.min,
                maximum=None if within is None else within.max,
                override=found.options.overrides.get(target.name),
            )
        )
    return tuple(rows)


def counts_note(found: ResolvedTargets, options: PruningOptions, allocation: str, *, has_data: bool) -> str | None:
    """Returns the note of a plan on counts that follow from the weights' values; None if they follow from shapes.

    Args:
        found: The targets and their calculator.
        options: The pruning options.
        allocation: Name of the allocation.
        has_data: Whether the recipe has data.
    """
    if found.calculator.shares_known:
        return None
    reason = unknown_counts(found, options, has_data=has_data)
    start = f"allocation {allocation}: how many weights of each target are pruned follows from their values"
    if reason is None:
        return (
            f"{start}; the counts above are for the weights that the model has now, before any step, and training "
            "changes them."
        )
    return f"{start}, which the plan does not know: {reason}. The counts above stand for an even share."

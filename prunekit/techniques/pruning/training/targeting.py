"""resolved_targets: what a pruning will prune, and by which masks; creates no variable."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from prunekit.anatomy.layers.targets import Target, values_by_name
from prunekit.anatomy.records.reports import Skipped
from prunekit.sparsity.patterns import Pattern, get_pattern
from prunekit.sparsity.schedules import Schedule, as_schedule
from prunekit.techniques.pruning.masks.mask_calculator import MaskCalculator
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.masks.policy import MaskPolicy, get_policy


@dataclass(frozen=True, eq=False)
class ResolvedTargets:
    """What a pruning will prune.

    Attributes:
        model: The model.
        options: The pruning options; the keys of `overrides` and `bounds` are exact names of targets.
        policy: The rules by which the masks change.
        schedule: The schedule that the policy follows.
        targets: The pruned weights.
        skipped: The weights that are not pruned, with reasons.
        calculator: Calculates the masks of the targets.
    """

    model: Any
    options: PruningOptions
    policy: MaskPolicy
    schedule: Schedule
    targets: tuple[Target, ...]
    skipped: tuple[Skipped, ...]
    calculator: MaskCalculator

    @property
    def fractions(self) -> list[float]:
        """Final sparsity of each target; with an allocation that reads importances, the final sparsity over all."""
        return self.calculator.fractions(self.schedule.final_sparsity)


def resolved_targets(model: Any, schedule: Any, options: PruningOptions, *, training: bool) -> ResolvedTargets:
    """Returns what a pruning with these arguments will prune.

    Args:
        model: A built Keras model.
        schedule: A `Schedule`, or a schedule of another package that `as_schedule` accepts.
        options: Pruning options.
        training: Whether the model will be trained; frozen weights that `include` does not name are then skipped.

    Raises:
        ValueError: No weight to prune; a name pattern that matches no weight; the policy or the pattern does not
            support the schedule, an option or a weight.
        TypeError: `schedule` is not a schedule.
    """
    policy = get_policy(options.policy)
    followed = policy.check(as_schedule(schedule), options)
    training = training and not policy.counts_forward_passes
    targets, skipped = policy.select(model, options, training=training)
    if options.misfits == "skip":
        targets, misfits = _fitting(targets, get_pattern(options.pattern), followed.final_sparsity)
        skipped = [*skipped, *misfits]
    named = replace(
        options,
        overrides=values_by_name(model, targets, options.overrides, "overrides"),
        bounds=values_by_name(model, targets, options.bounds, "bounds"),
    )
    both = sorted(set(named.overrides) & set(named.bounds))
    if both:
        raise ValueError(
            "An override fixes the sparsity that bounds leave open. Received: both for "
            f"{', '.join(both)}. Leave one out."
        )
    calculator = policy.calculator(model, targets, named, followed.final_sparsity)
    return ResolvedTargets(model, named, policy, followed, tuple(targets), tuple(skipped), calculator)


def _fitting(targets: Sequence[Target], pattern: Pattern, sparsity: float) -> tuple[list[Target], list[Skipped]]:
    """Returns the targets that the pattern fits, and the others with the reason; raises if it fits none."""
    fitting: list[Target] = []
    misfits: list[Skipped] = []
    errors: list[ValueError] = []
    for target in targets:
        try:
            pattern.check(target.shape, target.in_axes, target.out_axes, sparsity, target.name)
            fitting.append(target)
        except ValueError as error:
            errors.append(error)
            misfits.append(Skipped(target.name, f"the pattern {pattern} does not fit: {error}"))
    if not fitting:
        raise errors[-1]
    return fitting, misfits

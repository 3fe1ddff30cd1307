"""The rules of a pruning: which steps are due, how masks are chosen, and when they are applied. prunekit's own."""

import contextlib
from collections.abc import Sequence
from typing import Any

from prunekit.anatomy.targets import Target
from prunekit.sparsity.schedules import Schedule
from prunekit.sparsity.selection import removed_count
from prunekit.techniques.pruning.mask_calculator import MaskCalculator
from prunekit.techniques.pruning.options import PruningOptions


class Rules:
    """prunekit's rules: zeros hold after every optimizer update, counts are exact, and schedules land.

    A subclass reproduces another library. `Pruner` and `PruningCallback` ask these methods wherever libraries differ;
    `pruner` is the `Pruner` that asks.
    """

    # Updates before its landing step at which a training may end, and the schedule lands all the same.
    grace = 1
    # When a loop calls `Pruner.step`.
    stepped = "after each optimizer update"
    # Whether weights that a training does not change are left out of it, unless `include` names them.
    leaves_frozen = True

    def check(self, schedule: Schedule, options: PruningOptions) -> None:
        """Refuses what these rules have no answer for."""

    def check_targets(self, model: Any, targets: Sequence[Target]) -> None:
        """Refuses weights that these rules do not prune."""

    def schedule(self, schedule: Schedule, options: PruningOptions) -> Schedule:
        """The schedule as it is followed."""
        return schedule

    def calculator(self, targets: Sequence[Target], options: PruningOptions, final_sparsity: float) -> MaskCalculator:
        """What calculates the masks."""
        return MaskCalculator(targets, options, final_sparsity)

    def pruned(self, sparsity: float, units: int, *, keep_one: bool = True) -> int:
        """How many of so many units a sparsity removes."""
        return removed_count(sparsity, units, keep_one=keep_one)

    def counted(self, optimizers: list[Any]) -> list[Any]:
        """Of the optimizers that a loop has, those whose updates are steps; calls of `step` are, where it is none."""
        return optimizers

    def check_loop(self, name: str) -> None:
        """Refuses to be stepped by a loop of prunekit's, after its updates."""

    def scope(self, pruner: Any) -> contextlib.AbstractContextManager:
        """What training steps are traced and run in."""
        return pruner.store.enforcing(pruner.optimizers)

    def begin(self, pruner: Any) -> None:
        """Before the first update."""
        pruner.follow_schedule()

    def before_batch(self, pruner: Any) -> None:
        """When `fit` is about to train on a batch."""

    def after_batch(self, pruner: Any) -> None:
        """When `fit` has trained on a batch."""
        pruner.note_updates(pruner.model.steps_per_execution or 1)

    def before_evaluation(self, pruner: Any) -> None:
        """When `fit` is about to evaluate."""

    def after_epoch(self, pruner: Any) -> None:
        """When `fit` ends an epoch."""

    def step(self, pruner: Any) -> bool:
        """What `Pruner.step` does; whether masks changed."""
        pruner.verify_enforcement()
        return pruner.follow_schedule()

    def end_training(self, pruner: Any) -> list[str]:
        """Acts at the end of a training; returns messages for the user."""
        return pruner.finalize_masks()

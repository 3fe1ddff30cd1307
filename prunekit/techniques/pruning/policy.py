"""prunekit's pruning rules: which steps count, how masks are calculated, and when they are enforced."""

import contextlib
from collections.abc import Sequence
from typing import Any

from prunekit.anatomy.targets import Target
from prunekit.sparsity.schedules import Schedule
from prunekit.sparsity.selection import removed_count
from prunekit.techniques.pruning.mask_calculator import MaskCalculator
from prunekit.techniques.pruning.options import PruningOptions


class Rules:
    """prunekit's rules: masks hold after every optimizer update, counts are exact, schedules reach the final sparsity.

    A subclass reproduces another library. `Pruner` and `PruningCallback` call these methods where libraries differ, and
    pass the `Pruner` as `pruner`.
    """

    # Number of updates before the landing step at which a training may end and still reach the final sparsity.
    grace = 1
    # When a loop must call `Pruner.step`; part of error messages.
    stepped = "after each optimizer update"
    # Whether a training skips frozen weights that `include` does not name.
    leaves_frozen = True

    def check(self, schedule: Schedule, options: PruningOptions) -> None:
        """Raises ValueError if these rules do not support the schedule or an option."""

    def check_targets(self, model: Any, targets: Sequence[Target]) -> None:
        """Raises ValueError if these rules do not support pruning one of the targets."""

    def schedule(self, schedule: Schedule, options: PruningOptions) -> Schedule:
        """Returns the schedule that the pruner follows."""
        return schedule

    def calculator(self, targets: Sequence[Target], options: PruningOptions, final_sparsity: float) -> MaskCalculator:
        """Returns the mask calculator."""
        return MaskCalculator(targets, options, final_sparsity)

    def pruned(self, sparsity: float, units: int, *, keep_one: bool = True) -> int:
        """Returns how many of `units` units a sparsity removes."""
        return removed_count(sparsity, units, keep_one=keep_one)

    def counted(self, optimizers: list[Any]) -> list[Any]:
        """Returns the optimizers whose updates count as steps; if empty, calls of `Pruner.step` count."""
        return optimizers

    def check_loop(self, name: str) -> None:
        """Raises ValueError if the prunekit loop `name`, which steps after updates, does not fit these rules."""

    def scope(self, pruner: Any) -> contextlib.AbstractContextManager:
        """Returns the context manager in which training steps are traced and run."""
        return pruner.store.enforcing(pruner.optimizers)

    def begin(self, pruner: Any) -> None:
        """Runs before the first update."""
        pruner.follow_schedule()

    def before_batch(self, pruner: Any) -> None:
        """Runs before `fit` trains on a batch."""

    def after_batch(self, pruner: Any) -> None:
        """Runs after `fit` has trained on a batch."""
        pruner.note_updates(pruner.model.steps_per_execution or 1)

    def before_evaluation(self, pruner: Any) -> None:
        """Runs before `fit` evaluates."""

    def after_epoch(self, pruner: Any) -> None:
        """Runs when `fit` ends an epoch."""

    def step(self, pruner: Any) -> bool:
        """Implements `Pruner.step`; returns True if masks changed."""
        pruner.verify_enforcement()
        return pruner.follow_schedule()

    def end_training(self, pruner: Any) -> list[str]:
        """Runs at the end of a training; returns messages for the user."""
        return pruner.finalize_masks()

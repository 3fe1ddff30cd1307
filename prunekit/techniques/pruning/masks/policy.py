"""MaskPolicy: the rules by which masks change during a training; the base class of every policy."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from prunekit.anatomy.layers.targets import Target, find_targets
from prunekit.anatomy.records.reports import Skipped
from prunekit.sparsity.schedules import Schedule
from prunekit.sparsity.shorthands import POLICIES
from prunekit.techniques.pruning.masks.mask_store import MaskStore


@dataclass(frozen=True, eq=False)
class MaskRequest:
    """What a policy is given for one mask update.

    Attributes:
        step: Step of the training, counted from the origin of the schedule.
        sparsity: Overall sparsity that the schedule asks for at this step.
        schedule: The schedule.
        targets: The pruned weights.
        masks: Current masks, one boolean tensor per target, True = kept.
        kept: Number of kept entries of each target, shape (targets,).
        statistics: {name: value} per target, for the statistics that criterion and policy need; None without any.
        calculator: `MaskCalculator` of the pruning options: importances, counts and masks.
    """

    step: int
    sparsity: float
    schedule: Schedule
    targets: tuple[Target, ...]
    masks: Sequence[Any]
    kept: np.ndarray
    statistics: Sequence[dict[str, Any]] | None
    calculator: Any


@dataclass(frozen=True, eq=False)
class MaskUpdate:
    """New masks, and perhaps new weight values; nothing is written until the `Pruner` applies it.

    Attributes:
        masks: One boolean tensor per target, True = kept.
        nans: Number of NaN importances per target, shape (targets,).
        leaks: Number of entries per target that the former mask pruned and that are not zero, shape (targets,).
        kept: Number of kept entries per target, shape (targets,).
        weights: New values, one tensor or None (unchanged) per target; None = all unchanged. The new masks are imposed
            on them.
        changed: Whether any mask differs from the former masks; None if the counts `kept` show it, as they do where
            masks only shrink.
    """

    masks: list[Any]
    nans: np.ndarray
    leaks: np.ndarray
    kept: np.ndarray
    weights: Sequence[Any] | None = None
    changed: bool | None = None

    def changes(self, kept: np.ndarray) -> bool:
        """Returns True if the masks differ from the former masks, which had the counts `kept`."""
        return bool(np.any(self.kept != kept)) if self.changed is None else self.changed


class MaskPolicy(ABC):
    """The rules by which masks change: when an update is due, what it does, and what the end of a training does.

    Subclasses are frozen dataclasses with the policy's options. Register a subclass by a row in
    `prunekit.sparsity.shorthands.POLICIES` to use its name in options and recipes.

    Attributes:
        needs: Names of the statistics that `update` reads besides those of the criterion.
        keeps_zeros: Default of the option `keep_zeros`.
        counts_forward_passes: Whether a step is a forward pass in training, so that `Pruner.step` belongs before each
            batch, updates are not enforced, and masks are imposed before each pass. False: a step is an optimizer
            update, enforced inside the compiled step.
        regrows: Whether an update may keep a weight again that an earlier update pruned. In a recipe, the masks of such
            a policy replace the masks of earlier steps; those of other policies are added to them.
        usual_allocation: Name of the allocation that stands for "auto", with the criterion "magnitude"; "auto" if both
            depend on model and data (`prunekit.techniques.pruning.policies.choices`).
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    keeps_zeros: ClassVar[bool] = True
    counts_forward_passes: ClassVar[bool] = False
    regrows: ClassVar[bool] = False
    usual_allocation: ClassVar[str] = "uniform"

    def check(self, schedule: Schedule, options: Any) -> Schedule:
        """Returns the schedule that a training follows.

        Args:
            schedule: The user's schedule.
            options: `PruningOptions`.

        Raises:
            ValueError: The policy does not support the schedule or an option.
        """
        return schedule

    def select(self, model: Any, options: Any, *, training: bool = False) -> tuple[list[Target], list[Skipped]]:
        """Returns (the weights that the policy masks, the other weights with reasons).

        Args:
            model: The model.
            options: `PruningOptions`.
            training: Whether the model will be trained.

        Raises:
            ValueError: As for `find_targets`.
        """
        return find_targets(model, options.include, options.exclude, training=training)

    @abstractmethod
    def calculator(self, model: Any, targets: Sequence[Target], options: Any, final_sparsity: float) -> Any:
        """Returns the `MaskCalculator` that mask requests of this policy carry.

        Args:
            model: The model.
            targets: The weights to prune.
            options: `PruningOptions`.
            final_sparsity: Final sparsity of the schedule.

        Raises:
            ValueError: The policy or the pattern does not support one of the targets.
        """

    def due(self, schedule: Schedule, step: int, last: int) -> int | None:
        """Returns the schedule's update step to apply at `step`, or None.

        Args:
            schedule: The schedule.
            step: Current step.
            last: Update step that was applied last, or -1.
        """
        due = schedule.latest_update(step)
        # Not an equality test: with steps_per_execution the step advances by several at once.
        return due if due is not None and due > last else None

    @abstractmethod
    def update(self, request: MaskRequest) -> MaskUpdate:
        """Returns the masks for a request; writes no variable."""

    def store(self, model: Any, targets: Sequence[Target]) -> MaskStore:
        """Returns the masks of a training and what enforces them.

        Args:
            model: The model.
            targets: The pruned weights.
        """
        return MaskStore(targets, model)

    def scope(self, store: MaskStore, optimizers: Sequence[Any]) -> contextlib.AbstractContextManager:
        """Returns the context manager in which training steps are traced and run.

        Args:
            store: The masks.
            optimizers: The optimizers of the training.
        """
        return store.enforcing(optimizers)

    def end_training(self, run: Any) -> list[str]:
        """Runs at the end of a training; returns messages for the user.

        Args:
            run: The `PrunerRun`.
        """
        return run.finalize_masks()


def get_policy(policy: str | MaskPolicy) -> MaskPolicy:
    """Returns the policy for a name; returns a `MaskPolicy` unchanged.

    Raises:
        ValueError: `policy` is an unknown name.
        TypeError: `policy` is neither a name nor a `MaskPolicy` instance.
    """
    expected = f"A policy is one of {', '.join(POLICIES)}, or a MaskPolicy"
    return POLICIES.resolve(policy, MaskPolicy, expected)  # type: ignore[type-abstract]

"""MaskUpdater: applies a policy's mask updates to the masks of a training."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.records.reports import Event
from prunekit.core.statistics.statistics import Collectors
from prunekit.core.training.step_counter import StepCounter
from prunekit.sparsity.schedules import Schedule
from prunekit.sparsity.scores import get_criterion, sparsities_of_rounds
from prunekit.techniques.pruning.masks.enforcement_check import EnforcementCheck
from prunekit.techniques.pruning.masks.mask_store import MaskStore
from prunekit.techniques.pruning.masks.policy import MaskRequest, MaskUpdate
from prunekit.techniques.pruning.training.targeting import ResolvedTargets


class MaskUpdater:
    """Updates the masks of a store when the schedule has an update due.

    Args:
        plan: Schedule, policy, calculator and options.
        store: The masks.
        counter: The steps.
        check: Receives the leaks that an update finds.
        collectors: The statistics that criterion and policy need.

    Attributes:
        store: The masks.
        events: Every mask update so far.
        last_update: Update step of the schedule that was applied last, or -1.
        kept: Number of kept entries of each target, shape (targets,).
    """

    def __init__(
        self,
        plan: ResolvedTargets,
        store: MaskStore,
        counter: StepCounter,
        check: EnforcementCheck,
        collectors: Collectors,
    ):
        self._plan, self.store, self._counter, self._check = plan, store, counter, check
        self._collectors, self._criterion = collectors, get_criterion(plan.options.criterion)
        self.events: list[Event] = []
        self.last_update = -1
        self.kept = _sizes(store)
        self.size = int(self.kept.sum())

    @property
    def sparsity(self) -> float:
        """Fraction of the targets' entries that are currently pruned."""
        return 1.0 - int(self.kept.sum()) / self.size

    @property
    def at_final_sparsity(self) -> bool:
        """Whether the masks have the final sparsity of the schedule."""
        return self.last_update >= self._plan.schedule.final_step

    def keep_all(self) -> None:
        """Keeps every position again, without an event; weights are not changed."""
        self.store.reset()
        self.kept = _sizes(self.store)

    def replace(self, masks: Sequence[Any], kept: np.ndarray) -> None:
        """Replaces all masks without an event.

        Args:
            masks: One boolean array or tensor per target, True = kept.
            kept: Number of kept entries of each target, shape (targets,).
        """
        self.kept = kept
        self.store.replace(masks, self._counter.optimizers)

    def follow(self, schedule: Schedule) -> None:
        """Replaces the schedule, before the first update."""
        self._plan = replace(self._plan, schedule=schedule)

    def due(self, step: int) -> int | None:
        """Returns the schedule's update step to apply at `step`, or None."""
        return self._plan.policy.due(self._plan.schedule, step, self.last_update)

    def follow_schedule(self) -> bool:
        """Updates the masks if the schedule has an update due; returns True if they changed."""
        step = self._counter.now
        due = self.due(step)
        if due is None:
            return False
        self.last_update = due
        return self.update(step, self._plan.schedule(due))

    def apply_final(self) -> None:
        """Applies the final sparsity if the schedule is one step before its final step."""
        step, schedule = self._counter.now, self._plan.schedule
        if step == schedule.final_step - 1:
            self.update(step, schedule.final_sparsity)
            self.last_update = schedule.final_step

    def update(self, step: int, sparsity: float) -> bool:
        """Asks the policy for masks of this sparsity and applies them; returns True if they changed.

        A criterion with several `rounds` has its statistics collected anew, and masks applied, in each round.

        Raises:
            ValueError: An importance is NaN, or a statistic from training lacks updates; the masks are unchanged.
            LeakError: Pruned weights are non-zero; the masks were re-imposed.
        """
        self._refuse_unobserved(step, sparsity)
        rounds = sparsities_of_rounds(self.sparsity, sparsity, self._criterion.rounds)
        changed = [self._update_once(step, each) for each in rounds]
        self.events.append(Event(step=step, asked=sparsity, reached=self.sparsity))
        return any(changed)

    def _update_once(self, step: int, sparsity: float) -> bool:
        request = MaskRequest(
            step=step,
            sparsity=sparsity,
            schedule=self._plan.schedule,
            targets=self.store.targets,
            masks=[self.store.mask(i) for i in range(len(self.store.targets))],
            kept=self.kept,
            statistics=self._collectors.values(),
            calculator=self._plan.calculator,
        )
        with self.store.all_weights():
            found = self._plan.policy.update(request)
        self._refuse_nan(found.nans)
        self._check.refuse(found.leaks)
        self._refuse_unmoved(found.kept < self.kept)
        changed = found.changes(self.kept) or found.weights is not None
        if changed:
            self._apply(found)
        return changed

    def _apply(self, found: MaskUpdate) -> None:
        if found.weights is not None:
            for target, value in zip(self.store.targets, found.weights, strict=True):
                if value is not None:
                    target.variable.assign(value)
        self.store.replace(found.masks, self._counter.optimizers)
        self.kept = found.kept
        self._check.due = True

    def _refuse_unobserved(self, step: int, sparsity: float) -> None:
        # After a resumption, rounding may differ from the current masks by up to half an entry per target.
        more = sparsity * self.size > self.size - int(self.kept.sum()) + len(self.store.targets) / 2
        if more and self._collectors.unobserved:
            raise ValueError(
                f"The criterion {self._criterion} needs updates of a Keras optimizer before the first mask. "
                f"Received: sparsity {sparsity:g} at step {step}, and no update before it. Let the schedule begin "
                "later, in a training with a Keras optimizer, or choose another criterion."
            )

    def _refuse_nan(self, nans: np.ndarray) -> None:
        if nans.any():
            raise ValueError(
                "Masks cannot be calculated from importances that are NaN. Received NaN for: "
                f"{self.store.named(nans)}. The weights or the criterion cause it: look for a loss that became NaN, "
                "lower the learning rate, or train from an earlier checkpoint. The masks are unchanged."
            )

    def _refuse_unmoved(self, pruned: np.ndarray) -> None:
        for collector in self._collectors.from_training.values():
            if not collector.observations or not pruned.any():
                continue
            # Equal statistics would be pruned by position.
            leaves = [keras.tree.flatten(value) for value in collector.values()]
            equal = [all(bool(ops.all(ops.equal(leaf, 0))) for leaf in row) for row in leaves]
            names = [t.name for t, gone, zero in zip(self.store.targets, pruned, equal, strict=True) if gone and zero]
            if names:
                raise ValueError(
                    f"The criterion {self._criterion} ranks weights by how updates changed them. Received: no "
                    f"change in {', '.join(names)}. Layers that are frozen or get no gradient do not change, and "
                    "weights that began at zero have no movement yet: leave them out with `exclude`, begin later, or "
                    "choose another criterion. The masks are unchanged."
                )


def _sizes(store: MaskStore) -> np.ndarray:
    """Returns the number of entries of each target, shape (targets,)."""
    return np.array([target.size for target in store.targets])

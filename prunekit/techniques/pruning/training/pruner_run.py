"""PrunerRun: the pruning of a model, driven by the events of its trainings."""

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prunekit.anatomy.layers.model_weights import check_built
from prunekit.anatomy.records.reports import Choice
from prunekit.core.layerwise.layerwise import Progress
from prunekit.core.runtime import jax_state
from prunekit.core.runtime.optimizers import optimizers_for, optimizers_of
from prunekit.core.statistics.statistics import Collectors
from prunekit.core.training import train_function
from prunekit.core.training.step_counter import StepCounter
from prunekit.sparsity.schedules import Schedule
from prunekit.techniques.pruning.masks.enforcement_check import CHECK_EVERY, EnforcementCheck
from prunekit.techniques.pruning.masks.mask_store import MaskStore
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.masks.policy import MaskPolicy
from prunekit.techniques.pruning.policies.choices import GIVEN, chosen_options
from prunekit.techniques.pruning.training import attached_pruners, pruning_notes
from prunekit.techniques.pruning.training.held_masks import without_zeros
from prunekit.techniques.pruning.training.mask_updater import MaskUpdater
from prunekit.techniques.pruning.training.pruner_state import PrunerState
from prunekit.techniques.pruning.training.targeting import resolved_targets

_WITHOUT = "; for a loop with another kind leave it out, on a model that is not compiled, and use pruner.mask_gradients"

_MASKS = "masks"


class PrunerRun:
    """Owns the state of a pruning. Call `begin` before the first update, then train in `enforcing`.

    Args:
        model: As for `Pruner`.
        schedule: As for `Pruner`.
        options: Pruning options.
        optimizer: As for `Pruner`.
        training: Whether the model will be trained; frozen weights that `include` does not name are then skipped.
            None = if there is an optimizer.
        data: As for `Pruner`.
        progress: Told of the examples that are read.

    Attributes:
        model: The model.
        options: The pruning options.
        policy: The rules by which the masks change.
        schedule: The schedule that the policy follows.
        targets: The pruned weights.
        skipped: The weights that are not pruned, with reasons.
        store: The masks.
        counter: The steps, and the optimizers whose updates count as steps.
        check: Detects updates that bypass the masks.
        updater: The mask updates so far, and the counts of kept entries.
    """

    def __init__(
        self,
        model: Any,
        schedule: Schedule,
        options: PruningOptions,
        optimizer: Any = None,
        *,
        training: bool | None = True,
        data: Any = None,
        progress: Progress | None = None,
    ):
        check_built(model)
        self.model = model
        optimizers = optimizers_for(model, optimizer, _WITHOUT)
        trains = bool(optimizers) if training is None else training
        options = chosen_options(options, model, training=training is not False, data=None if data is None else GIVEN)
        self.options = options
        found = resolved_targets(model, schedule, options, training=trains)
        self.policy, self.schedule, self.targets = found.policy, found.schedule, found.targets
        attached_pruners.refuse_pruned_weights(self.targets)
        self.skipped, self._calculator = list(found.skipped), found.calculator
        self._calculator.once = training is False
        self._collectors = Collectors(options.needs, model, self._calculator.scored, data, progress)
        self.store = self.policy.store(model, self.targets)
        self.counter = StepCounter(model, self._counted(optimizers), options.origin)
        self.check = EnforcementCheck(model, self.store, self.counter)
        self.updater = MaskUpdater(found, self.store, self.counter, self.check, self._collectors)
        self._late = pruning_notes.LateWeights(model)
        # Number of updates before the next `step()` has work to do.
        self._updates_until_due = 0
        self._planned_steps: int | None = None

    @property
    def enforces_masks_only(self) -> bool:
        """True if the scope of `enforcing` contains the masks and nothing else."""
        plain = type(self.policy).scope is MaskPolicy.scope and type(self.store) is MaskStore
        return plain and not self._collectors.from_training

    def use_store(self, store: MaskStore) -> None:
        """Replaces the masks by those of another store of the same targets, before `begin` or between two steps."""
        self.store = self.check.store = self.updater.store = store

    def _counted(self, optimizers: Sequence[Any]) -> Sequence[Any]:
        return [] if self.policy.counts_forward_passes else optimizers

    def fit_schedule(self, steps: int | None) -> None:
        """Fits an open schedule to a training of `steps` updates, before its first one; other schedules stay as given.

        Raises:
            ValueError: The schedule is open, and `steps` is None.
        """
        if not self.schedule.is_open:
            return
        fitted, self._planned_steps = self.schedule.fitted(steps), steps
        made = [Choice("end_step", str(fitted.last_update), f"for a training of {steps} updates")]
        if self.schedule.frequency is None:
            made.append(Choice("frequency", str(fitted.frequency), "between begin_step and end_step"))
        self.options = replace(self.options, choices=(*self.options.choices, *made))
        self.schedule = fitted
        self.updater.follow(fitted)

    def take(self, choices: Sequence[Choice]) -> None:
        """Replaces what was chosen for options by what was taken in the end."""
        taken: dict[str, Any] = {choice.option: choice for choice in choices}
        self.options = replace(
            self.options,
            choices=tuple(taken.get(choice.option, choice) for choice in self.options.choices),
            **{name: choice.value for name, choice in taken.items()},
        )

    def begin(self) -> None:
        """Adopts existing zeros and applies the schedule's sparsity at the current step, before the first update."""
        jax_state.sync_model_state(self.model)
        jax_state.unshare_ema_arrays(self.counter.optimizers)
        self.check.note_progress()
        if self.options.keep_zeros:
            self.adopt_zeros()
        if self.policy.counts_forward_passes and self.counter.now:
            # The first step of a training is its first forward pass; a resumed one has the zeros of its last step.
            if not self.updater.events and self.schedule.latest_update(self.counter.now) is not None:
                self.adopt_zeros()
        # A resumed training has observed no update before its first one, so due mask updates wait until then.
        elif not (self._collectors.unobserved and self.counter.now):
            self.updater.follow_schedule()

    def adopt_zeros(self) -> None:
        """Adds zero entries of the targets to the masks, except in targets whose entries are all zero."""
        masks, kept = without_zeros([self.store.mask(i) for i in range(len(self.targets))], self.targets)
        if kept.sum() < self.updater.size:
            self.updater.replace(masks, kept)

    def step(self) -> bool:
        """Follows the schedule by one step; returns True if masks changed.

        Raises:
            LeakError: As for `Pruner.step`.
        """
        jax_state.sync_model_state(self.model)
        self.counter.calls += 1
        if self.policy.counts_forward_passes:
            changed = self.updater.follow_schedule()
            self.enforce()
        else:
            self.check.verify()
            changed = self.updater.follow_schedule()
        self.counter.unseen, self._updates_until_due = 0, self._count_until_due()
        return changed

    def note_updates(self, updates: int) -> None:
        """Calls `step()`; on JAX, only once enough updates have passed for a mask update or a check to be due.

        On JAX, reading a variable blocks until the device is ready, and `fit` writes its state back only on request.

        Args:
            updates: Upper bound of the number of optimizer updates since the last call.
        """
        self.counter.unseen += updates
        if self.counter.unseen >= self._updates_until_due or not jax_state.steps_are_pure():
            self.step()

    def _count_until_due(self) -> int:
        if self.check.due:
            return 1
        done = self.counter.done
        due = (ahead for ahead in range(1, CHECK_EVERY) if self.updater.due(done + ahead) is not None)
        return next(due, CHECK_EVERY)

    def enforce(self) -> None:
        """Sets weights and optimizer slots to zero at pruned positions, immediately."""
        jax_state.sync_model_state(self.model)
        self.store.enforce(self.counter.optimizers)

    @contextlib.contextmanager
    def enforcing(self) -> Iterator[None]:
        """Context manager that masks gradients and weights in every optimizer update."""
        # The collectors are entered after the store's scope, so that movements count the changes after masking.
        with (
            self.policy.scope(self.store, self.counter.optimizers),
            self._collectors.observing(self.counter.optimizers),
        ):
            yield

    @property
    def masks(self) -> dict[str, np.ndarray]:
        """Masks as {weight name: boolean array, True = kept}."""
        jax_state.sync_model_state(self.model)
        return self.store.masks

    def audit(self) -> dict[str, int]:
        """Returns {weight name: number of pruned positions that are not exactly zero}."""
        jax_state.sync_model_state(self.model)
        return self.store.audit()

    def end_training(self, *, forgotten: bool = False) -> list[str]:
        """Ends a training: re-imposes the masks, applies the final sparsity if due; returns messages for the user.

        Args:
            forgotten: Whether the loop trained without following the schedule, which then is not expected to end.
        """
        notes = self.policy.end_training(self)
        jax_state.unshare_ema_arrays(self.counter.optimizers)
        if self.updater.events:
            asked = self.updater.events[-1].asked
            notes += pruning_notes.emptied_weights(self.store, self._calculator, asked, self.updater.kept)
        notes += self.late_weights()
        return notes if forgotten else notes + self.shortfall(self.counter.now, ended=True)

    def late_weights(self) -> list[str]:
        """Returns messages about weights created since pruning began, each named once, and adds them to `skipped`."""
        notes, self.skipped = self._late.found(self.skipped)
        return notes

    def finalize_masks(self) -> list[str]:
        """Re-imposes the masks; applies the final sparsity if the schedule is one step before its final step.

        Returns messages for the user.
        """
        restored = sum(self.audit().values())
        self.enforce()
        self.updater.apply_final()
        self.counter.mark_all_seen()
        return pruning_notes.masks_written_back(restored)

    def shortfall(self, steps: int | None, *, ended: bool = False) -> list[str]:
        """Returns a message for the user if a training of `steps` updates ends before the schedule; else []."""
        if steps is None:
            return []
        grace = 0 if self.policy.counts_forward_passes else 1
        return pruning_notes.shortfall(
            self.schedule, steps, grace=grace, reached=self.updater.sparsity if ended else None
        )

    def resume_counting(self) -> None:
        """Continues the step count of the last training, even if the model has a new optimizer."""
        self.counter.resume(self._counted(optimizers_of(self.model)))

    def state(self) -> PrunerState:
        """Returns everything besides weights and optimizer that `restore` continues from."""
        return PrunerState(
            masks=self.masks,
            origin=self.counter.origin,
            done=self.counter.now,
            calls=self.counter.calls,
            last_update=self.updater.last_update,
            events=tuple(self.updater.events),
            statistics=self._collectors.state(),
            pruned_values=self.store.pruned_values,
            planned_steps=self._planned_steps,
        )

    def restore(self, state: PrunerState) -> None:
        """Restores a state, instead of calling `begin()`; weights and optimizer must already be restored.

        Raises:
            ValueError: The state has no statistics of the training although the criterion needs them.
        """
        self.fit_schedule(state.planned_steps)
        masks = [state.masks[target.name] for target in self.targets]
        self.updater.replace(masks, np.array([np.count_nonzero(mask) for mask in masks]))
        self.updater.last_update = state.last_update
        self.updater.events = list(state.events)
        self.counter.origin, self.counter.calls, self.counter.done = state.origin, state.calls, state.done
        self.store.restore_pruned_values(state.pruned_values)
        self.check.note_progress()
        self._collectors.restore(state.statistics)


def overall_sparsity(runs: Sequence[PrunerRun]) -> float:
    """Returns the fraction of currently pruned entries over all targets of the runs."""
    kept = sum(int(run.updater.kept.sum()) for run in runs)
    return 1.0 - kept / sum(run.updater.size for run in runs)


@dataclass(frozen=True, eq=False)
class _Kept:
    """What a kept train function belongs to: its masks, its optimizers, and the run that used it last."""

    store: MaskStore
    optimizers: tuple[Any, ...]
    run: Any


def keep_trace(function: train_function.ScopedFunction, run: PrunerRun) -> None:
    """Keeps the train function that was traced with the run's masks for the next callback."""
    if run.enforces_masks_only:
        scope = functools.partial(run.store.enforcing, run.counter.optimizers)
        function.keep(scope, _Kept(run.store, tuple(run.counter.optimizers), weakref.ref(run)), _MASKS)


def take_over_trace(run: PrunerRun) -> Any:
    """Returns the train function kept with the model, whose masks become those of `run`; None if it does not fit.

    A former run that is still in use gets a copy of its masks.
    """
    function, kept = train_function.kept(run.model, _MASKS)
    if function is None or not run.enforces_masks_only or not _fits(kept, run):
        return None
    former = kept.run()
    if former is not None:
        former.use_store(kept.store.copy(run.model))
    kept.store.reset()
    run.use_store(kept.store)
    return function


def _fits(kept: _Kept, run: PrunerRun) -> bool:
    pairs = [(kept.store.targets, run.targets), (kept.optimizers, run.counter.optimizers)]
    if any(len(first) != len(second) for first, second in pairs):
        return False
    same = all(one.variable is other.variable for one, other in zip(*pairs[0], strict=True))
    return same and all(one is other for one, other in zip(*pairs[1], strict=True))

"""Pruner: updates masks on a schedule after optimizer updates, in any training loop."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Unpack

import numpy as np

from prunekit.anatomy.cost.inspection import Event, Report, inspect, inspect_again
from prunekit.anatomy.layers.model_weights import check_built
from prunekit.anatomy.records.reports import Choice
from prunekit.core.layerwise.layerwise import Progress
from prunekit.core.runtime import backend, jax_state
from prunekit.core.runtime.optimizers import optimizers_for, optimizers_of
from prunekit.core.statistics.statistics import Collectors
from prunekit.core.training import distribution, train_function
from prunekit.core.training.step_counter import StepCounter
from prunekit.keyword_options import keyword_options
from prunekit.sparsity.schedules import Schedule
from prunekit.techniques.pruning.masks.enforcement_check import CHECK_EVERY, EnforcementCheck
from prunekit.techniques.pruning.masks.mask_store import MaskStore
from prunekit.techniques.pruning.masks.options import Options, PruningOptions, as_options
from prunekit.techniques.pruning.masks.policy import MaskPolicy
from prunekit.techniques.pruning.policies.choices import GIVEN, chosen_options
from prunekit.techniques.pruning.training import attached_pruners, pruning_notes
from prunekit.techniques.pruning.training.held_masks import without_zeros
from prunekit.techniques.pruning.training.mask_updater import MaskUpdater, PruningPlan
from prunekit.techniques.pruning.training.pruner_state import PrunerState
from prunekit.techniques.pruning.training.targeting import resolved_targets

_WITHOUT = "; for a loop with another kind leave it out, on a model that is not compiled, and use pruner.mask_gradients"


class Pruner:
    """Prunes a model while any loop trains it: call `step()` after each optimizer update.

    From construction to `finish()`, every optimizer update masks the gradients first and the weights last, inside the
    compiled step. Build the Pruner before the loop's `tf.function` runs for the first time.

    Args:
        model: A built Keras model; only its weights are changed, in place.
        schedule: A `Schedule` (step -> sparsity) with an end, or a schedule of tensorflow-model-optimization.
        optimizer: Keras optimizer of the loop, or a list of optimizers. None uses the compiled model's optimizer.
            Without any optimizer, `step()` counts its own calls as steps and re-imposes the masks at each call; the
            loop then passes its gradients through `mask_gradients` before using them.
        data: Calibration data, for a criterion or policy that needs them: inputs, a pair (inputs, labels), or a
            dataset or list of such batches. They are read at each mask update.
        **options: `criterion`, `pattern`, `allocation`, `include`, `exclude`, `keep_zeros`, `keep_one`, `origin`,
            `overrides`, `policy`, `misfits`: see `pk.PruningOptions`.

    Attributes:
        model: The model.
        options: The pruning options.
        policy: The rules by which the masks change.
        schedule: The schedule that the policy follows.
        targets: The pruned weights.
        skipped: The weights that are not pruned, with reasons.
        store: The masks.
        updater: The mask updates so far, and the counts of kept entries.

    Raises:
        ValueError: No weight to prune; a name pattern that matches no weight; a sparsity pattern that does not fit a
            weight; an invalid option value; the criterion needs data, and there are none; another Pruner that is not
            finished prunes one of the weights.
        TypeError: `schedule` is not a schedule, `optimizer` is not a Keras optimizer, or an option is unknown.
    """

    @keyword_options(PruningOptions, Options)
    def __init__(self, model, schedule: Schedule, optimizer=None, *, data: Any = None, **options: Unpack[Options]):
        with contextlib.ExitStack() as undo:
            self._prepare(model, schedule, optimizer, as_options(options), data=data)
            self.fit_schedule(None)
            undo.enter_context(train_function.fresh_train_function(model))
            undo.enter_context(self.enforcing())
            self.begin()
            self._attached = undo.pop_all()
        self.store.owner = self
        attached_pruners.note_attached(self)

    @classmethod
    def detached(
        cls,
        model,
        schedule: Schedule,
        options: PruningOptions,
        *,
        training: bool = True,
        data: Any = None,
        progress: Progress | None = None,
    ) -> "Pruner":
        """Returns a Pruner not attached to the optimizer: callers use `begin()`, and run updates in `enforcing()`.

        Args:
            model: As for `Pruner`.
            schedule: As for `Pruner`.
            options: Pruning options.
            training: Whether the model will be trained; frozen weights that `include` does not name are then skipped.
            data: As for `Pruner`.
            progress: Told of the examples that are read.
        """
        pruner = cls.__new__(cls)
        pruner._prepare(model, schedule, None, options, training=training, data=data, progress=progress)
        pruner._attached = contextlib.ExitStack()
        return pruner

    def _prepare(
        self,
        model,
        schedule,
        optimizer,
        options,
        *,
        training: bool | None = None,
        data: Any = None,
        progress: Progress | None = None,
    ) -> None:
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
        self._counter = StepCounter(model, self._counted(optimizers), options.origin)
        self._check = EnforcementCheck(model, self.store, self._counter)
        plan = PruningPlan(self.schedule, self.policy, self._calculator, options.criterion)
        self.updater = MaskUpdater(plan, self.store, self._counter, self._check, self._collectors)
        self._late = pruning_notes.LateWeights(model)
        self._notes: list[str] = []
        # Number of updates before the next `step()` has work to do.
        self._updates_until_due = 0
        self._finished = False
        self._planned_steps: int | None = None

    @property
    def enforces_masks_only(self) -> bool:
        """True if the scope of `enforcing` contains the masks and nothing else."""
        plain = type(self.policy).scope is MaskPolicy.scope and type(self.store) is MaskStore
        return plain and not self._collectors.from_training

    def use_store(self, store: MaskStore) -> None:
        """Replaces the masks by those of another store of the same targets, before `begin` or between two steps."""
        self.store = self._check.store = self.updater.store = store

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
        taken = {choice.option: choice for choice in choices}
        self.options = replace(
            self.options,
            choices=tuple(taken.get(choice.option, choice) for choice in self.options.choices),
            **{name: choice.value for name, choice in taken.items()},
        )

    # The loop -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Adopts existing zeros and applies the schedule's sparsity at the current step, before the first update."""
        jax_state.sync_model_state(self.model)
        jax_state.unshare_ema_arrays(self.optimizers)
        self._check.note_progress()
        if self.options.keep_zeros:
            self.adopt_zeros()
        if self.policy.counts_forward_passes and self.step_count:
            # The first step of a training is its first forward pass; a resumed one has the zeros of its last step.
            if not self.events and self.schedule.latest_update(self.step_count) is not None:
                self.adopt_zeros()
        # A resumed training has observed no update before its first one, so due mask updates wait until then.
        elif not (self._collectors.unobserved and self.step_count):
            self.updater.follow_schedule()

    def adopt_zeros(self) -> None:
        """Adds zero entries of the targets to the masks, except in targets whose entries are all zero."""
        masks, kept = without_zeros([self.store.mask(i) for i in range(len(self.targets))], self.targets)
        if kept.sum() < self.updater.size:
            self.updater.replace(masks, kept)

    def step(self) -> bool:
        """Follows the schedule by one step, after an optimizer update; returns True if masks changed.

        With policy="tfmot", a step is a forward pass in training: call `step()` before each such pass.

        Raises:
            LeakError: Pruned weights became non-zero, or no update passed through the optimizer since the last call.
            RuntimeError: Called inside a `tf.function`, or after `finish()`.
        """
        if backend.inside_graph():
            raise RuntimeError(
                "Pruner.step() was called while a tf.function is traced, so it would run only during tracing. "
                "Call it in Python, after the compiled training step returns."
            )
        if self._finished:
            raise RuntimeError("Pruner.step() was called after finish(). Build a new Pruner to prune further.")
        jax_state.sync_model_state(self.model)
        self._counter.calls += 1
        if self.policy.counts_forward_passes:
            changed = self.updater.follow_schedule()
            self.enforce()
        else:
            self._check.verify()
            changed = self.updater.follow_schedule()
        self._counter.unseen, self._updates_until_due = 0, self._count_until_due()
        return changed

    def note_updates(self, updates: int) -> None:
        """Calls `step()`; on JAX, only once enough updates have passed for a mask update or a check to be due.

        On JAX, reading a variable blocks until the device is ready, and `fit` writes its state back only on request.
        Use this method instead of `step()` with a detached pruner.

        Args:
            updates: Upper bound of the number of optimizer updates since the last call.
        """
        self._counter.unseen += updates
        if self._counter.unseen >= self._updates_until_due or not jax_state.steps_are_pure():
            self.step()

    def _count_until_due(self) -> int:
        if self._check.due:
            return 1
        done = self._counter.done
        due = (ahead for ahead in range(1, CHECK_EVERY) if self.updater.due(done + ahead) is not None)
        return next(due, CHECK_EVERY)

    def mask_gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns `gradients`, aligned with `model.trainable_variables`, set to zero at pruned positions.

        None stays None, and `tf.IndexedSlices` stay sparse.

        Raises:
            TypeError: `gradients` is not a list or tuple.
            ValueError: The number of gradients differs from that of the variables, or the shape of a gradient from
                that of its variable.
        """
        return self.store.mask_gradients(gradients, self.model.trainable_variables)

    def enforce(self) -> None:
        """Sets weights and optimizer slots to zero at pruned positions, immediately."""
        jax_state.sync_model_state(self.model)
        self.store.enforce(self.optimizers)

    @contextlib.contextmanager
    def enforcing(self) -> Iterator[None]:
        """Context manager that masks gradients and weights in every optimizer update; for detached pruners."""
        # The collectors are entered after the store's scope, so that movements count the changes after masking.
        with self.policy.scope(self.store, self.optimizers), self._collectors.observing(self.optimizers):
            yield

    def audit(self) -> dict[str, int]:
        """Returns {weight name: number of pruned positions that are not exactly zero}."""
        jax_state.sync_model_state(self.model)
        return self.store.audit()

    def check(self) -> None:
        """Checks all targets for leaks immediately; reads every target and its mask once.

        Raises:
            LeakError: Pruned weights are non-zero; the masks were re-imposed.
        """
        self._check.check()

    # The end of a training ------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Re-imposes the masks and detaches from model and optimizers; the zeros stay. Idempotent.

        Warns if the schedule did not end, or if `step()` was never called although the loop trained.
        """
        try:
            if not self._finished:
                self._finished = True
                forgotten = self._step_was_forgotten()
                notes = self._end()
                if forgotten:
                    passes = self.policy.counts_forward_passes
                    when = "before each forward pass in training" if passes else "after each optimizer update"
                    notes.append(pruning_notes.step_never_called(self.schedule, self.sparsity, when))
                else:
                    notes += self.shortfall(self.step_count, ended=True)
                self._warn(notes)
        finally:
            attached_pruners.note_detached(self)
            self._attached.close()

    def _warn(self, notes: Sequence[str]) -> None:
        self._notes += notes
        for note in notes:
            if distribution.speaks_for(self.model):
                warnings.warn(note, stacklevel=3)

    def _step_was_forgotten(self) -> bool:
        # Without an optimizer, calls are the steps: no training and forgotten calls cannot be told apart.
        trained = self.step_count > 0 or not self.optimizers
        return trained and not self._counter.calls and self.updater.last_update < self.schedule.final_step

    def end_training(self) -> list[str]:
        """Ends a training: re-imposes the masks, applies the final sparsity if due; returns messages for the user."""
        return self._end() + self.shortfall(self.step_count, ended=True)

    def _end(self) -> list[str]:
        notes = self.policy.end_training(self)
        jax_state.unshare_ema_arrays(self.optimizers)
        if self.events:
            asked = self.events[-1].asked
            notes += pruning_notes.emptied_weights(self.store, self._calculator, asked, self.updater.kept)
        return notes + self.late_weights()

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
        self._counter.mark_all_seen()
        return pruning_notes.masks_written_back(restored)

    def shortfall(self, steps: int | None, *, ended: bool = False) -> list[str]:
        """Returns a message for the user if a training of `steps` updates ends before the schedule; else []."""
        if steps is None:
            return []
        grace = 0 if self.policy.counts_forward_passes else 1
        return pruning_notes.shortfall(self.schedule, steps, grace=grace, reached=self.sparsity if ended else None)

    def resume_counting(self) -> None:
        """Continues the step count of this pruner's last training, even if the model has a new optimizer."""
        self._counter.resume(self._counted(optimizers_of(self.model)))

    def state(self) -> PrunerState:
        """Returns everything besides weights and optimizer that `restore` continues from."""
        return PrunerState(
            masks=self.masks,
            origin=self._counter.origin,
            done=self.step_count,
            calls=self._counter.calls,
            last_update=self.updater.last_update,
            events=tuple(self.events),
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
        self._counter.origin, self._counter.calls, self._counter.done = state.origin, state.calls, state.done
        self.store.restore_pruned_values(state.pruned_values)
        self._check.note_progress()
        self._collectors.restore(state.statistics)

    def __enter__(self) -> "Pruner":
        return self

    def __exit__(self, kind, *exception) -> None:
        if kind is None:
            self.finish()
            return
        # The loop raised: no check here may hide its exception, and weights may be NaN.
        self._finished = True
        attached_pruners.note_detached(self)
        with self._attached:
            self.enforce()

    # What it knows --------------------------------------------------------------------------------------------------

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers whose updates count as steps."""
        return self._counter.optimizers

    @property
    def origin(self) -> int:
        """Optimizer update from which steps count."""
        return self._counter.origin

    @property
    def events(self) -> list[Event]:
        """Every mask update so far."""
        return self.updater.events

    @property
    def masks(self) -> dict[str, np.ndarray]:
        """Masks as {weight name: boolean array, True = kept}."""
        jax_state.sync_model_state(self.model)
        return self.store.masks

    @property
    def sparsity(self) -> float:
        """Fraction of the targets' entries that are currently pruned."""
        return self.updater.sparsity

    def fractions(self, sparsity: float) -> list[float]:
        """Returns the sparsity of each target, in the order of `targets`, for an overall `sparsity`."""
        return self._calculator.fractions(sparsity)

    @property
    def step_count(self) -> int:
        """Optimizer updates since the origin."""
        return self._counter.now

    def report(self, *, before: Report | None = None, notes: Sequence[str] = (), only_pruned: bool = False) -> Report:
        """Returns the report: weights, mask updates (events), skipped weights with reasons, and notes.

        Args:
            before: Report on the model before pruning.
            notes: Messages to add.
            only_pruned: Whether nothing but the pruned weights changed since `before`.
        """
        after = inspect_again(before, self.targets) if before is not None and only_pruned else inspect(self.model)
        return Report(
            model_name=after.model_name,
            weights=after.weights,
            skipped=tuple(self.skipped),
            events=tuple(self.events),
            notes=(*after.notes, *self._notes, *notes),
            before=before,
            targets=tuple(target.name for target in self.targets),
            choices=self.options.choices,
        )


def overall_sparsity(pruners: Sequence[Pruner]) -> float:
    """Returns the fraction of currently pruned entries over all targets of the pruners."""
    kept = sum(int(pruner.updater.kept.sum()) for pruner in pruners)
    return 1.0 - kept / sum(pruner.updater.size for pruner in pruners)


def check_loop_steps_after_updates(pruner: Pruner, loop: str) -> None:
    """Checks that a loop that steps its pruner after each update can use this pruner.

    Raises:
        ValueError: The pruner's policy counts forward passes.
    """
    if pruner.policy.counts_forward_passes:
        raise ValueError(
            f"{loop} steps its pruner after each update, and the pruner's policy prunes before each forward pass. "
            f"Received: a pruner with policy={pruner.policy}. Leave it out, or train with `fit` or a loop of your own."
        )

"""Pruner: updates masks on a schedule after optimizer updates, in any training loop."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import numpy as np
from keras import ops

from prunekit.anatomy.inspection import Event, Report, inspect, inspect_again
from prunekit.anatomy.targets import Skipped, Target, check_built, find_targets, weights_in
from prunekit.core import backend, distribution, jax_state, train_function
from prunekit.core.optimizers import optimizers_for, optimizers_of
from prunekit.sparsity.adoption import adopted
from prunekit.sparsity.schedules import OneShot, Schedule
from prunekit.sparsity.scores import Criterion, get_criterion
from prunekit.techniques.pruning.mask_calculator import without_zeros
from prunekit.techniques.pruning.mask_store import LeakError, MaskStore
from prunekit.techniques.pruning.movement import Movements
from prunekit.techniques.pruning.options import Options, PruningOptions, as_options
from prunekit.techniques.pruning.tfmot_rules import rules_of

# Steps between two leak checks while the masks do not change: a check reads every target and its mask.
_CHECK_EVERY = 100
_WITHOUT = "; for a loop with another kind leave it out, on a model that is not compiled, and use pruner.mask_gradients"


class Pruner:
    """Prunes a model while any loop trains it: call `step()` after each optimizer update.

    From construction to `finish()`, every optimizer update masks the gradients first and the weights last, inside the
    compiled step. Build the Pruner before the loop's `tf.function` runs for the first time.

    Args:
        model: A built Keras model; only its weights are changed, in place.
        schedule: A `Schedule` (step -> sparsity) or a schedule of tensorflow-model-optimization.
        optimizer: Keras optimizer of the loop, or a list of optimizers. None uses the compiled model's optimizer.
            Without any optimizer, `step()` counts its own calls as steps and re-imposes the masks at each call; the
            loop then passes its gradients through `mask_gradients` before using them.
        **options: `criterion`, `pattern`, `allocation`, `include`, `exclude`, `keep_zeros`, `keep_one`,
            `origin`, `compat`, as `prunekit.techniques.pruning.options.PruningOptions` describes them.

    Raises:
        ValueError: No weight to prune; a name pattern that matches no weight; a sparsity pattern that does not fit a
            weight; an invalid option value.
        TypeError: `schedule` is not a schedule, `optimizer` is not a Keras optimizer, or an option is unknown.
    """

    def __init__(self, model, schedule: Schedule, optimizer=None, **options: Unpack[Options]):
        with contextlib.ExitStack() as undo:
            self._prepare(model, schedule, optimizer, as_options(options))
            undo.enter_context(train_function.fresh_train_function(model))
            undo.enter_context(self.enforcing())
            self.begin()
            self._attached = undo.pop_all()
        self.store.owner = self

    @classmethod
    def detached(cls, model, schedule: Schedule, options: PruningOptions, *, training: bool = True) -> "Pruner":
        """Returns a Pruner not attached to the optimizer: callers use `begin()`, and run updates in `enforcing()`.

        Args:
            model: As for `Pruner`.
            schedule: As for `Pruner`.
            options: Pruning options.
            training: Whether the model will be trained; frozen weights that `include` does not name are then skipped.
        """
        pruner = cls.__new__(cls)
        pruner._prepare(model, schedule, None, options, training=training)
        pruner._attached = contextlib.ExitStack()
        return pruner

    def _prepare(self, model, schedule, optimizer, options: PruningOptions, training: bool | None = None) -> None:
        schedule = adopted(schedule)
        if not isinstance(schedule, Schedule):
            raise TypeError(
                "`schedule` says how sparse the model is at each step, for example "
                f"pk.PolynomialDecay(final_sparsity=0.8, end_step=1000). Received: {schedule!r}."
            )
        check_built(model)
        self.rules = rules_of(schedule, options)
        self.model = model
        self.schedule = self.rules.schedule(schedule, options)
        self.options = options
        optimizers = optimizers_for(model, optimizer, _WITHOUT)
        self.optimizers = self.rules.counted(optimizers)
        training = self.rules.leaves_frozen and (bool(optimizers) if training is None else training)
        found, self.skipped = find_targets(model, options.include, options.exclude, training=training)
        self._weights_seen = {weight.name for weight in weights_in(model)}
        self.targets: tuple[Target, ...] = tuple(found)
        self.rules.check_targets(model, self.targets)
        self._calculator = self.rules.calculator(self.targets, options, self.schedule.final_sparsity)
        self.store = MaskStore(self.targets, model)
        self._movements = _movements(get_criterion(self.options.criterion), self.targets, model)
        self.events: list[Event] = []
        self._notes: list[str] = []
        self._calls = 0
        # Upper bound of the updates since the last `step()`; number of updates before the next `step()` has work to do.
        self._unseen, self._quiet = 0, 0
        self._checked = 0
        self.origin: int = self._iterations() if options.origin is None else options.origin
        self._done = 0
        self._seen_updates: Any = 0
        self._last_update = -1
        # Changed masks are checked after the next update: weights written outside the optimizer are non-zero by then.
        self._unchecked = False
        self._finished = False
        self._kept = np.array([target.size for target in self.targets])
        self._size = int(self._kept.sum())

    # The loop -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Adopts existing zeros and applies the schedule's sparsity at the current step, before the first update."""
        jax_state.sync_model_state(self.model)
        jax_state.unshare_ema_arrays(self.optimizers)
        if jax_state.steps_are_pure():
            self._seen_updates = jax_state.progress(self.optimizers)
        if self.options.keep_zeros:
            self.adopt_zeros()
        # A resumed training has no movement statistics before its first update, so due mask updates wait until then.
        if self._movements is None or self._movements.updates or not self.step_count:
            self.rules.begin(self)

    def adopt_zeros(self) -> None:
        """Adds zero entries of the targets to the masks, except in targets whose entries are all zero."""
        found = [
            without_zeros(self.store.mask(i), backend.value_now(target.variable))
            for i, target in enumerate(self.targets)
        ]
        kept = np.array([n for _, n in found])
        masks = [mask if n else self.store.mask(i) for i, (mask, n) in enumerate(found)]
        self._kept = np.where(kept, kept, self._kept)
        if self._kept.sum() == self._size:
            return
        self.store.replace(masks, self.optimizers)

    def step(self) -> bool:
        """Follows the schedule by one step, after an optimizer update; returns True if masks changed.

        With compat="tfmot", a step is a forward pass in training: call `step()` before each such pass.

        Raises:
            LeakError: Pruned weights became non-zero, or no update passed through the optimizer since the last call.
            RuntimeError: Called inside a `tf.function`, or after `finish()`.
        """
        if backend.inside_graph():
            raise RuntimeError(
                "Pruner.step() was called while a tf.function is traced, so it would run once and never again. "
                "Call it in Python, after the compiled training step returns."
            )
        if self._finished:
            raise RuntimeError("Pruner.step() was called after finish(). Build a new Pruner to prune further.")
        jax_state.sync_model_state(self.model)
        self._calls += 1
        changed = self.rules.step(self)
        self._unseen, self._quiet = 0, self._quiet_updates()
        return changed

    def verify_enforcement(self) -> None:
        """Checks that the last update was enforced; without an optimizer, re-imposes the masks.

        Raises:
            LeakError: The update did not pass through the optimizer, or pruned weights became non-zero.
        """
        if self.optimizers:
            self._check_loop()
        else:
            self.store.enforce()
        self._done = self.step_count
        if self._unchecked or not 0 <= self._done - self._checked < _CHECK_EVERY:
            self.check()

    def note_updates(self, updates: int) -> None:
        """Calls `step()`; on JAX, only once enough updates have passed for a mask update or a check to be due.

        On JAX, reading a variable blocks until the device is ready, and `fit` writes its state back only on request.
        Use this method instead of `step()` with a detached pruner.

        Args:
            updates: Upper bound of the number of optimizer updates since the last call.
        """
        self._unseen += updates
        if self._unseen >= self._quiet or not jax_state.steps_are_pure():
            self.step()

    def _quiet_updates(self) -> int:
        if self._unchecked:
            return 1
        due = (ahead for ahead in range(1, _CHECK_EVERY) if self._due(self._done + ahead) is not None)
        return next(due, _CHECK_EVERY)

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
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.rules.scope(self))
            if self._movements is not None:
                # Entered after the store's scope, so that movements count the changes after masking.
                stack.enter_context(self._movements.observing(self.optimizers))
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
        self._unchecked, self._checked = False, self._done
        self._refuse_leaks(np.array(list(self.audit().values())))

    def finish(self) -> None:
        """Re-imposes the masks and detaches from model and optimizers; the zeros stay. Idempotent.

        Warns if the schedule did not end, or if `step()` was never called although the loop trained.
        """
        try:
            if not self._finished:
                self._finished = True
                forgotten = self._step_was_forgotten()
                notes = self._end()
                notes += [self._never_stepped()] if forgotten else self.shortfall(self.step_count, ended=True)
                self._warn(notes)
        finally:
            self._attached.close()

    def _warn(self, notes: Sequence[str]) -> None:
        self._notes += notes
        for note in notes:
            if distribution.speaks_for(self.model):
                warnings.warn(note, stacklevel=3)

    def _step_was_forgotten(self) -> bool:
        # Without an optimizer, calls are the steps: no training and forgotten calls cannot be told apart.
        trained = self.step_count > 0 or not self.optimizers
        return trained and not self._calls and self._last_update < self.schedule.landing_step

    def _never_stepped(self) -> str:
        return (
            f"Pruner.step() was never called, so the schedule was not followed: the sparsity is {self.sparsity:.4f}, "
            f"and the schedule lands on {self.schedule.final_sparsity:g}. Call pruner.step() {self.rules.stepped}."
        )

    def end_training(self) -> list[str]:
        """Ends a training: re-imposes the masks, lands the schedule if due; returns messages for the user."""
        return self._end() + self.shortfall(self.step_count, ended=True)

    def _end(self) -> list[str]:
        notes = self.rules.end_training(self)
        jax_state.unshare_ema_arrays(self.optimizers)
        return notes + self._bare() + self.late_weights()

    def _bare(self) -> list[str]:
        """Returns messages for the user about targets with no unit or one unit left."""
        if not self.events:
            return []
        asked, notes = self.events[-1].asked, []
        spared, emptied = self._calculator.spared(asked, self._kept), self._kept == 0
        if spared.any():
            notes.append(
                f"Of these weights sparsity {asked:g} leaves no more than one unit, which is kept: "
                f"{self._named(self._kept * spared)}. Leave them out with `exclude`, or ask for less sparsity; with "
                "keep_one=False they may become zero throughout."
            )
        if emptied.any():
            sizes = np.array([target.size for target in self.targets])
            notes.append(
                f"Of these weights nothing is left at sparsity {asked:g}: {self._named(sizes * emptied)}. Leave them "
                "out with `exclude`, or leave keep_one=False out, so that one unit of each is kept."
            )
        return notes

    def late_weights(self) -> list[str]:
        """Returns messages for the user about weights created since pruning began; each weight is named once.

        A layer that the training step does not call is built later, for example by an evaluation. Its weights are
        also added to `skipped`.
        """
        late = [weight for weight in weights_in(self.model) if weight.name not in self._weights_seen]
        if not late:
            return []
        self._weights_seen.update(weight.name for weight in late)
        layers = dict.fromkeys(weight.layer_path or self.model.name for weight in late)
        self.skipped = [item for item in self.skipped if item.name not in layers]
        self.skipped += [Skipped(weight.name, "its layer was built after pruning had begun") for weight in late]
        return [
            f"{', '.join(layers)}: built after pruning had begun, so {', '.join(weight.name for weight in late)} is "
            "not pruned. Call these layers once before training, for example by calling the model on a batch of data."
        ]

    def finalize_masks(self) -> list[str]:
        """Re-imposes the masks; applies the final sparsity if the schedule is one step before its landing step.

        Returns messages for the user.
        """
        notes = []
        restored = sum(self.audit().values())
        self.enforce()
        if restored:
            notes.append(
                f"{restored:,} pruned weights had been written back at the end of training, as EarlyStopping does with "
                "the best weights of an epoch that was less sparse; they are zero again. Evaluate the model anew, and "
                "give EarlyStopping start_from_epoch= an epoch after the schedule has landed. Without such a callback, "
                "the training loop writes weights without passing through the optimizer."
            )
        if self.step_count == self.schedule.landing_step - 1:
            self._update_masks(self.step_count, self.schedule.final_sparsity)
            self._last_update = self.schedule.landing_step
        self._done, self._unseen = self.step_count, 0
        return notes

    def shortfall(self, steps: int | None, *, ended: bool = False) -> list[str]:
        """Returns a message for the user if a training of `steps` updates ends before the schedule; else []."""
        landing = self.schedule.landing_step
        if steps is None or steps >= landing - self.rules.grace:
            return []
        reached = self.sparsity if ended else self.schedule(self.schedule.latest_update(steps) or 0)
        return [
            f"The schedule lands on sparsity {self.schedule.final_sparsity:g} at step {landing}, but training "
            f"{'ended after' if ended else 'has only'} {steps} steps: it {'ended' if ended else 'will end'} at "
            f"{reached:.4f}. Train longer, or let the schedule end by step {steps}."
        ]

    def resume_counting(self) -> None:
        """Continues the step count of this pruner's last training, even if the model has a new optimizer."""
        former, self.optimizers = self.optimizers, self.rules.counted(optimizers_of(self.model))
        if not self.optimizers:
            # Without an optimizer, the calls of `step()` are the steps.
            return
        if former == self.optimizers:
            # An interrupted training made updates that `step()` has not counted yet.
            self._done += min(max(self.step_count - self._done, 0), self._unseen)
        self._unseen = 0
        self.origin = self._iterations() - self._done

    def __enter__(self) -> "Pruner":
        return self

    def __exit__(self, kind, *exception) -> None:
        if kind is None:
            self.finish()
            return
        # The loop raised: no check here may hide its exception, and weights may be NaN.
        self._finished = True
        with self._attached:
            self.enforce()

    # What it knows --------------------------------------------------------------------------------------------------

    @property
    def masks(self) -> dict[str, np.ndarray]:
        """Masks as {weight name: boolean array, True = kept}."""
        jax_state.sync_model_state(self.model)
        return self.store.masks

    @property
    def sparsity(self) -> float:
        """Fraction of the targets' entries that are currently pruned."""
        return overall_sparsity([self])

    def fractions(self, sparsity: float) -> list[float]:
        """Returns the sparsity of each target, in the order of `targets`, for an overall `sparsity`."""
        return self._calculator.fractions(sparsity)

    @property
    def step_count(self) -> int:
        """Optimizer updates since the origin."""
        return self._iterations() - self.origin

    def report(self, *, before: Report | None = None, notes: Sequence[str] = (), only_pruned: bool = False) -> Report:
        """Returns the report: weights, mask updates (events), skipped weights with reasons, and notes.

        Args:
            before: Report on the model before pruning.
            notes: Messages to add.
            only_pruned: Whether nothing but the pruned weights changed since `before`.
        """
        after = inspect_again(before, self.targets) if before is not None and only_pruned else inspect(self.model)
        return Report(
            model=after.model,
            weights=after.weights,
            skipped=tuple(self.skipped),
            events=tuple(self.events),
            notes=(*self._notes, *notes),
            before=before,
            targets=tuple(target.name for target in self.targets),
        )

    # How masks are made ---------------------------------------------------------------------------------------------

    def _iterations(self) -> int:
        if not self.optimizers:
            return self._calls
        jax_state.sync_model_state(self.model)
        # The maximum: a GAN's model may also hold the unused default optimizer that `compile()` creates.
        return max(int(backend.number(optimizer.iterations)) for optimizer in self.optimizers)

    def _check_loop(self) -> None:
        jax_state.sync_model_state(self.model)
        updates = jax_state.progress(self.optimizers) if jax_state.steps_are_pure() else self.store.updates
        if updates == self._seen_updates:
            self.enforce()
            raise LeakError(
                "Pruner.step() was called, but no update passed through "
                f"{', '.join(type(optimizer).__name__ for optimizer in self.optimizers)} since the last call, so "
                "pruned weights may have grown back. Pass the optimizer that your loop uses, as "
                "Pruner(model, schedule, optimizer=...), build the Pruner before your tf.function is first called, "
                "or, for a loop without a Keras optimizer, use pruner.mask_gradients on a model without one. "
                "The masks were re-imposed."
            )
        self._seen_updates = updates

    def follow_schedule(self) -> bool:
        """Updates the masks if the schedule has an update due; returns True if they changed."""
        step = self.step_count
        due = self._due(step)
        if due is None:
            return False
        self._last_update = due
        return self._update_masks(step, self.schedule(due))

    def _due(self, step: int) -> int | None:
        """Returns the schedule's latest update step <= `step`, or None if it was already applied."""
        due = self.schedule.latest_update(step)
        # Not an equality test: with steps_per_execution the step advances by several at once.
        return due if due is not None and due > self._last_update else None

    def _update_masks(self, step: int, sparsity: float) -> bool:
        masks = [self.store.mask(i) for i in range(len(self.targets))]
        choice = self._calculator.choose(sparsity, masks, self._statistics(sparsity))
        self._refuse_nan(choice.nans)
        self._refuse_leaks(choice.leaks)
        self._refuse_unmoved(choice.kept < self._kept)
        changed = choice.changes(self._kept)
        if changed:
            self.store.replace(choice.masks, self.optimizers)
            self._kept = choice.kept
            self._unchecked = True
        self.events.append(Event(step=step, asked=sparsity, reached=self.sparsity))
        return changed

    def _statistics(self, sparsity: float) -> list[Any] | None:
        if self._movements is None:
            return None
        # After a resumption, rounding may differ from the current masks by up to half an entry per target.
        more = sparsity * self._size > self._size - int(self._kept.sum()) + len(self.targets) / 2
        if more and not self._movements.updates:
            raise ValueError(
                f"The criterion {self.options.criterion} looks at how updates moved the weights. Received: sparsity "
                f"{sparsity:g} at step {self.step_count}, and no update of a Keras optimizer seen before it. Let the "
                "schedule begin later, in a training with a Keras optimizer, or choose another criterion."
            )
        return [{"movement": movement} for movement in self._movements.sums]

    def _named(self, counts) -> str:
        return ", ".join(f"{target.name} ({n})" for target, n in zip(self.targets, counts, strict=True) if n)

    def _refuse_nan(self, nans) -> None:
        if nans.any():
            raise ValueError(
                "Importances that are NaN have no rank, so no mask can be chosen. "
                f"Received NaN for: {self._named(nans)}. The weights or the criterion are to blame: "
                "look for a loss that became NaN, lower the learning rate, or train from an "
                "earlier checkpoint. The masks are as they were."
            )

    def _refuse_unmoved(self, pruned) -> None:
        if self._movements is None or not self._movements.updates or not pruned.any():
            return
        # Equal movements would be pruned by position.
        unmoved = pruned & ~np.array([bool(ops.any(ops.not_equal(movement, 0))) for movement in self._movements.sums])
        if unmoved.any():
            named = ", ".join(target.name for target, one in zip(self.targets, unmoved, strict=True) if one)
            raise ValueError(
                f"The criterion {self.options.criterion} ranks weights by how updates moved them. Received: none that "
                f"moved in {named}. Frozen layers, those without a gradient, and weights that began at zero do not "
                "so far: leave them out with `exclude`, begin later, or choose another criterion. The masks are as "
                "they were."
            )

    def _refuse_leaks(self, leaks) -> None:
        if leaks.any():
            self.enforce()
            raise LeakError(
                f"Pruned weights became non-zero since the last update: {self._named(leaks)}. "
                "Something in the loop writes weights without passing through the optimizer: assign weights "
                "before the optimizer update, or call pruner.enforce() after writing them. The masks were re-imposed."
            )


def overall_sparsity(pruners: Sequence[Pruner]) -> float:
    """Returns the fraction of currently pruned entries over all targets of the pruners."""
    kept = sum(int(pruner._kept.sum()) for pruner in pruners)
    return 1.0 - kept / sum(pruner._size for pruner in pruners)


def _movements(criterion: Criterion, targets: Sequence[Target], model) -> Movements | None:
    unknown = criterion.needs - {"movement"}
    if unknown:
        raise ValueError(
            f'The statistic that prunekit gathers for criteria is "movement". Received: {criterion}, which needs '
            f"{', '.join(sorted(unknown))}. Compute the importance beforehand, and pass a function that returns it."
        )
    if not criterion.needs:
        return None
    backend.require_tensorflow(f"What {criterion} needs")
    return Movements([target.variable for target in targets], model)


def prune(model, sparsity: float, data=None, **options: Unpack[Options]) -> Report:
    """Prunes a trained model once, in place, without training; returns a `Report`.

    Args:
        model: A built Keras model.
        sparsity: Fraction of the targets' entries to remove, in [0, 1).
        data: Reserved for criteria that need a pass over data; must be None, as no existing criterion needs data.
        **options: `criterion`, `pattern`, `allocation`, `include`, `exclude`, `keep_zeros`, `keep_one`,
            `origin`, `compat`, as `prunekit.techniques.pruning.options.PruningOptions` describes them.

    Raises:
        ValueError: As for `Pruner`; `data` is not None; the criterion needs statistics of a training ("movement").
        TypeError: An option is unknown.
    """
    settings = as_options(options)
    criterion = get_criterion(settings.criterion)
    if criterion.needs:
        raise ValueError(
            f"The criterion {criterion} looks at what a training does to the weights, and pk.prune trains nothing. "
            "Train with PruningCallback or Pruner, or choose another criterion."
        )
    if data is not None:
        raise ValueError(f"The criterion {criterion} looks at weights only. Received: data. Leave `data` out.")
    before = inspect(model)
    pruner = Pruner.detached(model, OneShot(sparsity=sparsity), settings, training=False)
    pruner._calculator.once = True
    pruner.begin()
    pruner.finish()
    return pruner.report(before=before, only_pruned=True)

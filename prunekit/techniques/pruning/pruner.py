"""Pruner: schedule -> importance -> masks -> store, after each optimizer update, in any loop."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import numpy as np
from keras import ops

from prunekit.anatomy.inspection import Event, Report, inspect
from prunekit.anatomy.targets import Skipped, Target, check_built, find_targets, weights_in
from prunekit.core import backend, distribution, jax_state, train_function
from prunekit.core.optimizers import optimizers_for, optimizers_of
from prunekit.sparsity.adoption import adopted
from prunekit.sparsity.schedules import OneShot, Schedule
from prunekit.sparsity.scores import Criterion, get_criterion
from prunekit.sparsity.selection import count_true
from prunekit.techniques.pruning.mask_store import LeakError, MaskStore
from prunekit.techniques.pruning.movement import Movements
from prunekit.techniques.pruning.options import Options, PruningOptions, as_options
from prunekit.techniques.pruning.tfmot_rules import rules_of

# Steps between two looks for leaks while masks stay as they are: one reads every target and its mask.
_CHECK_EVERY = 100
_WITHOUT = "; for a loop with another kind leave it out, on a model that is not compiled, and use pruner.mask_gradients"


class Pruner:
    """Prunes a model while any loop trains it: call `step()` after each optimizer update.

    From construction to `finish()` every update of the optimizer masks gradients first and weights last, inside the
    compiled step. Build it before the loop's `tf.function` runs for the first time.

    Args:
        model: A Keras model that has its weights; changed in place, weights only.
        schedule: A `Schedule`: step -> sparsity, or one of tensorflow-model-optimization.
        optimizer: The Keras optimizer, or several, that the loop updates with. None takes the one the model was
            compiled with. Where there is none, `step()` counts its own calls and re-imposes the masks each time:
            pass gradients through `mask_gradients` before using them.
        **options: `criterion`, `pattern`, `allocation`, `include`, `exclude`, `keep_zeros`, `keep_one`,
            `origin`, `compat`, as `prunekit.techniques.pruning.options.PruningOptions` describes them.

    Raises:
        ValueError: Nothing to prune, a pattern that matches nothing or does not fit a weight.
        TypeError: `schedule` is not a schedule, an unknown option.
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
        """A pruner that is not attached: its owner calls `begin()`, and runs updates inside `enforcing()`.

        Args:
            model: As for `Pruner`.
            schedule: The same.
            options: How it prunes.
            training: The owner trains the model; frozen weights that `include` does not name are left out then.
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
        # Updates since the last look at the optimizer, at most, and how many can pass before there is anything to do.
        self._unseen, self._quiet = 0, 0
        self._checked = 0
        self.origin: int = self._iterations() if options.origin is None else options.origin
        self._done = 0
        self._seen_updates: Any = 0
        self._last_update = -1
        # Masks that changed are looked at after the next update: a loop that goes around the optimizer shows there.
        self._unchecked = False
        self._finished = False
        self._kept = np.array([target.size for target in self.targets])
        self._size = int(self._kept.sum())

    # The loop -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Adopts zeros that are there already, and applies what the schedule asks before the first update."""
        jax_state.sync_model_state(self.model)
        jax_state.unshare_ema_arrays(self.optimizers)
        if jax_state.steps_are_pure():
            self._seen_updates = jax_state.progress(self.optimizers)
        if self.options.keep_zeros:
            self.adopt_zeros()
        # A training that is resumed has statistics again after its first update; what is due waits until then.
        if self._movements is None or self._movements.updates or not self.step_count:
            self.rules.begin(self)

    def adopt_zeros(self) -> None:
        """Takes the zeros that are there for pruned, but for weights that are zero throughout."""
        masks = [
            ops.logical_and(self.store.mask(i), ops.not_equal(ops.convert_to_tensor(target.variable), 0))
            for i, target in enumerate(self.targets)
        ]
        kept = np.array([int(count_true(mask, expect_any=True)) for mask in masks])
        masks = [mask if n else self.store.mask(i) for i, (mask, n) in enumerate(zip(masks, kept, strict=True))]
        self._kept = np.where(kept, kept, self._kept)
        self.store.replace(masks, self.optimizers)

    def step(self) -> bool:
        """To be called after each optimizer update; returns True if masks changed.

        With compat="tfmot" it stands for a forward pass in training, and is called before it.

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
        """Checks that the last update was enforced; without an optimizer, re-imposes the masks."""
        if self.optimizers:
            self._check_loop()
        else:
            self.store.enforce()
        self._done = self.step_count
        if self._unchecked or not 0 <= self._done - self._checked < _CHECK_EVERY:
            self.check()

    def note_updates(self, updates: int) -> None:
        """Calls `step()` if `updates` more updates can have made something due; for owners of a detached pruner.

        On JAX, reading a variable makes Python wait for the device, and `fit` writes its state back only when asked.
        There `step()` is left out until enough updates have passed for something to be due.

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
        """The gradients, a list aligned with `model.trainable_variables`, zero at pruned positions.

        None stays None, and `tf.IndexedSlices` stay sparse.

        Raises:
            TypeError: It is no list or tuple.
            ValueError: It has another length, or a gradient another shape than its variable.
        """
        return self.store.mask_gradients(gradients, self.model.trainable_variables)

    def enforce(self) -> None:
        """Re-imposes every mask on weights and optimizer slots, now."""
        jax_state.sync_model_state(self.model)
        self.store.enforce(self.optimizers)

    @contextlib.contextmanager
    def enforcing(self) -> Iterator[None]:
        """A scope in which updates of the optimizers are enforced, for owners of a detached pruner."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.rules.scope(self))
            if self._movements is not None:
                # After the store, so that a change is what remains of it under the mask.
                stack.enter_context(self._movements.observing(self.optimizers))
            yield

    def audit(self) -> dict[str, int]:
        """{weight name: number of pruned positions that are not exactly zero}."""
        jax_state.sync_model_state(self.model)
        return self.store.audit()

    def check(self) -> None:
        """Looks for leaks now: reads every target and its mask once.

        Raises:
            LeakError: There are some; the masks were re-imposed.
        """
        self._unchecked, self._checked = False, self._done
        self._refuse_leaks(np.array(list(self.audit().values())))

    def finish(self) -> None:
        """Re-imposes the masks and gives model and optimizers back as they were; the zeros stay. Idempotent.

        Warns where `step()` was never called although the loop trained and the schedule had masks to change.
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
        # Without an optimizer the calls are the steps: that nothing trained and that they were forgotten look alike.
        trained = self.step_count > 0 or not self.optimizers
        return trained and not self._calls and self._last_update < self.schedule.landing_step

    def _never_stepped(self) -> str:
        return (
            f"Pruner.step() was never called, so the schedule was not followed: the sparsity is {self.sparsity:.4f}, "
            f"and the schedule lands on {self.schedule.final_sparsity:g}. Call pruner.step() {self.rules.stepped}."
        )

    def end_training(self) -> list[str]:
        """Ends a training; returns what its owner should tell the user."""
        return self._end() + self.shortfall(self.step_count, ended=True)

    def _end(self) -> list[str]:
        notes = self.rules.end_training(self)
        jax_state.unshare_ema_arrays(self.optimizers)
        return notes + self._bare() + self.late_weights()

    def _bare(self) -> list[str]:
        """What to tell the user about targets of which nothing is left, or one unit; else nothing."""
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
        """What to tell the user where layers got weights since pruning began; each weight is named once.

        A layer that a training step does not call is built later, by an evaluation for one. `skipped` names it too.
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
        """Re-imposes the masks, and applies the final sparsity where the schedule is one step short of its end.

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
        """What to tell the user where a training of `steps` updates ends before the schedule does; else nothing."""
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
        """Continues the step count of the last training with this pruner, also under another optimizer."""
        former, self.optimizers = self.optimizers, self.rules.counted(optimizers_of(self.model))
        if not self.optimizers:
            # Its own calls are the steps.
            return
        if former == self.optimizers:
            # A training that was interrupted made updates that nobody looked at yet.
            self._done += min(max(self.step_count - self._done, 0), self._unseen)
        self._unseen = 0
        self.origin = self._iterations() - self._done

    def __enter__(self) -> "Pruner":
        return self

    def __exit__(self, kind, *exception) -> None:
        if kind is None:
            self.finish()
            return
        # The loop broke: its exception is what the user must see, and weights may be NaN.
        self._finished = True
        with self._attached:
            self.enforce()

    # What it knows --------------------------------------------------------------------------------------------------

    @property
    def masks(self) -> dict[str, np.ndarray]:
        """{weight name: boolean array, True = kept}."""
        jax_state.sync_model_state(self.model)
        return self.store.masks

    @property
    def sparsity(self) -> float:
        """Fraction of the targets' entries that are pruned now."""
        return overall_sparsity([self])

    def fractions(self, sparsity: float) -> list[float]:
        """The sparsity of each target, in their order, where all of them together have `sparsity`."""
        return self._calculator.fractions(sparsity)

    @property
    def step_count(self) -> int:
        """Optimizer updates since the origin."""
        return self._iterations() - self.origin

    def report(self, *, before: Report | None = None, notes: Sequence[str] = ()) -> Report:
        """What changed, what was skipped and why."""
        after = inspect(self.model)
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
        # The furthest: a GAN's model may also hold the optimizer that `compile()` makes by default and no one uses.
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
        """Makes the masks that are due; whether they changed."""
        step = self.step_count
        due = self._due(step)
        if due is None:
            return False
        self._last_update = due
        return self._update_masks(step, self.schedule(due))

    def _due(self, step: int) -> int | None:
        """The update step of the schedule that has come by `step` and was not followed yet."""
        due = self.schedule.latest_update(step)
        # Compared, not matched: with steps_per_execution the step moves by several at once.
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
        # Half a weight of each target is what rounding may add to what is pruned already, as after a resumption.
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
        # All alike, they would be pruned by position.
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
    """Fraction of the entries of all targets of the pruners that are pruned now."""
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
    """Prunes a trained model once, in place, without training; returns the report of what changed.

    Args:
        model: A built Keras model.
        sparsity: Fraction of the targets' weights to remove, in [0, 1).
        data: Reserved for criteria that need a pass over data; those that exist need none.
        **options: `criterion`, `pattern`, `allocation`, `include`, `exclude`, `keep_zeros`, `keep_one`,
            `origin`, `compat`, as `prunekit.techniques.pruning.options.PruningOptions` describes them.

    Raises:
        ValueError: As `Pruner`, or data given to a criterion that uses none.
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
    pruner.begin()
    pruner.finish()
    return pruner.report(before=before)

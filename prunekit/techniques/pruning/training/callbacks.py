"""PruningCallback: forwards the events of `fit` to a Pruner."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Unpack

import keras

from prunekit.anatomy.cost.inspection import SparsityReport
from prunekit.core.data.model_building import build_from_batch, waits_for_data
from prunekit.core.runtime.optimizers import updates_in
from prunekit.core.runtime.snapshot import Snapshot
from prunekit.core.training import distribution, train_function
from prunekit.core.training.backup_sync import Resumption
from prunekit.core.training.last_callback import LastCallback
from prunekit.keyword_options import keyword_options
from prunekit.sparsity.allocation import Allocation
from prunekit.sparsity.patterns import Pattern
from prunekit.sparsity.schedules import Schedule, as_schedule
from prunekit.sparsity.scores import Criterion
from prunekit.sparsity.shorthands import AllocationName, CriterionName, PatternName
from prunekit.techniques.pruning.masks.options import FORMER, CallbackKeywords, PruningOptions
from prunekit.techniques.pruning.masks.policy import get_policy
from prunekit.techniques.pruning.training import attached_pruners
from prunekit.techniques.pruning.training.pruner import Pruner
from prunekit.techniques.pruning.training.pruner_run import PrunerRun, keep_trace, overall_sparsity, take_over_trace
from prunekit.techniques.pruning.training.pruner_state import PrunerState
from prunekit.techniques.pruning.training.pruning_notes import LATER_TRAINING, abrupt
from prunekit.techniques.pruning.training.saved_files import SavedFiles


class PruningCallback(keras.callbacks.Callback):
    """Prunes the model that `fit` trains; pruned weights are exactly zero after every batch and after training.

    The model, its optimizer and its compiled functions are modified only while a batch runs, so other callbacks save,
    evaluate and restore an unmodified model, also after an exception. A second `fit` with the same callback continues
    the schedule. Every callback of the list finds "sparsity" in the epoch logs: the sparsity over all weights that the
    pruning callbacks of this `fit` prune. If the list contains a `BackupAndRestore`, the pruning state is saved and
    restored with the weights.

    The zeros hold while this callback trains. In a later `fit` they grow back, unless `pk.KeepZeros()` is a callback.

    A model without weights before `fit`, such as a subclassed model that was never called, is built from the first
    batch before the first update, as Keras would build it. The callback then selects the weights to prune.

    Args:
        schedule: A `Schedule` (step -> sparsity), a schedule of tensorflow-model-optimization, or the final sparsity of
            a `PolynomialDecay`; steps are optimizer updates since this callback's first `fit` began. A schedule without
            `end_step` fits its steps to that `fit`.
        criterion: Importance criterion. `pk.PruningOptions` lists the values of
            this option and of the following options.
        pattern: Sparsity pattern.
        allocation: Distribution of the sparsity over the weights.
        include: Layers and weights to prune; empty means every weight pruned by default.
        exclude: Layers and weights to skip.
        data: Calibration data, for a criterion or policy that needs them, as `Pruner` takes them.
        **options: `keep_zeros`, `keep_one`, `origin`, `overrides`, `bounds`, `policy`, `misfits`.

    Raises:
        TypeError: `schedule` is not a schedule, or an option is unknown.
        ValueError: In `fit`, before the first update: no weight to prune; a name that matches no weight; the callback
            is listed twice; another callback of the same `fit`, or a `Pruner` that is not finished, prunes one of the
            weights.
        LeakError: In `fit`: weights are updated without passing through the optimizer.
    """

    # Of the callbacks of one `fit`, masks come first: what others round or cluster are kept weights.
    rank: ClassVar[int] = 0
    _if_frozen = "Prune the model with pk.prune, or make layers trainable before compile()."

    @keyword_options(PruningOptions, CallbackKeywords, FORMER)
    def __init__(
        self,
        schedule: Schedule,
        criterion: CriterionName | Criterion | Callable[..., Any] = "auto",
        pattern: PatternName | Pattern = "unstructured",
        allocation: AllocationName | Allocation = "auto",
        include: Sequence[str] | str = (),
        exclude: Sequence[str] | str = (),
        *,
        data: Any = None,
        **options: Unpack[CallbackKeywords],
    ):
        super().__init__()
        self.schedule = as_schedule(schedule)
        self.options = PruningOptions(criterion, pattern, allocation, include, exclude, **options)
        self._data = data
        get_policy(self.options.policy).check(self.schedule, self.options)
        self.notes: list[str] = []
        self._pruner: Pruner | None = None
        self._function: Any = None
        self._begun, self._first_epoch = False, 0
        self.resumption = Resumption()
        self._companions: _Companions | None = None

    @property
    def pruner(self) -> Pruner:
        """The `Pruner` of the current or last `fit`, with masks, events and audit; RuntimeError before a `fit`."""
        if self._pruner is None:
            raise RuntimeError("`pruner` and `report` exist once `fit` has run with this callback.")
        return self._pruner

    @property
    def report(self) -> SparsityReport:
        """The `SparsityReport` of the last `fit`, computed at each access."""
        return self.pruner.report_since(notes=[*self.notes, *([LATER_TRAINING] if self.pruner.sparsity else [])])

    @property
    def at_final_sparsity(self) -> bool:
        """Whether the masks have the final sparsity of the schedule."""
        pruner = self._pruner
        return pruner is not None and not pruner.run.schedule.is_open and pruner.run.updater.at_final_sparsity

    # Keras calls set_model before any on_train_begin, so the step count is read before BackupAndRestore changes it.
    def set_model(self, model) -> None:
        super().set_model(model)
        found = train_function.callback_list_above()
        self._last = None if found is None else LastCallback.placed_after_all(found, self)
        self._companions = None if found is None else _Companions.placed_before_all(found, self)
        self.resumption.find_backup(self, found)
        if self._pruner is not None and self._pruner.model is model:
            self._pruner.run.resume_counting()
            return
        self._pruner = self._function = None
        if not waits_for_data(model):
            self._make_pruner()

    def _make_pruner(self) -> None:
        if self.model.weights and not self.model.trainable_variables:
            raise ValueError(
                f"All weights of {self.model.name!r} are frozen, so `fit` updates none of them. {self._if_frozen}"
            )
        run = PrunerRun(self.model, self.schedule, self.options, data=self._data)
        self._pruner, self._function, self._store = Pruner.following(run), take_over_trace(run), run.store

    def on_train_begin(self, logs=None) -> None:
        self.notes, self._begun = [], False
        if self._pruner is not None:
            self._prepare_training()

    def _prepare_training(self) -> None:
        if self._companions is not None:
            self._companions.refuse_shared_targets()
        if self._function is None or not self._function.fits(self.model) or self._store is not self.pruner.run.store:
            # Another callback may have taken over the function, and this one's pruner has got other masks.
            self._store = self.pruner.run.store
            self._function = train_function.ScopedFunction(self.model, self.pruner.run.enforcing)

    # Masks are initialised here, because callbacks listed later still load weights in on_train_begin.
    def on_epoch_begin(self, epoch, logs=None) -> None:
        if not self._begun:
            self._first_epoch = epoch
            if self._pruner is not None:
                self._begin()

    def _begin(self) -> None:
        self._begun = True
        self.resumption.begin(self)
        # Not before: a resumed training counts from the origin of the first one. What is fitted ends in time.
        if not self.schedule.is_open:
            self.announce([*abrupt(self.schedule), *self.pruner.run.shortfall(self._planned_steps())])

    def start(self) -> None:
        """Applies the schedule's sparsity at the first step of a training that resumes none."""
        self.pruner.run.fit_schedule(self._planned_steps())
        self.pruner.run.begin()

    def snapshot(self) -> Snapshot:
        """Returns the pruner's state, as `restore` takes it."""
        return self.pruner.run.state().to_snapshot()

    def resume(self, snapshot: Snapshot) -> None:
        """Lets the next `fit` go on from a state that `snapshot` returned."""
        self.resumption.state = snapshot

    def restore(self, snapshot: Snapshot) -> None:
        """Restores the pruner's state; weights and optimizer must already be restored.

        Raises:
            ValueError: The state belongs to a pruner of other weights, or is incomplete.
        """
        self.pruner.run.restore(PrunerState.from_snapshot(snapshot, self.pruner.targets))

    def on_train_batch_begin(self, batch, logs=None) -> None:
        if self._last is None:
            self.begin_batch()

    def begin_batch(self) -> None:
        """Prepares one training batch; called after all other callbacks' `on_train_batch_begin`."""
        if self._pruner is None:
            train_function.prepare_next_call(self.model, self._build_and_begin)
            return
        if self._counts_passes:
            self._refuse_several_batches_at_once()
            self.pruner.run.step()
        self._function.arm()

    @property
    def _counts_passes(self) -> bool:
        return self.pruner.run.policy.counts_forward_passes

    def _refuse_several_batches_at_once(self) -> None:
        policy, together = self.pruner.run.policy, getattr(self.pruner.model, "steps_per_execution", 1)
        if together != 1:
            raise ValueError(
                f"The policy {policy} prunes before each batch, so it needs one batch at a time. Received: "
                f"a model compiled with steps_per_execution={together}. Compile it with steps_per_execution=1."
            )

    def _build_and_begin(self, batches: Any) -> Any:
        """Builds the model and starts pruning before the first update; returns the batches to train on."""
        if self._pruner is None:
            batches = build_from_batch(self.model, batches)
            # Creates the pruners of all pruning callbacks at once, so that shared targets are refused before any mask
            # is calculated.
            for one in [self] if self._companions is None else self._companions.pruning:
                if one._pruner is None:
                    one._make_pruner()
        self._prepare_training()
        self._begin()
        self.begin_batch()
        return batches

    def on_train_batch_end(self, batch, logs=None) -> None:
        if self._pruner is None:
            raise RuntimeError(
                "PruningCallback builds a model that has no weights yet when model.train_function is called. Received: "
                "a batch that was trained without calling it. Call the model once on a batch of data before training."
            )
        self._function.disarm()
        if not self._counts_passes:
            # Not `self.model`: on JAX, Keras writes its state back whenever a callback reads that.
            self.pruner.run.note_updates(self.pruner.model.steps_per_execution or 1)

    def on_test_begin(self, logs=None) -> None:
        if self._pruner is not None and self._counts_passes:
            # Weights are dense between an update and the next forward pass.
            self.pruner.enforce()

    def on_epoch_end(self, epoch, logs=None) -> None:
        # Without a single batch of data, the model still has no weights.
        if self._pruner is None:
            return
        if self._counts_passes:
            self.pruner.enforce()
        self.announce(self.pruner.run.late_weights())
        if logs is not None:
            logs["sparsity"] = self.pruner.sparsity if self._companions is None else self._companions.sparsity

    def on_train_end(self, logs=None) -> None:
        if self._last is None:
            self.end()

    def begin_test_batch(self) -> None:
        """Does nothing: the weights are those of the last update."""

    def end_of_list(self) -> None:
        """Notes saved files; called after all other callbacks have ended the batch or the epoch."""
        if self._companions is not None:
            self._companions.note_saved()

    def end(self) -> None:
        """Enforces the masks after all other callbacks' `on_train_end`."""
        if self._pruner is None:
            return
        # If the backup is of the last epoch, `fit` begins no epoch, so the state is restored here.
        self.resumption.restore_pending(self)
        self.announce(self.pruner.run.end_training())
        if self._function is not None:
            keep_trace(self._function, self.pruner.run)
        if self._companions is not None and self._companions.pruning[-1] is self:
            self.announce(self._companions.saved_less_sparse())

    def _planned_steps(self) -> int | None:
        steps, epochs = (self.params or {}).get("steps"), (self.params or {}).get("epochs")
        if not (steps and epochs):
            return None
        return self.pruner.step_count + updates_in(steps * (epochs - self._first_epoch), self.pruner.optimizers)

    def announce(self, notes: Sequence[str]) -> None:
        """Warns with each message and adds it to the notes of the report."""
        for note in notes:
            self.notes.append(note)
            if distribution.speaks_for(self.model):
                warnings.warn(note, stacklevel=2)


class _Companions(keras.callbacks.Callback):
    """First callback of the list: adds "sparsity" to the logs and records the sparsity of files that are saved.

    All pruning callbacks of a list share one instance.
    """

    def __init__(self, found: keras.callbacks.CallbackList):
        super().__init__()
        self._list = found
        self._epoch = 0
        self._files = SavedFiles(found.callbacks)

    @classmethod
    def placed_before_all(cls, found: keras.callbacks.CallbackList, pruning: PruningCallback) -> "_Companions":
        """Returns the list's `_Companions`; the first pruning callback of the list inserts it at the front.

        Raises:
            ValueError: `pruning` is listed twice.
        """
        listed = [one for one in found.callbacks if isinstance(one, PruningCallback)]
        if sum(one is pruning for one in listed) > 1:
            raise ValueError(
                f"A list of callbacks may contain a {type(pruning).__name__} once. Received: the same callback twice. "
                "List it once, or create a second callback for other weights."
            )
        if listed[0] is pruning:
            # Assigns a new list object, because Keras is iterating over the old one.
            found.callbacks = [cls(found), *(one for one in found.callbacks if not isinstance(one, cls))]
        return next(one for one in found.callbacks if isinstance(one, cls))

    @property
    def pruning(self) -> list[PruningCallback]:
        """The pruning callbacks of the list."""
        return [one for one in self._list.callbacks if isinstance(one, PruningCallback)]

    @property
    def _pruners(self) -> list[Pruner]:
        return [one._pruner for one in self.pruning if one._pruner is not None]

    @property
    def sparsity(self) -> float:
        """Fraction of the weights that are pruned, over all targets of all pruning callbacks."""
        return overall_sparsity([pruner.run for pruner in self._pruners])

    def refuse_shared_targets(self) -> None:
        """Checks that no weight is pruned by two pruning callbacks of the list, or by one of them and a Pruner.

        Raises:
            ValueError: A weight is pruned twice.
        """
        seen: set[int] = set()
        shared = []
        for pruner in self._pruners:
            shared += [target.name for target in pruner.targets if id(target.variable) in seen]
            seen.update(id(target.variable) for target in pruner.targets)
        if shared:
            more = f" and {len(shared) - 3} more" if len(shared) > 3 else ""
            kinds = " and ".join(type(one).__name__ for one in self.pruning)
            raise ValueError(
                f"Pruning callbacks of one `fit` must prune different weights. Received: {kinds} for "
                f"{', '.join(shared[:3])}{more}. Separate their weights with `include` or `exclude`; a "
                "PruningCallback keeps the zeros of its weights itself."
            )
        for pruner in self._pruners:
            attached_pruners.refuse_pruned_weights(pruner.targets)

    def on_train_begin(self, logs=None) -> None:
        self._files = SavedFiles(self._list.callbacks)

    def on_train_batch_end(self, batch, logs=None) -> None:
        if self._pruners:
            values = {"batch": batch + 1, **(logs or {})}
            self._files.expect_after_batch(self._epoch + 1, lambda: self.sparsity, values)

    def on_epoch_begin(self, epoch, logs=None) -> None:
        self._epoch = epoch
        # Callbacks may have built a Pruner in their on_train_begin.
        self.refuse_shared_targets()

    def on_epoch_end(self, epoch, logs=None) -> None:
        if self._pruners:
            if logs is not None:
                logs["sparsity"] = self.sparsity
            self._files.expect_after_epoch(epoch + 1, lambda: self.sparsity, logs or {})

    def note_saved(self) -> None:
        """Records which files were written; called after all other callbacks ended the batch or epoch."""
        self._files.note_saved(self._sparsity_saved)

    def _sparsity_saved(self, checkpoint: Any) -> float | None:
        # A ModelCheckpoint listed after a pruning callback saves the weights after that callback's update.
        after = self._list.callbacks.index(checkpoint) > self._list.callbacks.index(self.pruning[0])
        return self.sparsity if after else None

    def saved_less_sparse(self) -> list[str]:
        """Returns a message for each saved file whose weights are less sparse than the model's weights now."""
        return self._files.less_sparse(self.sparsity)

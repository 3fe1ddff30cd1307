"""PruningCallback: the events of `fit` -> Pruner, and nothing else."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras

from prunekit.anatomy.inspection import Report
from prunekit.core import distribution, train_function
from prunekit.core.model_building import build_from_batch, waits_for_data
from prunekit.core.optimizers import updates_in
from prunekit.sparsity.adoption import adopted
from prunekit.sparsity.allocation import Allocation
from prunekit.sparsity.patterns import Pattern
from prunekit.sparsity.schedules import Schedule
from prunekit.sparsity.scores import Criterion
from prunekit.techniques.pruning.backup_sync import Resumption
from prunekit.techniques.pruning.options import as_options
from prunekit.techniques.pruning.pruner import Pruner
from prunekit.techniques.pruning.tfmot_rules import rules_of


class PruningCallback(keras.callbacks.Callback):
    """Prunes the model that `fit` trains; pruned weights are exactly zero after every batch and at the end.

    The model, its optimizer and its compiled functions are the user's own whenever no batch is running: what other
    callbacks save, evaluate or restore holds no trace of this one, and an exception leaves nothing behind. A second
    `fit` with the same callback goes on with the schedule. Adds "sparsity" (of the pruned weights) to the epoch's logs.
    Beside a `BackupAndRestore`, its state is saved and restored with the weights.

    A model that has no weights before `fit`, as a subclassed model that was never called, is built from the first
    batch, as Keras would build it, before the first update. Its weights are chosen, or refused, then.

    Args:
        schedule: A `Schedule`: step -> sparsity, or one of tensorflow-model-optimization; steps are optimizer updates
            since this callback's first `fit` began.
        criterion: Which weights matter. `prunekit.techniques.pruning.options.PruningOptions` has the values of this
            option and of those that follow.
        pattern: The shape of the zeros.
        allocation: How the sparsity is shared between weights.
        include: Which layers and weights; empty means every weight pruned by default.
        exclude: Which are left out.
        **options: `keep_zeros`, `origin`, `compat`.

    Raises:
        ValueError: In `fit`, before the first update: nothing to prune, a name that matches nothing.
        LeakError: In `fit`: weights are updated without passing through the optimizer.
    """

    def __init__(
        self,
        schedule: Schedule,
        criterion: str | Criterion | Callable[..., Any] = "magnitude",
        pattern: str | Pattern = "unstructured",
        allocation: str | Allocation = "uniform",
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        **options: Any,
    ):
        super().__init__()
        schedule = adopted(schedule)
        if not isinstance(schedule, Schedule):
            raise TypeError(f"PruningCallback needs a schedule such as pk.PolynomialDecay(). Received: {schedule!r}.")
        self.schedule = schedule
        named = {"criterion": criterion, "pattern": pattern, "allocation": allocation}
        self.options = as_options({**named, "include": include, "exclude": exclude, **options})
        rules_of(schedule, self.options)
        self.notes: list[str] = []
        self._pruner: Pruner | None = None
        self._function: Any = None
        self._begun = False
        self.resumption = Resumption()

    @property
    def pruner(self) -> Pruner:
        """The pruner of the model that `fit` trains or trained: masks, events, audit."""
        if self._pruner is None:
            raise RuntimeError("There is no pruner and no report before `fit` has run with this callback.")
        return self._pruner

    @property
    def report(self) -> Report:
        """What the last `fit` did; made when it is asked for."""
        return self.pruner.report(notes=self.notes)

    # Called before any callback's on_train_begin: where the optimizer stands here is where this fit begins, whatever
    # BackupAndRestore restores after it.
    def set_model(self, model) -> None:
        super().set_model(model)
        found = train_function.callback_list_above()
        self._last = None if found is None else _Last.placed_after_all(found, self)
        self.resumption.look(self, found)
        if self._pruner is not None and self._pruner.model is model:
            self._pruner.resume_counting()
            return
        self._pruner = self._function = None
        if not waits_for_data(model):
            self._make_pruner()

    def _make_pruner(self) -> None:
        if self.model.weights and not self.model.trainable_variables:
            raise ValueError(
                f"fit updates nothing of {self.model.name!r}, whose weights are all frozen: prune it with pk.prune, or "
                "make layers trainable before compile()."
            )
        self._pruner = Pruner.detached(self.model, self.schedule, self.options)

    def on_train_begin(self, logs=None) -> None:
        self.notes, self._begun = [], False
        if self._pruner is not None:
            self._prepare_training()

    def _prepare_training(self) -> None:
        self._announce(self.pruner.shortfall(self._planned_steps()))
        if self._function is None or not self._function.fits(self.model):
            self._function = train_function.ScopedTrainFunction(self.model, self.pruner.enforcing)

    # Masks are taken up here and not in on_train_begin, where callbacks listed later still load weights.
    def on_epoch_begin(self, epoch, logs=None) -> None:
        if self._pruner is not None and not self._begun:
            self._begin()

    def _begin(self) -> None:
        self._begun = True
        self.resumption.begin(self.pruner)

    def on_train_batch_begin(self, batch, logs=None) -> None:
        if self._last is None:
            self.begin_batch()

    def begin_batch(self) -> None:
        """Called once every callback has begun the batch."""
        if self._pruner is None:
            train_function.prepare_next_call(self.model, self._build_and_begin)
            return
        self.pruner.rules.before_batch(self.pruner)
        self._function.arm()

    def _build_and_begin(self, batches: Any) -> Any:
        """Does what had to wait for the model's weights, before the first update; returns the batches to train on."""
        batches = build_from_batch(self.model, batches)
        self._make_pruner()
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
        self.pruner.rules.after_batch(self.pruner)

    def on_test_begin(self, logs=None) -> None:
        if self._pruner is not None:
            self.pruner.rules.before_evaluation(self.pruner)

    def on_epoch_end(self, epoch, logs=None) -> None:
        # Data without a single batch leave the model without weights.
        if self._pruner is None:
            return
        self.pruner.rules.after_epoch(self.pruner)
        self._announce(self.pruner.late_weights())
        if logs is not None:
            logs["sparsity"] = self.pruner.sparsity

    def on_train_end(self, logs=None) -> None:
        if self._last is None:
            self.end()

    def end(self) -> None:
        """Enforces the masks after all other callbacks' `on_train_end`."""
        if self._pruner is None:
            return
        # Where the backup is of the last epoch, no epoch begins.
        self.resumption.take_up(self.pruner)
        self._announce(self.pruner.end_training())

    def _planned_steps(self) -> int | None:
        steps, epochs = (self.params or {}).get("steps"), (self.params or {}).get("epochs")
        if not (steps and epochs):
            return None
        return self.pruner.step_count + updates_in(steps * epochs, self.pruner.optimizers)

    def _announce(self, notes: Sequence[str]) -> None:
        for note in notes:
            self.notes.append(note)
            if distribution.speaks_for(self.model):
                warnings.warn(note, stacklevel=2)


class _Last(keras.callbacks.Callback):
    """The end of the list: begins each batch after every other callback, and has the last word when training ends."""

    def __init__(self, pruning: PruningCallback):
        super().__init__()
        self._pruning = pruning

    @classmethod
    def placed_after_all(cls, found: keras.callbacks.CallbackList, pruning: PruningCallback) -> "_Last":
        """One that stands at the end of the list that holds `pruning`."""
        # A list that is used for a second fit still holds the one of the first.
        kept = [one for one in found.callbacks if not (isinstance(one, cls) and one._pruning is pruning)]
        last = cls(pruning)
        found.callbacks[:] = [*kept, last]
        return last

    def on_train_batch_begin(self, batch, logs=None) -> None:
        self._pruning.begin_batch()

    def on_train_batch_end(self, batch, logs=None) -> None:
        self._pruning.resumption.keep()

    def on_epoch_end(self, epoch, logs=None) -> None:
        self._pruning.resumption.keep()

    def on_train_end(self, logs=None) -> None:
        self._pruning.end()

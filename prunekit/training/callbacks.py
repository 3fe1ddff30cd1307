"""PruningCallback: the events of `fit` -> Pruner, and nothing else."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras

from prunekit.anatomy.inspection import Report
from prunekit.sparsity.adoption import adopted
from prunekit.sparsity.allocation import Allocation
from prunekit.sparsity.patterns import Pattern
from prunekit.sparsity.schedules import Schedule
from prunekit.sparsity.scores import Criterion
from prunekit.training import core, distribution, trainer
from prunekit.training.backup import Resumption
from prunekit.training.choice import as_options
from prunekit.training.pruner import Pruner
from prunekit.training.tfmot_rules import rules_of


class PruningCallback(keras.callbacks.Callback):
    """Prunes the model that `fit` trains; pruned weights are exactly zero after every batch and at the end.

    The model, its optimizer and its compiled functions are the user's own whenever no batch is running: what other
    callbacks save, evaluate or restore holds no trace of this one, and an exception leaves nothing behind. A second
    `fit` with the same callback goes on with the schedule. Adds "sparsity" (of the pruned weights) to the epoch's logs.
    Beside a `BackupAndRestore`, its state is saved and restored with the weights.

    Args:
        schedule: A `Schedule`: step -> sparsity, or one of tensorflow-model-optimization; steps are optimizer updates
            since this callback's first `fit` began.
        criterion: Which weights matter. `prunekit.training.choice.PruningOptions` has the values of this and of the
            options that follow.
        pattern: The shape of the zeros.
        allocation: How the sparsity is shared between weights.
        include: Which layers and weights; empty means every weight pruned by default.
        exclude: Which are left out.
        **options: `keep_zeros`, `keep_one`, `origin`, `compat`.

    Raises:
        ValueError: In `fit`, before anything is trained: nothing to prune, a name that matches nothing.
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
        if model.built and not model.trainable_variables:
            raise ValueError(
                f"fit updates nothing of {model.name!r}, whose weights are all frozen: prune it with pk.prune, or make "
                "layers trainable before compile()."
            )
        found = trainer.callback_list_above()
        self._last = None if found is None else _Last.placed_after_all(found, self)
        self.resumption.look(self, found)
        if self._pruner is None or self._pruner.model is not model:
            self._pruner, self._function = Pruner.detached(model, self.schedule, self.options), None
        else:
            self.pruner.rejoin()

    def on_train_begin(self, logs=None) -> None:
        self.notes, self._begun = [], False
        self._announce(self.pruner.shortfall(self._planned_steps()))
        if self._function is None or not self._function.fits(self.model):
            self._function = trainer.ScopedTrainFunction(self.model, self.pruner.enforcing)

    # Masks are taken up here and not in on_train_begin, where callbacks listed later still load weights.
    def on_epoch_begin(self, epoch, logs=None) -> None:
        if not self._begun:
            self._begun = True
            self.resumption.begin(self.pruner)

    def on_train_batch_begin(self, batch, logs=None) -> None:
        if self._last is None:
            self.begin_batch()

    def begin_batch(self) -> None:
        """Called once every callback has begun the batch."""
        self.pruner.rules.before_batch(self.pruner)
        self._function.arm()

    def on_train_batch_end(self, batch, logs=None) -> None:
        self._function.disarm()
        self.pruner.rules.after_batch(self.pruner)

    def on_test_begin(self, logs=None) -> None:
        self.pruner.rules.before_evaluation(self.pruner)

    def on_epoch_end(self, epoch, logs=None) -> None:
        self.pruner.rules.after_epoch(self.pruner)
        if logs is not None:
            logs["sparsity"] = self.pruner.sparsity

    def on_train_end(self, logs=None) -> None:
        if self._last is None:
            self.end()

    def end(self) -> None:
        """Has the last word on the weights; called once every callback has had its own."""
        # Where the backup is of the last epoch, no epoch begins.
        self.resumption.take_up(self.pruner)
        self._announce(self.pruner.settle())

    def _planned_steps(self) -> int | None:
        steps, epochs = (self.params or {}).get("steps"), (self.params or {}).get("epochs")
        if not (steps and epochs):
            return None
        return self.pruner.step_count + core.updates_in(steps * epochs, self.pruner.optimizers)

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

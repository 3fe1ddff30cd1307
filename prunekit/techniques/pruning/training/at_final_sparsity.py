"""AtFinalSparsity: shows a callback only the epochs at the final sparsity."""

import contextlib
import warnings
from typing import Any

import keras

from prunekit.core.training import distribution, train_function
from prunekit.techniques.pruning.training import attached_pruners
from prunekit.techniques.pruning.training.callbacks import PruningCallback


class AtFinalSparsity(keras.callbacks.Callback):
    """Shows a callback only the epochs and batches at the final sparsity of the pruning.

    A less sparse model is usually better, so a `ModelCheckpoint(save_best_only=True)` or an `EarlyStopping` beside a
    `PruningCallback` chooses an epoch before the schedule has ended. Inside `AtFinalSparsity`, the callback chooses
    among the epochs at the final sparsity:

    - An epoch is shown if the masks have the final sparsity when it ends, so the validation metrics of each shown
      epoch are those of the final sparsity. Training metrics of the first shown epoch may include earlier batches.
      Epochs keep their numbers; the `patience` of EarlyStopping and ReduceLROnPlateau counts shown epochs only.
    - A batch is shown if the masks have the final sparsity when it begins (`ModelCheckpoint` with an integer
      `save_freq`). The epoch's begin is shown before the first batch that is shown.
    - Begin and end of the training are always shown, predictions too. Batches of a validation are shown if the masks
      have the final sparsity.

    The callbacks of `fit` may be listed in any order. With several `PruningCallback`s, or a `Pruner` that is not
    finished, all of them must be at their final sparsity. Where nothing prunes, there is nothing to wait for, and every
    epoch is shown. If a training ends without an epoch to show, a warning says so. Attributes such as `best` and
    `monitor` are those of the inner callback.

    Args:
        callback: The inner callback, such as `keras.callbacks.ModelCheckpoint(...)`.

    Attributes:
        callback: The inner callback.

    Raises:
        TypeError: `callback` is not a Keras callback.
        ValueError: `callback` is a `PruningCallback` or a `BackupAndRestore`, which need every epoch.
    """

    def __init__(self, callback: keras.callbacks.Callback):
        if not isinstance(callback, keras.callbacks.Callback) or isinstance(callback, keras.callbacks.CallbackList):
            raise TypeError(
                f"AtFinalSparsity takes one Keras callback, such as ModelCheckpoint(...). Received: {callback!r}."
            )
        if isinstance(callback, PruningCallback | keras.callbacks.BackupAndRestore):
            raise ValueError(
                f"{type(callback).__name__} needs every epoch, so it cannot be inside AtFinalSparsity. List it in "
                "`fit` beside AtFinalSparsity."
            )
        super().__init__()
        self.callback = callback
        self._list: keras.callbacks.CallbackList | None = None
        self._attached: list[Any] = []
        self._epoch: int | None = None
        self._begun: int | None = None
        self._shows_batch = self._shows_test = False
        self._shown = self._hidden = 0

    def __getattr__(self, name: str) -> Any:
        if name == "callback":  # Not set yet, for example in a copy: looking it up again would not end.
            raise AttributeError(name)
        return getattr(self.callback, name)

    @property
    def async_safe(self) -> bool:
        """Whether Keras may run batch hooks in another thread, as it does for callbacks without such hooks."""
        ends = ("on_batch_end", "on_train_batch_end", "on_test_batch_end", "on_predict_batch_end")
        inner = self.callback
        return getattr(inner, "async_safe", False) or not any(_overrides(inner, name) for name in ends)

    def set_model(self, model) -> None:
        super().set_model(model)
        self._list = train_function.callback_list_above()
        self.callback.set_model(model)

    def set_params(self, params) -> None:
        super().set_params(params)
        self.callback.set_params(params)

    @property
    def _pruning(self) -> list[PruningCallback]:
        listed = [] if self._list is None else self._list.callbacks
        return [one for one in listed if isinstance(one, PruningCallback)]

    def _is_sparse(self) -> bool:
        attached = all(pruner.run.updater.at_final_sparsity for pruner in self._attached)
        return attached and all(one.at_final_sparsity for one in self._pruning)

    def _find_pruners(self) -> None:
        # Not `self.model`: on JAX, Keras writes its state back whenever a callback reads that.
        self._attached = attached_pruners.attached_to_model(self._model)

    def _begin_epoch(self) -> None:
        if self._epoch is not None and self._begun != self._epoch:
            self._begun = self._epoch
            self.callback.on_epoch_begin(self._epoch, {})

    def on_train_begin(self, logs=None) -> None:
        self._epoch = self._begun = None
        self._shown = self._hidden = 0
        self.callback.on_train_begin(logs)

    def on_epoch_begin(self, epoch, logs=None) -> None:
        self._epoch, self._begun = epoch, None
        self._find_pruners()
        if self._is_sparse():
            self._begin_epoch()

    def on_train_batch_begin(self, batch, logs=None) -> None:
        # Decided before the batch: whether the masks land after it depends on the order of the callbacks.
        self._shows_batch = self._is_sparse()
        if self._shows_batch:
            self._begin_epoch()
            self.callback.on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch, logs=None) -> None:
        if self._shows_batch:
            self.callback.on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch, logs=None) -> None:
        self._find_pruners()
        if not self._is_sparse():
            self._hidden += 1
            return
        for pruner in (*self._attached, *(one.pruner for one in self._pruning)):
            if pruner.run.policy.counts_forward_passes:
                # Weights are dense between an update and the next forward pass.
                pruner.enforce()
        self._begin_epoch()
        self._shown += 1
        self.callback.on_epoch_end(epoch, logs)

    def on_train_end(self, logs=None) -> None:
        self.callback.on_train_end(logs)
        if self._hidden and not self._shown:
            self._announce_nothing_shown()
        # A later `evaluate` of this callback's own belongs to no training.
        self._epoch, self._attached = None, []

    def _announce_nothing_shown(self) -> None:
        pruners = list(self._attached)
        for one in self._pruning:
            # Without a single batch of data, a model that `fit` builds has no pruner.
            with contextlib.suppress(RuntimeError):
                pruners.append(one.pruner)
        waiting = [pruner for pruner in pruners if not pruner.run.updater.at_final_sparsity]
        if not waiting:
            return
        latest = max(waiting, key=lambda pruner: pruner.run.schedule.final_step - pruner.step_count)
        schedule = latest.run.schedule
        note = (
            f"AtFinalSparsity showed no epoch to {type(self.callback).__name__}: the schedule lands on sparsity "
            f"{schedule.final_sparsity:g} at step {schedule.final_step}, and no epoch ended after that "
            f"step in a training of {latest.step_count} steps. Train longer, or let the schedule end earlier."
        )
        if self._pruning:
            self._pruning[-1].announce([note])
        elif distribution.speaks_for(self._model):
            warnings.warn(note, stacklevel=2)

    def on_test_begin(self, logs=None) -> None:
        self._shows_test = self._is_sparse()
        if self._shows_test:
            self._begin_epoch()
            self.callback.on_test_begin(logs)

    def on_test_batch_begin(self, batch, logs=None) -> None:
        if self._shows_test:
            self.callback.on_test_batch_begin(batch, logs)

    def on_test_batch_end(self, batch, logs=None) -> None:
        if self._shows_test:
            self.callback.on_test_batch_end(batch, logs)

    def on_test_end(self, logs=None) -> None:
        if self._shows_test:
            self.callback.on_test_end(logs)

    def on_predict_begin(self, logs=None) -> None:
        self.callback.on_predict_begin(logs)

    def on_predict_batch_begin(self, batch, logs=None) -> None:
        self.callback.on_predict_batch_begin(batch, logs)

    def on_predict_batch_end(self, batch, logs=None) -> None:
        self.callback.on_predict_batch_end(batch, logs)

    def on_predict_end(self, logs=None) -> None:
        self.callback.on_predict_end(logs)


def _overrides(callback: keras.callbacks.Callback, name: str) -> bool:
    """Returns True if a callback has a method of its own in the place of Keras's empty one."""
    return name in vars(callback) or getattr(type(callback), name) is not getattr(keras.callbacks.Callback, name)

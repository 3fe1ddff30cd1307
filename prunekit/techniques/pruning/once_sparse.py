"""OnceSparse: lets a callback see only epochs at the final sparsity."""

import warnings
from typing import Any

import keras

from prunekit.core import train_function
from prunekit.techniques.pruning.callbacks import PruningCallback


class OnceSparse(keras.callbacks.Callback):
    """Passes epochs and batches to another callback once all masks have their final sparsity.

    A `ModelCheckpoint(save_best_only=True)`, an `EarlyStopping` or a `ReduceLROnPlateau` beside a `PruningCallback`
    compares epochs of different sparsity, and less sparse epochs are usually better:

        model.fit(..., callbacks=[pruning, pk.OnceSparse(keras.callbacks.ModelCheckpoint(path, save_best_only=True))])

    The callback sees the beginning and the end of the training, the beginning of every epoch, evaluations, and the end
    of those epochs and batches after which every `PruningCallback` of the `fit` has made its last mask update. The
    place in the list does not matter. Attributes of the callback, such as `best`, are read from this one as well.

    Args:
        callback: The callback.

    Raises:
        TypeError: `callback` is not a Keras callback, or is one that must see every epoch: a `PruningCallback`, or a
            `BackupAndRestore`.
        ValueError: In `fit`: no `PruningCallback` is listed.
    """

    def __init__(self, callback: keras.callbacks.Callback):
        super().__init__()
        refused = (PruningCallback, keras.callbacks.BackupAndRestore, OnceSparse)
        if not isinstance(callback, keras.callbacks.Callback) or isinstance(callback, refused):
            raise TypeError(
                "OnceSparse takes a callback such as ModelCheckpoint, EarlyStopping or ReduceLROnPlateau. Received: "
                f"{callback!r}. A PruningCallback and a BackupAndRestore must see every epoch: list them as they are."
            )
        self.callback = callback
        self._list: Any = None
        self._seen = 0

    def __getattr__(self, name: str) -> Any:
        if name == "callback":
            raise AttributeError(name)
        return getattr(self.callback, name)

    @property
    def landed(self) -> bool:
        """True once every pruning callback of the `fit` has made its last mask update."""
        return all(one.landed for one in self._pruning())

    def _pruning(self) -> list[PruningCallback]:
        listed = [] if self._list is None else self._list.callbacks
        return [one for one in listed if isinstance(one, PruningCallback)]

    def set_params(self, params) -> None:
        super().set_params(params)
        self.callback.set_params(params)

    def set_model(self, model) -> None:
        super().set_model(model)
        self._list = train_function.callback_list_above()
        self.callback.set_model(model)

    def on_train_begin(self, logs=None) -> None:
        if not self._pruning():
            raise ValueError(
                "OnceSparse waits for the final sparsity of a PruningCallback in the same `fit`. Received: a list "
                f"without one. List the {type(self.callback).__name__} itself."
            )
        self._seen = 0
        self.callback.on_train_begin(logs)

    def on_epoch_begin(self, epoch, logs=None) -> None:
        self.callback.on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch, logs=None) -> None:
        if self.landed:
            self.callback.on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch, logs=None) -> None:
        if self.landed:
            self.callback.on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch, logs=None) -> None:
        if self.landed:
            self._seen += 1
            self.callback.on_epoch_end(epoch, logs)

    def on_train_end(self, logs=None) -> None:
        self.callback.on_train_end(logs)
        if not self._seen:
            warnings.warn(
                f"OnceSparse: {type(self.callback).__name__} saw no epoch, because no epoch ended at the final "
                "sparsity. Train longer, or let the schedule end earlier.",
                stacklevel=2,
            )

    def on_test_begin(self, logs=None) -> None:
        self.callback.on_test_begin(logs)

    def on_test_end(self, logs=None) -> None:
        self.callback.on_test_end(logs)

    def on_test_batch_begin(self, batch, logs=None) -> None:
        self.callback.on_test_batch_begin(batch, logs)

    def on_test_batch_end(self, batch, logs=None) -> None:
        self.callback.on_test_batch_end(batch, logs)

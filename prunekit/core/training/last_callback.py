"""LastCallback: runs hooks of a callback after all other callbacks of `fit`."""

from __future__ import annotations

from typing import Any, Protocol

import keras

from prunekit.core.training.backup_sync import Resumption


class EndsLast(Protocol):
    """A callback with hooks that run after those of all other callbacks."""

    resumption: Resumption

    def begin_batch(self) -> None:
        """Prepares one training batch."""

    def end_of_list(self) -> None:
        """Called after a batch, and after an epoch."""

    def end(self) -> None:
        """Ends the training."""


class LastCallback(keras.callbacks.Callback):
    """Last callback of a list; the backup that another callback has written is completed by it.

    Callbacks of the user's list save, evaluate and restore weights, also in `on_train_end` (EarlyStopping).
    """

    def __init__(self, served: EndsLast):
        super().__init__()
        self._served = served

    @classmethod
    def placed_after_all(cls, found: keras.callbacks.CallbackList, served: EndsLast) -> LastCallback:
        """Appends a new `LastCallback` for `served` to the callback list and returns it."""
        # A list that is reused for a second fit still contains the one of the first fit.
        kept = [one for one in found.callbacks if not (isinstance(one, cls) and one._served is served)]
        last = cls(served)
        found.callbacks[:] = [*kept, last]
        return last

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._served.begin_batch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._served.resumption.keep()
        self._served.end_of_list()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._served.resumption.keep()
        self._served.end_of_list()

    def on_train_end(self, logs: Any = None) -> None:
        self._served.end()

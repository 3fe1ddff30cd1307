"""LastCallback: runs hooks of a callback after all other callbacks of `fit`."""

from __future__ import annotations

from typing import Any, Protocol

import keras

from prunekit.core.training.backup_sync import Resumption


class EndsLast(Protocol):
    """A callback with hooks that run after those of all other callbacks, in the order of their ranks."""

    resumption: Resumption
    rank: int

    def begin_batch(self) -> None:
        """Prepares one training batch."""

    def begin_test_batch(self) -> None:
        """Prepares one batch of the validation."""

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
        """Appends a new `LastCallback` for `served` to the callback list and returns it; its rank gives its place."""
        # A list that is reused for a second fit still contains the one of the first fit.
        kept = [one for one in found.callbacks if not (isinstance(one, cls) and one._served is served)]
        last = cls(served)
        ours = [*(one for one in kept if isinstance(one, cls)), last]
        others = [one for one in kept if not isinstance(one, cls)]
        found.callbacks[:] = [*others, *sorted(ours, key=lambda one: one._served.rank)]
        return last

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._served.begin_batch()

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._served.begin_test_batch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._served.resumption.keep()
        self._served.end_of_list()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._served.resumption.keep()
        self._served.end_of_list()

    def on_train_end(self, logs: Any = None) -> None:
        self._served.end()

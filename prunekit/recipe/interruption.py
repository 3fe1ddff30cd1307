"""Ctrl-C where Python alone would lose it, or never hear of it."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras


@contextlib.contextmanager
def ctrl_c_handled_by(handler: Callable[..., None] | signal.Handlers) -> Iterator[None]:
    """Inside, Ctrl-C does what `handler` says, as in `signal.signal`.

    Elsewhere than in the main thread, and where a handler of somebody else is set, nothing is changed.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def ctrl_c_held_back() -> Iterator[keras.callbacks.Callback]:
    """Inside, Ctrl-C raises KeyboardInterrupt as the next batch begins, or at the end; a second one does so at once.

    Python raises it wherever it is at that moment. In a finalizer, in a function that TensorFlow, JAX or PyTorch calls
    back, or in Keras's bare `except` around the tracing of layers that is the same as nowhere: the training goes on.

    Yields:
        A callback for `fit` or `evaluate`.
    """
    held = _Held()
    with ctrl_c_handled_by(held.note):
        yield held
    held.raise_if_it_came()


class _Held(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self._came = False

    def note(self, *_: object) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True

    def raise_if_it_came(self) -> None:
        if self._came:
            raise KeyboardInterrupt

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self.raise_if_it_came()

    def on_test_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self.raise_if_it_came()

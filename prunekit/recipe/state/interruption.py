"""Handles Ctrl-C in places where Python's own handling would lose or never deliver it."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras


@contextlib.contextmanager
def ctrl_c_handled_by(handler: Callable[..., None] | signal.Handlers) -> Iterator[None]:
    """Sets the Ctrl-C handler inside the block, as `signal.signal` does.

    Outside the main thread, or if other code has set a handler, the block changes nothing.
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
    """Delays Ctrl-C: KeyboardInterrupt is raised at the next batch or the block's end; a second Ctrl-C raises at once.

    By default, Python raises KeyboardInterrupt at its current line. In a finalizer, in a callback from TensorFlow, JAX
    or PyTorch, or in Keras's bare `except` around the tracing of layers, the exception is lost and training goes on.

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

"""Observes a model's layer calls while it runs, without changing the model."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from prunekit.anatomy.layers.layers import is_repeater

_ONE_AT_A_TIME = threading.RLock()
_WATCHED = threading.local()


@contextmanager
def watching(see: Callable[[Callable[..., Any], Any, tuple, dict], Any]) -> Iterator[None]:
    """Sends every layer call of this thread through `see(original, layer, args, kwargs)`, which returns its outputs."""
    # Keras offers no hook on layer calls, and wrapping single layers would modify the user's model.
    with _ONE_AT_A_TIME:
        original, thread = keras.layers.Layer.__call__, threading.get_ident()

        def watched(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(layer, *args, **kwargs)
            return see(original, layer, args, kwargs)

        keras.layers.Layer.__call__ = watched
        _WATCHED.depth = getattr(_WATCHED, "depth", 0) + 1
        try:
            yield
        finally:
            _WATCHED.depth -= 1
            keras.layers.Layer.__call__ = original


@contextmanager
def watching_outside_loops(see: Callable[[Callable[..., Any], Any, tuple, dict], Any]) -> Iterator[None]:
    """`watching` without the calls inside recurrent and time-distributed layers.

    The backend may call the inner layer once, in a loop, or never.
    """
    loops: list[Any] = []

    def outside(original: Callable[..., Any], layer: Any, args: tuple, kwargs: dict) -> Any:
        def called(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if is_repeater(layer):
                loops.append(layer)
            try:
                return original(layer, *args, **kwargs)
            finally:
                loops.clear()

        return original(layer, *args, **kwargs) if loops else see(called, layer, args, kwargs)

    with watching(outside):
        yield


def is_watched() -> bool:
    """Returns True while layer calls of this thread are watched."""
    return getattr(_WATCHED, "depth", 0) > 0

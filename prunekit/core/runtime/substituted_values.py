"""Other values for the weights of a model, in every call of it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prunekit.core.runtime.patching import wrapped
from prunekit.core.runtime.variable_values import with_values

# Takes the ids of the variables whose values are needed, None = of all; returns variables with their values.
Values = Callable[[set[int] | None], Sequence[tuple[Any, Any]]]


@contextlib.contextmanager
def substituted(model: Any, layers: Mapping[int, Any], values: Values) -> Iterator[None]:
    """Inside the scope, a model and its layers compute with other values of some weights; gradients flow to these.

    The values are calculated once in a call of the model, and once for each layer that a training step of the model's
    own calls by itself. Functions that were traced before stay as they are.

    Args:
        model: The model.
        layers: id of a variable -> the layer that reads it.
        values: Returns the values.
    """
    owners: dict[int, tuple[Any, set[int]]] = {}
    for key, layer in layers.items():
        owners.setdefault(id(layer), (layer, set()))[1].add(key)
    inside = _Inside()
    with contextlib.ExitStack() as stack:
        for layer, keys in owners.values():
            if layer is not model:
                stack.enter_context(wrapped(layer, "call", functools.partial(_Call, layer, values, inside, keys)))
        stack.enter_context(wrapped(model, "call", functools.partial(_Call, model, values, inside, None)))
        yield


class _Inside(threading.local):
    """Whether a call of the model runs, whose values those of its layers are."""

    now = False


class _Call:
    """Replaces the `call` of a model or layer.

    Args:
        owner: The model or layer.
        values: Returns the values.
        inside: Whether the values are in place.
        keys: ids of the variables whose values are needed; None = of all.
        call: The `call`.
    """

    def __init__(
        self,
        owner: Any,
        values: Values,
        inside: _Inside,
        keys: set[int] | None,
        call: Callable[..., Any],
    ):
        self._owner, self._values, self._inside, self._keys, self._call = owner, values, inside, keys, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._inside.now:
            return self._call(*args, **kwargs)
        self._inside.now = True
        try:
            with with_values(self._values(self._keys), self._owner):
                return self._call(*args, **kwargs)
        finally:
            self._inside.now = False

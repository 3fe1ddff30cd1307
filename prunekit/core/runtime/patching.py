"""Temporary replacement and wrapping of methods of single instances, mainly of `optimizer.apply`."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras


@contextlib.contextmanager
def shadowed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an instance attribute over a method or property inside the scope, then restores the instance's attribute."""
    # Written to `__dict__`: `setattr` on a Keras object would make Keras track the value as part of the model.
    attributes = vars(owner)
    missing = object()
    former = attributes.get(name, missing)
    attributes[name] = value
    try:
        yield
    finally:
        if former is missing:
            del attributes[name]
        else:
            attributes[name] = former


@contextlib.contextmanager
def computing_in(dtype: str, layers: Iterable[Any]) -> Iterator[None]:
    """Context manager in which layers compute in `dtype`; their weights keep their dtypes.

    Functions that were traced before still compute as they did.
    """
    policy = keras.dtype_policies.DTypePolicy(dtype)
    with contextlib.ExitStack() as stack:
        for layer in {id(layer): layer for layer in layers}.values():
            stack.enter_context(shadowed(layer, "_dtype_policy", policy))
        yield


@contextlib.contextmanager
def wrapped(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replaces a method of one instance by `wrap(method)` inside the scope; nested scopes may close in any order."""
    attributes = vars(owner)
    wrapping = attributes.get(name)
    if not isinstance(wrapping, _Wrapping):
        wrapping = _Wrapping(owner, name)
    mine = wrapping.enter(wrap)
    try:
        yield
    finally:
        wrapping.leave(mine)


class _Wrapping:
    """Callable that shadows a method of an instance and applies all wrappers that are currently active."""

    def __init__(self, owner: Any, name: str):
        functools.update_wrapper(self, getattr(owner, name))
        self._method = self._outermost = getattr(owner, name)
        self._wraps: list[tuple[Callable[..., Any]]] = []
        self._shadow = contextlib.ExitStack()
        self._shadow.enter_context(shadowed(owner, name, self))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._outermost(*args, **kwargs)

    def enter(self, wrap: Callable[..., Any]) -> Any:
        self._wraps.append((wrap,))
        self._outermost = wrap(self._outermost)
        return self._wraps[-1]

    def leave(self, one: Any) -> None:
        self._wraps = [other for other in self._wraps if other is not one]
        self._outermost = functools.reduce(lambda inner, each: each[0](inner), self._wraps, self._method)
        if not self._wraps:
            self._shadow.close()


@contextlib.contextmanager
def around_updates(optimizers: Sequence[Any], around: Callable[..., Any]) -> Iterator[None]:
    """Replaces `apply` of the optimizers by `around(optimizer, update, gradients, variables)`, also in traced steps.

    `fit`, `apply_gradients` and tape loops all call `apply`. It is shadowed on the instance, so the optimizer's class,
    config and saved state are untouched. `update(gradients)` calls the optimizer's original `apply`.
    """
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            reached = _reached(optimizer)
            stack.enter_context(wrapped(reached, "apply", functools.partial(_Apply, reached, around)))
        yield


def _reached(optimizer) -> Any:
    """Returns the optimizer whose `apply` a step calls: on JAX, LossScaleOptimizer calls its inner optimizer's."""
    while keras.backend.backend() == "jax" and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


class _Apply:
    """Replacement of `optimizer.apply`, with the same signature."""

    def __init__(self, optimizer: Any, around: Callable[..., Any], inner: Callable[..., Any]):
        self._optimizer = optimizer
        self._around = around
        self._inner = inner

    def __call__(self, grads, trainable_variables=None):
        if trainable_variables is None:
            variables = list(self._optimizer._trainable_variables) if self._optimizer.built else []
            if len(variables) != len(grads):
                return self._inner(grads)  # Keras raises the error.
        else:
            variables = trainable_variables = list(trainable_variables)
        return self._around(
            self._optimizer, lambda gradients: self._inner(gradients, trainable_variables), grads, variables
        )

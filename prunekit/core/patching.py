"""Methods of one instance shadowed or wrapped for the length of a scope, `optimizer.apply` above all."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras


@contextlib.contextmanager
def shadowed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An instance attribute over a method or a property's value, and whatever was in the instance before put back."""
    # Through __dict__: Keras objects track what is assigned to them, and this is not theirs to track.
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
def wrapped(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """A method of one instance as `wrap(method)`. Who wraps it several times may leave in any order."""
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
    """Stands in an instance before a method that is wrapped, while it is."""

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
    """Inside, every `apply` of the optimizers is `around(optimizer, update, gradients, variables)`, also when traced.

    `apply` is the one method through which `fit`, `apply_gradients` and tape loops pass. It is shadowed on the
    instance, so the optimizer's class, config and saved state are untouched. `update(gradients)` is its own `apply`.
    """
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            reached = _reached(optimizer)
            stack.enter_context(wrapped(reached, "apply", functools.partial(_Apply, reached, around)))
        yield


def _reached(optimizer) -> Any:
    """The one whose `apply` is called: on JAX, a LossScaleOptimizer goes around its own."""
    while keras.backend.backend() == "jax" and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


class _Apply:
    """Stands before `optimizer.apply`, with its signature."""

    def __init__(self, optimizer: Any, around: Callable[..., Any], inner: Callable[..., Any]):
        self._optimizer = optimizer
        self._around = around
        self._inner = inner

    def __call__(self, grads, trainable_variables=None):
        if trainable_variables is None:
            variables = list(self._optimizer._trainable_variables) if self._optimizer.built else []
            if len(variables) != len(grads):
                return self._inner(grads)  # Keras says what is wrong.
        else:
            variables = trainable_variables = list(trainable_variables)
        return self._around(
            self._optimizer, lambda gradients: self._inner(gradients, trainable_variables), grads, variables
        )

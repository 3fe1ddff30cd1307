"""Observes weights before and after each optimizer update, inside the compiled step."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras import ops

from prunekit.core import backend, patching


class UpdateObserver(ABC):
    """Sees weights just before and just after each update of an optimizer.

    Args:
        variables: The weights, Keras variables.
    """

    def __init__(self, variables: Sequence[Any]):
        backend.require_tensorflow(type(self).__name__)
        self.variables = tuple(variables)
        self._index = {id(backend.native(variable)): index for index, variable in enumerate(self.variables)}

    @contextlib.contextmanager
    def observing(self, optimizers: Sequence[Any]) -> Iterator[None]:
        """Inside, every update of the optimizers is seen, also when traced.

        Scopes nest: what is entered later sees more, such as the masks that a `Pruner` imposes at an update's end.
        """
        with patching.around_updates(optimizers, self._observed):
            yield

    @abstractmethod
    def add(self, updates: Any, seen: dict[int, tuple[Any, Any]]) -> None:
        """Takes one update into account; runs inside the compiled step.

        Args:
            updates: int64 scalar tensor: 0 where the optimizer only accumulated gradients, else 1.
            seen: index of a variable -> its value before, and after.
        """

    def _observed(self, optimizer, update, gradients: Sequence[Any], variables: Sequence[Any]):
        watched = {
            self._index[key]: variable
            for key, variable in ((id(backend.native(variable)), variable) for variable in variables)
            if key in self._index
        }
        before = {index: backend.value_now(variable) for index, variable in watched.items()}
        count = _updates(optimizer)
        result = update(gradients)
        self.add(
            _updates(optimizer) - count,
            {index: (before[index], backend.value_now(variable)) for index, variable in watched.items()},
        )
        return result


def _updates(optimizer) -> Any:
    # With accumulation Keras computes it anew from the variable; without, it is the variable.
    iterations = optimizer.iterations
    return ops.cast(backend.value_now(iterations) if hasattr(iterations, "assign") else iterations, "int64")


def state_variable(value: Any, dtype: str, name: str) -> keras.Variable:
    """A variable in which an observer sums up updates; of several replicas the first one writes it."""
    return keras.Variable(value, dtype=dtype, trainable=False, name=name, aggregation="only_first_replica")

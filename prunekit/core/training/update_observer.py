"""Observes weights before and after each optimizer update, inside the compiled step."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras import ops

from prunekit.core.runtime import backend, patching


class UpdateObserver(ABC):
    """Receives the values of weights immediately before and after each optimizer update.

    Args:
        variables: The observed weights, as Keras variables.
    """

    def __init__(self, variables: Sequence[Any]):
        backend.require_tensorflow(type(self).__name__)
        self.variables = tuple(variables)
        self._index = {id(backend.native(variable)): index for index, variable in enumerate(self.variables)}

    @contextlib.contextmanager
    def observing(self, optimizers: Sequence[Any]) -> Iterator[None]:
        """Context manager that observes every update of the optimizers, including updates that are traced inside it.

        Scopes nest: a scope entered later also observes the changes of earlier scopes, such as a `Pruner`'s masks.
        """
        with patching.around_updates(optimizers, self._observed):
            yield

    @abstractmethod
    def add(self, updates: Any, seen: dict[int, tuple[Any, Any]]) -> None:
        """Processes one update; runs inside the compiled step.

        Args:
            updates: int64 scalar tensor: 0 if the optimizer only accumulated gradients, else 1.
            seen: Index of a variable -> (value before the update, value after it).
        """

    def _observed(self, optimizer, update, gradients: Sequence[Any], variables: Sequence[Any]):
        watched = {
            self._index[key]: variable
            for key, variable in ((id(backend.native(variable)), variable) for variable in variables)
            if key in self._index
        }
        before = {index: backend.value_now(variable) for index, variable in watched.items()}
        count = updates_of(optimizer)
        result = update(gradients)
        self.add(
            ops.cast(updates_of(optimizer) - count, "int64"),
            {index: (before[index], backend.value_now(variable)) for index, variable in watched.items()},
        )
        return result


def updates_of(optimizer) -> Any:
    """Returns the number of updates of an optimizer so far, integer scalar; batches that only accumulate count not."""
    # With gradient accumulation, `iterations` is a computed tensor; without, it is the variable.
    iterations = optimizer.iterations
    # A copy: PyTorch counts in place.
    return ops.copy(backend.value_now(iterations)) if hasattr(iterations, "assign") else iterations


def state_variable(value: Any, dtype: str, name: str) -> keras.Variable:
    """Returns a variable for an observer's running sums; with several replicas, only the first replica writes it."""
    return keras.Variable(value, dtype=dtype, trainable=False, name=name, aggregation="only_first_replica")

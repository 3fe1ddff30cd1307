"""Accumulates the movement of weights, the statistic of the criterion "movement"."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.core import backend
from prunekit.core.update_observer import UpdateObserver, state_variable


class Movements(UpdateObserver):
    """Accumulates each weight's movement: the sum over updates of the weight's value times its change.

    The movement is positive for a weight driven away from zero, and negative for a weight driven towards zero.

    Args:
        variables: The weights.
        model: Model whose distribution strategy, if any, is the scope of the sums' creation.

    Source: Sanh et al. 2020, arXiv:2005.07683, eq. 3, with the optimizer's actual change in place of the paper's
        plain gradient descent step.
    """

    def __init__(self, variables: Sequence[Any], model: Any):
        super().__init__(variables)
        with backend.variable_scope(model):
            self._sums = [
                state_variable(
                    np.zeros(tuple(variable.shape)), keras.backend.result_type(variable.dtype, "float32"), "movement"
                )
                for variable in self.variables
            ]
            self._updates = state_variable(np.int64(0), "int64", "updates")

    @property
    def updates(self) -> int:
        """Number of accumulated updates."""
        return int(self._updates.numpy())

    @property
    def sums(self) -> list[Any]:
        """The movement of each variable so far: tensors of its shape, in float32, or float64 for a float64 weight."""
        return [backend.value_now(variable) for variable in self._sums]

    def restore(self, sums: Sequence[Any], updates: int) -> None:
        """Continues from the sums and the number of updates of an earlier training."""
        for variable, total in zip(self._sums, sums, strict=True):
            variable.assign(total)
        self._updates.assign(updates)

    def add(self, updates: Any, seen: dict[int, tuple[Any, Any]]) -> None:
        """Adds one update's value times change to the sums."""
        for index, (before, after) in seen.items():
            total = self._sums[index]
            before, after = (ops.cast(value, total.dtype) for value in (before, after))
            total.assign_add(before * (after - before))
        self._updates.assign_add(updates)

"""Collects the movement of weights, the statistic of the criterion "movement"."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.layers.targets import Target
from prunekit.core.runtime import backend
from prunekit.core.runtime.snapshot import Snapshot
from prunekit.core.statistics.statistics import TrainingCollector
from prunekit.core.training.update_observer import UpdateObserver, state_variable


class Movements(UpdateObserver, TrainingCollector):
    """Collects each weight's movement: the sum over updates of the weight's value times its change.

    The movement is positive for a weight driven away from zero, and negative for a weight driven towards zero.

    Args:
        model: Model whose distribution strategy, if any, is the scope of the sums' creation.
        targets: The weights.

    Raises:
        RuntimeError: Keras does not run on TensorFlow.

    Source: Sanh et al. 2020, arXiv:2005.07683, eq. 3, with the optimizer's actual change in place of the paper's
        plain gradient descent step.
    """

    def __init__(self, model: Any, targets: Sequence[Target]):
        TrainingCollector.__init__(self, model, targets)
        UpdateObserver.__init__(self, [target.variable for target in targets])
        with backend.variable_scope(model):
            self._sums = [
                state_variable(
                    np.zeros(tuple(variable.shape)), keras.backend.result_type(variable.dtype, "float32"), "movement"
                )
                for variable in self.variables
            ]
            self._updates = state_variable(np.int64(0), "int64", "updates")

    @property
    def observations(self) -> int:
        """Number of accumulated updates."""
        return int(backend.number(self._updates))

    def values(self) -> list[Any]:
        """Returns the movement of each weight: tensors of its shape, float32, or float64 for a float64 weight."""
        return [backend.value_now(variable) for variable in self._sums]

    def add(self, updates: Any, seen: dict[int, tuple[Any, Any]]) -> None:
        """Adds one update's value times change to the sums."""
        for index, (before, after) in seen.items():
            total = self._sums[index]
            before, after = (ops.cast(value, total.dtype) for value in (before, after))
            total.assign_add(before * (after - before))
        self._updates.assign_add(updates)

    def state(self) -> Snapshot:
        """Returns the number of updates, and the sums by weight name."""
        sums = zip(self.targets, self.values(), strict=True)
        return Snapshot({"updates": self.observations}, {target.name: np.array(total) for target, total in sums})

    def restore(self, state: Snapshot) -> None:
        """Continues from the sums and the number of updates of an earlier training."""
        for target, variable in zip(self.targets, self._sums, strict=True):
            variable.assign(state.arrays[target.name])
        self._updates.assign(state.values["updates"])

"""DenseStore: masks whose pruned weights are zero in the model while their values go on training beside it."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.layers.targets import Target
from prunekit.core.runtime import backend
from prunekit.core.runtime.optimizers import parts_of
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.pruning.masks.mask_store import AVERAGES, MaskStore


class DenseStore(MaskStore):
    """Masks of straight-through training: an optimizer update changes all weights, the model holds the kept ones.

    The model's variables are zero at pruned positions between updates, so that forward passes, gradients and saved
    files are those of the sparse model. Each update restores the pruned weights, applies the gradients of all
    positions, stores the pruned weights again, and masks the variables. Optimizer slots are those of all weights.

    Args:
        targets: The weights to mask; each variable once.
        model: The model.
        decay: Coefficient of the pruned weights that is added to their gradients.

    Raises:
        ValueError: The model is distributed over several replicas of TensorFlow.
    """

    def __init__(self, targets: Sequence[Target], model: Any, decay: float):
        super().__init__(targets, model)
        if self._needs_trace:
            raise ValueError(
                "Straight-through training runs on one replica. Received: a model of a distribution strategy. Train "
                "without the strategy, or choose another policy."
            )
        self._decay = decay
        # Values at pruned positions, 0 elsewhere.
        self._pruned = [
            keras.Variable(
                np.zeros(target.shape, "float32"), dtype=target.variable.dtype, trainable=False, name="pruned"
            )
            for target in self.targets
        ]

    @property
    def pruned_values(self) -> dict[str, np.ndarray]:
        """Target name -> values at pruned positions, 0 elsewhere."""
        return {t.name: np.array(array_of(v)) for t, v in zip(self.targets, self._pruned, strict=True)}

    def restore_pruned_values(self, values: Mapping[str, np.ndarray]) -> None:
        """Sets what `pruned_values` returned."""
        for target, variable in zip(self.targets, self._pruned, strict=True):
            variable.assign(values[target.name])

    @contextlib.contextmanager
    def all_weights(self) -> Iterator[None]:
        """Context manager in which the model's variables hold the pruned weights, too; for operations run eagerly."""
        everything = range(len(self.targets))
        self._restore(everything)
        try:
            yield
        finally:
            self._set_aside(everything)
            super().enforce()

    def reset(self) -> None:
        """Keeps every position again, at zero where it was pruned, and counts updates from 0."""
        super().reset()
        for variable in self._pruned:
            variable.assign(ops.zeros_like(variable))

    def replace(self, masks: Sequence[Any], optimizers: Sequence[Any] = ()) -> None:
        """Assigns new masks; weights that they keep again return with their values. Other slots than averages stay."""
        with self.all_weights():
            self.assign(masks)
        self.enforce(optimizers)

    def mask_gradients(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients unchanged: pruned weights train, too."""
        return list(gradients)

    @contextlib.contextmanager
    def enforcing(self, optimizers: Sequence[Any]) -> Iterator[None]:
        """Context manager in which every optimizer update changes all weights and leaves the model sparse.

        Raises:
            ValueError: There is no optimizer, or one that overwrites weights by averages.
        """
        if not optimizers:
            raise ValueError(
                "Straight-through training changes pruned weights in the updates of a Keras optimizer. Received: no "
                "optimizer. Compile the model, or pass the optimizer of the loop."
            )
        for part in (part for optimizer in optimizers for part in parts_of(optimizer)):
            if part.use_ema and part.ema_overwrite_frequency:
                raise ValueError(
                    "Straight-through training averages the model's weights, which are zero where pruned. Received: "
                    f"{part.name} with ema_overwrite_frequency={part.ema_overwrite_frequency}, which would write these "
                    "averages over the weights. Pass ema_overwrite_frequency=None."
                )
        with super().enforcing(optimizers):
            yield

    def _guests(self) -> list[tuple[Any, Any]]:
        rows = zip(self.targets, self._pruned, strict=True)
        return [*super()._guests(), *((target.variable, pruned) for target, pruned in rows)]

    def _enforced(self, optimizer, update, gradients: Sequence[Any], variables: Sequence[Any]):
        known = [self._index.get(id(backend.native(variable))) for variable in variables]
        ours = [index for index in known if index is not None]
        self._restore(ours)
        result = update(self._decayed(optimizer, gradients, known) if self._decay else gradients)
        self._set_aside(ours)
        self.after_update(optimizer, variables)
        return result

    def _slots(self, part) -> list[tuple[int, str, Any]]:
        # At the end of a training, Keras writes its averages over the weights.
        return [row for row in super()._slots(part) if row[1] == AVERAGES]

    def _restore(self, indices: Iterable[int]) -> None:
        """Writes the pruned values into the model's variables; kept values are those of the variables."""
        for index in indices:
            variable = self.targets[index].variable
            values = backend.value_now(variable), backend.value_now(self._pruned[index])
            variable.assign(ops.where(self.mask(index), *values))

    def _set_aside(self, indices: Iterable[int]) -> None:
        """Stores the pruned values."""
        for index in indices:
            pruned = ops.logical_not(self.mask(index))
            self._pruned[index].assign(backend.select(pruned, self.targets[index].variable))

    def _decayed(self, optimizer, gradients: Sequence[Any], indices: Sequence[int | None]) -> list[Any]:
        """Returns the gradients with `decay` times the pruned weights added; `indices` are those of the targets."""
        factor = self._decay * _scale(optimizer)
        found = []
        for gradient, index in zip(gradients, indices, strict=True):
            if index is not None and gradient is not None:
                dense = _dense(gradient)
                gradient = dense + ops.cast(factor, dense.dtype) * ops.cast(
                    backend.value_now(self._pruned[index]), dense.dtype
                )
            found.append(gradient)
        return found


def _dense(gradient) -> Any:
    # Tests the type's name, because a PyTorch tensor also has methods named `indices` and `values`.
    if type(gradient).__name__ != "IndexedSlices":
        return gradient
    import tensorflow as tf

    return tf.convert_to_tensor(gradient)


def _scale(optimizer) -> Any:
    """Returns what the optimizer will divide gradients by."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return 1.0
    return optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale

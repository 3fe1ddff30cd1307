"""Finds the optimizers of a model, and the optimizers inside other optimizers."""

from collections.abc import Sequence
from typing import Any

import keras

from prunekit.anatomy.layers import leaves_of


def optimizers_of(model) -> list[keras.optimizers.Optimizer]:
    """Returns the model's compiled optimizer and all optimizers in its attributes (as in a GAN), lists and dicts."""
    held = [getattr(model, "optimizer", None), *vars(model).values()]
    found: dict[int, keras.optimizers.Optimizer] = {}
    for value in held:
        for optimizer, _ in leaves_of(value, keras.optimizers.Optimizer):
            found.setdefault(id(optimizer), optimizer)
    inner = {id(part) for optimizer in found.values() for part in parts_of(optimizer) if part is not optimizer}
    return [optimizer for key, optimizer in found.items() if key not in inner]


def optimizers_for(model, optimizer: Any, remedy: str = "") -> list[keras.optimizers.Optimizer]:
    """Returns the given optimizer or optimizers as a list; the optimizers of the model if None is given.

    Raises:
        TypeError: `optimizer` is not a Keras optimizer or a list of them; the message includes `remedy`.
    """
    if optimizer is None:
        return optimizers_of(model)
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    for one in optimizers or [optimizer]:
        if not isinstance(one, keras.optimizers.Optimizer):
            raise TypeError(
                f"`optimizer` must be a Keras optimizer or a list of Keras optimizers{remedy}. Received: {one!r}."
            )
    return optimizers


def parts_of(optimizer) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers that update weights: those inside a LossScaleOptimizer or MultiOptimizer, or itself."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return parts_of(optimizer.inner_optimizer)
    inner = getattr(optimizer, "optimizers", None)
    if isinstance(inner, list | tuple) and inner:
        return [part for one in inner for part in parts_of(one)]
    return [optimizer]


def updates_in(batches: int, optimizers: Sequence[keras.optimizers.Optimizer]) -> int:
    """Returns the number of updates in `batches` batches; gradient accumulation makes it smaller."""
    parts = [part for optimizer in optimizers for part in parts_of(optimizer)]
    return batches // max((part.gradient_accumulation_steps or 1 for part in parts), default=1)

"""Where optimizers are found: in models, and inside one another."""

from collections.abc import Sequence
from typing import Any

import keras

from prunekit.anatomy.layers import leaves_of


def optimizers_of(model) -> list[keras.optimizers.Optimizer]:
    """The optimizer the model was compiled with, and others that it holds (as a GAN does), also in lists and dicts."""
    held = [getattr(model, "optimizer", None), *vars(model).values()]
    found: dict[int, keras.optimizers.Optimizer] = {}
    for value in held:
        for optimizer, _ in leaves_of(value, keras.optimizers.Optimizer):
            found.setdefault(id(optimizer), optimizer)
    inner = {id(part) for optimizer in found.values() for part in parts_of(optimizer) if part is not optimizer}
    return [optimizer for key, optimizer in found.items() if key not in inner]


def optimizers_for(model, optimizer: Any, remedy: str = "") -> list[keras.optimizers.Optimizer]:
    """The optimizer given, or several, as a list; those of the model where it is None.

    Raises:
        TypeError: `optimizer` is not a Keras optimizer or a list of them; the message includes `remedy`.
    """
    if optimizer is None:
        return optimizers_of(model)
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    for one in optimizers or [optimizer]:
        if not isinstance(one, keras.optimizers.Optimizer):
            raise TypeError(f"`optimizer` is a Keras optimizer, or a list of them{remedy}. Received: {one!r}.")
    return optimizers


def parts_of(optimizer) -> list[keras.optimizers.Optimizer]:
    """The optimizers that do the updates: those inside a LossScaleOptimizer or a MultiOptimizer, or itself."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return parts_of(optimizer.inner_optimizer)
    inner = getattr(optimizer, "optimizers", None)
    if isinstance(inner, list | tuple) and inner:
        return [part for one in inner for part in parts_of(one)]
    return [optimizer]


def updates_in(batches: int, optimizers: Sequence[keras.optimizers.Optimizer]) -> int:
    """How many updates the optimizers make in so many batches: fewer where they accumulate gradients."""
    parts = [part for optimizer in optimizers for part in parts_of(optimizer)]
    return batches // max((part.gradient_accumulation_steps or 1 for part in parts), default=1)

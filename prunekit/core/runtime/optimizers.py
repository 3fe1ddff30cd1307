"""Finds the optimizers of a model, and the optimizers inside other optimizers."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import keras

from prunekit.anatomy.layers.layers import leaves_of
from prunekit.core.runtime.backend import native

Key = TypeVar("Key")


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


def slots_of(part: Any, variables: Mapping[Key, Any]) -> list[tuple[Key, str, Any]]:
    """Returns (key, attribute name, slot) for each slot that an optimizer has for the variables.

    Factored slots, which differ in shape from their weight, are left out.

    Args:
        part: An optimizer that updates weights, as `parts_of` returns it.
        variables: Key -> variable; variables that the optimizer does not update have no slots.
    """
    found = state_of(part, variables)
    return [(key, name, slot) for key, name, slot in found if tuple(slot.shape) == tuple(variables[key].shape)]


def state_of(part: Any, variables: Mapping[Key, Any]) -> list[tuple[Key, str, Any]]:
    """Returns what `slots_of` returns, with the factored slots.

    Keras has no registry of slots: each optimizer keeps lists aligned with `_trainable_variables`, or a dictionary
    keyed by variable.
    """
    if not part.built:
        return []
    places = {id(native(variable)): place for place, variable in enumerate(part._trainable_variables)}
    ours = {key: places[id(native(one))] for key, one in variables.items() if id(native(one)) in places}
    found = []
    for name, held in vars(part).items():
        if name in ("_variables", "_trainable_variables") or not _holds_variables(held):
            continue
        for key, place in ours.items():
            slot = _entry(held, place, len(places), part, variables[key])
            if isinstance(slot, keras.Variable) and slot is not variables[key]:
                found.append((key, name, slot))
    return found


def _holds_variables(held) -> bool:
    """Returns True if an attribute is a list or a dictionary with a Keras variable."""
    entries = held.values() if isinstance(held, dict) else held if isinstance(held, list | tuple) else ()
    return any(isinstance(entry, keras.Variable) for entry in entries)


def _entry(held, place: int, count: int, part, variable):
    if isinstance(held, list | tuple):
        return held[place] if len(held) == count else None
    if isinstance(held, dict) and hasattr(part, "_var_key"):
        return held.get(part._var_key(variable))
    return None

"""Carries the compile settings and the optimizer's state over to a model with fewer channels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.channels import Channels
from prunekit.anatomy.weight_entries import cut
from prunekit.core.backend import native
from prunekit.core.optimizers import parts_of, slots_of
from prunekit.sparsity.array_ops import array_of


def carry_over(channels: Channels, kept: np.ndarray, model: Any, variables: dict[int, Any]) -> list[str]:
    """Compiles the new model as the former one is, with the optimizer's state cut to the kept channels.

    Args:
        channels: The channels of the former model.
        kept: True for each kept number.
        model: The new model.
        variables: id of a former variable -> (former variable, new variable).

    Returns:
        Notes on what could not be carried over.
    """
    former = channels.model
    if not getattr(former, "compiled", False):
        return []
    if former.optimizer is None:
        compile_like(former, model, None)
        return []
    optimizer, lost = _optimizer(former.optimizer, channels, kept, model, variables)
    compile_like(former, model, optimizer)
    if not lost:
        return []
    return [f"The optimizer's state of {', '.join(lost)} starts anew: its shape says nothing about the channels."]


def compile_like(former: Any, model: Any, optimizer: Any, names: Mapping[str, str] | None = None) -> None:
    """Compiles a model with the settings of a compiled one, and metrics of its own.

    Args:
        former: The compiled model.
        model: The new model.
        optimizer: The new model's optimizer; None leaves the setting as it was given.
        names: Former name of an output -> its new name, in losses and metrics that are given by name.
    """

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {(names or {}).get(key, key): one for key, one in value.items()}
        return value

    settings = {name: renamed(_again(value)) for name, value in former._compile_config.config.items()}
    if optimizer is not None:
        settings["optimizer"] = optimizer
    model.compile(**settings)


def new_optimizer(former: Any) -> Any:
    """Returns an optimizer of the same config without state; None for a model without one."""
    optimizer = former.optimizer
    return None if optimizer is None else type(optimizer).from_config(optimizer.get_config())


def _again(value: Any) -> Any:
    """Returns a value with new metrics in the place of the given ones, which hold the sums of their model."""
    if isinstance(value, dict):
        return {key: _again(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_again(one) for one in value)
    if isinstance(value, keras.Metric):
        return type(value).from_config(value.get_config())
    return value


def _optimizer(
    optimizer: Any, channels: Channels, kept: np.ndarray, model: Any, variables: dict[int, Any]
) -> tuple[Any, list[str]]:
    """Returns a new optimizer with the state of the former one, and the names of weights whose state is lost."""
    made = type(optimizer).from_config(optimizer.get_config())
    if not optimizer.built:
        return made, []
    by_native = {id(native(old)): new for old, new in variables.values()}
    trained = [by_native[id(native(one))] for one in optimizer._trainable_variables]
    known = {id(native(one)) for one in by_native.values()}
    added = [one for one in model.trainable_variables if id(native(one)) not in known]
    if added:
        # JAX takes the variables of an optimizer to be those of the model, in the same order.
        ours = {id(native(one)) for one in (*trained, *added)}
        trained = [one for one in model.trainable_variables if id(native(one)) in ours]
    made.build(trained)
    weights = {id(native(axes.variable)): axes for axes in channels.links.weights.values()}
    carried = set()
    for old, new, owner in _pairs(optimizer, made, by_native):
        axes = None if owner is None else weights.get(id(native(owner)))
        value = cut(array_of(old), axes, kept)
        if value.shape == tuple(new.shape):
            new.assign(value)
            carried.add(id(old))
    return made, list(dict.fromkeys(one.path for one in optimizer.variables if id(one) not in carried))


def _pairs(former: Any, made: Any, by_native: Mapping[int, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yields (variable of the former optimizer, variable of the new one, the former weight that it belongs to or None).

    Slots of weights that the former model lacks are left as they are.
    """
    slots, owned = {}, set()
    for number, (part, other) in enumerate(zip(parts_of(former), parts_of(made), strict=True)):
        held = {id(native(by_native[id(native(one))])): one for one in part._trainable_variables}
        for key, name, slot in slots_of(part, held):
            slots[number, key, name] = slot, held[key]
            owned.add(id(slot))
        for key, name, slot in slots_of(other, {id(native(one)): one for one in other._trainable_variables}):
            owned.add(id(slot))
            if (number, key, name) in slots:
                yield slots[number, key, name][0], slot, slots[number, key, name][1]
    others, left = ([one for one in each.variables if id(one) not in owned] for each in (former, made))
    if len(others) != len(left):
        # A new bias has factored slots, whose places in the list are not known: only counters are carried over.
        named = {one.path: one for one in left}
        others = [one for one in others if not len(one.shape) and one.path in named]
        left = [named[one.path] for one in others]
    for old, new in zip(others, left, strict=True):
        yield old, new, None

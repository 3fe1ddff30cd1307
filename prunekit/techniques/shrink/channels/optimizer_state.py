"""Carries the compile settings and the optimizer's state over to a model of which parts were removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from prunekit.core.runtime.backend import native
from prunekit.core.runtime.optimizers import parts_of, state_of
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.shrink.graph.layer_copies import Variables, takes_a_graph


def carry_over(
    former: Any, model: Any, variables: Variables, cut: Callable[[Any, np.ndarray], np.ndarray] | None = None
) -> list[str]:
    """Compiles the new model as the former one is, with the optimizer's state; returns notes on what is different.

    Args:
        former: The model.
        model: The new model.
        variables: The new variable of each former one that the new model has.
        cut: (former weight, value of a slot) -> value of the new weight's slot; None: weights have their former shapes.
    """
    optimizer = former.optimizer if getattr(former, "compiled", False) else None
    if optimizer is None:
        return compile_like(former, model, None)
    made, lost = _optimizer(optimizer, model, variables, cut or (lambda weight, value: value))
    notes = compile_like(former, model, made)
    if not lost:
        return notes
    return [
        f"The optimizer's state of {', '.join(lost)} starts anew: its shape says nothing about the channels.",
        *notes,
    ]


def class_notes(former: Any, model: Any) -> list[str]:
    """Returns a note if a new model lacks methods of the former one's class: its `train_step`, or all of them."""
    kind = type(former)
    if kind.train_step is not type(model).train_step:
        return [f"The new model is a {type(model).__name__}, without the train_step of {kind.__name__}."]
    if not takes_a_graph(kind) and type(model) is not kind:
        return [f"The new model is a keras.Model of layers, without the methods of {kind.__name__}."]
    return []


def compile_like(former: Any, model: Any, optimizer: Any) -> list[str]:
    """Compiles a model with the settings of a compiled one, and metrics of its own; returns a note on renamed outputs.

    Losses and metrics that are given by the name of an output follow its new name.

    Args:
        former: The model; nothing is done if it is not compiled.
        model: The new model.
        optimizer: The new model's optimizer; None leaves the setting as it was given.
    """
    if not getattr(former, "compiled", False):
        return []
    pairs = zip(*(list(getattr(one, "output_names", None) or []) for one in (former, model)), strict=False)
    names = {one: other for one, other in pairs if one != other}

    def renamed(value: Any) -> Any:
        return {names.get(key, key): one for key, one in value.items()} if isinstance(value, dict) else value

    settings = {name: renamed(_again(value)) for name, value in former._compile_config.config.items()}
    if optimizer is not None:
        settings["optimizer"] = optimizer
    model.compile(**settings)
    told = ", ".join(f"{one} -> {other}" for one, other in names.items())
    return [f"Outputs have the names of other layers now: {told}."] if told else []


def new_optimizer(former: Any) -> Any:
    """Returns an optimizer of the same config without state; None for a model without one."""
    optimizer = getattr(former, "optimizer", None)
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
    optimizer: Any, model: Any, variables: Variables, cut: Callable[[Any, np.ndarray], np.ndarray]
) -> tuple[Any, list[str]]:
    """Returns a new optimizer with the state of the former one, and the names of variables whose state is lost."""
    made = type(optimizer).from_config(optimizer.get_config())
    if not optimizer.built:
        return made, []
    by_native = {id(native(old)): (old, new) for old, new in variables.values()}
    trained = [by_native[key][1] for key in _keys(optimizer) if key in by_native]
    known = {id(native(new)) for _, new in by_native.values()}
    added = [one for one in model.trainable_variables if id(native(one)) not in known]
    if added:
        # JAX takes the variables of an optimizer to be those of the model, in the same order.
        ours = {id(native(one)) for one in (*trained, *added)}
        trained = [one for one in model.trainable_variables if id(native(one)) in ours]
    made.build(trained)
    done = set()
    for old, new, owner in _pairs(optimizer, made, by_native):
        value = array_of(old)
        if owner is not None and tuple(old.shape) == tuple(owner.shape):
            value = cut(owner, value)
        elif owner is not None and tuple(owner.shape) != tuple(by_native[id(native(owner))][1].shape):
            continue  # A factored slot sums over axes of its weight: it is true only as long as the weight is not cut.
        if value.shape == tuple(new.shape):
            new.assign(value)
            done.add(id(old))
    for part in parts_of(optimizer):
        removed = [one for one in part._trainable_variables if id(native(one)) not in by_native]
        done.update(id(slot) for _, _, slot in state_of(part, dict(enumerate(removed))))
    return made, list(dict.fromkeys(one.path for one in optimizer.variables if id(one) not in done))


def _keys(part: Any) -> list[int]:
    return [id(native(one)) for one in part._trainable_variables]


def _pairs(former: Any, made: Any, by_native: Mapping[int, tuple[Any, Any]]) -> Iterator[tuple[Any, Any, Any]]:
    """Yields (variable of the former optimizer, variable of the new one, the former weight that it belongs to or None).

    Slots of weights that only one of the models has are left out.
    """
    owned = set()
    for part, other in zip(parts_of(former), parts_of(made), strict=True):
        present = dict(zip(_keys(part), part._trainable_variables, strict=True))
        left = {key: by_native[key][1] for key in present if key in by_native}
        slots = {(key, name): slot for key, name, slot in state_of(other, left)}
        for key, name, slot in state_of(part, present):
            owned.add(id(slot))
            if (key, name) in slots:
                yield slot, slots[key, name], present[key]
        owned.update(id(slot) for _, _, slot in state_of(other, dict(enumerate(other._trainable_variables))))
    others, news = ([one for one in each.variables if id(one) not in owned] for each in (former, made))
    if len(others) != len(news):
        # Slots that an optimizer keeps in its own way: their weights are unknown, so only counters are carried over.
        named = {one.path: one for one in news}
        others = [one for one in others if not len(one.shape) and one.path in named]
        news = [named[one.path] for one in others]
    for old, new in zip(others, news, strict=True):
        yield old, new, None

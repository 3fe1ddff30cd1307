"""Other values for variables: while a layer is called, in traced and stateless steps too, and until a block fails."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.variables import AutocastScope

from prunekit.sparsity.array_ops import array_of


def full_value(variable: Any) -> Any:
    """Returns the present value of a variable in its own dtype, also where a layer would read it in half precision."""
    with AutocastScope(None):
        # Not `ops.convert_to_tensor`, which on TensorFlow returns the variable, for a later user to cast.
        return variable.value


def weights_digest(model: Any) -> int:
    """Returns a checksum of a model's weights, which changes when one of them does."""
    digest = 0
    for variable in model.weights:
        digest = zlib.crc32(np.ascontiguousarray(array_of(variable)).reshape(-1).view("uint8").data, digest)
    return digest


@contextlib.contextmanager
def with_values(pairs: Sequence[tuple[Any, Any]], layer: Any) -> Iterator[None]:
    """Inside the scope, variables have other values; a gradient flows to what these were calculated from.

    What is assigned to other variables inside, such as moving means and the states of random seeds, is assigned to them
    at the end, and the losses that are added belong to the layer.

    Args:
        pairs: Variables with their values.
        layer: The layer that is called.
    """
    outer = get_stateless_scope()
    scope = _Scope(pairs, outer)
    with scope:
        yield
    for variable, value in scope.assigned.values():
        variable.assign(value)
    for loss in scope.losses:
        if outer is None:
            layer.add_loss(loss)
        elif outer.collect_losses:
            outer.add_loss(loss)


@contextlib.contextmanager
def assigned(pairs: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Assigns values to variables; if an exception leaves the block, the variables get their former values again.

    Args:
        pairs: Variables with their new values, each variable once.
    """
    former = _assign(pairs)
    try:
        yield
    except BaseException:
        _assign(former)
        raise


@contextlib.contextmanager
def replaced(pairs: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Variables have other values inside the block, and their former values at its end.

    Args:
        pairs: Variables with their values, each variable once.
    """
    before = _assign(pairs)
    try:
        yield
    finally:
        _assign(before)


def _assign(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, np.ndarray]]:
    """Assigns values to variables, all or, if that fails, none; returns the variables with their former values."""
    former = []
    try:
        for variable, value in pairs:
            former.append((variable, np.array(array_of(variable))))
            variable.assign(value)
    except BaseException:
        for variable, value in former:
            variable.assign(value)
        raise
    return former


class _Scope(keras.StatelessScope):
    """Values in front of those of an outer scope, such as that of a training step on JAX."""

    def __init__(self, pairs: Sequence[tuple[Any, Any]], outer: Any):
        super().__init__(pairs, collect_losses=True)
        for key, value in outer.state_mapping.items() if outer is not None else ():
            self.state_mapping.setdefault(key, value)
        self.assigned: dict[int, tuple[Any, Any]] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        super().add_update(update)
        self.assigned[id(update[0])] = update

"""Merges calls that compute the same tensor."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from prunekit.anatomy.channels.graph_calls import Graph, GraphCall
from prunekit.anatomy.records.reports import Skipped
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.shrink.graph.layer_graph import LayerGraph
from prunekit.techniques.shrink.graph.simplify_report import Rewrite

MERGED = "duplicate merged"
# Entries of a config that do not change what a layer computes from its weights.
_INITIAL = ("_initializer", "_regularizer", "_constraint")


def merge_duplicates(graph: LayerGraph) -> tuple[list[Rewrite], list[Skipped]]:
    """Merges calls on the same tensors of layers with equal configs and weights, or of equal operations.

    Returns:
        The rewrites, and the calls that are left although they compute the same.
    """
    done: list[Rewrite] = []
    left: list[Skipped] = []
    for level in graph.graphs():
        known: dict[Any, list[GraphCall]] = {}
        for call in list(level.calls):
            if call not in level.calls:
                continue
            key = _key(graph, call)
            if key is None:
                continue
            first = next((one for one in known.get(key, ()) if _same_weights(graph, one, call)), None)
            if first is None:
                known.setdefault(key, []).append(call)
            elif not _can_merge(level, first, call):
                left.append(Skipped(call.name, f"it computes the same as {first.name}; both are outputs of the model"))
            else:
                for old, new in zip(call.outputs, first.outputs, strict=True):
                    level.replace(old, new)
                done.append(Rewrite(MERGED, (call.name,), f"with {first.name}"))
    return done, left


def _can_merge(level: Graph, first: GraphCall, call: GraphCall) -> bool:
    return all(level.can_replace(old, new) for old, new in zip(call.outputs, first.outputs, strict=True))


def _key(graph: LayerGraph, call: GraphCall) -> Any:
    """Returns what must be equal in equal calls; None for a call that is never merged."""
    operation = call.operation
    if call.fixed_training or getattr(operation, "stateful", False):
        return None
    arguments = _plain(keras.tree.flatten((call.args, call.kwargs))), repr(_outline((call.args, call.kwargs)))
    if id(operation) in graph.nested:
        return id(operation), arguments
    if isinstance(operation, keras.layers.Layer):
        # Seeds of random numbers are variables, and no weights.
        if len(operation.variables) != len(operation.weights) or operation.losses:
            return None
    try:
        config = operation.get_config()
    except NotImplementedError:
        return id(operation), arguments
    changed = graph.changes.get(id(operation))
    config = {**config, **(changed.config if changed else {})}
    fixed = {
        name: value
        for name, value in config.items()
        if name not in ("name", "trainable") and not name.endswith(_INITIAL)
    }
    return type(operation), _plain(fixed), arguments


def _outline(structure: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: None, structure)


def _plain(value: Any) -> Any:
    """Returns a hashable value that is equal for equal configs; other objects are equal to themselves alone."""
    if isinstance(value, dict):
        return tuple((name, _plain(value[name])) for name in sorted(value, key=str))
    if isinstance(value, list | tuple):
        return tuple(_plain(one) for one in value)
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return type(value), value
    if isinstance(value, slice):
        return slice, _plain((value.start, value.stop, value.step))
    if isinstance(value, np.ndarray | np.generic):
        return str(value.dtype), value.shape, value.tobytes()
    return _Same(value)


class _Same:
    """An object that is equal to itself alone; it lives as long as the key that it is part of."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _same_weights(graph: LayerGraph, one: GraphCall, other: GraphCall) -> bool:
    first, second = one.operation, other.operation
    if first is second or not isinstance(first, keras.layers.Layer):
        return True
    values, others = _values(graph, first), _values(graph, second)
    return len(values) == len(others) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(values, others, strict=True)
    )


def _values(graph: LayerGraph, layer: Any) -> list[np.ndarray]:
    change = graph.changes.get(id(layer))
    if change is None:
        return [array_of(one) for one in layer.weights]
    rest = [array_of(one) for one in layer.weights if one.name not in change.values]
    return [*(change.values[name] for name in sorted(change.values)), *rest]

"""Records what happens inside a layer or model without a graph, by calling it on symbolic tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from prunekit.anatomy.layers import sublayers

# Batch size of the symbolic inputs where a layer does not accept an open one.
BATCH = 2


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """The calls inside one call of a layer.

    Attributes:
        nodes: The calls of inner layers and operations, in order of execution.
        args: Positional arguments of the recorded call, with symbolic tensors.
        kwargs: Keyword arguments, likewise.
        outputs: The outputs, in the layer's structure.
        repeatable: True if the same calls compute the layer's outputs for every batch size and in training: no batch
            size and no weight of the layer's own is written into them.
    """

    nodes: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any
    repeatable: bool


def recorded(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedCall | None:
    """Returns the calls inside `layer(*args, **kwargs)`; None if they cannot be recorded. Changes nothing.

    Args:
        layer: A built layer.
        args: Arguments with symbolic tensors, whose batch size may be open.
        kwargs: Keyword arguments, likewise.
    """
    found = _recorded(layer, args, kwargs, None)
    if found is not None:
        training = _recorded(layer, args, {**kwargs, "training": True}, None) if layer._call_has_training_arg else found
        repeatable = training is not None and _signature(found) == _signature(training) and not _reads_weights(found)
        return RecordedCall(found.nodes, found.args, found.kwargs, found.outputs, repeatable)
    return _recorded(layer, args, kwargs, BATCH)


def _recorded(layer: Any, args: Any, kwargs: Any, batch: int | None) -> RecordedCall | None:
    fresh: dict[int, Any] = {}

    def symbol(value: Any) -> Any:
        if not isinstance(value, keras.KerasTensor):
            return value
        if id(value) not in fresh:
            shape = value.shape if batch is None else (batch, *value.shape[1:])
            fresh[id(value)] = keras.KerasTensor(shape, dtype=value.dtype)
        return fresh[id(value)]

    args, kwargs = keras.tree.map_structure(symbol, (args, kwargs))
    before = _lengths(layer)
    try:
        with keras.StatelessScope():
            outputs = layer.call(*args, **kwargs)
        nodes = _nodes_between(keras.tree.flatten(outputs), {id(tensor) for tensor in fresh.values()})
    except Exception:  # noqa: BLE001  # a user's code may raise anything on tensors without values
        return None
    finally:
        _forget(before)
    return None if nodes is None else RecordedCall(tuple(nodes), args, kwargs, outputs, False)


def _lengths(layer: Any) -> list[tuple[list[Any], int]]:
    """Returns (list of calls, its length) for all layers inside a layer."""
    inner, pending = [], [layer]
    while pending:
        one = pending.pop()
        inner.append(one)
        pending.extend(sublayers(one))
    return [(calls, len(calls)) for one in inner for calls in (one._inbound_nodes, one._outbound_nodes)]


def _forget(lengths: Sequence[tuple[list[Any], int]]) -> None:
    for calls, length in lengths:
        del calls[length:]


def _nodes_between(outputs: Sequence[Any], inputs: set[int]) -> list[Any] | None:
    """Returns the calls that lead from the inputs to the outputs, in order; None if an output is no symbolic tensor."""
    found: dict[int, Any] = {}
    done: list[Any] = []
    pending: list[tuple[Any, bool]] = []
    for tensor in outputs:
        if not isinstance(tensor, keras.KerasTensor):
            return None
        if id(tensor) not in inputs:
            pending.append((_node_of(tensor), False))
        while pending:
            node, ready = pending.pop()
            if ready:
                done.append(node)
            elif id(node) not in found:
                found[id(node)] = node
                pending.append((node, True))
                pending.extend((_node_of(one), False) for one in node.input_tensors if id(one) not in inputs)
    return done


def _node_of(tensor: Any) -> Any:
    operation, index, _ = tensor._keras_history
    return operation._inbound_nodes[index]


def _signature(call: RecordedCall) -> list[tuple[Any, ...]]:
    return [(type(node.operation), tuple(tuple(one.shape) for one in node.outputs)) for node in call.nodes]


def _reads_weights(call: RecordedCall) -> bool:
    leaves = (leaf for node in call.nodes for leaf in keras.tree.flatten((node.arguments.args, node.arguments.kwargs)))
    return any(isinstance(leaf, keras.Variable) for leaf in leaves)

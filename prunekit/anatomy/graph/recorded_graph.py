"""The layer calls that a Functional or Sequential model recorded when it was made: shapes without running the model."""

from __future__ import annotations

import inspect
from typing import Any

import keras

from prunekit.anatomy.graph.flow import Seen
from prunekit.anatomy.layers.layers import is_repeater, own_variables, sublayers


def recorded_calls(model: Any) -> list[Seen] | None:
    """Returns the calls of the model's layers, in order; None if only running the model shows all calls.

    Running is necessary for subclassed models, for layers of users and layers with sublayers (whose `call` may call
    other layers), for operations outside layers (which may change the batch axis), and for sizes that the model leaves
    open, other than the batch size.
    """
    graph = model._functional if isinstance(model, keras.Sequential) else model
    kinds: list[Any] = [base for base in type(graph).__mro__ if base.__name__ == "Functional"]
    changed = type(model).call is not (keras.Sequential if graph is not model else kinds[0]).call if kinds else True
    if changed or type(graph).call is not kinds[0].call or own_variables(model):
        return None
    levels = graph._nodes_by_depth
    nodes = [node for depth in sorted(levels, reverse=True) for node in levels[depth] if not node.is_input]
    if not all(_is_plain(node) for node in nodes):
        return None
    return [Seen(node.operation, _inputs(node), tuple(node.outputs)) for node in nodes]


def _is_plain(node: Any) -> bool:
    layer = node.operation
    own = isinstance(layer, keras.Layer) and type(layer).__module__.startswith("keras.")
    if not own or isinstance(layer, keras.layers.Lambda) or "call" in vars(layer):
        return False
    sized = all(None not in tensor.shape[1:] for tensor in (*node.input_tensors, *node.outputs))
    return sized and not sublayers(layer) and not is_repeater(layer)


def _inputs(node: Any) -> tuple[Any, ...]:
    """Returns the tensors of the call in the order of the signature of the layer's `call`."""
    args, kwargs = node.arguments.args, node.arguments.kwargs
    try:
        found: Any = list(inspect.signature(node.operation.call).bind(*args, **kwargs).arguments.values())
    except TypeError:  # arguments that Keras takes for itself
        found = [*args, *kwargs.values()]
    return tuple(leaf for leaf in keras.tree.flatten(found) if isinstance(leaf, keras.KerasTensor))

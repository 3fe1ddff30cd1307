"""Records what happens inside a layer or model without a graph, by calling it on symbolic tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.channels.keras_hub_calls import with_open_lengths
from prunekit.anatomy.graph.example_inputs import declared_inputs
from prunekit.anatomy.graph.model_graph import calls_of, graph_of, tensors_in, with_tensors
from prunekit.anatomy.layers.layers import sublayers

# Lengths that stand for open ones where a layer does not accept these: of the batch, and of other axes.
BATCH, OTHERS = 2, 11


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """The calls inside one call of a layer.

    Attributes:
        nodes: The calls of inner layers and operations, in order of execution.
        args: Positional arguments of the recorded call, with symbolic tensors.
        kwargs: Keyword arguments, likewise.
        outputs: The outputs, in the layer's structure.
        repeatable: True if the same calls do all that the layer does, for every batch size and in training: no batch
            size and no weight of the layer's own is written into them, no loss is added and no variable assigned.
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
        same = training is not None and _constants(found.nodes) == _constants(training.nodes)
        _use_reshape_layers(found)
        repeatable = same and found.repeatable and not _has_open_lengths(found)
        repeatable = repeatable and not _reads_weights(found, layer, args, kwargs)
        repeatable = repeatable and not _casts(layer, (args, kwargs))
        return RecordedCall(found.nodes, found.args, found.kwargs, found.outputs, repeatable)
    fixed = _recorded(layer, args, kwargs, BATCH)
    return None if fixed is None else replace(fixed, repeatable=False)


def graph_call(model: Any) -> RecordedCall | None:
    """Returns the calls in the graph of a model as those of a call on its inputs; None if it has no graph."""
    graph = graph_of(model)
    return None if graph is None else RecordedCall(tuple(calls_of(model)), (graph.input,), {}, graph.output, True)


def recorded_model(model: Any) -> RecordedCall:
    """Returns the calls inside a built model without a graph of layers; its only argument has the declared inputs.

    Raises:
        ValueError: The model declares no inputs, or its `call` cannot be followed.
    """
    inputs = _inputs_of(model)
    if inputs is None:
        raise ValueError(
            f"The model {model.name!r} has no graph of layers, and the shape of its inputs is not known. Received: "
            f"{type(model).__name__}, which was not built by a call on one tensor. Call it once on a batch, pass the "
            "models in it one by one, or build it as keras.Model(inputs, outputs)."
        )
    found = recorded(model, (inputs,), {})
    if found is None or not found.repeatable:
        raise ValueError(
            f"The model {model.name!r} has no graph of layers, and its `call` cannot be followed: it must consist of "
            "Keras layers and keras.ops alone, with the same calls for every batch size and in training. Received: "
            f"{type(model).__name__}. Build it as keras.Model(inputs, outputs)."
        )
    return found


def _inputs_of(model: Any) -> Any:
    """Returns symbolic tensors for the inputs of a model; None if their shapes are not known."""
    declared = declared_inputs(model)
    if declared is not None:
        return keras.tree.map_structure(lambda one: keras.KerasTensor(one.shape, one.dtype, name=one.name), declared)
    shape = (model.get_build_config() or {}).get("input_shape") if model.built else None
    if not isinstance(shape, tuple | list) or not all(n is None or isinstance(n, int) for n in shape):
        return None
    return keras.KerasTensor((None, *tuple(shape)[1:]), dtype=model.compute_dtype)


def recorded_function(function: Any, tensor: Any) -> list[Any] | None:
    """Returns the operations in `function(tensor)`, in order.

    None if they cannot be recorded, or depend on the length of the last axis.
    """
    longer = keras.KerasTensor((*tensor.shape[:-1], (tensor.shape[-1] or 1) + 1), dtype=tensor.dtype)
    try:
        nodes, others = (_nodes_between([function(one)], {id(one)}) for one in (tensor, longer))
    except Exception:  # noqa: BLE001  # a user's code may raise anything on tensors without values
        return None
    if nodes is None or others is None or _constants(nodes) != _constants(others):
        return None
    return nodes


def recorded_function_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedCall:
    """Returns the operations in `function(*args, **kwargs)`; errors of the function are raised.

    Args:
        function: A function of operations alone, which do the same for every batch size and in training.
        args: Arguments with symbolic tensors, which new ones replace.
        kwargs: Keyword arguments, likewise.
    """
    args, kwargs = _with_new_tensors((args, kwargs))
    outputs = function(*args, **kwargs)
    nodes = _nodes_between(keras.tree.flatten(outputs), set(map(id, tensors_in((args, kwargs)))))
    return RecordedCall(tuple(nodes or ()), args, kwargs, outputs, repeatable=True)


def _constants(nodes: Sequence[Any]) -> list[str]:
    """Returns a text for each call: its operation, with settings and arguments other than tensors."""

    def plain(leaf: Any) -> Any:
        return "" if isinstance(leaf, keras.KerasTensor) else leaf

    found = []
    for node in nodes:
        given = keras.tree.map_structure(plain, (node.arguments.args, node.arguments.kwargs))
        if isinstance(node.operation, keras.layers.Layer):
            # The same layer or the same weights; `training` is passed on to it, and is no constant.
            args, kwargs = given
            same = [id(one) for one in node.operation.variables] or id(node.operation)
            found.append(repr((same, args, {k: v for k, v in kwargs.items() if k != "training"})))
            continue
        settings = {name: value for name, value in vars(node.operation).items() if not name.startswith("_")}
        found.append(repr((type(node.operation).__name__, given, {**settings, "name": ""})))
    return found


def _recorded(
    layer: Any, args: Any, kwargs: Any, batch: int | None, values: Sequence[tuple[Any, Any]] = ()
) -> RecordedCall | None:
    """Returns the calls inside a layer.

    Args:
        layer: The layer.
        args: Arguments with symbolic tensors.
        kwargs: Keyword arguments, likewise.
        batch: A length for the batch, with lengths for other open axes; None to leave them open.
        values: Pairs of weights and other values for them.
    """
    args, kwargs = _with_new_tensors((args, kwargs), batch)
    before = _lengths(layer)
    losses = len(layer._losses)
    try:
        with keras.StatelessScope(state_mapping=values) as scope, with_open_lengths(layer):
            outputs = layer.call(*args, **kwargs)
        nodes = _nodes_between(keras.tree.flatten(outputs), set(map(id, tensors_in((args, kwargs)))))
    except Exception:  # noqa: BLE001  # a user's code may raise anything on tensors without values
        return None
    finally:
        pure = len(layer._losses) == losses and layer.activity_regularizer is None
        del layer._losses[losses:]
        _forget(before)
    pure = pure and len(scope.state_mapping) == len(values)
    return None if nodes is None else RecordedCall(tuple(nodes), args, kwargs, outputs, pure)


def _with_new_tensors(arguments: Any, batch: int | None = None) -> Any:
    """Returns arguments with a new symbolic tensor in the place of each one; `batch` as for `_recorded`."""
    new = {}
    for one in tensors_in(arguments):
        shape = one.shape if batch is None else (batch, *(OTHERS if n is None else n for n in one.shape[1:]))
        new[id(one)] = keras.KerasTensor(shape, dtype=one.dtype, name=one.name)
    return with_tensors(arguments, new)


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


def _casts(layer: Any, arguments: Any) -> bool:
    """Returns True if the layer casts an input to its own type before its call."""
    types = {keras.backend.standardize_dtype(one.dtype) for one in keras.tree.flatten(arguments) if _is_symbolic(one)}
    return layer.autocast and any("float" in dtype and dtype != layer.compute_dtype for dtype in types)


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, keras.KerasTensor)


def _has_open_lengths(call: RecordedCall) -> bool:
    """Returns True if a setting of an operation is a shape with an open length, which the operation cannot compute."""
    shapes = (getattr(node.operation, name, None) for node in call.nodes for name in ("newshape", "shape"))
    return any(isinstance(shape, tuple | list) and None in shape for shape in shapes)


def _use_reshape_layers(call: RecordedCall) -> None:
    """Puts `keras.layers.Reshape` in the place of reshapes to open lengths that keep the first axis."""
    for node in call.nodes:
        shape = getattr(node.operation, "newshape", None)
        if not isinstance(shape, tuple | list) or None not in shape:
            continue
        x, (first, *rest) = node.input_tensors[0], shape
        if first == x.shape[0] and sum(n is None or n == -1 for n in rest) <= 1:
            target = tuple(-1 if n is None else n for n in rest)
            dtype = x.dtype if "float" in x.dtype else None
            node.operation = keras.layers.Reshape(target, name=node.operation.name, dtype=dtype)


def _reads_weights(call: RecordedCall, layer: Any, args: Any, kwargs: Any) -> bool:
    """Returns True if a weight, or a value calculated from weights, is written into the calls."""
    constants = _tensors(call)
    if any(isinstance(leaf, keras.Variable) for leaf in constants):
        return True
    if not constants:
        return False
    others = [(one, keras.ops.add(one.value, keras.ops.ones_like(one.value))) for one in layer.weights]
    again = _recorded(layer, args, kwargs, None, others)
    pairs = zip(constants, _tensors(again), strict=True) if again is not None else [(0, 1)]
    return any(not np.array_equal(*map(keras.ops.convert_to_numpy, pair)) for pair in pairs)


def _tensors(call: RecordedCall) -> list[Any]:
    """Returns the weights and the tensors with values in the arguments of calls."""
    leaves = (leaf for node in call.nodes for leaf in keras.tree.flatten((node.arguments.args, node.arguments.kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, keras.Variable) or keras.ops.is_tensor(leaf)]

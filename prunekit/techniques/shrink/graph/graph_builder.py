"""Makes Keras models again from their graphs of calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.channels.graph_calls import Graph, GraphCall
from prunekit.anatomy.graph.model_graph import graph_of, inputs_in, tensors_in
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.shrink.graph.layer_copies import (
    Variables,
    assign,
    input_like,
    known_lengths,
    made_again,
    pairs_of,
    takes_a_graph,
    undrawn,
)
from prunekit.techniques.shrink.graph.layer_graph import Change, LayerGraph


def build(graph: LayerGraph, value_of: Callable[[Any], np.ndarray] = array_of) -> tuple[Any, Variables]:
    """Returns a new model with the calls of a graph, and the new variable of each former one.

    Its layers are new, of the same names, and trainable where the former ones are. The new model has the class of the
    former one where that class is made from inputs and outputs. It is not compiled.

    Args:
        graph: The graph.
        value_of: Returns the value of the new variable for a former one; values that the graph changes take precedence.

    Raises:
        ValueError: A layer cannot be made again from its config, or its weights have other shapes then.
    """
    building = _Building(graph)
    model = building.model(graph.main, [tensor.shape for tensor in tensors_in(graph.main.inputs)])
    model.trainable = graph.model.trainable
    building.copy_trainable()
    return model, building.assigned(value_of)


class _Building:
    """One model that is made again."""

    def __init__(self, graph: LayerGraph):
        self._graph = graph
        self._calls = Counter(id(call.operation) for level in graph.graphs() for call in level.calls)
        self._layers: dict[int, tuple[Any, Any]] = {}
        self._models: dict[int, tuple[Any, Any]] = {}

    def model(self, graph: Graph, shapes: Sequence[Any]) -> Any:
        """Returns the new model of one graph, for inputs of these shapes; its layers have the values of new layers."""
        given = tensors_in(graph.inputs)
        entries = [input_like(one, _shape(one.shape, shape)) for one, shape in zip(given, shapes, strict=True)]
        name = self._graph.names.get(id(graph.model), graph.model.name)
        if isinstance(graph.model, keras.Sequential) and graph.is_chain:
            layers, tensor = list[Any](), entries[0]
            for call in graph.calls:
                layers.append(self._operation(call, tensor))
                with undrawn(layers[-1]):
                    tensor = layers[-1](tensor)
            return keras.Sequential([*entries, *layers], name=name)
        new = {id(tensor): entry for tensor, entry in zip(given, entries, strict=True)}
        for call in graph.calls:
            self._run(call, new)
        inputs = keras.tree.map_structure(lambda tensor: new[id(tensor)], graph.inputs)
        outputs = keras.tree.map_structure(lambda tensor: new[id(tensor)], graph.outputs)
        kind = type(graph.model)
        if graph_of(graph.model) is None or isinstance(graph.model, keras.Sequential) or not takes_a_graph(kind):
            kind = keras.Model
        return kind(inputs, outputs, name=name)

    def _run(self, call: GraphCall, new: dict[int, Any]) -> None:
        def known(leaf: Any) -> Any:
            return new[id(leaf)] if isinstance(leaf, keras.KerasTensor) else leaf

        args, kwargs = keras.tree.map_structure(known, (call.args, call.kwargs))
        operation = self._operation(call, inputs_in(args, kwargs))
        with undrawn(operation):
            outputs = operation(*args, **kwargs)
        for old, made in zip(call.outputs, keras.tree.flatten(outputs), strict=True):
            new[id(old)] = made

    def _operation(self, call: GraphCall, inputs: Any) -> Any:
        """Returns the new layer or operation for a former one that is called on inputs, the same one at each call."""
        operation, key = call.operation, id(call.operation)
        if key in self._graph.nested:
            if key not in self._models:
                graph = self._graph.nested[key]
                if isinstance(inputs, Mapping) and not isinstance(graph.inputs, Mapping):
                    # Keras finds each input by its name.
                    inputs = [inputs[tensor.name] for tensor in tensors_in(graph.inputs)]
                self._models[key] = operation, self.model(graph, [one.shape for one in keras.tree.flatten(inputs)])
            return self._models[key][1]
        if key not in self._layers:
            config = self._graph.changes.get(key, Change()).config
            if self._calls[key] == 1:
                config = known_lengths(operation, inputs, config)
            self._layers[key] = operation, made_again(operation, config, self._graph.names.get(key))
        return self._layers[key][1]

    def assigned(self, value_of: Callable[[Any], np.ndarray]) -> Variables:
        """Assigns values to the new variables; returns the new variable of each former one."""
        found: Variables = {}
        for old, new in self._layers.values():
            changed = self._graph.changes.get(id(old), Change()).values
            for attribute, value in changed.items():
                getattr(new, attribute).assign(value)
            fixed = {id(getattr(new, attribute)) for attribute in changed}
            for one, other in pairs_of(old, new):
                # Two layers may hold one variable, and are made again apart.
                found.setdefault(id(one), (one, other))
                other.trainable = one.trainable
                if id(other) not in fixed:
                    assign(one, other, value_of(one))
        return found

    def copy_trainable(self) -> None:
        """Makes the nested models trainable that are; `assigned` does so for the layers."""
        for old, new in reversed(list(self._models.values())):
            new.trainable = old.trainable


def _shape(declared: Sequence[int | None], given: Sequence[int | None]) -> tuple[int | None, ...]:
    """Returns the shape of a new input: None where the former one has None, else the length of the tensor passed.

    Keras adds or removes a last axis of length 1; then the shape stays.
    """
    if len(declared) != len(given):
        return tuple(declared)
    return tuple(
        None if old is None else (old if new is None else new) for old, new in zip(declared, given, strict=True)
    )

"""Makes Keras models again from their graphs of calls."""

from __future__ import annotations

from typing import Any

import keras

from prunekit.anatomy.model_graph import graph_of
from prunekit.techniques.shrink.layer_copies import (
    Variables,
    copy_trainable,
    input_like,
    made_again,
    pairs_of,
    takes_a_graph,
)
from prunekit.techniques.shrink.layer_graph import Call, Graph, LayerGraph


def build(graph: LayerGraph) -> tuple[Any, Variables]:
    """Returns a new model with the calls of a graph, and the new variable of each former one of an unchanged layer.

    Its layers are new, of the same names, with the values of the former ones. The new model has the class of the former
    one where that class is made from inputs and outputs. It is not compiled.

    Raises:
        ValueError: A layer cannot be made again from its config.
    """
    building = _Building(graph)
    model = building.model(graph.main)
    variables = building.assigned()
    model.trainable = graph.model.trainable
    building.copy_trainable()
    return model, variables


class _Building:
    """One model that is made again."""

    def __init__(self, graph: LayerGraph):
        self._graph = graph
        self._layers: dict[int, tuple[Any, Any]] = {}
        self._models: dict[int, tuple[Any, Any]] = {}

    def model(self, graph: Graph) -> Any:
        """Returns the new model of one graph; its layers have the values of new layers."""
        given = keras.tree.flatten(graph.inputs)
        entries = [input_like(tensor, tensor.shape) for tensor in given]
        if isinstance(graph.model, keras.Sequential):
            return self._sequential(graph, entries[0])
        facts = {id(tensor): entry for tensor, entry in zip(given, entries, strict=True)}
        for call in graph.calls:
            self._run(call, facts)
        inputs = keras.tree.map_structure(lambda tensor: facts[id(tensor)], graph.inputs)
        outputs = keras.tree.map_structure(lambda tensor: facts[id(tensor)], graph.outputs)
        plain = graph_of(graph.model) is not None and takes_a_graph(type(graph.model))
        return (type(graph.model) if plain else keras.Model)(inputs, outputs, name=graph.model.name)

    def _sequential(self, graph: Graph, entry: Any) -> Any:
        made = keras.Sequential([entry], name=graph.model.name)
        for call in graph.calls:
            made.add(self._operation(call))
        return made

    def _run(self, call: Call, facts: dict[int, Any]) -> None:
        def known(leaf: Any) -> Any:
            return facts[id(leaf)] if isinstance(leaf, keras.KerasTensor) else leaf

        args, kwargs = keras.tree.map_structure(known, (call.args, call.kwargs))
        outputs = self._operation(call)(*args, **kwargs)
        for old, new in zip(call.outputs, keras.tree.flatten(outputs), strict=True):
            facts[id(old)] = new

    def _operation(self, call: Call) -> Any:
        """Returns the new layer or operation for a former one, the same one at each call."""
        operation, key = call.operation, id(call.operation)
        if key in self._graph.nested:
            if key not in self._models:
                self._models[key] = operation, self.model(self._graph.nested[key])
            return self._models[key][1]
        if key not in self._layers:
            self._layers[key] = operation, self._again(operation)
        return self._layers[key][1]

    def _again(self, operation: Any) -> Any:
        change = self._graph.changes.get(id(operation))
        return made_again(operation, change.config if change else None)

    def assigned(self) -> Variables:
        """Assigns the values of the former weights, or the changed ones; returns the pairs of unchanged layers."""
        found: Variables = {}
        for old, new in self._layers.values():
            change = self._graph.changes.get(id(old))
            values = {} if change is None else change.values
            if not values:
                found |= {id(one): (one, other) for one, other in pairs_of(old, new)}
                continue
            fixed = {id(getattr(new, attribute)) for attribute in values}
            for attribute, value in values.items():
                getattr(new, attribute).assign(value)
            # A changed layer may have a bias more than the former one, so weights go by their names.
            named = {one.name: one for one in old.variables}
            for other in new.variables:
                if id(other) not in fixed:
                    other.assign(keras.ops.convert_to_numpy(named[other.name]))
        for one, other in found.values():
            if one is not other:
                other.assign(keras.ops.convert_to_numpy(one))
        return found

    def copy_trainable(self) -> None:
        """Makes trainable what is trainable in the former model."""
        for old, new in reversed(list(self._models.values())):
            new.trainable = old.trainable
        for old, new in self._layers.values():
            if isinstance(old, keras.layers.Layer):
                copy_trainable(old, new)

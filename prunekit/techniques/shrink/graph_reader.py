"""Reads a model's graph of calls as data that can be rewritten."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from prunekit.anatomy.model_graph import graph_of, nodes_of
from prunekit.anatomy.recorded_calls import RecordedCall, recorded_model
from prunekit.techniques.shrink.calls import Call, Graph, tensors_in


class GraphReader:
    """Reads the calls of a model and of its nested models.

    Args:
        model: The model.
        inside: As for `LayerGraph`.

    Attributes:
        nested: id of a nested model -> its graph.
        names: id of a layer that is no longer inside another -> its new name.

    Raises:
        ValueError: The model has no graph, and its `call` cannot be followed.
    """

    def __init__(self, model: Any, inside: Callable[[Any], RecordedCall | None]):
        self.nested: dict[int, Graph] = {}
        self.names: dict[int, str] = {}
        self._model, self._inside = model, inside
        self._call = None if graph_of(model) is not None else inside(model) or recorded_model(model)
        self._seen: set[int] = set()
        self._taken: set[str] = set()
        self._sharing = self._models_that_share_layers()

    def main(self) -> Graph:
        """Returns the graph of the model."""
        if self._call is None:
            return self._graph(self._model)
        tensors: dict[int, Any] = {}
        calls = self._calls(self._call.nodes, tensors, "")
        return Graph(self._model, self._call.args[0], _replaced(self._call.outputs, tensors), calls)

    def _graph(self, model: Any) -> Graph:
        graph, tensors = graph_of(model), dict[int, Any]()
        calls = self._calls(_calls_of(model), tensors, "")
        return Graph(model, graph.input, _replaced(graph.output, tensors), calls)

    def _calls(self, nodes: Sequence[Any], tensors: dict[int, Any], prefix: str) -> list[Call]:
        """Returns the calls of nodes.

        Args:
            nodes: The nodes, in order of execution.
            tensors: id of a tensor of the nodes -> the tensor of the calls that stands for it, if it is another.
            prefix: What the names of layers get in front, since they were inside the layer of this name.
        """
        found: list[Call] = []
        for node in nodes:
            args, kwargs = _replaced((node.arguments.args, node.arguments.kwargs), tensors)
            inner, given, results = self._inlined(node)
            if inner is None:
                # The calls inside a layer that is called twice are read twice.
                outputs = [_like(one) for one in node.outputs] if prefix else node.outputs
                tensors |= {id(old): new for old, new in zip(node.outputs, outputs, strict=True) if old is not new}
                found.append(self._read(node.operation, args, kwargs, outputs, prefix))
                continue
            passed = tensors_in((args, kwargs))
            own = {id(old): new for old, new in zip(given, passed, strict=False)}
            found += self._calls(inner, own, f"{prefix}{node.operation.name}_")
            made = keras.tree.flatten(_replaced(results, own))
            tensors |= {id(old): new for old, new in zip(node.outputs, made, strict=True)}
        return found

    def _inlined(self, node: Any) -> tuple[Sequence[Any] | None, Sequence[Any], Any]:
        """Returns the nodes that stand for one node, with the tensors that they read and those that they compute."""
        call = self._inside(node)
        if call is not None:
            return call.nodes, tensors_in((call.args, call.kwargs)), call.outputs
        if id(node.operation) in self._sharing:
            graph = graph_of(node.operation)
            return _calls_of(node.operation), graph.inputs, graph.output
        return None, (), None

    def _read(self, operation: Any, args: Any, kwargs: Any, outputs: Sequence[Any], prefix: str) -> Call:
        given = tensors_in((args, kwargs))
        if type(operation).__name__ == "Multiply" and len(given) == 1:
            number = next(one for one in args if one is not given[0])
            if keras.ops.is_tensor(number) and number.ndim == 0 and "float" in given[0].dtype:
                # Keras takes the product of a symbolic tensor and a constant for sparse, which not all layers accept.
                name = self._unused(f"{prefix}{operation.name}") if prefix else operation.name
                operation = keras.layers.Rescaling(float(number), dtype=given[0].dtype, name=name)
                return Call(operation, (given[0],), {}, outputs)
        if graph_of(operation) is not None:
            if id(operation) not in self.nested:
                self.nested[id(operation)] = self._graph(operation)
        elif prefix and isinstance(operation, keras.layers.Layer) and id(operation) not in self._seen:
            self.names[id(operation)] = self._unused(f"{prefix}{operation.name}")
        self._seen.add(id(operation))
        return Call(operation, args, kwargs, outputs)

    def _unused(self, name: str) -> str:
        """Returns the name, with a number if another layer has it: "a_b" may be "b" in "a", and "a_b" beside "a"."""
        found, number = name, 0
        while found in self._taken:
            number += 1
            found = f"{name}_{number}"
        self._taken.add(found)
        return found

    def _models_that_share_layers(self) -> set[int]:
        """Returns the ids of the nested models with a layer that is also called outside of them."""
        called: dict[int, dict[int, Any]] = {}
        self._collect(self._model, _calls_of(self._model) if self._call is None else self._call.nodes, called)
        found = set()
        for key in called.keys() - {id(self._model)}:
            within, pending = set[int](), [key]
            while pending:
                one = pending.pop()
                if one not in within:
                    within.add(one)
                    pending += called.keys() & called[one].keys()
            inner = {operation for one in within for operation in called[one]}
            outer = {operation for one in called.keys() - within for operation in called[one]}
            if inner & outer:
                found.add(key)
        return found

    def _collect(self, model: Any, nodes: Sequence[Any], called: dict[int, dict[int, Any]]) -> None:
        """Adds the operations that a model calls, and those of the models nested in it, by ids."""
        called[id(model)], pending = {}, list(nodes)
        while pending:
            node = pending.pop()
            call = self._inside(node)
            if call is None:
                called[id(model)][id(node.operation)] = node.operation
                self._taken.add(node.operation.name)
            else:
                pending += call.nodes
        for one in called[id(model)].values():
            if graph_of(one) is not None and id(one) not in called:
                self._collect(one, _calls_of(one), called)


def _calls_of(model: Any) -> list[Any]:
    return [node for node in nodes_of(model) if not node.is_input]


def _like(tensor: Any) -> Any:
    return keras.KerasTensor(tensor.shape, tensor.dtype)


def _replaced(structure: Any, tensors: Mapping[int, Any]) -> Any:
    return keras.tree.map_structure(lambda leaf: tensors.get(id(leaf), leaf), structure)

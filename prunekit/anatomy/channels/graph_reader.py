"""Reads a model's graph of calls as data that can be rewritten."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.ops.numpy import Multiply

from prunekit.anatomy.channels.graph_calls import Call, Graph
from prunekit.anatomy.channels.recorded_calls import RecordedCall, recorded_model
from prunekit.anatomy.graph.model_graph import (
    calls_of,
    graph_of,
    inputs_in,
    reads_inputs_alone,
    tensors_in,
    with_tensors,
)

# Returns for a node of a graph, or for a model without a graph, the calls that replace it; None if it stays.
Opened = Callable[[Any], RecordedCall | None]


@dataclass(frozen=True, eq=False)
class ReadGraphs:
    """What was read of a model.

    Attributes:
        main: Its graph.
        nested: id of a nested model -> its graph.
        names: id of a layer, operation or nested model -> its name in the new model, where that is another.
    """

    main: Graph
    nested: dict[int, Graph]
    names: dict[int, str]


def read_graphs(model: Any, opened: Opened | None, *, names_operations: bool = False) -> ReadGraphs:
    """Returns the graphs of a model and of its nested models.

    Args:
        model: The model.
        opened: As for `LayerGraph`.
        names_operations: True: operations inside opened layers, too, get the names of these before theirs.

    Raises:
        ValueError: The model has no graph, and its `call` cannot be followed.
    """
    reader = _Reader(model, opened, names_operations=names_operations)
    return ReadGraphs(reader.main(), reader.nested, reader.names)


@dataclass(frozen=True, eq=False)
class _Place:
    """Where calls are read.

    Attributes:
        taken: Name -> id of the layer or operation of this name in the present model.
        path: Names of the opened layers and nested models around the calls, each with "_" after it.
        prefix: Likewise of the opened layers alone: the names of their layers begin with it.
    """

    taken: dict[str, int]
    path: str = ""
    prefix: str = ""


class _Reader:
    """Reads one model; see `ReadGraphs`."""

    def __init__(self, model: Any, opened: Opened | None, *, names_operations: bool):
        self.nested: dict[int, Graph] = {}
        self.names: dict[int, str] = {}
        self._model, self._opens, self._opened = model, opened is not None, opened or (lambda node: None)
        self._names_operations = names_operations
        self._call = None if graph_of(model) is not None else self._opened(model) or recorded_model(model)
        self._named: set[int] = set()
        self._computed: set[int] = set()
        self._sharing = self._models_that_share_layers()

    def main(self) -> Graph:
        """Returns the graph of the model."""
        if self._call is None:
            return self._graph(self._model)
        inputs = self._call.args[0]
        return self._read(self._model, self._call.nodes, inputs, self._call.outputs)

    def _graph(self, model: Any) -> Graph:
        graph = graph_of(model)
        return self._read(model, calls_of(model), graph.input, graph.output)

    def _read(self, model: Any, nodes: Sequence[Any], inputs: Any, outputs: Any) -> Graph:
        histories = [getattr(one, "_keras_history", None) for one in tensors_in(inputs)]
        layers = [one.operation for one in histories if one is not None and one.operation is not None]
        layers += [node.operation for node in nodes if self._opened_node(node) is None]
        place = _Place({layer.name: id(layer) for layer in layers})
        tensors: dict[int, Any] = {}
        calls = self._calls(nodes, tensors, place)
        return Graph(model, inputs, with_tensors(outputs, tensors), calls)

    def _calls(self, nodes: Sequence[Any], tensors: dict[int, Any], place: _Place) -> list[Call]:
        """Returns the calls of nodes, with those inside opened layers.

        Args:
            nodes: The nodes, in order of execution.
            tensors: id of a tensor of the nodes -> the tensor that replaces it in the calls. Outputs are added.
            place: Where the nodes are.
        """
        found: list[Call] = []
        for node in nodes:
            args, kwargs = with_tensors((node.arguments.args, node.arguments.kwargs), tensors)
            opened = self._opened_node(node)
            if opened is None:
                outputs = [self._output(one, tensors) for one in node.outputs]
                found.append(self._call_of(node.operation, args, kwargs, outputs, place))
                continue
            inner_of = dict(zip(map(id, opened.inputs), tensors_in((args, kwargs)), strict=True))
            found += self._calls(opened.nodes, inner_of, opened.place(place, node.operation))
            results = keras.tree.flatten(with_tensors(opened.outputs, inner_of))
            tensors |= {id(old): new for old, new in zip(node.outputs, results, strict=True)}
        return found

    def _output(self, tensor: Any, tensors: dict[int, Any]) -> Any:
        """Returns an output of a node, or a copy if the node is read again: its layer is opened in two calls."""
        if id(tensor) not in self._computed:
            self._computed.add(id(tensor))
            return tensor
        tensors[id(tensor)] = keras.KerasTensor(tensor.shape, tensor.dtype)
        mask = get_keras_mask(tensor)
        if mask is not None:
            set_keras_mask(tensors[id(tensor)], tensors.get(id(mask), mask))
        return tensors[id(tensor)]

    def _opened_node(self, node: Any) -> _OpenedNode | None:
        call = self._opened(node)
        if call is not None:
            return _OpenedNode(call.nodes, tensors_in((call.args, call.kwargs)), call.outputs, renames=True)
        if id(node.operation) in self._sharing and _is_plain(node):
            graph = graph_of(node.operation)
            return _OpenedNode(calls_of(node.operation), graph.inputs, graph.output, renames=False)
        return None

    def _call_of(self, operation: Any, args: Any, kwargs: Any, outputs: Sequence[Any], place: _Place) -> Call:
        """Returns the call of a layer or operation that stays; reads a nested model, once."""
        given = tensors_in(args)
        if self._opens and type(operation) is Multiply and len(given) == 1:
            number: Any = next((one for one in args if one is not given[0]), None)
            if keras.ops.is_tensor(number) and number.ndim == 0 and "float" in given[0].dtype:
                # Keras takes the product of a symbolic tensor and a constant for sparse, which layers inside an opened
                # one may not accept, although the one around them does.
                name = _unused(f"{place.prefix}{operation.name}", place.taken) if place.prefix else operation.name
                operation = keras.layers.Rescaling(float(number), dtype=outputs[0].dtype, name=name)
                place.taken[name] = id(operation)
                return Call(operation, (given[0],), {}, outputs)
        if id(operation) not in self._named:
            self._named.add(id(operation))
            self._name(operation, place)
            if graph_of(operation) is not None:
                self.nested[id(operation)] = self._graph(operation)
        return Call(operation, args, kwargs, outputs)

    def _name(self, operation: Any, place: _Place) -> None:
        """Gives a name that no other layer has: "a_b" may be "b" in "a", and "a_b" beside "a"."""
        prefixed = self._names_operations or isinstance(operation, keras.layers.Layer)
        name = f"{place.prefix}{operation.name}" if prefixed and graph_of(operation) is None else str(operation.name)
        if place.taken.get(name, id(operation)) != id(operation):
            name = _unused(f"{place.path}{operation.name}", place.taken)
        place.taken[name] = id(operation)
        if name != operation.name:
            self.names[id(operation)] = name

    def _models_that_share_layers(self) -> set[int]:
        """Returns the ids of the nested models with a layer that is also called outside of them."""
        called: dict[int, dict[int, Any]] = {}
        self._collect(self._model, calls_of(self._model) if self._call is None else self._call.nodes, called)
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
            call = self._opened(node)
            if call is None:
                called[id(model)][id(node.operation)] = node.operation
            else:
                pending += call.nodes
        for one in called[id(model)].values():
            if graph_of(one) is not None and id(one) not in called:
                self._collect(one, calls_of(one), called)


@dataclass(frozen=True, eq=False)
class _OpenedNode:
    """The nodes that replace a node, the tensors that they read, and their results.

    Attributes:
        nodes: The nodes, in order of execution.
        inputs: The tensors that they read.
        outputs: What they compute, in the structure of the node's outputs.
        renames: True if the layers get the name of the opened layer before theirs; otherwise names stay if they can.
    """

    nodes: Sequence[Any]
    inputs: Sequence[Any]
    outputs: Any
    renames: bool

    def place(self, outer: _Place, operation: Any) -> _Place:
        """Returns the place of the nodes in an opened layer, model or operation."""
        path = f"{outer.path}{operation.name}_"
        if outer.prefix and not isinstance(operation, keras.layers.Layer):
            # Of an operation in an opened layer, which it has a name by its kind in.
            return _Place(outer.taken, path, outer.prefix)
        return _Place(outer.taken, path, path if self.renames else outer.prefix)


def _is_plain(node: Any) -> bool:
    """Returns True if a nested model is called with its inputs alone, of its declared structure and numbers of axes."""
    if not reads_inputs_alone(node) or node.arguments.kwargs.get("training"):
        return False
    given = inputs_in(node.arguments.args, node.arguments.kwargs)
    declared = graph_of(node.operation).input
    ranks = [[len(one.shape) for one in tensors_in(structure)] for structure in (given, declared)]
    return isinstance(given, Mapping) is isinstance(declared, Mapping) and ranks[0] == ranks[1]


def _unused(name: str, taken: Mapping[str, int]) -> str:
    """Returns the name, with a number if it is taken."""
    found, number = name, 0
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found

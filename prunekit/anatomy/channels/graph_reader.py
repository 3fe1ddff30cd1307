"""Reads a model's graph of calls as data that can be rewritten."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.ops.numpy import Multiply

from prunekit.anatomy.channels.graph_calls import Graph, GraphCall
from prunekit.anatomy.channels.recorded_calls import RecordedCall, graph_call, recorded_model
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
    """The graphs of a model.

    Attributes:
        main: The graph of the model itself.
        nested: id of a nested model -> its graph.
        names: id of a layer, operation or nested model -> its name in the new model, where the names differ.
    """

    main: Graph
    nested: dict[int, Graph]
    names: dict[int, str]


def read_graphs(model: Any, opened: Opened | None, *, names_operations: bool = False) -> ReadGraphs:
    """Returns the graphs of a model and of its nested models.

    Args:
        model: The model.
        opened: As for `LayerGraph`.
        names_operations: True if operations inside an opened layer, as layers do, get its name as a prefix of theirs.

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
        prefix: Names of the opened layers alone, likewise: what the names of layers inside them begin with.
    """

    taken: dict[str, int]
    path: str = ""
    prefix: str = ""

    def inside(self, operation: Any, *, renames: bool) -> _Place:
        """Returns the place of the calls in an opened layer, model or operation.

        Args:
            operation: The layer, model or operation.
            renames: True if its name becomes part of the prefix; otherwise names stay if they can.
        """
        path = f"{self.path}{operation.name}_"
        # An operation inside an opened layer is named by its kind: its name is no prefix.
        renames = renames and (not self.prefix or isinstance(operation, keras.layers.Layer))
        return _Place(self.taken, path, path if renames else self.prefix)


class _Reader:
    """Reads one model; see `ReadGraphs`."""

    def __init__(self, model: Any, opened: Opened | None, *, names_operations: bool):
        self.nested: dict[int, Graph] = {}
        self.names: dict[int, str] = {}
        self._model, self._opens, self._opened = model, opened is not None, opened or (lambda node: None)
        self._names_operations = names_operations
        self._call = graph_call(model) or self._opened(model) or recorded_model(model)
        self._named: set[int] = set()
        self._computed: set[int] = set()
        self._sharing = self._models_that_share_layers()

    def main(self) -> Graph:
        """Returns the graph of the model."""
        return self._read(self._model, self._call)

    def _read(self, model: Any, call: RecordedCall) -> Graph:
        (inputs,) = call.args
        histories = [getattr(one, "_keras_history", None) for one in tensors_in(inputs)]
        layers = [one.operation for one in histories if one is not None and one.operation is not None]
        layers += [node.operation for node in call.nodes if self._opened_node(node) is None]
        place = _Place({layer.name: id(layer) for layer in layers})
        tensors: dict[int, Any] = {}
        calls = self._calls(call.nodes, tensors, place)
        return Graph(model, inputs, with_tensors(call.outputs, tensors), calls)

    def _calls(self, nodes: Sequence[Any], tensors: dict[int, Any], place: _Place) -> list[GraphCall]:
        """Returns the calls of nodes, with those inside opened layers.

        Args:
            nodes: The nodes, in order of execution.
            tensors: id of a tensor of the nodes -> the tensor that replaces it in the calls. Outputs are added.
            place: Where the nodes are.
        """
        found: list[GraphCall] = []
        for node in nodes:
            args, kwargs = with_tensors((node.arguments.args, node.arguments.kwargs), tensors)
            opened = self._opened_node(node)
            if opened is None:
                outputs = [self._output(one, tensors) for one in node.outputs]
                found.append(self._call_of(node.operation, args, kwargs, outputs, place))
                continue
            inner = tensors_in((opened.args, opened.kwargs))
            inner_of = dict(zip(map(id, inner), tensors_in((args, kwargs)), strict=True))
            renames = self._opened(node) is not None
            found += self._calls(opened.nodes, inner_of, place.inside(node.operation, renames=renames))
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

    def _opened_node(self, node: Any) -> RecordedCall | None:
        """Returns the calls that replace a node; None if it stays."""
        shares = id(node.operation) in self._sharing and _is_plain(node)
        return self._opened(node) or (graph_call(node.operation) if shares else None)

    def _call_of(self, operation: Any, args: Any, kwargs: Any, outputs: Sequence[Any], place: _Place) -> GraphCall:
        """Returns the call of a layer or operation that stays; reads a nested model, once."""
        given = tensors_in(args)
        if self._opens and type(operation) is Multiply and len(given) == 1:
            number: Any = next((one for one in args if one is not given[0]), None)
            if keras.ops.is_tensor(number) and number.ndim == 0 and "float" in given[0].dtype:
                # Keras marks the product of a symbolic tensor and a constant as sparse. Layers inside an opened layer
                # may refuse sparse inputs, although the opened layer accepts them.
                name = _unused(f"{place.prefix}{operation.name}", place.taken) if place.prefix else operation.name
                operation = keras.layers.Rescaling(float(number), dtype=outputs[0].dtype, name=name)
                place.taken[name] = id(operation)
                return GraphCall(operation, (given[0],), {}, outputs)
        if id(operation) not in self._named:
            self._named.add(id(operation))
            self._name(operation, place)
            inner = graph_call(operation)
            if inner is not None:
                self.nested[id(operation)] = self._read(operation, inner)
        return GraphCall(operation, args, kwargs, outputs)

    def _name(self, operation: Any, place: _Place) -> None:
        """Gives a name that no other layer has: "b" in "a" becomes "a_b", which may also be a layer beside "a"."""
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
        self._collect(self._model, self._call.nodes, called)
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

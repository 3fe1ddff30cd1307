"""Runs a model layer by layer over calibration data, once as it was and once as it is while its weights change.

Quantization and pruning of one layer after another need, at each layer, the inputs that the changed layers before it
produce and the inputs that it had before. A model with a graph is run call by call, so that each layer runs a fixed
number of times, however many layers there are.
"""

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from prunekit.anatomy.model_graph import graph_of, nodes_of


@dataclass(frozen=True, eq=False)
class Pair:
    """A structure of tensors in the model as it was, and in the model as it is; the same object if nothing changed."""

    before: Any
    after: Any

    @property
    def same(self) -> bool:
        """True if the weights that led to the tensors are unchanged."""
        return self.after is self.before

    def each(self, function: Callable[[Any], Any]) -> "Pair":
        """Returns the function's results; calls it once if both structures are the same."""
        before = function(self.before)
        return Pair(before, before if self.same else function(self.after))


@dataclass(frozen=True, eq=False)
class Call:
    """One call in the model's graph, or the whole model if it has no graph.

    Attributes:
        operation: The layer or operation.
        arguments: (args, kwargs) of the call, one pair per batch.
    """

    operation: Any
    arguments: Sequence[Pair]


# The values of one tensor of the graph, one pair per batch.
Column = list[Pair]
# Receives each call in the order of execution, and returns its outputs, one pair per batch.
Visit = Callable[[Call], list[Pair]]


def walk(model: Any, batches: Sequence[Any], visit: Visit) -> None:
    """Shows every call of a model to `visit`, with the outputs that `visit` returned for the calls before it.

    Args:
        model: A built Keras model. A model without a graph of layers, and models that are called several times inside
            it, are one call.
        batches: The inputs of the model.
        visit: Called once per call.

    Memory: the inputs of all calls that were not yet visited, for all batches, twice after the first change.
    """
    tensors = [keras.tree.map_structure(ops.convert_to_tensor, batch) for batch in batches]
    pairs = [Pair(batch, batch) for batch in tensors]
    if graph_of(model) is None:
        visit(Call(model, [pair.each(lambda inputs: ((inputs,), {"training": False})) for pair in pairs]))
        return
    _walk_graph(model, pairs, visit)


def _walk_graph(model: Any, inputs: Sequence[Pair], visit: Visit) -> list[Column]:
    """Returns the graph's outputs, one column for each output tensor."""
    graph, nodes = graph_of(model), nodes_of(model)
    flat = [pair.each(graph._standardize_inputs) for pair in inputs]
    values: dict[int, Column] = dict(zip(map(id, graph.inputs), _columns(flat, len(graph.inputs)), strict=True))
    uses = Counter(id(tensor) for node in nodes for tensor in node.input_tensors)
    uses.update(map(id, graph.outputs))
    calls = Counter(id(node.operation) for node in nodes)
    for node in nodes:
        if node.is_input:
            continue
        needed = {id(tensor): values[id(tensor)] for tensor in node.input_tensors}
        arguments = [_filled(node, {key: column[i] for key, column in needed.items()}) for i in range(len(inputs))]
        del needed
        uses.subtract(map(id, node.input_tensors))
        for key in [key for key in values if uses[key] <= 0]:
            del values[key]
        if calls[id(node.operation)] == 1 and isinstance(node.operation, keras.Model) and graph_of(node.operation):
            outputs = _walk_graph(node.operation, [pair.each(_inputs_of) for pair in arguments], visit)
        else:
            found = visit(Call(node.operation, arguments))
            outputs = _columns([pair.each(keras.tree.flatten) for pair in found], len(node.outputs))
        values |= {
            id(tensor): column for tensor, column in zip(node.outputs, outputs, strict=True) if uses[id(tensor)] > 0
        }
    return [values[id(tensor)] for tensor in graph.outputs]


def _columns(batches: Sequence[Pair], count: int) -> list[Column]:
    """Returns one column for each of the `count` tensors in the lists of the batches."""
    return [[pair.each(operator.itemgetter(at)) for pair in batches] for at in range(count)]


def _filled(node: Any, pairs: dict[int, Pair]) -> Pair:
    """Returns (args, kwargs) of a node's call for one batch."""

    def of(side: str) -> Any:
        args, kwargs = node.arguments.fill_in({key: getattr(pair, side) for key, pair in pairs.items()})
        if "training" in getattr(node.operation, "_call_context_args", ()):
            kwargs = {**kwargs, "training": False}
        return args, kwargs

    before = of("before")
    return Pair(before, before if all(pair.same for pair in pairs.values()) else of("after"))


def _inputs_of(arguments: Any) -> Any:
    args, kwargs = arguments
    return args[0] if args else kwargs["inputs"]

"""A model's graph of calls as plain data that can be rewritten: calls, their inputs, outputs and changed weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.model_graph import graph_of, nodes_of
from prunekit.anatomy.recorded_calls import recorded
from prunekit.sparsity.array_ops import array_of


def tensors_in(structure: Any) -> list[Any]:
    """Returns the symbolic tensors in a structure, in order."""
    return [leaf for leaf in keras.tree.flatten(structure) if isinstance(leaf, keras.KerasTensor)]


class Call:
    """One call of a layer or operation. The model's own symbolic tensors stand for inputs and outputs.

    Args:
        operation: The layer or operation of the former model, or a new one without weights.
        args: Positional arguments.
        kwargs: Keyword arguments.
        outputs: The tensors that the call computes.
    """

    def __init__(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Sequence[Any]):
        self.operation, self.args, self.kwargs, self.outputs = operation, args, dict(kwargs), tuple(outputs)
        self.inputs = tensors_in((args, self.kwargs))

    @property
    def name(self) -> str:
        """Name of the layer or operation."""
        return str(self.operation.name)

    @property
    def kind(self) -> str:
        """Name of the class of the layer or operation."""
        return type(self.operation).__name__

    @property
    def output(self) -> Any:
        """The only output; None if there are several."""
        return self.outputs[0] if len(self.outputs) == 1 else None

    @property
    def input(self) -> Any:
        """The only tensor that is read, besides masks; None if there are several."""
        found = tensors_in((self.args, {name: value for name, value in self.kwargs.items() if name != "mask"}))
        return found[0] if len(found) == 1 else None

    @property
    def fixed_training(self) -> bool:
        """True if the graph itself asks for the behaviour of training: `layer(x, training=True)`."""
        return self.kwargs.get("training") not in (None, False)

    def read(self, function: Callable[[Any], Any]) -> None:
        """Replaces each symbolic tensor in the arguments by `function` of it."""

        def changed(leaf: Any) -> Any:
            return function(leaf) if isinstance(leaf, keras.KerasTensor) else leaf

        self.args, self.kwargs = keras.tree.map_structure(changed, (self.args, self.kwargs))
        self.inputs = tensors_in((self.args, self.kwargs))


class Graph:
    """The calls of one model, without those of nested models.

    Args:
        model: The model.
        inputs: Structure of its inputs.
        outputs: Structure of its outputs.
        calls: Its calls in order of execution.
    """

    def __init__(self, model: Any, inputs: Any, outputs: Any, calls: Sequence[Call]):
        self.model, self.inputs, self.outputs, self.calls = model, inputs, outputs, list(calls)
        self._producers: dict[int, Call] | None = None
        self._readers: dict[int, list[Call]] = {}

    def producer(self, tensor: Any) -> Call | None:
        """Returns the call that computes a tensor; None for an input."""
        return self._index().get(id(tensor))

    def readers(self, tensor: Any) -> list[Call]:
        """Returns the calls that read a tensor, each once."""
        self._index()
        return self._readers.get(id(tensor), [])

    def is_output(self, tensor: Any) -> bool:
        """Returns True for an output of the model."""
        return any(one is tensor for one in keras.tree.flatten(self.outputs))

    def is_input(self, tensor: Any) -> bool:
        """Returns True for an input of the model."""
        return any(one is tensor for one in keras.tree.flatten(self.inputs))

    def can_replace(self, old: Any, new: Any) -> bool:
        """Returns False if an output of the model would become an input, or the same as another output."""
        return not self.is_output(old) or not (self.is_output(new) or self.is_input(new))

    def replace(self, old: Any, new: Any) -> None:
        """Lets every reader of `old`, and the outputs, read `new`; then drops calls that no output depends on."""

        def other(tensor: Any) -> Any:
            return new if tensor is old else tensor

        for call in self.readers(old):
            call.read(other)
        self.outputs = keras.tree.map_structure(other, self.outputs)
        self.sweep()

    def sweep(self) -> None:
        """Drops the calls that no output depends on."""
        needed = {id(tensor) for tensor in keras.tree.flatten(self.outputs)}
        left = []
        for call in reversed(self.calls):
            if needed.intersection(map(id, call.outputs)):
                needed.update(map(id, call.inputs))
                left.append(call)
        self.calls = left[::-1]
        self._producers = None

    def _index(self) -> dict[int, Call]:
        if self._producers is None:
            self._producers, self._readers = {}, {}
            for call in self.calls:
                self._producers |= {id(tensor): call for tensor in call.outputs}
                for key in dict.fromkeys(map(id, call.inputs)):
                    self._readers.setdefault(key, []).append(call)
        return self._producers


@dataclass
class Change:
    """What differs when a layer is made again.

    Attributes:
        config: Entries of the config.
        values: Values of the weights, by attribute.
    """

    config: dict[str, Any] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)


class LayerGraph:
    """The graphs of a model and of its nested models, with the changes of layers. The model itself stays as it is.

    Args:
        model: A built model with a graph of layers, or a subclassed model whose `call` consists of layers and
            operations alone.

    Attributes:
        model: The model.
        main: Its graph.
        nested: id of a nested model -> its graph.
        changes: id of a layer -> what differs when it is made again.

    Raises:
        ValueError: The model's calls cannot be read.
    """

    def __init__(self, model: Any):
        self.model = model
        self.nested: dict[int, Graph] = {}
        self.changes: dict[int, Change] = {}
        self.main = self._read(model) if graph_of(model) is not None else _opened(model)

    def _read(self, model: Any) -> Graph:
        graph = graph_of(model)
        calls = []
        for node in nodes_of(model):
            if node.is_input:
                continue
            calls.append(Call(node.operation, node.arguments.args, node.arguments.kwargs, node.outputs))
            if graph_of(node.operation) is not None and id(node.operation) not in self.nested:
                self.nested[id(node.operation)] = self._read(node.operation)
        return Graph(model, graph.input, graph.output, calls)

    def graphs(self) -> Iterator[Graph]:
        """Yields the graph of the model, and that of each nested model which is still called."""
        pending, seen = [self.main], set()
        while pending:
            graph = pending.pop(0)
            yield graph
            found = [id(call.operation) for call in graph.calls if id(call.operation) in self.nested]
            pending += [self.nested[key] for key in dict.fromkeys(found) if key not in seen]
            seen.update(found)

    def calls_of(self, operation: Any) -> int:
        """Returns how often the graphs call a layer or operation."""
        return sum(call.operation is operation for graph in self.graphs() for call in graph.calls)

    def value(self, layer: Any, attribute: str) -> np.ndarray | None:
        """Returns the present values of a weight; None if the layer has no such weight."""
        change = self.changes.get(id(layer))
        if change is not None and attribute in change.values:
            return change.values[attribute]
        variable = getattr(layer, attribute, None)
        return None if variable is None else array_of(variable)

    def change(self, layer: Any, config: Mapping[str, Any], values: Mapping[str, np.ndarray]) -> None:
        """Changes entries of a layer's config, and weights."""
        change = self.changes.setdefault(id(layer), Change())
        change.config |= config
        # Without + 0, a pruned weight times a negative number would be -0.
        change.values |= {name: value + 0 for name, value in values.items()}

    def layer_count(self) -> int:
        """Returns the number of different layers and operations that are called, without inputs and nested models."""
        called = {id(call.operation) for graph in self.graphs() for call in graph.calls}
        return len(called - self.nested.keys())


def _opened(model: Any) -> Graph:
    declared = getattr(model, "_inputs_struct", None) or getattr(model, "inputs", None)
    if declared:
        given = declared[0] if isinstance(declared, list) and len(declared) == 1 else declared
        inputs: Any = keras.tree.map_structure(lambda one: keras.KerasTensor(one.shape, one.dtype), given)
    else:
        shape = (model.get_build_config() or {}).get("input_shape") if model.built else None
        single = isinstance(shape, list | tuple) and all(one is None or isinstance(one, int) for one in shape)
        inputs = keras.KerasTensor((None, *shape[1:]), dtype=model.input_dtype) if shape and single else None
    call = None if inputs is None else recorded(model, (inputs,), {})
    if call is None or not call.repeatable:
        raise ValueError(
            f"The model {model.name!r} has no graph of layers, and its `call` cannot be followed: it must be built, "
            "take one tensor, and consist of Keras layers and keras.ops alone, with the same calls for every batch "
            f"size and in training. Received: {type(model).__name__}. Build it as keras.Model(inputs, outputs)."
        )
    calls = [Call(node.operation, node.arguments.args, node.arguments.kwargs, node.outputs) for node in call.nodes]
    return Graph(model, call.args[0], call.outputs, calls)

"""The calls of a model's layers and operations as plain data that can be rewritten."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from prunekit.anatomy.graph.model_graph import tensors_in


class GraphCall:
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

    @property
    def has_default_options(self) -> bool:
        """True if each keyword argument is None or its default; Keras records defaults such as training=False, too."""
        defaults = inspect.signature(self.operation.call).parameters if self.kwargs else {}
        return all(
            value is None or (name in defaults and value is defaults[name].default)
            for name, value in self.kwargs.items()
        )

    def map_inputs(self, function: Callable[[Any], Any]) -> None:
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

    def __init__(self, model: Any, inputs: Any, outputs: Any, calls: Sequence[GraphCall]):
        self.model, self.inputs, self.outputs, self.calls = model, inputs, outputs, list(calls)
        self._producers: dict[int, GraphCall] | None = None
        self._readers: dict[int, list[GraphCall]] = {}

    def producer(self, tensor: Any) -> GraphCall | None:
        """Returns the call that computes a tensor; None for an input."""
        return self._index().get(id(tensor))

    def readers(self, tensor: Any) -> list[GraphCall]:
        """Returns the calls that read a tensor, each once."""
        self._index()
        return self._readers.get(id(tensor), [])

    def is_output(self, tensor: Any) -> bool:
        """Returns True for an output of the model."""
        return any(one is tensor for one in keras.tree.flatten(self.outputs))

    def is_input(self, tensor: Any) -> bool:
        """Returns True for an input of the model."""
        return any(one is tensor for one in keras.tree.flatten(self.inputs))

    @property
    def is_chain(self) -> bool:
        """True if each call is that of a layer on the output of the call before it alone, as in a Sequential model."""
        tensor = self.inputs
        # In the config of a Sequential model, a layer that is called twice would stand once.
        if len({id(call.operation) for call in self.calls}) < len(self.calls):
            return False
        for call in self.calls:
            alone = isinstance(call.operation, keras.layers.Layer) and len(call.args) == 1 and call.args[0] is tensor
            if not alone or call.output is None or not call.has_default_options:
                return False
            tensor = call.output
        return bool(self.outputs is tensor)

    def can_replace(self, old: Any, new: Any) -> bool:
        """Returns False if an output of the model would become an input, or the same as another output."""
        return not self.is_output(old) or not (self.is_output(new) or self.is_input(new))

    def replace(self, old: Any, new: Any) -> None:
        """Replaces `old` by `new` in all arguments and outputs, then drops the calls that no output depends on."""

        def other(tensor: Any) -> Any:
            return new if tensor is old else tensor

        for call in self.readers(old):
            call.map_inputs(other)
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

    def _index(self) -> dict[int, GraphCall]:
        if self._producers is None:
            self._producers, self._readers = {}, {}
            for call in self.calls:
                self._producers |= {id(tensor): call for tensor in call.outputs}
                for key in dict.fromkeys(map(id, call.inputs)):
                    self._readers.setdefault(key, []).append(call)
        return self._producers

"""Builds a model again with fewer channels: new layers from changed configs, weights cut to the kept channels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.channel_axes import resolved
from prunekit.anatomy.channel_links import Rescale
from prunekit.anatomy.channels import Channels
from prunekit.anatomy.model_graph import graph_of, nodes_of
from prunekit.anatomy.recorded_calls import RecordedCall
from prunekit.anatomy.weight_entries import cut
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.shrink.constants import NO_CONSTANTS, Constants
from prunekit.techniques.shrink.layer_copies import (
    Variables,
    can_be_made_again,
    input_like,
    made_again,
    pairs_of,
    takes_a_graph,
)


def without_channels(
    channels: Channels, removed: np.ndarray, constants: Constants = NO_CONSTANTS
) -> tuple[Any, Variables]:
    """Returns a new model without some channels, and the new variable of each former one.

    The new model is not compiled. A model without a graph of layers, and a layer whose inner layers shrink, are
    replaced by the layers inside them.

    Args:
        channels: The channels of the model.
        removed: The channels to remove.
        constants: What takes over the constants of removed channels.

    Raises:
        ValueError: A layer cannot be made again from its config.
    """
    building = _Rebuilding(channels, channels.kept_numbers(removed), constants.biases)
    model = building.model()
    variables = building.variables()
    values = {key: array_of(old) for key, (old, _) in variables.items()}
    assign_cut(channels, removed, variables, values | constants.values)
    return model, variables


def assign_cut(channels: Channels, removed: np.ndarray, variables: Variables, values: Mapping[int, np.ndarray]) -> None:
    """Assigns values of the former shapes to new variables, cut to the kept channels.

    Args:
        channels: The channels of the former model.
        removed: The removed channels.
        variables: The new variable of each former one.
        values: id of a former variable -> its value.
    """
    kept = channels.kept_numbers(removed)
    rescaled = {id(one.variable): one for one in channels.links.rescaled}
    for key, value in values.items():
        old, new = variables[key]
        left = cut(value, channels.links.weights.get(key), kept)
        left = _rescaled(left, rescaled[key], kept) if key in rescaled else left
        if tuple(new.shape) != left.shape:
            raise ValueError(
                f"The weight {old.path!r} has another shape when its layer is made again: {tuple(new.shape)} instead "
                f"of {left.shape}. Leave the layer out with `exclude`."
            )
        if new is not old:
            new.assign(left)


def _rescaled(value: np.ndarray, one: Rescale, kept: np.ndarray) -> np.ndarray:
    left = int(np.count_nonzero(kept[one.channels]))
    factor = float((one.channels.size / left) ** one.power)
    return value if factor == 1.0 else ((value + one.offset) * factor - one.offset).astype(value.dtype)


class _Rebuilding:
    """One model that is built again."""

    def __init__(self, channels: Channels, kept: np.ndarray, biases: Mapping[int, np.ndarray]):
        self._channels, self._links, self._kept, self._biases = channels, channels.links, kept, biases
        self._layers: dict[int, tuple[Any, Any]] = {}
        self._models: dict[int, Any] = {}
        self._makeable: dict[int, bool] = {}
        self._names: Counter[str] = Counter()
        self._called_beside: set[int] = set()

    # ---- models ------------------------------------------------------------------------------------------------------

    def model(self) -> Any:
        """Returns the new model; its weights are those of new layers."""
        model = self._channels.model
        call = self._channels.opened.get(id(model))
        if call is None:
            return self._of_graph(model, [tensor.shape for tensor in graph_of(model).inputs])
        shapes = keras.tree.flatten((call.args, call.kwargs))
        inputs = [keras.Input(batch_shape=one.shape, dtype=one.dtype) for one in shapes]
        outputs = self._inside(call, inputs, "")
        return keras.Model(inputs[0] if len(inputs) == 1 else inputs, outputs, name=model.name)

    def _of_graph(self, model: Any, shapes: Sequence[Any]) -> Any:
        graph = graph_of(model)
        nodes = [node for node in nodes_of(model) if not node.is_input]
        if isinstance(model, keras.Sequential) and not self._replaced(nodes):
            entry = input_like(graph.inputs[0], shapes[0])
            made = keras.Sequential([entry], name=model.name)
            for node in nodes:
                made.add(self._operation(node.operation, made.outputs if made.layers else [entry]))
            return made
        entries = [input_like(tensor, shape) for tensor, shape in zip(graph.inputs, shapes, strict=True)]
        facts = {id(tensor): entry for tensor, entry in zip(graph.inputs, entries, strict=True)}
        self._run(nodes, facts, "")
        inputs = keras.tree.map_structure(lambda tensor: facts[id(tensor)], graph.input)
        outputs = keras.tree.map_structure(lambda tensor: facts[id(tensor)], graph.output)
        kind = type(model) if takes_a_graph(type(model)) else keras.Model
        return kind(inputs, outputs, name=model.name)

    def _replaced(self, nodes: Sequence[Any]) -> list[Any]:
        """Returns the calls whose layers are replaced by the layers inside them."""
        return [node for node in nodes if self._call_inside(node) is not None]

    def _call_inside(self, node: Any) -> RecordedCall | None:
        call = self._channels.opened.get(id(node))
        if call is None or not call.repeatable:
            return None
        # A layer may read the lengths of its inputs: it is made again only if all that it meets stays as it was.
        met = self._channels.met.get(id(node), [])
        stays = all(self._kept[numbers].all() for numbers in met)
        return None if stays and self._can_be_made_again(node.operation) else call

    def _can_be_made_again(self, layer: Any) -> bool:
        """Returns True if a layer can be made from its config."""
        if id(layer) not in self._makeable:
            self._makeable[id(layer)] = can_be_made_again(layer)
        return self._makeable[id(layer)]

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _run(self, nodes: Sequence[Any], facts: dict[int, Any], prefix: str) -> None:
        def known(leaf: Any) -> Any:
            return facts[id(leaf)] if isinstance(leaf, keras.KerasTensor) else leaf

        self._called_beside.update(id(node.operation) for node in nodes)
        for node in nodes:
            args, kwargs = keras.tree.map_structure(known, (node.arguments.args, node.arguments.kwargs))
            outputs = self._called(node, args, kwargs, prefix)
            for old, new in zip(node.outputs, keras.tree.flatten(outputs), strict=True):
                facts[id(old)] = new

    def _called(self, node: Any, args: Any, kwargs: Any, prefix: str) -> Any:
        inside = self._call_inside(node)
        tensors = [leaf for leaf in keras.tree.flatten((args, kwargs)) if isinstance(leaf, keras.KerasTensor)]
        if inside is not None:
            return self._inside(inside, tensors, f"{prefix}{node.operation.name}_")
        if self._shares_layers(node.operation):
            return self._of_nested(node.operation, tensors, f"{prefix}{node.operation.name}_")
        asked = self._links.resized.get(id(node.operation), {})
        if type(node.operation).__name__ == "GetItem" and "key" in asked:
            key = resolved(asked["key"], self._kept)
            return args[0][key]
        if type(node.operation).__name__ == "Multiply" and len(tensors) == 1:
            number = next(one for one in args if one is not tensors[0])
            if keras.ops.is_tensor(number) and number.ndim == 0 and "float" in tensors[0].dtype:
                # Keras takes the product of a symbolic tensor and a constant for sparse, which not all layers accept.
                name = f"{prefix}{node.operation.name}"
                return keras.layers.Rescaling(float(number), dtype=tensors[0].dtype, name=name)(tensors[0])
        return self._operation(node.operation, tensors, prefix)(*args, **kwargs)

    def _inside(self, call: RecordedCall, tensors: Sequence[Any], prefix: str) -> Any:
        given = [one for one in keras.tree.flatten((call.args, call.kwargs)) if isinstance(one, keras.KerasTensor)]
        facts = {id(old): new for old, new in zip(given, tensors, strict=True)}
        self._run(call.nodes, facts, prefix)
        return keras.tree.map_structure(lambda tensor: facts[id(tensor)], call.outputs)

    def _shares_layers(self, operation: Any) -> bool:
        """Returns True for a nested model with a layer that is also called outside: Keras cannot load such a model."""
        if graph_of(operation) is None:
            return False
        inner = (id(layer) for layer in operation._flatten_layers(include_self=False))
        return not self._called_beside.isdisjoint(inner)

    def _of_nested(self, model: Any, tensors: Sequence[Any], prefix: str) -> Any:
        """Returns the outputs of the calls in a nested model, which become calls of the present model."""
        graph = graph_of(model)
        facts = {id(old): new for old, new in zip(graph.inputs, tensors, strict=False)}
        self._run([node for node in nodes_of(model) if not node.is_input], facts, prefix)
        return keras.tree.map_structure(lambda tensor: facts[id(tensor)], graph.output)

    # ---- layers and operations ---------------------------------------------------------------------------------------

    def _operation(self, operation: Any, tensors: Sequence[Any], prefix: str = "") -> Any:
        """Returns the new layer or operation for a former one, the same one at each call."""
        if graph_of(operation) is not None:
            if id(operation) not in self._models:
                shapes = [tensor.shape for tensor in tensors[: len(graph_of(operation).inputs)]]
                self._models[id(operation)] = self._of_graph(operation, shapes)
                self._models[id(operation)].trainable = operation.trainable
            return self._models[id(operation)]
        if id(operation) not in self._layers:
            self._layers[id(operation)] = operation, self._again(operation, prefix)
        return self._layers[id(operation)][1]

    def _again(self, operation: Any, prefix: str = "") -> Any:
        changes: dict[str, Any] = {}
        for name, layer in self._links.inner.get(id(operation), {}).items():
            changes[name] = keras.saving.serialize_keras_object(self._again(layer))
        changes |= resolved(self._links.resized.get(id(operation), {}), self._kept)
        if id(operation) in self._biases:
            changes["use_bias"] = True
        if prefix and isinstance(operation, keras.layers.Layer):
            changes["name"] = self._unused(f"{prefix}{operation.name}")
        return made_again(operation, changes)

    def _unused(self, name: str) -> str:
        """Returns the name, with a number if another layer has it: "a_b" may be "b" in "a", and "a_b" beside "a"."""
        self._names[name] += 1
        return name if self._names[name] == 1 else f"{name}_{self._names[name] - 1}"

    def variables(self) -> Variables:
        """Returns the new variable of each former one."""
        found: Variables = {}
        for old, new in self._layers.values():
            if id(old) in self._biases:
                new.bias.assign(self._biases[id(old)])
            for one, other in pairs_of(old, new):
                if id(one) not in found:
                    found[id(one)] = one, other
                    other.trainable = one.trainable
        return found

"""Builds a model again with fewer channels: new layers from changed configs, weights cut to the kept channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.channels.channel_axes import resolved
from prunekit.anatomy.channels.channels import Channels
from prunekit.anatomy.channels.recorded_calls import RecordedCall
from prunekit.anatomy.channels.weight_entries import cut
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.shrink.graph.constants import NO_CONSTANTS, Constants
from prunekit.techniques.shrink.graph.graph_builder import build
from prunekit.techniques.shrink.graph.layer_copies import Variables, assign, can_be_made_again, made_again
from prunekit.techniques.shrink.graph.layer_graph import LayerGraph


def without_channels(
    channels: Channels, removed: np.ndarray, constants: Constants = NO_CONSTANTS
) -> tuple[Any, Variables]:
    """Returns a new model without some channels, and the new variable of each former one.

    The new model is not compiled. A model without a graph of layers, and each layer whose inner layers lose channels,
    are replaced by their inner layers.

    Args:
        channels: The channels of the model.
        removed: The channels to remove.
        constants: What takes over the constants of removed channels.

    Raises:
        ValueError: A layer cannot be made again from its config.
    """
    kept = channels.kept_numbers(removed)
    layers, values = _CutLayers(channels, kept), _CutValues(channels, kept)
    graph = LayerGraph(channels.model, layers.opened)
    layers.change(graph, constants.biases)
    return build(graph, lambda variable: values.of(variable, constants.values.get(id(variable))))


def assign_cut(channels: Channels, removed: np.ndarray, variables: Variables, values: Mapping[int, np.ndarray]) -> None:
    """Assigns values of the former shapes to new variables, cut to the kept channels.

    Args:
        channels: The channels of the former model.
        removed: The removed channels.
        variables: The new variable of each former one.
        values: id of a former variable -> its value.
    """
    cut_values = _CutValues(channels, channels.kept_numbers(removed))
    for key, value in values.items():
        old, new = variables[key]
        assign(old, new, cut_values.of(old, value))


class _CutValues:
    """Cuts values of weights to the kept channels.

    Args:
        channels: The channels of the model.
        kept: True for each number whose channel is kept.
    """

    def __init__(self, channels: Channels, kept: np.ndarray):
        self._weights, self._kept = channels.links.weights, kept
        self._rescaled = {id(one.variable): one for one in channels.links.rescaled}

    def of(self, variable: Any, value: np.ndarray | None = None) -> np.ndarray:
        """Returns a value of a former variable, by default the present one, as the new variable has it."""
        value = array_of(variable) if value is None else value
        left = cut(value, self._weights.get(id(variable)), self._kept)
        one = self._rescaled.get(id(variable))
        if one is None:
            return left
        factor = float((one.channels.size / np.count_nonzero(self._kept[one.channels])) ** one.power)
        return left if factor == 1.0 else ((left + one.offset) * factor - one.offset).astype(left.dtype)


class _CutLayers:
    """The layers of a model with fewer channels.

    Args:
        channels: The channels of the model.
        kept: True for each number whose channel is kept.
    """

    def __init__(self, channels: Channels, kept: np.ndarray):
        self._channels, self._links, self._kept = channels, channels.links, kept
        self._makeable: dict[int, bool] = {}

    def opened(self, node: Any) -> RecordedCall | None:
        """Returns the calls that replace a node's call, or the `call` of a model; None if the layer is made again."""
        call = self._channels.opened.get(id(node))
        if call is None or not call.repeatable:
            return None
        if node is self._channels.model:
            return call
        # A layer may read the lengths of its inputs: it is made again only if all that it meets stays as it was.
        met = self._channels.met.get(id(node), [])
        stays = all(self._kept[numbers].all() for numbers in met)
        return None if stays and self._can_be_made_again(node.operation) else call

    def _can_be_made_again(self, layer: Any) -> bool:
        """Returns True if a layer can be made from its config."""
        if id(layer) not in self._makeable:
            self._makeable[id(layer)] = can_be_made_again(layer)
        return self._makeable[id(layer)]

    def change(self, graph: LayerGraph, biases: Mapping[int, np.ndarray]) -> None:
        """Changes the sizes in the configs of a graph's layers, and in its calls.

        Args:
            graph: The graph.
            biases: id of a layer without a bias -> the bias that it gets.
        """
        calls = [call for level in graph.graphs() for call in level.calls]
        for call in calls:
            sizes = self._links.resized.get(id(call.operation), {})
            if call.kind == "GetItem" and "key" in sizes:
                call.args, call.kwargs = (call.inputs[0], resolved(sizes["key"], self._kept)), {}
        for key, operation in {id(call.operation): call.operation for call in calls}.items():
            if key in biases:
                graph.change(operation, {"use_bias": True}, {"bias": biases[key]})
            config = {} if type(operation).__name__ == "GetItem" else self._config(operation)
            if config:
                graph.change(operation, config, {})

    def _config(self, operation: Any) -> dict[str, Any]:
        """Returns the entries of a config that change."""
        inner = self._links.inner.get(id(operation), {})
        made = {name: made_again(layer, self._config(layer)) for name, layer in inner.items()}
        layers = {name: keras.saving.serialize_keras_object(layer) for name, layer in made.items()}
        return layers | resolved(self._links.resized.get(id(operation), {}), self._kept)

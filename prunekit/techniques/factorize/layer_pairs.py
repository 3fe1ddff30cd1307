"""Two layers in the place of one: the first computes a few numbers, the second the outputs from these."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.channels.graph_calls import Graph, GraphCall
from prunekit.anatomy.layers.counting import einsum_labels
from prunekit.anatomy.layers.linear_kinds import CONVOLUTIONS, is_table, kind_of
from prunekit.anatomy.layers.targets import Target
from prunekit.techniques.shrink.graph.layer_graph import LayerGraph

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
# Entries of a config that are about weights which the first layer does not have, or that have other shapes there.
_WITHOUT_BIAS = {"use_bias": False, "activation": None, "kernel_constraint": None}


@dataclass(frozen=True, eq=False)
class Pair:
    """What stands in the place of a layer.

    Attributes:
        added: The new layer, built, with its values.
        follows: True if it follows the layer, as the projection of a table does; False if it comes first.
        config: Entries of the layer's config that differ.
        values: Values of the layer's weights, by attribute.
    """

    added: Any
    follows: bool
    config: Mapping[str, Any]
    values: Mapping[str, np.ndarray]


def refusal(target: Target) -> str | None:
    """Returns why a weight cannot be factorized; None if it can."""
    layer = target.layer
    if target.role == "embedding":
        return None if is_table(layer) else f"prunekit has no rule for {type(layer).__name__}"
    kind = kind_of(layer)
    if target.role == "depthwise_kernel":
        return "a depthwise kernel has one input for each output"
    if kind not in (keras.layers.Dense, keras.layers.EinsumDense, *CONVOLUTIONS) or target.role != "kernel":
        return f"prunekit has no rule for the {target.role} of {type(layer).__name__}"
    if target.groups > 1 or target.parallel_axes:
        return "its outputs are computed by groups, each from inputs of its own"
    if kind is keras.layers.EinsumDense and "..." in einsum_labels(layer)[0][1:]:
        return "its equation has an ellipsis inside"
    if getattr(layer, "lora_enabled", False):
        return "it has LoRA weights: merge them first"
    return None


def pair_of(target: Target, first: np.ndarray, second: np.ndarray, bias: np.ndarray | None, name: str) -> Pair:
    """Returns the two layers for two factors.

    Args:
        target: The weight.
        first: Shape (inputs, rank), rows in the order of `LayerProduct`.
        second: Shape (rank, outputs).
        bias: New value of the layer's bias; None = as it is.
        name: Name of the new layer.
    """
    layer, rank = target.layer, first.shape[1]
    values = {} if bias is None else {"bias": bias.astype("float32")}
    if target.role == "embedding":
        added = keras.layers.Dense(second.shape[1], use_bias=False, name=name, dtype=layer.dtype_policy)
        return Pair(_built(added, (None, rank), second), True, {"output_dim": rank}, {"embeddings": first})
    if kind_of(layer) is keras.layers.Dense:
        config = {**layer.get_config(), **_WITHOUT_BIAS, "units": rank, "name": name}
        return Pair(_built(_like(layer, config), (None, len(first)), first), False, {}, {"kernel": second, **values})
    if kind_of(layer) is keras.layers.EinsumDense:
        return _einsum_pair(target, first, second, values, name)
    shape = tuple(target.shape)
    window = shape[:-2]
    config = {**layer.get_config(), **_WITHOUT_BIAS, "filters": rank, "name": name}
    entry = (None, *(None,) * len(window), shape[-2])
    if layer.data_format == "channels_first":
        entry = (None, shape[-2], *(None,) * len(window))
    added = _built(_like(layer, config), entry, first.reshape(*window, shape[-2], rank))
    ones = (1,) * len(window)
    changed = {"kernel_size": ones, "strides": ones, "padding": "valid", "dilation_rate": ones}
    return Pair(added, False, changed, {"kernel": second.reshape(*ones, rank, shape[-1]), **values})


def _einsum_pair(
    target: Target, first: np.ndarray, second: np.ndarray, values: Mapping[str, np.ndarray], name: str
) -> Pair:
    layer, rank = target.layer, first.shape[1]
    data, kernel, output = einsum_labels(layer)
    letter = next(one for one in _LETTERS if one not in data + kernel + output)
    summed = [one for one in kernel if one in data and one not in output]
    made = [one for one in kernel if one not in summed]
    rows = "".join(one for one in data if one not in summed)
    lengths = dict(zip(kernel, target.shape, strict=True))
    # The factors have the axes of the kernel in its order.
    equation = f"{data},{''.join(summed)}{letter}->{rows}{letter}"
    known = (None,) * (len(rows.replace("...", "")) - (0 if rows.startswith("...") else 1))
    config = {
        **layer.get_config(),
        **_WITHOUT_BIAS,
        "bias_axes": None,
        "equation": equation,
        "output_shape": (*known, rank),
        "name": name,
    }
    config.pop("use_bias")
    added = _like(layer, config)
    entry = [None if one not in lengths else lengths[one] for one in data.replace("...", "")]
    entry = [None, *entry] if data.startswith("...") else [None, *entry[1:]]
    added = _built(added, tuple(entry), first.reshape(*(lengths[one] for one in summed), rank))
    changed = {"equation": f"{rows}{letter},{letter}{''.join(made)}->{output}"}
    return Pair(added, False, changed, {"kernel": second.reshape(rank, *(lengths[one] for one in made)), **values})


def _like(layer: Any, config: Mapping[str, Any]) -> Any:
    # Not the class of a user's own, whose other weights the first layer does not have.
    kind: Any = kind_of(layer)
    names = inspect.signature(kind.__init__).parameters
    return kind.from_config({key: value for key, value in config.items() if key in names or key in _OF_LAYERS})


# Entries of every layer's config.
_OF_LAYERS = ("name", "trainable", "dtype")


def _built(layer: Any, shape: tuple[int | None, ...], kernel: np.ndarray) -> Any:
    layer.build(shape)
    layer.kernel.assign(kernel.astype("float32"))
    return layer


def insert(graph: LayerGraph, target: Target, pair: Pair) -> None:
    """Puts a pair in the place of a layer, in all its calls."""
    layer = target.layer
    for level in graph.graphs():
        for call in [one for one in level.calls if one.operation is layer]:
            _insert(level, call, pair)
    pair.added.trainable = layer.trainable
    graph.change(layer, pair.config, pair.values)


def _insert(level: Graph, call: GraphCall, pair: Pair) -> None:
    place = level.calls.index(call)
    if pair.follows:
        (output,) = call.outputs
        between = keras.KerasTensor((*output.shape[:-1], pair.config["output_dim"]), dtype=output.dtype)
        call.outputs = (between,)
        level.calls.insert(place + 1, GraphCall(pair.added, (between,), {}, (output,)))
    else:
        source = call.inputs[0]
        shape = pair.added.compute_output_shape(source.shape)
        between = keras.KerasTensor(shape, dtype=pair.added.compute_dtype)
        level.calls.insert(place, GraphCall(pair.added, (source,), {}, (between,)))
        replaced: Callable[[Any], Any] = lambda tensor: between if tensor is source else tensor  # noqa: E731
        call.map_inputs(replaced)
    level.sweep()

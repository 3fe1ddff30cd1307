"""Two or three layers in the place of one: the last computes the outputs from the few numbers of those before it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.channels.graph_calls import Graph, GraphCall
from prunekit.anatomy.layers.counting import einsum_labels
from prunekit.anatomy.layers.linear_kinds import CONVOLUTIONS, is_table, kind_of
from prunekit.anatomy.layers.targets import Target
from prunekit.core.statistics.layer_products import product_of
from prunekit.techniques.factorize.forms import CHANNELS, PAIR, SEPARABLE, Factors, Layout
from prunekit.techniques.shrink.graph.layer_graph import LayerGraph

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
# Entries of a config that are about weights which the first layer does not have, or that have other shapes there.
_WITHOUT_BIAS = {"use_bias": False, "activation": None, "kernel_constraint": None}


@dataclass(frozen=True, eq=False)
class Parts:
    """What stands in the place of a layer.

    Attributes:
        added: The new layers, built, with their values, in the order in which they compute.
        follows: True if they follow the layer, as the projection of a table does; False if they come first.
        config: Entries of the layer's config that differ.
        values: Values of the layer's weights, by attribute.
    """

    added: tuple[Any, ...]
    follows: bool
    config: Mapping[str, Any]
    values: Mapping[str, np.ndarray]


def refusal(target: Target, form: str = "auto") -> str | None:
    """Returns why a weight cannot be factorized, or not in a form; None if it can."""
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
    return None if form == "auto" else layout_of(target).refusal(form)


def layout_of(target: Target) -> Layout:
    """Returns the axes of a weight that can be factorized."""
    if target.role != "embedding" and kind_of(target.layer) in CONVOLUTIONS:
        return Layout(tuple(target.shape[:-2]), *target.shape[-2:])
    product = product_of(target)
    return Layout((), product.inputs, product.outputs)


def forms_of(target: Target, form: str) -> tuple[str, ...]:
    """Returns the forms whose errors are found: those that the weight may take, and "channels" for the report."""
    asked = layout_of(target).asked(form)
    return asked if asked == (PAIR,) else tuple({CHANNELS: None} | dict.fromkeys(asked))


def parts_of(target: Target, factors: Factors, bias: np.ndarray | None, names: Sequence[str]) -> Parts:
    """Returns the layers for the factors of a weight.

    Args:
        target: The weight.
        factors: Its factors.
        bias: New value of the layer's bias; None = as it is.
        names: Names of the new layers, one less than there are factors.
    """
    layer = target.layer
    values = {} if bias is None else {"bias": bias.astype("float32")}
    if layout_of(target).window:
        return _convolution_parts(target, factors, values, names)
    first, second = factors.arrays
    rank, (name,) = first.shape[1], names
    if target.role == "embedding":
        added = keras.layers.Dense(second.shape[1], use_bias=False, name=name, dtype=layer.dtype_policy)
        return Parts((_built(added, (None, rank), second),), True, {"output_dim": rank}, {"embeddings": first})
    if kind_of(layer) is keras.layers.Dense:
        config = {**layer.get_config(), **_WITHOUT_BIAS, "units": rank, "name": name}
        added = _built(_like(layer, config), (None, len(first)), first)
        return Parts((added,), False, {}, {"kernel": second, **values})
    return _einsum_parts(target, first, second, values, name)


# Entries of the config of a convolution that have one number for each side of the window, and what they are for one
# position.
_SIDES = {"kernel_size": 1, "strides": 1, "dilation_rate": 1}


def _convolution_parts(
    target: Target, factors: Factors, values: Mapping[str, np.ndarray], names: Sequence[str]
) -> Parts:
    layer, window = target.layer, tuple(target.shape[:-2])
    whole = tuple(range(len(window)))
    # The sides of the window that each layer has.
    sides: list[tuple[int, ...]] = [whole, ()]
    if factors.form == SEPARABLE:
        sides = [(0,), (1,)]
    elif len(factors.arrays) == 3:
        sides = [(), whole, ()]
    kernels = []
    for array, own in zip(factors.arrays, sides, strict=True):
        size = tuple(window[side] if side in own else 1 for side in whole)
        inputs = array.size // array.shape[-1] // int(np.prod(size))
        kernels.append(array.reshape(*size, inputs, array.shape[-1]))
    added = []
    for kernel, own, name in zip(kernels[:-1], sides[:-1], names, strict=True):
        config = {
            **layer.get_config(),
            **_WITHOUT_BIAS,
            **_sides(layer, own),
            "filters": kernel.shape[-1],
            "name": name,
        }
        entry = (None, *(None,) * len(window), kernel.shape[-2])
        if layer.data_format == "channels_first":
            entry = (None, kernel.shape[-2], *(None,) * len(window))
        added.append(_built(_like(layer, config), entry, kernel))
    return Parts(tuple(added), False, _sides(layer, sides[-1]), {"kernel": kernels[-1], **values})


def _sides(layer: Any, own: Sequence[int]) -> dict[str, Any]:
    """Returns the window, strides and padding of a convolution for some sides of its window; 1 for the others."""
    found: dict[str, Any] = {
        name: tuple(length if side in own else one for side, length in enumerate(getattr(layer, name)))
        for name, one in _SIDES.items()
    }
    return found if own else {**found, "padding": "valid"}


def _einsum_parts(
    target: Target, first: np.ndarray, second: np.ndarray, values: Mapping[str, np.ndarray], name: str
) -> Parts:
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
    return Parts((added,), False, changed, {"kernel": second.reshape(rank, *(lengths[one] for one in made)), **values})


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


def insert(graph: LayerGraph, target: Target, parts: Parts) -> None:
    """Puts layers in the place of a layer, in all its calls."""
    layer = target.layer
    for level in graph.graphs():
        for call in [one for one in level.calls if one.operation is layer]:
            _insert(level, call, parts)
    for one in parts.added:
        one.trainable = layer.trainable
    graph.change(layer, parts.config, parts.values)


def _insert(level: Graph, call: GraphCall, parts: Parts) -> None:
    place = level.calls.index(call)
    if parts.follows:
        (output,), (added,) = call.outputs, parts.added
        between = keras.KerasTensor((*output.shape[:-1], parts.config["output_dim"]), dtype=output.dtype)
        call.outputs = (between,)
        level.calls.insert(place + 1, GraphCall(added, (between,), {}, (output,)))
    else:
        insert_before(level, call, parts.added)
    level.sweep()


def insert_before(level: Graph, call: GraphCall, added: Sequence[Any]) -> None:
    """Puts layers between a call and its first input."""
    source = tensor = call.inputs[0]
    for place, layer in enumerate(added, start=level.calls.index(call)):
        after = keras.KerasTensor(layer.compute_output_shape(tensor.shape), dtype=layer.compute_dtype)
        level.calls.insert(place, GraphCall(layer, (tensor,), {}, (after,)))
        tensor = after
    replaced: Callable[[Any], Any] = lambda one: tensor if one is source else one  # noqa: E731
    call.map_inputs(replaced)

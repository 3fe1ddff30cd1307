"""Rules of layers with kernels and embeddings: dense layers, convolutions, tables of vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from prunekit.anatomy.channels.channel_axes import Axes, Kept, Numbers
from prunekit.anatomy.channels.channel_calls import (
    ChannelCall,
    Rule,
    Walk,
    activated,
    channel_axis,
    contracted,
    keep_other_axes,
)
from prunekit.anatomy.layers.counting import einsum_labels


def _dense(walk: Walk, call: ChannelCall) -> list[Axes]:
    layer, x, links = call.operation, call.x, walk.links
    links.bind(layer._kernel, 0, x.at(-1))
    units = links.weight(layer._kernel, 1)
    links.bind(layer.bias, 0, units)
    links.resize(layer, units=Kept(units))
    # A bias makes what was zero at the channels of another axis nonzero.
    zero = not any(numbers is not None for numbers in x.channels[:-1]) or (x.zero and layer.bias is None)
    return [activated(walk, layer.activation, replace(x.with_axis(-1, layer.units, units), zero=zero))]


def _einsum_dense(walk: Walk, call: ChannelCall) -> list[Axes]:
    layer, x, links = call.operation, call.x, walk.links
    data, kernel, output = einsum_labels(layer)
    shape = call.outputs[0]
    axes = [
        links.weight(layer._kernel, i) if _varies(label, data, output, x) else None for i, label in enumerate(kernel)
    ]
    weight = Axes(tuple(layer._kernel.shape), tuple(axes))
    made = contracted(walk, [x, weight], [data, kernel], output, shape)
    if layer.bias is not None:
        own = {len(shape) - 1 - axis for axis in range(len(layer.bias.shape)) if layer.bias.shape[-1 - axis] > 1}
        made = replace(made, zero=made.zero and set(made.labelled) <= own)
        offset = len(shape) - len(layer.bias.shape)
        for axis, length in enumerate(layer.bias.shape):
            if length > 1:
                links.bind(layer.bias, axis, made.channels[offset + axis])
    if isinstance(layer.partial_output_shape, tuple | list):
        sizes = zip(layer.partial_output_shape, made.channels[1:], strict=True)
        asked = tuple(size if numbers is None or size is None else Kept(numbers) for size, numbers in sizes)
        links.resize(layer, output_shape=asked)
    return [activated(walk, layer.activation, made)]


def _varies(label: str, data: str, output: str, x: Axes) -> bool:
    """Returns True if the kernel's axis is new, or belongs to an input axis that has channels."""
    return label not in data or x.channels[data.index(label)] is not None


def _inputs(walk: Walk, call: ChannelCall) -> tuple[int, Numbers]:
    """Returns (axis of the channels, their numbers) of a convolution's input, whose other axes are places."""
    axis = channel_axis(call.operation, len(call.x.shape))
    keep_other_axes(walk, call.x, axis)
    return axis, call.x.channels[axis]


def _outputs(walk: Walk, call: ChannelCall, axis: int, units: Numbers) -> list[Axes]:
    """Returns the axes of a convolution's output: the bias has its channels."""
    walk.links.bind(call.operation.bias, 0, units)
    made = Axes.fixed(call.outputs[0]).with_axis(axis, call.outputs[0][axis], units)
    return [activated_at(walk, call.operation.activation, made, axis)]


def _convolution(walk: Walk, call: ChannelCall) -> list[Axes]:
    layer, links = call.operation, walk.links
    axis, inputs = _inputs(walk, call)
    units = links.weight(layer._kernel, -1)
    links.resize(layer, filters=Kept(units))
    if layer.groups > 1:
        _groups(walk, layer, inputs, units)
    else:
        links.bind(layer._kernel, -2, inputs)
    return _outputs(walk, call, axis, units)


def _groups(walk: Walk, layer: Any, inputs: Numbers, units: np.ndarray) -> None:
    links, groups = walk.links, layer.groups
    if layer._kernel.shape[-2] == 1 and inputs is not None:
        # Each group has one input: a group is removed with it, as in a depthwise convolution.
        links.tie(np.repeat(inputs, layer.filters // groups), units)
        links.resize(layer, groups=Kept(inputs))
        return
    links.evenly(units, groups)
    if inputs is None:
        links.bind(layer._kernel, -2, None)
    else:
        links.bind_groups(layer._kernel, -2, inputs, groups)
        links.evenly(inputs, groups)


def _transposed(walk: Walk, call: ChannelCall) -> list[Axes]:
    layer, links = call.operation, walk.links
    axis, inputs = _inputs(walk, call)
    links.bind(layer.kernel, -1, inputs)
    units = links.weight(layer.kernel, -2)
    links.resize(layer, filters=Kept(units))
    return _outputs(walk, call, axis, units)


def _depthwise(walk: Walk, call: ChannelCall) -> list[Axes]:
    axis, inputs = _inputs(walk, call)
    walk.links.bind(call.operation.kernel, -2, inputs)
    return _outputs(walk, call, axis, _multiplied(inputs, call.operation))


def _separable(walk: Walk, call: ChannelCall) -> list[Axes]:
    layer, links = call.operation, walk.links
    axis, inputs = _inputs(walk, call)
    links.bind(layer.depthwise_kernel, -2, inputs)
    links.bind(layer.pointwise_kernel, -2, _multiplied(inputs, layer))
    units = links.weight(layer.pointwise_kernel, -1)
    links.resize(layer, filters=Kept(units))
    return _outputs(walk, call, axis, units)


def _multiplied(inputs: Numbers, layer: Any) -> Numbers:
    return None if inputs is None else np.repeat(inputs, layer.depth_multiplier)


def activated_at(walk: Walk, function: Any, x: Axes, axis: int) -> Axes:
    """Returns the axes after an activation function of a layer whose channels may be at another axis than the last."""
    name = getattr(function, "__name__", "")
    if axis != len(x.shape) - 1 and name in ("softmax", "log_softmax", "sparsemax"):
        # It acts on the last axis, which is a place and no channel.
        return replace(x, zero=False)
    return activated(walk, function, x)


def _embedding(walk: Walk, call: ChannelCall) -> list[Axes]:
    layer, links = call.operation, walk.links
    if call.argument("reverse", 1, False):
        return _reversed(walk, call)
    links.keep_all(call.inputs, "positions of an embedding")
    width = links.weight(layer._embeddings, 1)
    links.resize(layer, output_dim=Kept(width))
    if getattr(layer, "tie_weights", True) is False:
        links.bind(layer.reverse_embeddings, 0, width)
    return [Axes.fixed(call.outputs[0]).with_axis(-1, layer.output_dim, width)]


def _reversed(walk: Walk, call: ChannelCall) -> list[Axes]:
    layer, x, links = call.operation, call.x, walk.links
    tied = getattr(layer, "tie_weights", True)
    weight, axis = (layer._embeddings, 1) if tied else (layer.reverse_embeddings, 0)
    width = links.weight(layer._embeddings, 1)
    links.bind(weight, axis, width)
    links.resize(layer, output_dim=Kept(width))
    links.tie(x.at(-1), width)
    return [Axes.fixed(call.outputs[0])]


def _positions(walk: Walk, call: ChannelCall) -> list[Axes]:
    numbers = call.x.at(-1)
    walk.links.bind(call.operation.position_embeddings, 1, numbers)
    return [Axes.fixed(call.outputs[0]).with_axis(-1, call.x.shape[-1], numbers)]


RULES: dict[Rule, str] = {
    _dense: "Dense",
    _einsum_dense: "EinsumDense",
    _embedding: "Embedding ReversibleEmbedding",
}
# Base classes of Keras's convolutions by a layer that has them.
BASES: dict[Rule, tuple[str, str]] = {
    _convolution: ("Conv2D", "BaseConv"),
    _transposed: ("Conv2DTranspose", "BaseConvTranspose"),
    _depthwise: ("DepthwiseConv2D", "BaseDepthwiseConv"),
    _separable: ("SeparableConv2D", "BaseSeparableConv"),
}
# Layers of KerasHub by class name.
HUB: dict[str, Rule] = {"PositionEmbedding": _positions}

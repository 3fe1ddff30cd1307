"""Rules of Keras's layers: which weight axes belong to the channels of a layer's inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.channel_axes import Axes, Kept, Numbers, Scaled
from prunekit.anatomy.channel_calls import (
    Call,
    NotFollowedError,
    Rule,
    Walk,
    activated,
    channel_axis,
    contracted,
    elementwise,
    keep_other_axes,
    maps_zero_to_zero,
)
from prunekit.anatomy.channel_links import STAYS
from prunekit.anatomy.counting import einsum_labels
from prunekit.anatomy.layers import _base, refusal
from prunekit.anatomy.model_graph import graph_of

_L = keras.layers


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _dense(walk: Walk, call: Call) -> list[Axes]:
    layer, x, links = call.operation, call.x, walk.links
    links.bind(layer._kernel, 0, x.at(-1))
    units = links.weight(layer._kernel, 1)
    links.bind(layer.bias, 0, units)
    links.resize(layer, units=Kept(units))
    # A bias makes what was zero at the channels of another axis nonzero.
    zero = not any(numbers is not None for numbers in x.channels[:-1]) or (x.zero and layer.bias is None)
    return [activated(walk, layer.activation, replace(x.with_axis(-1, layer.units, units), zero=zero))]


def _einsum_dense(walk: Walk, call: Call) -> list[Axes]:
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


def _convolution(walk: Walk, call: Call) -> list[Axes]:
    layer, x, links = call.operation, call.x, walk.links
    axis = channel_axis(layer, len(x.shape))
    keep_other_axes(walk, x, axis)
    inputs, units = x.channels[axis], links.weight(layer._kernel, -1)
    links.bind(layer.bias, 0, units)
    links.resize(layer, filters=Kept(units))
    if layer.groups > 1:
        _groups(walk, layer, inputs, units)
    else:
        links.bind(layer._kernel, -2, inputs)
    made = Axes.fixed(call.outputs[0]).with_axis(axis, layer.filters, units)
    return [activated_at(walk, layer.activation, made, axis)]


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


def _transposed(walk: Walk, call: Call) -> list[Axes]:
    layer, x, links = call.operation, call.x, walk.links
    axis = channel_axis(layer, len(x.shape))
    keep_other_axes(walk, x, axis)
    links.bind(layer.kernel, -1, x.channels[axis])
    units = links.weight(layer.kernel, -2)
    links.bind(layer.bias, 0, units)
    links.resize(layer, filters=Kept(units))
    made = Axes.fixed(call.outputs[0]).with_axis(axis, layer.filters, units)
    return [activated_at(walk, layer.activation, made, axis)]


def _depthwise(walk: Walk, call: Call) -> list[Axes]:
    layer, x, links = call.operation, call.x, walk.links
    axis = channel_axis(layer, len(x.shape))
    keep_other_axes(walk, x, axis)
    inputs = x.channels[axis]
    links.bind(layer.kernel, -2, inputs)
    units = None if inputs is None else np.repeat(inputs, layer.depth_multiplier)
    links.bind(layer.bias, 0, units)
    made = Axes.fixed(call.outputs[0])
    made = replace(made.with_axis(axis, call.outputs[0][axis], units), zero=True)
    return [activated_at(walk, layer.activation, made, axis)]


def _separable(walk: Walk, call: Call) -> list[Axes]:
    layer, x, links = call.operation, call.x, walk.links
    axis = channel_axis(layer, len(x.shape))
    keep_other_axes(walk, x, axis)
    inputs = x.channels[axis]
    links.bind(layer.depthwise_kernel, -2, inputs)
    links.bind(layer.pointwise_kernel, -2, None if inputs is None else np.repeat(inputs, layer.depth_multiplier))
    units = links.weight(layer.pointwise_kernel, -1)
    links.bind(layer.bias, 0, units)
    links.resize(layer, filters=Kept(units))
    made = Axes.fixed(call.outputs[0]).with_axis(axis, layer.filters, units)
    return [activated_at(walk, layer.activation, made, axis)]


def activated_at(walk: Walk, function: Any, x: Axes, axis: int) -> Axes:
    """Returns the axes after an activation function of a layer whose channels may be at another axis than the last."""
    name = getattr(function, "__name__", "")
    if axis != len(x.shape) - 1 and name in ("softmax", "log_softmax", "sparsemax"):
        # It acts on the last axis, which is a place and no channel.
        return replace(x, zero=False)
    return activated(walk, function, x)


def _embedding(walk: Walk, call: Call) -> list[Axes]:
    layer, links = call.operation, walk.links
    if call.argument("reverse", 1, False):
        return _reversed(walk, call)
    links.keep_all(call.inputs, "positions of an embedding")
    width = links.weight(layer._embeddings, 1)
    links.resize(layer, output_dim=Kept(width))
    if getattr(layer, "tie_weights", True) is False:
        links.bind(layer.reverse_embeddings, 0, width)
    return [Axes.fixed(call.outputs[0]).with_axis(-1, layer.output_dim, width)]


def _reversed(walk: Walk, call: Call) -> list[Axes]:
    layer, x, links = call.operation, call.x, walk.links
    tied = getattr(layer, "tie_weights", True)
    weight, axis = (layer._embeddings, 1) if tied else (layer.reverse_embeddings, 0)
    width = links.weight(layer._embeddings, 1)
    links.bind(weight, axis, width)
    links.resize(layer, output_dim=Kept(width))
    links.tie(x.at(-1), width)
    return [Axes.fixed(call.outputs[0])]


# ---- normalisation ---------------------------------------------------------------------------------------------------


def _batch_norm(walk: Walk, call: Call) -> list[Axes]:
    layer, x = call.operation, call.x
    if getattr(layer, "renorm", False) and x.at(layer.axis) is not None:
        raise NotFollowedError("batch renormalisation keeps statistics that are not followed")
    for name in ("gamma", "beta", "moving_mean", "moving_variance"):
        walk.links.bind(getattr(layer, name, None), 0, x.at(layer.axis))
    alone = set(x.labelled) <= {layer.axis % len(x.shape)}
    return [replace(x, zero=alone and (x.zero or layer.scale))]


def _layer_norm(walk: Walk, call: Call) -> list[Axes]:
    layer, x = call.operation, call.x
    axes = layer.axis if isinstance(layer.axis, list | tuple) else [layer.axis]
    for axis in axes:
        walk.links.keep(x.at(axis), "LayerNormalization subtracts the mean of all channels")
    return [Axes(x.shape, tuple(None if i in _positive(axes, x) else n for i, n in enumerate(x.channels)), False)]


def _positive(axes: Sequence[int], x: Axes) -> set[int]:
    return {axis % len(x.shape) for axis in axes}


def _rms_norm(walk: Walk, call: Call) -> list[Axes]:
    layer, x, links = call.operation, call.x, walk.links
    axes = layer.axis if isinstance(layer.axis, list | tuple) else [layer.axis]
    carrying = [axis for axis in axes if x.at(axis) is not None]
    if not carrying:
        return [x]
    numbers: Any = x.at(carrying[0])
    if len(axes) > 1 or not x.zero:
        for axis in carrying:
            links.keep(x.at(axis), "RMSNormalization over channels that are not zero where they are removed")
        return [replace(x, channels=tuple(None if i in _positive(axes, x) else n for i, n in enumerate(x.channels)))]
    links.bind(layer.scale, 0, numbers)
    # mean over C' channels + e C / C' = (mean over C channels + e) C / C'.
    links.rescale(layer.scale, numbers, 0.5)
    links.resize(layer, epsilon=Scaled(layer.epsilon, numbers, 1.0))
    return [x]


def _group_norm(walk: Walk, call: Call) -> list[Axes]:
    layer, x, links = call.operation, call.x, walk.links
    numbers = x.at(layer.axis)
    keep_other_axes(walk, x, layer.axis)
    if numbers is None:
        return [Axes.fixed(x.shape)]
    links.bind(layer.gamma, 0, numbers)
    links.bind(layer.beta, 0, numbers)
    groups = numbers.size if layer.groups == -1 else layer.groups
    matrix = numbers.reshape(groups, -1)
    if groups == 1:
        links.keep(numbers, "GroupNormalization over all channels")
    # Whole groups: the mean of a group counts each of its channels.
    links.tie(np.repeat(matrix[:, 0], matrix.shape[1] - 1), matrix[:, 1:])
    links.resize(layer, groups=Kept(matrix[:, 0]))
    return [replace(x, zero=x.zero or layer.scale)]


def _unit_norm(walk: Walk, call: Call) -> list[Axes]:
    layer, x = call.operation, call.x
    for axis in layer.axis if isinstance(layer.axis, list | tuple) else [layer.axis]:
        if not x.zero:
            walk.links.keep(x.at(axis), "UnitNormalization over channels that are not zero where they are removed")
    return [x]


def _normalization(walk: Walk, call: Call) -> list[Axes]:
    walk.links.keep_all([call.x], "Normalization holds constants of its inputs")
    return [Axes.fixed(call.outputs[0])]


def _prelu(walk: Walk, call: Call) -> list[Axes]:
    layer, x = call.operation, call.x
    for axis, numbers in enumerate(x.channels[1:]):
        if numbers is not None and layer.alpha.shape[axis] > 1:
            walk.links.bind(layer.alpha, axis, numbers)
    return [x]


def _layer_scale(walk: Walk, call: Call) -> list[Axes]:
    layer, x = call.operation, call.x
    numbers = x.at(-1)
    if numbers is not None:
        walk.links.bind(layer.gamma, 0, numbers)
        walk.links.resize(layer, projection_dim=Kept(numbers))
    return [replace(x, zero=True)]


# ---- entry by entry --------------------------------------------------------------------------------------------------


def _same(walk: Walk, call: Call) -> list[Axes]:
    return [replace(call.x, shape=shape) for shape in call.outputs]


def _activation(walk: Walk, call: Call) -> list[Axes]:
    return [activated(walk, call.operation.activation, call.x)]


def _softmax(walk: Walk, call: Call) -> list[Axes]:
    x, axes = call.x, call.operation.axis
    axes = axes if isinstance(axes, list | tuple) else [axes]
    for axis in axes:
        walk.links.keep(x.at(axis), "softmax over the channels")
    channels = tuple(None if i in _positive(axes, x) else n for i, n in enumerate(x.channels))
    return [Axes(x.shape, channels, False)]


def _rescaling(walk: Walk, call: Call) -> list[Axes]:
    layer, x = call.operation, call.x
    if max(np.size(layer.scale), np.size(layer.offset)) > 1:
        walk.links.keep(x.at(-1), "Rescaling by one constant for each channel")
        return [Axes.fixed(call.outputs[0])]
    return [replace(x, zero=x.zero and layer.offset == 0)]


def _relu(walk: Walk, call: Call) -> list[Axes]:
    return [replace(call.x, zero=call.x.zero and maps_zero_to_zero(call.operation))]


def _merge(walk: Walk, call: Call) -> list[Axes]:
    inputs, shape = call.inputs, call.outputs[0]
    if len({len(one.shape) for one in inputs}) > 1 and any(one.labelled for one in inputs):
        raise NotFollowedError("it merges tensors of different ranks")
    return [elementwise(walk, inputs, shape, "any" if isinstance(call.operation, _L.Multiply) else "all")]


def _concatenate(walk: Walk, call: Call) -> list[Axes]:
    return [concatenated(walk, call.inputs, call.operation.axis, call.outputs[0])]


def concatenated(walk: Walk, inputs: Sequence[Axes], axis: int, shape: Sequence[int | None]) -> Axes:
    """Returns the axes of a concatenation; an input without channels gets channels that stay."""
    links, axis = walk.links, axis % len(shape)
    joined = None
    if any(one.channels[axis] is not None for one in inputs):
        parts = []
        for one in inputs:
            numbers, length = one.channels[axis], one.shape[axis]
            if length is None:
                links.keep_all(inputs, "concatenated with an axis of unknown length")
                return Axes.fixed(shape)
            parts.append(np.full(length, STAYS) if numbers is None else numbers)
        joined = np.concatenate(parts)
    shapes = [one.with_axis(axis, 1, None) for one in inputs]
    rest = elementwise(walk, shapes, (*shape[:axis], 1, *shape[axis + 1 :]), "all")
    return replace(rest.with_axis(axis, shape[axis], joined), zero=rest.zero and all(one.zero for one in inputs))


def _dot(walk: Walk, call: Call) -> list[Axes]:
    layer, inputs = call.operation, call.inputs
    axes = layer.axes if isinstance(layer.axes, list | tuple) else (layer.axes, layer.axes)
    if layer.normalize and not all(one.zero for one in inputs):
        walk.links.keep_all(inputs, "normalised over channels that are not zero where they are removed")
    first = "".join(chr(97 + i) for i in range(len(inputs[0].shape)))
    second = "".join("a" if i == 0 else chr(110 + i) for i in range(len(inputs[1].shape)))
    shared = first[axes[0] % len(first)]
    place = axes[1] % len(second)
    second = second[:place] + shared + second[place + 1 :]
    output = "".join(c for c in first if c != shared) + "".join(c for c in second[1:] if c != shared)
    if len(call.outputs[0]) != len(output):
        return [
            replace(
                contracted(walk, inputs, [first, second], output, (None,) * len(output)),
                shape=call.outputs[0],
                channels=(None,) * len(call.outputs[0]),
            )
        ]
    return [contracted(walk, inputs, [first, second], output, call.outputs[0])]


# ---- shapes ----------------------------------------------------------------------------------------------------------


def _spatial(walk: Walk, call: Call) -> list[Axes]:
    """Pooling, padding, cropping and upsampling: the channels stay where they are."""
    x, axis = call.x, channel_axis(call.operation, len(call.x.shape))
    for place, numbers in enumerate(x.channels):
        if place != axis:
            walk.links.keep(numbers, "an axis of places")
    return [replace(Axes.fixed(call.outputs[0]).with_axis(axis, x.shape[axis], x.channels[axis]), zero=x.zero)]


def _global_pool(walk: Walk, call: Call) -> list[Axes]:
    layer, x = call.operation, call.x
    axis = channel_axis(layer, len(x.shape))
    for place, numbers in enumerate(x.channels):
        if place != axis:
            walk.links.keep(numbers, "averaged over")
    made = Axes.fixed(call.outputs[0])
    at = axis if layer.keepdims else len(made.shape) - 1
    return [replace(made.with_axis(at, x.shape[axis], x.channels[axis]), zero=x.zero)]


def _flatten(walk: Walk, call: Call) -> list[Axes]:
    layer, x = call.operation, call.x
    if layer.data_format == "channels_first" and len(x.shape) > 2:
        x = Axes((x.shape[0], *x.shape[2:], x.shape[1]), (x.channels[0], *x.channels[2:], x.channels[1]), x.zero)
    return [walk.links.reshaped(x, call.outputs[0])]


def _reshape(walk: Walk, call: Call) -> list[Axes]:
    layer = call.operation
    made = walk.links.reshaped(call.x, call.outputs[0])
    walk.links.resize(layer, target_shape=sizes(layer.target_shape, made.channels[1:]))
    return [made]


def sizes(shape: Sequence[Any], channels: Sequence[Numbers]) -> tuple[Any, ...]:
    """Returns a shape in which axes with channels have the number of kept ones; -1 remains."""
    pairs = zip(shape, channels, strict=True)
    return tuple(
        size if numbers is None or not isinstance(size, int) or size < 0 else Kept(numbers) for size, numbers in pairs
    )


def _permute(walk: Walk, call: Call) -> list[Axes]:
    order = (0, *call.operation.dims)
    return [Axes(call.outputs[0], tuple(call.x.channels[axis] for axis in order), call.x.zero)]


def _repeat_vector(walk: Walk, call: Call) -> list[Axes]:
    x = call.x
    return [Axes(call.outputs[0], (x.channels[0], None, x.channels[1]), x.zero)]


# ---- recurrent layers ------------------------------------------------------------------------------------------------

_GATES = {"SimpleRNNCell": 1, "GRUCell": 3, "LSTMCell": 4, "ConvLSTMCell": 4}


def _recurrent(walk: Walk, call: Call) -> list[Axes]:
    layer, x, links = call.operation, call.x, walk.links
    cell = layer.cell
    if type(cell).__name__ not in _GATES or not type(cell).__module__.startswith("keras."):
        raise NotFollowedError(f"its cell {type(cell).__name__} is not known")
    gates = _GATES[type(cell).__name__]
    axis = channel_axis(layer, len(x.shape))
    keep_other_axes(walk, x, axis)
    links.bind(cell.kernel, -2, x.channels[axis])
    units = links.weight(cell.recurrent_kernel, -2)
    for weight in (cell.kernel, cell.recurrent_kernel, cell.bias):
        links.bind(weight, -1, np.tile(units, gates))
    if layer.stateful:
        links.keep(units, "the layer keeps its state between batches")
    links.resize(layer, **{"filters" if gates == 4 and len(x.shape) > 3 else "units": Kept(units)})
    begins = call.inputs[1:] if call.argument("initial_state", 1) is not None else []
    begins = [one for one in begins if len(one.shape) == len(x.shape) - 1]
    for one in begins:
        links.tie(units, one.at(axis - 1), "the initial state has a fixed length")
    zero = not begins and _zero_state(cell)
    return [replace(_with_units(shape, layer, units), zero=zero) for shape in call.outputs]


def _zero_state(cell: Any) -> bool:
    return maps_zero_to_zero(cell.activation)


def _with_units(shape: Sequence[int | None], layer: Any, units: np.ndarray) -> Axes:
    # A sequence has one axis more than a state.
    states = 2 if not hasattr(layer, "filters") and not hasattr(layer.cell, "filters") else layer.cell.rank + 2
    axis = channel_axis(layer, len(shape))
    if axis == 1 and len(shape) > states:
        axis = 2
    return Axes.fixed(shape).with_axis(axis, units.size, units)


def _bidirectional(walk: Walk, call: Call) -> list[Axes]:
    layer, x = call.operation, call.x
    if len(call.inputs) > 1 and call.argument("initial_state", 1) is not None:
        raise NotFollowedError("it is called with an initial state")
    walk.links.contain(layer, layer=layer.forward_layer, backward_layer=layer.backward_layer)
    forward = walk.follow(layer.forward_layer, x)
    backward = walk.follow(layer.backward_layer, x)
    states = [*forward[1:], *backward[1:]]
    if layer.merge_mode is None:
        return [forward[0], backward[0], *states]
    one, other = forward[0], backward[0]
    if layer.merge_mode == "concat":
        return [concatenated(walk, [one, other], -1, call.outputs[0]), *states]
    return [elementwise(walk, [one, other], call.outputs[0], "any" if layer.merge_mode == "mul" else "all"), *states]


def _time_distributed(walk: Walk, call: Call) -> list[Axes]:
    layer, x = call.operation, call.x
    if graph_of(layer.layer) is not None:
        raise NotFollowedError("it contains a model")
    walk.links.keep(x.channels[1], "an axis of time steps")
    walk.links.contain(layer, layer=layer.layer)
    inner = Axes((x.shape[0], *x.shape[2:]), (x.channels[0], *x.channels[2:]), x.zero)
    found = []
    for one, shape in zip(walk.follow(layer.layer, inner), call.outputs, strict=True):
        found.append(Axes(shape, (one.channels[0], None, *one.channels[1:]), one.zero))
    return found


# ---- attention -------------------------------------------------------------------------------------------------------


def _multi_head(walk: Walk, call: Call) -> list[Axes]:
    layer, links = call.operation, walk.links
    kernel = layer._query_dense._kernel
    if len(kernel.shape) != 3:
        raise NotFollowedError("its projections have axes that are not known")
    heads, width = links.weight(kernel, 1), links.weight(kernel, 2)
    value_width = links.weight(layer._value_dense._kernel, 2)
    links.tie(heads, links.weight(layer._key_dense._kernel, 1))
    links.tie(heads, links.weight(layer._value_dense._kernel, 1))
    links.tie(width, links.weight(layer._key_dense._kernel, 2))
    links.name(heads, "heads")
    links.name(width, "key width")
    links.name(value_width, "value width")
    links.resize(layer, num_heads=Kept(heads), key_dim=Kept(width), value_dim=Kept(value_width))
    return _attention(walk, call, heads, heads, width, value_width)


def _group_query(walk: Walk, call: Call) -> list[Axes]:
    layer, links = call.operation, walk.links
    kernel = layer._query_dense._kernel
    heads, width = links.weight(kernel, 1), links.weight(kernel, 2)
    shared = links.weight(layer._key_dense._kernel, 1)
    if shared.size > 1:
        # Whole groups: key and value of a group serve its query heads alone.
        links.tie(heads, np.repeat(shared, heads.size // shared.size))
    links.name(heads, "heads")
    links.name(width, "head width")
    links.tie(shared, links.weight(layer._value_dense._kernel, 1))
    for dense in (layer._key_dense, layer._value_dense):
        links.tie(width, links.weight(dense._kernel, 2))
    links.resize(layer, num_query_heads=Kept(heads), num_key_value_heads=Kept(shared), head_dim=Kept(width))
    # The layer returns as many features as its query has.
    out = links.weight(layer._output_dense._kernel, 2)
    links.tie(out, call.argument("query", 0).at(-1), "the layer returns as many features as its query has")
    return _attention(walk, call, heads, shared, width, width)


def _attention(
    walk: Walk, call: Call, heads: np.ndarray, shared: np.ndarray, width: np.ndarray, value_width: np.ndarray
) -> list[Axes]:
    layer, links = call.operation, walk.links
    if getattr(layer, "_use_gate", getattr(layer, "use_gate", False)):
        raise NotFollowedError("gated attention is not followed")
    query, value = call.argument("query", 0), call.argument("value", 1)
    key = call.argument("key", 2)
    key = value if key is None else key
    for one in (query, value, key):
        keep_other_axes(walk, one, -1)
    for dense, x, units, size in (
        (layer._query_dense, query, heads, width),
        (layer._key_dense, key, shared, width),
        (layer._value_dense, value, shared, value_width),
    ):
        links.bind(dense._kernel, 0, x.at(-1))
        if dense.bias is not None:
            links.bind(dense.bias, 0, units)
            links.bind(dense.bias, 1, size)
    output = layer._output_dense
    links.bind(output._kernel, 0, heads)
    links.bind(output._kernel, 1, value_width)
    if len(output._kernel.shape) != 3:
        raise NotFollowedError("its output has several axes")
    features = links.weight(output._kernel, 2)
    links.bind(output.bias, 0, features)
    if isinstance(layer, _L.MultiHeadAttention):
        links.resize(layer, output_shape=(Kept(features),))
    # The scores are divided by the square root of the width.
    links.rescale(layer._query_dense._kernel, width, -0.5)
    links.rescale(layer._query_dense.bias, width, -0.5)
    made = [Axes.fixed(call.outputs[0]).with_axis(-1, features.size, features)]
    if len(call.outputs) > 1:
        made.append(replace(Axes.fixed(call.outputs[1]).with_axis(1, heads.size, heads), zero=False))
    return made


def _not_followed(walk: Walk, call: Call) -> list[Axes]:
    raise NotFollowedError(f"layers of type {type(call.operation).__name__} are not followed")


def _dot_attention(walk: Walk, call: Call) -> list[Axes]:
    layer = call.operation
    if layer.score_mode != "dot":
        raise NotFollowedError(f"the score mode {layer.score_mode!r} is not followed")
    inputs = call.argument("inputs", 0)
    query, value = inputs[0], inputs[1]
    key = inputs[2] if len(inputs) > 2 else value
    for one in inputs:
        keep_other_axes(walk, one, -1)
    contracted(walk, [query, key], ["btd", "bsd"], "bts", (None,) * 3)
    made = Axes.fixed(call.outputs[0]).with_axis(-1, value.shape[-1], value.at(-1))
    return [replace(made, zero=value.zero), *[Axes.fixed(shape) for shape in call.outputs[1:]]]


# ---- the table -------------------------------------------------------------------------------------------------------


def _first_table() -> dict[type, Rule]:
    names: dict[Rule, str] = {
        _dense: "Dense",
        _einsum_dense: "EinsumDense",
        _embedding: "Embedding ReversibleEmbedding",
        _batch_norm: "BatchNormalization",
        _layer_norm: "LayerNormalization",
        _rms_norm: "RMSNormalization",
        _group_norm: "GroupNormalization",
        _unit_norm: "UnitNormalization",
        _normalization: "Normalization",
        _prelu: "PReLU",
        _same: "Identity Dropout AlphaDropout GaussianDropout GaussianNoise SpatialDropout1D SpatialDropout2D "
        "SpatialDropout3D ActivityRegularization",
        _activation: "Activation",
        _softmax: "Softmax",
        _rescaling: "Rescaling",
        _relu: "ReLU LeakyReLU ELU",
        _merge: "Add Subtract Multiply Average Maximum Minimum",
        _concatenate: "Concatenate",
        _dot: "Dot",
        _spatial: "MaxPooling1D MaxPooling2D MaxPooling3D AveragePooling1D AveragePooling2D AveragePooling3D "
        "ZeroPadding1D ZeroPadding2D ZeroPadding3D Cropping1D Cropping2D Cropping3D UpSampling1D UpSampling2D "
        "UpSampling3D Resizing",
        _global_pool: "GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D GlobalMaxPooling1D "
        "GlobalMaxPooling2D GlobalMaxPooling3D",
        _flatten: "Flatten",
        _reshape: "Reshape",
        _permute: "Permute",
        _repeat_vector: "RepeatVector",
        _recurrent: "SimpleRNN LSTM GRU ConvLSTM1D ConvLSTM2D ConvLSTM3D",
        _bidirectional: "Bidirectional",
        _time_distributed: "TimeDistributed",
        _multi_head: "MultiHeadAttention",
        _group_query: "GroupQueryAttention",
        _dot_attention: "Attention",
        _not_followed: "AdditiveAttention SpectralNormalization",
    }
    table = {getattr(_L, name): rule for rule, listed in names.items() for name in listed.split() if hasattr(_L, name)}
    table[_base(_L.Conv2D, "BaseConv")] = _convolution
    table[_base(_L.Conv2DTranspose, "BaseConvTranspose")] = _transposed
    table[_base(_L.DepthwiseConv2D, "BaseDepthwiseConv")] = _depthwise
    table[_base(_L.SeparableConv2D, "BaseSeparableConv")] = _separable
    return table


_TABLE = _first_table()
# ConvNeXt's layers have no public names.
_BY_NAME: dict[str, Rule] = {"LayerScale": _layer_scale, "StochasticDepth": _same}


# What a subclass may define without computing something else than its base class.
_HARMLESS = {"__init__", "get_config", "from_config", "compute_output_shape", "compute_output_spec"}


def _computes_the_same(kind: type, base: type) -> bool:
    """Returns True if the classes between a layer's class and a known one redefine nothing that computes."""
    between = kind.__mro__[: kind.__mro__.index(base)]
    names = {name for one in between for name in vars(one)}
    inherited = {name for name in names if hasattr(base, name) and not (name.startswith("__") and name.endswith("__"))}
    return not (inherited - _HARMLESS - {"_abc_impl"}) and "__call__" not in names


def layer_rule(layer: Any) -> Rule | None:
    """Returns the rule of a layer; None for a type that is not known, or that has a `call` of its own.

    Raises:
        NotFollowedError: The layer is in a state in which its weights are not what it multiplies with.
    """
    kind: Any = type(layer)
    own = kind.__module__.startswith("keras.")
    known = (base for base in kind.__mro__ if base in _TABLE)
    base = next(known, None)
    rule = _TABLE[base] if base is not None and (own or _computes_the_same(kind, base)) else None
    if rule is None and own:
        rule = _BY_NAME.get(kind.__name__)
    if rule is not None and "call" in vars(layer):
        return None
    reason = refusal(layer)
    if rule is not None and reason:
        raise NotFollowedError(reason)
    return rule

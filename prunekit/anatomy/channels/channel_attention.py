"""Rules of attention: heads, widths, and the scale of the scores."""

from __future__ import annotations

from dataclasses import replace

import keras
import numpy as np

from prunekit.anatomy.channels.channel_axes import Axes, Kept
from prunekit.anatomy.channels.channel_calls import (
    ChannelCall,
    NotFollowedError,
    Rule,
    Walk,
    contracted,
    keep_other_axes,
)

_L = keras.layers


def _multi_head(walk: Walk, call: ChannelCall) -> list[Axes]:
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


def _group_query(walk: Walk, call: ChannelCall) -> list[Axes]:
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
    walk: Walk, call: ChannelCall, heads: np.ndarray, shared: np.ndarray, width: np.ndarray, value_width: np.ndarray
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


def _dot_attention(walk: Walk, call: ChannelCall) -> list[Axes]:
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


RULES: dict[Rule, str] = {
    _multi_head: "MultiHeadAttention",
    _group_query: "GroupQueryAttention",
    _dot_attention: "Attention",
}


def _cached_multi_head(walk: Walk, call: ChannelCall) -> list[Axes]:
    if any(call.argument(name, place) is not None for place, name in ((4, "cache"), (5, "cache_update_index"))):
        raise NotFollowedError("attention with a cache is not followed")
    return _multi_head(walk, call)


def _rotary(walk: Walk, call: ChannelCall) -> list[Axes]:
    layer, x = call.operation, call.x
    for axis in (layer.sequence_axis, layer.feature_axis):
        walk.links.keep(x.at(axis), "a rotary embedding turns channels by angles that depend on their number")
    return [x.without([layer.sequence_axis, layer.feature_axis])]


def _llama_rotary(walk: Walk, call: ChannelCall) -> list[Axes]:
    # Its config has an entry that its constructor does not take: only the operations inside it can be saved.
    return walk.inside(replace(call, args=(_rotary(walk, call)[0], *call.args[1:])))


# Layers of KerasHub by class name.
HUB: dict[str, Rule] = {
    "CachedMultiHeadAttention": _cached_multi_head,
    "RotaryEmbedding": _rotary,
    "LlamaRotaryEmbedding": _llama_rotary,
}

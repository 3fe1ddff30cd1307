"""Calls inside KerasHub's layers, in operations that need no length as a number. Does not import KerasHub.

KerasHub's layers make masks and positions with `arange` over the length of the sequence, which fails where the length
is open. The functions here compute the same values from tensors: a cumulative sum of ones counts the positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
from keras import ops

from prunekit.anatomy.layers.keras_hub_layers import PACKAGE

Method = Callable[..., Any]
WITH_CACHE = "calls with a cache are not followed"


def _positions(ones: Any, axis: int) -> Any:
    """Returns the position of each entry along an axis, from a tensor of ones."""
    return ops.subtract(ops.cumsum(ones, axis=axis), 1)


# ---------------------------------------------------------------- masks


def _causal_mask(sequence: Any, padding_mask: Any, attention_mask: Any, window: int | None = None) -> Any:
    """Returns 1 where a query may read a key, shape (batch, queries, keys): neither later, nor masked.

    Args:
        sequence: Features, shape (batch, length, features).
        padding_mask: 0 at padding, shape (batch, length); or None.
        attention_mask: 0 at pairs that are masked, shape (batch, queries, keys); or None.
        window: How many keys a query reads at most, counted backwards; None for all.
    """
    like = ops.sum(sequence, axis=-1) if padding_mask is None else padding_mask
    positions = _positions(ops.cast(ops.ones_like(like), "int32"), 1)
    queries, keys = ops.expand_dims(positions, 2), ops.expand_dims(positions, 1)
    mask = ops.cast(ops.greater_equal(queries, keys), "int32")
    if window is not None:
        mask = ops.minimum(mask, ops.cast(ops.less(queries, ops.add(keys, window)), "int32"))
    if padding_mask is not None:
        mask = ops.minimum(mask, ops.cast(ops.expand_dims(padding_mask, 1), "int32"))
    return mask if attention_mask is None else ops.minimum(mask, ops.cast(attention_mask, "int32"))


def _decoder_mask(
    layer: Any,
    usual: Method,
    decoder_sequence: Any,
    decoder_padding_mask: Any,
    decoder_attention_mask: Any,
    **others: Any,
) -> Any:
    if others.get("self_attention_cache") is not None:
        raise ValueError(WITH_CACHE)
    given = (decoder_sequence, decoder_padding_mask, decoder_attention_mask)
    if not others.get("use_causal_mask", True):
        return usual(*given, **others)
    return _causal_mask(*given, window=getattr(layer, "sliding_window", None))


def _gemma_mask(layer: Any, usual: Method, x: Any, padding_mask: Any, cache: Any, cache_update_index: Any) -> Any:
    if cache is not None:
        raise ValueError(WITH_CACHE)
    return _causal_mask(x, padding_mask, None)


def _t5_mask(layer: Any, usual: Method, hidden_states: Any, attention_mask: Any, cache: Any, index: Any) -> Any:
    if cache is not None:
        raise ValueError(WITH_CACHE)
    return _causal_mask(hidden_states, None, attention_mask)


def _gemma_window(layer: Any, usual: Method, attention_mask: Any, cache_update_index: int = 0) -> Any:
    """Masks pairs of positions that are further apart than the window, on both sides."""
    ones = ops.cast(ops.ones_like(attention_mask), "int32")
    apart = ops.absolute(ops.subtract(_positions(ones, 1), _positions(ones, 2)))
    return ops.logical_and(attention_mask, ops.less(apart, layer.sliding_window_size))


# ---------------------------------------------------------------- attention


def _gemma_attention(layer: Any, usual: Method, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
    """Repeats keys and values for their query heads, so that heads are removed with the keys that they read."""
    shared, heads = layer.num_key_value_heads, layer.num_query_heads
    if shared in (1, heads):
        return usual(q, k, v, *args, **kwargs)
    k, v = (ops.repeat(one, heads // shared, axis=2) for one in (k, v))
    layer.num_key_value_heads = heads
    try:
        return usual(q, k, v, *args, **kwargs)
    finally:
        layer.num_key_value_heads = shared


def _without_cache(layer: Any, attention: Any, cache: Any = None, cache_update_index: Any = None, **kwargs: Any) -> Any:
    # Keras's output shapes of attention take no cache, not even None.
    if cache is not None:
        raise ValueError(WITH_CACHE)
    return attention(**kwargs)


def _t5_attention(layer: Any, attention: Any, hidden_states: Any, **given: Any) -> tuple[Any, Any, None]:
    """Returns (output, bias of the scores, None), as T5's attention does without a cache.

    Called on symbolic tensors, T5's attention fails: Keras accepts no None among the outputs.
    """
    if given.get("cache") is not None:
        raise ValueError(WITH_CACHE)
    keyed = given.get("key_value_states")
    keyed = hidden_states if keyed is None else keyed
    projected = (attention.query_projector(hidden_states), attention.key_projector(keyed))
    query, key, value = (
        ops.reshape(one, (ops.shape(one)[0], -1, attention.num_heads, attention.key_value_dim))
        for one in (*projected, attention.value_projector(keyed))
    )
    bias, mask = given.get("position_bias"), given.get("mask")
    if bias is None:
        bias = _t5_bias(attention, hidden_states, keyed) if attention.use_relative_attention_bias else None
        if mask is not None:
            # As in T5: a large number, not infinity.
            masked = ops.multiply(ops.subtract(1.0, ops.cast(mask[:, None], attention.compute_dtype)), -1e9)
            bias = masked if bias is None else ops.add(bias, masked)
    scores = ops.einsum("bqnd,bknd->bnqk", query, key)
    scores = scores if bias is None else ops.add(scores, ops.cast(bias, scores.dtype))
    weights = attention.dropout_layer(ops.softmax(scores, axis=-1), training=given.get("training"))
    read = ops.einsum("bnqk,bknd->bqnd", weights, value)
    return attention.output_projector(ops.reshape(read, (ops.shape(read)[0], -1, attention.inner_dim))), bias, None


def _t5_bias(attention: Any, queries: Any, keys: Any) -> Any:
    """Returns the bias of each distance, shape (1, heads, queries, keys)."""
    places = [_positions(ops.cast(ops.ones_like(ops.sum(one, axis=(0, 2))), "int32"), 0) for one in (queries, keys)]
    buckets = attention._relative_position_bucket(
        ops.subtract(ops.expand_dims(places[1], 0), ops.expand_dims(places[0], 1)),
        bidirectional=not attention.is_decoder,
        num_buckets=attention.relative_attention_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    size = tuple(attention.relative_attention_bias.shape)
    table = keras.layers.Embedding(*size, dtype=attention.dtype_policy, name="relative_attention_bias")
    table.build()
    _share(table, "_embeddings", attention.relative_attention_bias)
    return ops.expand_dims(ops.transpose(table(buckets), (2, 0, 1)), 0)


# ---------------------------------------------------------------- positions and tokens


def _rotary_positions(layer: Any, usual: Method, inputs: Any, start_index: Any = 0) -> Any:
    like = ops.sum(inputs, axis=tuple(axis for axis in range(len(inputs.shape)) if axis != 1))
    ones = ops.cast(ops.ones_like(like), "float32")
    return ops.add(_positions(ones, 0), ops.cast(start_index, "float32"))


def _vit_patches(layer: Any, usual: Method, inputs: Any) -> Any:
    patches = layer.patch_embedding(inputs)
    if layer.data_format == "channels_first":
        patches = ops.transpose(patches, (0, 2, 3, 1))
    patches = ops.reshape(patches, (ops.shape(patches)[0], layer.num_patches, layer.hidden_dim))
    if layer.use_class_token:
        token = _for_each_example(layer.class_token, patches, layer.dtype_policy, "class_token")
        patches = ops.concatenate([token, patches], axis=1)
    ones = ops.cast(ops.ones_like(ops.sum(patches, axis=-1)), "int32")
    return ops.add(patches, layer.position_embedding(_positions(ones, 1)))


def _for_each_example(weight: Any, x: Any, dtype: Any, name: str) -> Any:
    """Returns a weight of shape (1, 1, features) for each example of `x`, as the output of a layer that has it.

    Args:
        weight: The variable.
        x: Any tensor with the examples, shape (batch, length, features).
        dtype: Policy of the layer.
        name: Name of the layer.
    """
    ones = ops.ones_like(ops.sum(x, axis=(1, 2), keepdims=True))
    layer = keras.layers.EinsumDense("bca,acd->bcd", tuple(weight.shape)[1:], dtype=dtype, name=name)
    layer.build((None, 1, 1))
    _share(layer, "_kernel", weight)
    return layer(ones)


def _share(layer: Any, attribute: str, variable: Any) -> None:
    """Puts a variable of another layer in the place of a built layer's only variable.

    The variable of the new model that belongs to `layer` then belongs to the other layer's variable.
    """
    layer._trainable_variables[:] = [variable]
    # Keras's __setattr__ adds no variable to a built layer.
    object.__setattr__(layer, attribute, variable)


_DECODER: Mapping[str, Method] = {"_compute_self_attention_mask": _decoder_mask}
_ATTENTIONS = dict.fromkeys(("_self_attention_layer", "_cross_attention_layer"), _without_cache)
# Class name -> {attribute: function of the layer, of what the attribute is, and of the arguments}.
_METHODS: dict[str, Mapping[str, Method]] = {
    "TransformerDecoder": {**_DECODER, **_ATTENTIONS},
    "LlamaTransformerDecoder": _DECODER,
    "MistralTransformerDecoder": _DECODER,
    "GemmaDecoderBlock": {"_compute_attention_mask": _gemma_mask},
    "CachedGemmaAttention": {"_mask_sliding_window": _gemma_window, "_compute_attention": _gemma_attention},
    "T5TransformerLayer": {
        "_compute_self_attention_mask": _t5_mask,
        "self_attention": _t5_attention,
        "cross_attention": _t5_attention,
    },
    "LlamaRotaryEmbedding": {"_compute_positions": _rotary_positions},
    "ViTPatchingAndEmbedding": {"call": _vit_patches},
}

# Class name -> argument with the mask; without it, the layer reads the mask that Keras keeps on its input.
_PADDING = {
    **dict.fromkeys(
        ("TransformerDecoder", "LlamaTransformerDecoder", "MistralTransformerDecoder"), "decoder_padding_mask"
    ),
    "GemmaDecoderBlock": "padding_mask",
}


def lost_mask(layer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Returns the argument that a call leaves out, since Keras keeps the mask on the input; "" for other calls.

    The calls inside the layer are recorded on tensors without masks.
    """
    name = _PADDING.get(type(layer).__name__, "") if _is_hub(layer) else ""
    if not name or inspect.signature(layer.call).bind(*args, **kwargs).arguments.get(name) is not None:
        return ""
    tensors = keras.tree.flatten((args, dict(kwargs)))
    return name if any(getattr(one, "_keras_mask", None) is not None for one in tensors) else ""


def _is_hub(layer: Any) -> bool:
    return type(layer).__module__.partition(".")[0] == PACKAGE


@contextmanager
def with_open_lengths(layer: Any) -> Iterator[None]:
    """While open, a layer of KerasHub can be called on symbolic tensors whose lengths are open, if it is known here."""
    kind, own = type(layer), vars(layer)
    methods = _METHODS.get(kind.__name__, {}) if _is_hub(layer) else {}
    present = {name: getattr(layer, name, None) for name in methods}
    before = {name: own[name] for name in methods if name in own}
    # Not through Keras's __setattr__, which tracks what a layer is given.
    for name, method in methods.items():
        if present[name] is not None:
            object.__setattr__(layer, name, partial(method, layer, present[name]))
    try:
        yield
    finally:
        for name in methods:
            own.pop(name, None)
        own.update(before)

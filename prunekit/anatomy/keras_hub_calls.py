"""Calls inside KerasHub's layers, in operations that need no length as a number. Does not import KerasHub.

KerasHub's layers make masks and positions with `arange` over the length of the sequence, which fails where the length
is open. The functions here compute the same values from tensors: a cumulative sum of ones counts the positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
from keras import ops

from prunekit.anatomy.keras_hub_layers import PACKAGE

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
    *,
    self_attention_cache: Any = None,
    self_attention_cache_update_index: Any = None,
    use_causal_mask: bool = True,
) -> Any:
    given = (decoder_sequence, decoder_padding_mask, decoder_attention_mask)
    if self_attention_cache is not None:
        raise ValueError(WITH_CACHE)
    if not use_causal_mask:
        return usual(*given, False, None, None)
    return _causal_mask(*given, window=getattr(layer, "sliding_window", None))


def _gemma_mask(layer: Any, usual: Method, x: Any, padding_mask: Any, cache: Any, cache_update_index: Any) -> Any:
    if cache is not None:
        raise ValueError(WITH_CACHE)
    return _causal_mask(x, padding_mask, None)


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
    # The layer shares the variable, so that the new layer's variable is recognised as that of the former layer.
    layer._trainable_variables[:] = [weight]
    object.__setattr__(layer, "_kernel", weight)
    return layer(ones)


_DECODER: Mapping[str, Method] = {"_compute_self_attention_mask": _decoder_mask}
_ATTENTIONS = dict.fromkeys(("_self_attention_layer", "_cross_attention_layer"), _without_cache)
# Class name -> {attribute: function of the layer, of what the attribute is, and of the arguments}.
_METHODS: dict[str, Mapping[str, Method]] = {
    "TransformerDecoder": {**_DECODER, **_ATTENTIONS},
    "LlamaTransformerDecoder": _DECODER,
    "MistralTransformerDecoder": _DECODER,
    "GemmaDecoderBlock": {"_compute_attention_mask": _gemma_mask},
    "CachedGemmaAttention": {"_mask_sliding_window": _gemma_window, "_compute_attention": _gemma_attention},
    "LlamaRotaryEmbedding": {"_compute_positions": _rotary_positions},
    "ViTPatchingAndEmbedding": {"call": _vit_patches},
}


@contextmanager
def with_open_lengths(layer: Any) -> Iterator[None]:
    """While open, a layer of KerasHub can be called on symbolic tensors whose lengths are open, if it is known here."""
    kind, own = type(layer), vars(layer)
    methods = _METHODS.get(kind.__name__, {}) if kind.__module__.partition(".")[0] == PACKAGE else {}
    present = {name: getattr(layer, name) for name in methods}
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

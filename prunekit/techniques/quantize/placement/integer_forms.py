"""Layers and operations without an integer kernel, as operations that each have one.

Of normalizations and attention these are the operations that LiteRT's converter writes for them, except for factors and
offsets, which files compute as one depthwise convolution with a scale for each channel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
from keras import ops
from keras.src.backend.common.masking import get_keras_mask
from keras.src.ops.math import Rsqrt
from keras.src.ops.nn import DotProductAttention, Softmax
from keras.src.ops.numpy import Add, Matmul, Mean, Multiply, Repeat, Reshape, Square, Subtract, Transpose

from prunekit.anatomy.channels.recorded_calls import RecordedCall, recorded_function_of
from prunekit.anatomy.layers.linear_kinds import RECURRENT
from prunekit.techniques.quantize.placement.form_operations import ChannelAffine, NoIntegerForm
from prunekit.techniques.quantize.placement.recurrent_forms import bidirectional, recurrent

L = keras.layers
MASKED = "its mask has no integer kernel"


def integer_form(node: Any, *, fused_lstm: bool = False, plain: Collection[int] = ()) -> RecordedCall | None:
    """Returns operations that compute the call of a node of a graph; None for another layer than those known here.

    Args:
        node: The node.
        fused_lstm: True: one operation computes all steps of an LSTM where its kernel has the options for it.
        plain: ids of the factors of normalizations that compute without factors and offsets, since these change
            nothing.

    Raises:
        NoIntegerForm: The layer is known, but not this way of calling it.
    """
    operation, given = node.operation, node.arguments
    kinds = [one for one in _FORMS if isinstance(operation, one)]
    # A subclass may compute something else.
    if not kinds or getattr(type(operation), "call", None) is not kinds[0].call:
        return None
    tensors = (*node.input_tensors, *node.outputs)
    if any(get_keras_mask(one) is not None for one in tensors):
        # The operations would not pass it on.
        raise NoIntegerForm(MASKED)
    if len({one.dtype for one in tensors}) > 1:
        raise NoIntegerForm("it reads and computes different types")
    form = _FORMS[kinds[0]]
    if form in (recurrent, bidirectional):
        form = functools.partial(form, fused=fused_lstm)
    elif form in _NORMALIZATIONS:
        form = functools.partial(form, plain=plain)
    return recorded_function_of(lambda *args, **kwargs: form(operation, *args, **kwargs), given.args, given.kwargs)


# ---- normalizations --------------------------------------------------------------------------------------------------


def _layer_normalization(layer: Any, inputs: Any, plain: Collection[int]) -> Any:
    if layer.rms_scaling:
        raise NoIntegerForm("it has rms_scaling=True; RMSNormalization has an integer form")
    _check_last(layer.axis, inputs)
    return _scaled(_normalized(inputs, [-1], layer.epsilon), layer.gamma, layer.beta, plain)


def _rms_normalization(layer: Any, x: Any, plain: Collection[int]) -> Any:
    _check_last(layer.axis, x)
    return _scaled(_over_deviation(x, [-1], layer.epsilon), layer.scale, None, plain)


def _group_normalization(layer: Any, inputs: Any, plain: Collection[int]) -> Any:
    _check_last(layer.axis, inputs)
    shape = tuple(inputs.shape[1:])
    groups = (-1, *shape[:-1], layer.groups, shape[-1] // layer.groups)
    parts = Reshape(groups, name="groups")(inputs)
    parts = _normalized(parts, [*range(1, len(shape)), len(shape) + 1], layer.epsilon)
    return _scaled(Reshape((-1, *shape), name="channels")(parts), layer.gamma, layer.beta, plain)


def _normalized(x: Any, axes: Sequence[int], epsilon: float) -> Any:
    mean = Mean(axes, keepdims=True, name="mean")(x)
    return _over_deviation(Subtract(name="centred")(x, mean), axes, epsilon)


def _over_deviation(x: Any, axes: Sequence[int], epsilon: float) -> Any:
    variance = Mean(axes, keepdims=True, name="variance")(Square(name="square")(x))
    above = Add(name="epsilon")(variance, ops.convert_to_tensor(epsilon, x.dtype))
    return Multiply(name="normalized")(x, Rsqrt(name="rsqrt")(above))


def _scaled(x: Any, gamma: Any, beta: Any, plain: Collection[int]) -> Any:
    return x if (gamma is None and beta is None) or id(gamma) in plain else ChannelAffine("scaled", gamma, beta)(x)


def _check_last(axis: Any, x: Any) -> None:
    last = len(x.shape) - 1
    if [one % len(x.shape) for one in ([axis] if isinstance(axis, int) else axis)] != [last]:
        raise NoIntegerForm("normalizations have an integer form for the last axis")
    if None in x.shape[1:]:
        raise NoIntegerForm("normalizations have an integer form if the lengths of all axes but the batch are known")


# ---- attention -------------------------------------------------------------------------------------------------------


def _attention(
    operation: Any, query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, scale: Any = None
) -> Any:
    if operation.is_causal or mask is not None:
        raise NoIntegerForm(MASKED)
    if bias is not None or operation.attn_logits_soft_cap is not None:
        raise NoIntegerForm("attention has an integer form without a bias and a cap of its scores")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    repeats = query.shape[2] // key.shape[2]
    if repeats > 1:
        key, value = (Repeat(repeats, 2, name=name)(one) for name, one in (("keys", key), ("values", value)))
    query = Multiply(name="scale")(query, ops.convert_to_tensor(scale, query.dtype))
    query = Transpose((0, 2, 1, 3), name="heads_of_query")(query)
    key = Transpose((0, 2, 3, 1), name="heads_of_key")(key)
    value = Transpose((0, 2, 1, 3), name="heads_of_value")(value)
    shares = Softmax(name="softmax")(Matmul(name="scores")(query, key))
    return Transpose((0, 2, 1, 3), name="heads")(Matmul(name="sums")(shares, value))


_FORMS: dict[Any, Callable[..., Any]] = {
    L.LayerNormalization: _layer_normalization,
    L.RMSNormalization: _rms_normalization,
    L.GroupNormalization: _group_normalization,
    DotProductAttention: _attention,
    **dict.fromkeys(RECURRENT, recurrent),
    L.Bidirectional: bidirectional,
}
_NORMALIZATIONS = (_layer_normalization, _rms_normalization, _group_normalization)

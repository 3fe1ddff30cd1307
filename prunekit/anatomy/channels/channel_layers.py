"""Rules of layers that only combine or rearrange tensors, and the table of all layers' rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.channels import channel_attention, channel_kernels, channel_normalization, channel_recurrent
from prunekit.anatomy.channels.channel_axes import Axes
from prunekit.anatomy.channels.channel_calls import (
    ChannelCall,
    NotFollowedError,
    Rule,
    Walk,
    activated,
    axes_of,
    channel_axis,
    concatenated,
    contracted,
    elementwise,
    keep_other_axes,
    maps_zero_to_zero,
    sizes,
)
from prunekit.anatomy.layers.keras_hub_layers import PACKAGE
from prunekit.anatomy.layers.layers import _base, refusal

_L = keras.layers


# ---- entry by entry --------------------------------------------------------------------------------------------------


def _same(walk: Walk, call: ChannelCall) -> list[Axes]:
    return [replace(call.x, shape=shape) for shape in call.outputs]


def _activation(walk: Walk, call: ChannelCall) -> list[Axes]:
    return [activated(walk, call.operation.activation, call.x)]


def _softmax(walk: Walk, call: ChannelCall) -> list[Axes]:
    x, axes = call.x, axes_of(call.operation)
    for axis in axes:
        walk.links.keep(x.at(axis), "softmax over the channels")
    return [replace(x.without(axes), zero=False)]


def _rescaling(walk: Walk, call: ChannelCall) -> list[Axes]:
    layer, x = call.operation, call.x
    if max(np.size(layer.scale), np.size(layer.offset)) > 1:
        walk.links.keep(x.at(-1), "Rescaling by one constant for each channel")
        return [Axes.fixed(call.outputs[0])]
    return [replace(x, zero=x.zero and layer.offset == 0)]


def _relu(walk: Walk, call: ChannelCall) -> list[Axes]:
    return [replace(call.x, zero=call.x.zero and maps_zero_to_zero(call.operation))]


def _merge(walk: Walk, call: ChannelCall) -> list[Axes]:
    inputs, shape = call.inputs, call.outputs[0]
    if len({len(one.shape) for one in inputs}) > 1 and any(one.labelled for one in inputs):
        raise NotFollowedError("it merges tensors of different ranks")
    return [elementwise(walk, inputs, shape, "any" if isinstance(call.operation, _L.Multiply) else "all")]


def _concatenate(walk: Walk, call: ChannelCall) -> list[Axes]:
    return [concatenated(walk, call.inputs, call.operation.axis, call.outputs[0])]


def _dot(walk: Walk, call: ChannelCall) -> list[Axes]:
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


def _spatial(walk: Walk, call: ChannelCall) -> list[Axes]:
    """Pooling, padding, cropping and upsampling: the channels stay where they are."""
    x, axis = call.x, channel_axis(call.operation, len(call.x.shape))
    keep_other_axes(walk, x, axis)
    return [replace(Axes.fixed(call.outputs[0]).with_axis(axis, x.shape[axis], x.channels[axis]), zero=x.zero)]


def _global_pool(walk: Walk, call: ChannelCall) -> list[Axes]:
    layer, x = call.operation, call.x
    axis = channel_axis(layer, len(x.shape))
    keep_other_axes(walk, x, axis)
    made = Axes.fixed(call.outputs[0])
    at = axis if layer.keepdims else len(made.shape) - 1
    return [replace(made.with_axis(at, x.shape[axis], x.channels[axis]), zero=x.zero)]


def _flatten(walk: Walk, call: ChannelCall) -> list[Axes]:
    layer, x = call.operation, call.x
    if layer.data_format == "channels_first" and len(x.shape) > 2:
        x = Axes((x.shape[0], *x.shape[2:], x.shape[1]), (x.channels[0], *x.channels[2:], x.channels[1]), x.zero)
    return [walk.links.reshaped(x, call.outputs[0])]


def _reshape(walk: Walk, call: ChannelCall) -> list[Axes]:
    layer = call.operation
    made = walk.links.reshaped(call.x, call.outputs[0])
    walk.links.resize(layer, target_shape=sizes(layer.target_shape, made.channels[1:]))
    return [made]


def _permute(walk: Walk, call: ChannelCall) -> list[Axes]:
    order = (0, *call.operation.dims)
    return [Axes(call.outputs[0], tuple(call.x.channels[axis] for axis in order), call.x.zero)]


def _repeat_vector(walk: Walk, call: ChannelCall) -> list[Axes]:
    x = call.x
    return [Axes(call.outputs[0], (x.channels[0], None, x.channels[1]), x.zero)]


# ---- the table -------------------------------------------------------------------------------------------------------


def _not_followed(walk: Walk, call: ChannelCall) -> list[Axes]:
    raise NotFollowedError(f"layers of type {type(call.operation).__name__} are not followed")


RULES: dict[Rule, str] = {
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
    # Subclasses of layers that are followed, which compute something else.
    _not_followed: "AdditiveAttention SpectralNormalization",
}


def _first_table() -> dict[type, Rule]:
    families = (RULES, *(family.RULES for family in (channel_kernels, channel_normalization, channel_recurrent)))
    table = {
        getattr(_L, name): rule
        for rules in (*families, channel_attention.RULES)
        for rule, listed in rules.items()
        for name in listed.split()
        if hasattr(_L, name)
    }
    return table | {_base(getattr(_L, name), base): rule for rule, (name, base) in channel_kernels.BASES.items()}


_TABLE = _first_table()
# Layers of `keras.applications` without public names.
_BY_NAME: dict[str, Rule] = {**channel_normalization.BY_NAME, "StochasticDepth": _same}
_HUB: dict[str, Rule] = {**channel_kernels.HUB, **channel_normalization.HUB, **channel_attention.HUB}

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
    if rule is None:
        named = _BY_NAME if own else _HUB if kind.__module__.startswith(f"{PACKAGE}.") else {}
        rule = named.get(kind.__name__)
    if rule is not None and "call" in vars(layer):
        return None
    reason = refusal(layer)
    if rule is not None and reason:
        raise NotFollowedError(reason)
    return rule

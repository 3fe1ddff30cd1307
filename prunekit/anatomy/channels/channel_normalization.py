"""Rules of normalizations, and of layers that scale channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from prunekit.anatomy.channels.channel_axes import Axes, Kept, Scaled
from prunekit.anatomy.channels.channel_calls import (
    ChannelCall,
    NotFollowedError,
    Rule,
    Walk,
    axes_of,
    keep_other_axes,
)


def _batch_norm(walk: Walk, call: ChannelCall) -> list[Axes]:
    layer, x = call.operation, call.x
    if getattr(layer, "renorm", False) and x.at(layer.axis) is not None:
        raise NotFollowedError("batch renormalisation keeps statistics that are not followed")
    for name in ("gamma", "beta", "moving_mean", "moving_variance"):
        walk.links.bind(getattr(layer, name, None), 0, x.at(layer.axis))
    alone = set(x.labelled) <= {layer.axis % len(x.shape)}
    return [replace(x, zero=alone and (x.zero or layer.scale))]


# Approximations that a user may allow.
LAYER_NORMALIZATION = "layer_normalization"
APPROXIMATIONS = (LAYER_NORMALIZATION,)


def _approximated_norm(walk: Walk, call: ChannelCall, axis: int) -> list[Axes]:
    """The statistics of the normalization are those of the kept channels."""
    layer, x = call.operation, call.x
    axis %= len(x.shape)
    numbers = x.at(axis)
    for variable in (layer.gamma, layer.beta):
        walk.links.bind(variable, 0, numbers)
    if numbers is None:
        return [Axes.fixed(x.shape)]
    walk.links.approximated_at(layer, axis, numbers)
    return [replace(x, zero=layer.gamma is not None and x.labelled == (axis,))]


def _layer_norm(walk: Walk, call: ChannelCall) -> list[Axes]:
    layer, x = call.operation, call.x
    axes = axes_of(layer)
    known = len(axes) == 1 and not getattr(layer, "rms_scaling", False)
    if known and LAYER_NORMALIZATION in walk.links.approximate:
        return _approximated_norm(walk, call, axes[0])
    for axis in axes:
        walk.links.keep(x.at(axis), "LayerNormalization subtracts the mean of all channels")
    return [replace(x.without(axes), zero=False)]


def _rms_norm(walk: Walk, call: ChannelCall) -> list[Axes]:
    return _rms(walk, call, axes_of(call.operation), call.operation.scale)


def _hub_rms_norm(walk: Walk, call: ChannelCall) -> list[Axes]:
    return _rms(walk, call, [-1], call.operation.scale)


def _gemma_rms_norm(walk: Walk, call: ChannelCall) -> list[Axes]:
    # It multiplies by 1 + scale.
    return _rms(walk, call, [-1], call.operation.scale, offset=1.0)


def _t5_rms_norm(walk: Walk, call: ChannelCall) -> list[Axes]:
    return _rms(walk, call, [-1], call.operation.weight)


def _rms(walk: Walk, call: ChannelCall, axes: Sequence[int], scale: Any, offset: float = 0.0) -> list[Axes]:
    layer, x, links = call.operation, call.x, walk.links
    carrying = [axis for axis in axes if x.at(axis) is not None]
    if not carrying:
        return [x]
    numbers: Any = x.at(carrying[0])
    if len(axes) > 1 or not x.zero:
        for axis in carrying:
            links.keep(x.at(axis), "RMSNormalization over channels that are not zero where they are removed")
        return [x.without(axes)]
    links.bind(scale, 0, numbers)
    # mean over C' channels + e C / C' = (mean over C channels + e) C / C'.
    links.rescale(scale, numbers, 0.5, offset)
    links.resize(layer, epsilon=Scaled(layer.epsilon, numbers, 1.0))
    return [x]


def _group_norm(walk: Walk, call: ChannelCall) -> list[Axes]:
    layer, x, links = call.operation, call.x, walk.links
    numbers = x.at(layer.axis)
    keep_other_axes(walk, x, layer.axis)
    if layer.groups == 1 and LAYER_NORMALIZATION in links.approximate:
        return _approximated_norm(walk, call, layer.axis)
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


def _unit_norm(walk: Walk, call: ChannelCall) -> list[Axes]:
    layer, x = call.operation, call.x
    for axis in axes_of(layer):
        if not x.zero:
            walk.links.keep(x.at(axis), "UnitNormalization over channels that are not zero where they are removed")
    return [x]


def _normalization(walk: Walk, call: ChannelCall) -> list[Axes]:
    walk.links.keep_all([call.x], "Normalization holds constants of its inputs")
    return [Axes.fixed(call.outputs[0])]


def _prelu(walk: Walk, call: ChannelCall) -> list[Axes]:
    layer, x = call.operation, call.x
    for axis, numbers in enumerate(x.channels[1:]):
        if numbers is not None and layer.alpha.shape[axis] > 1:
            walk.links.bind(layer.alpha, axis, numbers)
    return [x]


def _layer_scale(walk: Walk, call: ChannelCall) -> list[Axes]:
    layer, x = call.operation, call.x
    numbers = x.at(-1)
    if numbers is not None:
        walk.links.bind(layer.gamma, 0, numbers)
        walk.links.resize(layer, projection_dim=Kept(numbers))
    return [replace(x, zero=True)]


RULES: dict[Rule, str] = {
    _batch_norm: "BatchNormalization",
    _layer_norm: "LayerNormalization",
    _rms_norm: "RMSNormalization",
    _group_norm: "GroupNormalization",
    _unit_norm: "UnitNormalization",
    _normalization: "Normalization",
    _prelu: "PReLU",
}
# ConvNeXt's layer has no public name.
BY_NAME: dict[str, Rule] = {"LayerScale": _layer_scale}
# Normalizations of KerasHub by class name.
HUB: dict[str, Rule] = {
    "LlamaLayerNorm": _hub_rms_norm,
    "MistralLayerNormalization": _hub_rms_norm,
    "RMSNormalization": _gemma_rms_norm,
    "T5LayerNorm": _t5_rms_norm,
}

"""Finds the channels that no input reaches: all kernels that compute them are zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from prunekit.anatomy.channels.channels import Channels, Group, Member
from prunekit.anatomy.channels.weight_entries import by_channel
from prunekit.anatomy.layers.model_weights import weights_in
from prunekit.anatomy.layers.targets import find_targets
from prunekit.sparsity.array_ops import array_of

# Weights with several axes that only scale, shift or filter a channel by itself.
_WITHIN_CHANNEL = ("depthwise_kernel", "bias", "normalization", "other")


def zero_channels(channels: Channels) -> np.ndarray:
    """Returns the channels of all groups whose producing kernels are entirely zero.

    Such a channel has the same value for every input: 0, or a constant from biases and normalizations. Where several
    layers compute a channel together, as in a residual sum, the kernels of all of them must be zero. A depthwise kernel
    reads the channel itself, and may have any values.
    """
    axes = {target.name: target.out_axes for target in find_targets(channels.model)[0]}
    named = {weight.name: weight for weight in weights_in(channels.model)}
    found = [
        _zero_in(group, [_producing(member, axes, named) for member in group.members]) for group in channels.groups
    ]
    return np.concatenate(found) if found else np.zeros(0, int)


def _producing(member: Member, axes: dict[str, tuple[int, ...]], named: dict[str, Any]) -> Any:
    """Returns the variable if the weight may compute the channels at this axis; else None."""
    weight = named.get(member.weight)
    if weight is None:
        return None
    if member.weight in axes:
        return weight.variable if member.axis in axes[member.weight] else None
    # How a layer that prunekit does not know uses a weight is not known.
    known = weight.spec is not None and weight.spec.role in _WITHIN_CHANNEL
    return None if known or len(weight.variable.shape) < 2 else weight.variable


def _zero_in(group: Group, producers: Sequence[Any]) -> np.ndarray:
    if all(variable is None for variable in producers):
        return np.zeros(0, int)
    nonzero = [
        member.channels.reshape(-1)[(by_channel(array_of(variable), member.axis, member.channels) != 0).any(axis=1)]
        for member, variable in zip(group.members, producers, strict=True)
        if variable is not None
    ]
    return group.channels[~np.isin(group.channels, np.concatenate(nonzero))]

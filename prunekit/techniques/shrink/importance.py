"""Importance of channels: the importances of a criterion, reduced over all weight entries of a channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from prunekit.anatomy.channels import Channels, Group, Member
from prunekit.anatomy.reports import Skipped
from prunekit.anatomy.targets import Target, find_targets
from prunekit.core.statistics import Collectors
from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.scores import Criterion, get_criterion
from prunekit.techniques.shrink.options import ShrinkOptions


def ranked_weights(model: Any, include: Any = (), exclude: Any = ()) -> tuple[list[Target], list[Skipped]]:
    """Returns the weights whose entries rank channels, and the other weights with reasons.

    Depthwise kernels count, which pruning leaves out: they have entries for each channel.
    """
    return find_targets(model, include, exclude, also=("depthwise_kernel",))


def importances(channels: Channels, options: ShrinkOptions, data: Any = None) -> list[np.ndarray]:
    """Returns the importance of each channel of each group, arrays of shape (channels,); higher = keep.

    The importance of a channel at an axis of a weight is the mean of the criterion's importances over the entries at
    the channel. A kernel that computes the channels and the kernels that read them all count; biases and normalizations
    do not.

    Args:
        channels: The channels of a model.
        options: Criterion, reduction and normalization.
        data: Calibration data, for a criterion that needs them.

    Raises:
        ValueError: The criterion needs data and there are none; an importance is NaN.
    """
    criterion = get_criterion(options.criterion)
    members: dict[str, list[tuple[int, Member]]] = {}
    for index, group in enumerate(channels.groups):
        for member in group.members:
            members.setdefault(member.weight, []).append((index, member))
    targets = [target for target in ranked_weights(channels.model)[0] if target.name in members]
    statistics = Collectors(criterion.needs, channels.model, targets, data).values()
    found: list[list[np.ndarray]] = [[] for _ in channels.groups]
    for number, target in enumerate(targets):
        given = statistics[number] if statistics else None
        scores = _scores(criterion, target, number, given)
        for index, member in members[target.name]:
            values = _of_channels(scores, member, channels.groups[index])
            average = values.mean()
            found[index].append(values / average if options.normalize and average > 0 else values)
    reduce: Any = {"mean": np.mean, "sum": np.sum, "max": np.max}[options.reduction]
    empty = (np.zeros(group.channels.size) for group in channels.groups)
    return [reduce(rows, axis=0) if rows else zeros for rows, zeros in zip(found, empty, strict=True)]


def _scores(criterion: Criterion, target: Target, number: int, statistics: Any) -> np.ndarray:
    scores = array_of(criterion(target.variable, target=target, seed_offset=number, statistics=statistics))
    if np.isnan(scores).any():
        raise ValueError(
            f"The importances of {criterion} are numbers. Received: NaN for {target.name!r}. The weight or the data "
            "hold NaN or infinite values."
        )
    return np.asarray(scores, np.float64)


def _of_channels(scores: np.ndarray, member: Member, group: Group) -> np.ndarray:
    """Returns the mean importance of the entries of each channel of the group, shape (channels,)."""
    numbers, axis = member.channels, member.axis
    if numbers.ndim > 1:
        # Each group of output units has its own inputs at the axis.
        parts = np.split(scores, numbers.shape[0], axis=-1)
        means = np.stack([np.moveaxis(part, axis, 0).reshape(numbers.shape[1], -1).mean(1) for part in parts])
    else:
        means = np.moveaxis(scores, axis, 0).reshape(numbers.size, -1).mean(1)
    order = np.argsort(group.channels)
    places = np.searchsorted(group.channels, numbers.reshape(-1), sorter=order)
    places = order[np.minimum(places, order.size - 1)]
    ours = group.channels[places] == numbers.reshape(-1)
    sums = np.bincount(places[ours], means.reshape(-1)[ours], group.channels.size)
    return sums / np.maximum(np.bincount(places[ours], minlength=group.channels.size), 1)


def producing(group: Group, targets: Sequence[Target]) -> list[str]:
    """Returns the names of the targets that compute the channels of a group."""
    axes = {target.name: target.out_axes for target in targets}
    return [member.weight for member in group.members if member.axis in axes.get(member.weight, ())]

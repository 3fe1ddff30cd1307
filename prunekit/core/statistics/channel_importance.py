"""Importance of channels: the importances of a criterion, reduced over all weight entries of a channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prunekit.anatomy.channels.channels import Channels, Group, Member
from prunekit.anatomy.channels.weight_entries import by_channel
from prunekit.anatomy.layers.targets import Target, find_targets
from prunekit.anatomy.records.reports import Skipped
from prunekit.core.runtime.backend import value_now
from prunekit.core.statistics.statistics import Collectors
from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.scores import Criterion


def ranked_weights(
    model: Any, include: Any = (), exclude: Any = (), *, training: bool = False
) -> tuple[list[Target], list[Skipped]]:
    """Returns the weights whose entries rank channels, and the other weights with reasons.

    Depthwise kernels count, which pruning leaves out: they have entries for each channel.
    """
    return find_targets(model, include, exclude, also=("depthwise_kernel",), training=training)


REDUCTIONS: dict[str, Any] = {"mean": np.mean, "sum": np.sum, "max": np.max}


@dataclass(frozen=True)
class GroupImportance:
    """How the importances of weight entries become one importance of each channel.

    Attributes:
        reduction: How the axes that a channel occurs in are reduced to one importance: "mean", "sum" or "max".
        normalize: True divides the importances of each axis by their mean over the group before the reduction, so that
            each weight counts alike, and large weights do not decide alone.
    """

    reduction: str = "mean"
    normalize: bool = True

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"`reduction` is one of {', '.join(REDUCTIONS)}. Received: {self.reduction!r}.")

    def of(self, channels: Channels, scores: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Returns the importance of each channel of each group, arrays of shape (channels,); higher = keep.

        The importance of a channel at an axis of a weight is the mean over the entries at the channel.

        Args:
            channels: The channels of a model.
            scores: Name of a weight -> importance of each entry, of the weight's shape; weights without count not.
        """
        found = []
        for group in channels.groups:
            rows = [_of_channels(scores[one.weight], one, group) for one in group.members if one.weight in scores]
            if self.normalize:
                rows = [row / row.mean() if row.mean() > 0 else row for row in rows]
            found.append(REDUCTIONS[self.reduction](rows, axis=0) if rows else np.zeros(group.channels.size))
        return found


def ranking_weights(channels: Channels) -> list[Target]:
    """Returns the weights that rank channels: the kernels that compute them and the kernels that read them."""
    met = {member.weight for group in channels.groups for member in group.members}
    return [target for target in ranked_weights(channels.model)[0] if target.name in met]


def entry_scores(channels: Channels, criterion: Criterion, data: Any = None) -> dict[str, np.ndarray]:
    """Returns {name of a weight: importance of each entry, float64} for the weights that rank channels.

    The kernels that compute the channels and the kernels that read them all count; biases and normalizations do not.

    Args:
        channels: The channels of a model.
        criterion: The criterion.
        data: Calibration data, for a criterion that needs them.

    Raises:
        ValueError: The criterion needs data and there are none; an importance is NaN.
    """
    targets = ranking_weights(channels)
    found = scores_of(criterion, targets, Collectors(criterion.needs, channels.model, targets, data).values())
    for name, scores in found.items():
        if np.isnan(scores).any():
            raise ValueError(
                f"The importances of {criterion} are numbers. Received: NaN for {name!r}. The weight or the data hold "
                "NaN or infinite values."
            )
    return found


def scores_of(
    criterion: Criterion, targets: Sequence[Target], statistics: Sequence[Any] | None
) -> dict[str, np.ndarray]:
    """Returns {name of a target: importance of each entry, float64}.

    Args:
        criterion: The criterion.
        targets: The targets.
        statistics: Statistics that the criterion needs, one entry per target; None if it needs none.
    """
    found = {}
    for number, target in enumerate(targets):
        weight, given = value_now(target.variable), statistics[number] if statistics else None
        scores = criterion(weight, target=target, seed_offset=number, statistics=given)
        found[target.name] = np.asarray(array_of(scores), np.float64)
    return found


def _of_channels(scores: np.ndarray, member: Member, group: Group) -> np.ndarray:
    """Returns the mean importance of the entries of each channel of the group, shape (channels,)."""
    numbers = member.channels.reshape(-1)
    means = by_channel(scores, member.axis, member.channels).mean(axis=1)
    order = np.argsort(group.channels)
    places = np.searchsorted(group.channels, numbers, sorter=order)
    places = order[np.minimum(places, order.size - 1)]
    ours = group.channels[places] == numbers
    sums = np.bincount(places[ours], means[ours], group.channels.size)
    return sums / np.maximum(np.bincount(places[ours], minlength=group.channels.size), 1)


def producing(group: Group, targets: Sequence[Target]) -> list[str]:
    """Returns the names of the targets that compute the channels of a group."""
    axes = {target.name: target.out_axes for target in targets}
    return [member.weight for member in group.members if member.axis in axes.get(member.weight, ())]


def reasons_to_stay(channels: Channels, include: Any = (), exclude: Any = (), *, training: bool = False) -> list[str]:
    """Returns for each group why all its channels stay, or "".

    A group may lose channels if a weight that computes them is selected, and none is excluded or frozen.

    Args:
        channels: The channels of a model.
        include: Names, globs or `re:` patterns of layers that compute channels; empty = all.
        exclude: The same, of layers whose channels stay.
        training: True if the model is trained meanwhile: channels that frozen weights compute stay.

    Raises:
        ValueError: All channels stay.
    """
    reasons = [""] * len(channels.groups)
    if channels.groups and (include or exclude or training):
        reasons = _reasons_of_names(channels, ranked_weights(channels.model, include, exclude, training=training))
    if all(reasons):
        stops = [f"{stop.name or 'outputs'}: {stop.reason}" for stop in channels.stops]
        listed = "; ".join(dict.fromkeys([*reasons, *stops][:8])) or "the model has no hidden layers"
        raise ValueError(f"The model {channels.model.name!r} has no channels that can be removed. Received: {listed}.")
    return reasons


def _reasons_of_names(channels: Channels, found: tuple[list[Target], list[Skipped]]) -> list[str]:
    """Returns the reason of each group for the weights that are selected and those that are not."""
    targets, _ = ranked_weights(channels.model)
    selected, skipped = found
    chosen = {target.name for target in selected}
    staying = {one.name: one.reason for one in skipped if one.reason.startswith(("excluded", "frozen"))}
    reasons = []
    for group in channels.groups:
        names = producing(group, targets) or [member.weight for member in group.members]
        named = [staying[one] for one in names if one in staying]
        others = [] if chosen.intersection(names) else ["not matched by include"]
        reasons.append(next(iter([*named, *others]), ""))
    return reasons

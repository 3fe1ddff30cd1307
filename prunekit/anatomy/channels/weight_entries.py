"""The entries of a weight that belong to channels: cuts them out, or sets them to zero."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from prunekit.anatomy.channels.channel_links import WeightAxes
from prunekit.anatomy.channels.channels import Channels
from prunekit.sparsity.array_ops import array_of


def cut(value: np.ndarray, axes: WeightAxes | None, kept: np.ndarray) -> np.ndarray:
    """Returns the entries of a weight that belong to kept channels alone.

    Args:
        value: The weight's values, or an optimizer's state of the same shape.
        axes: Its axes with channels; None for a weight without channels.
        kept: True for each kept number.
    """
    if axes is None:
        return value
    grouped = [axis for axis, numbers in axes.channels.items() if numbers.ndim > 1]
    for axis in grouped:
        value = _cut_groups(value, axis, axes.channels[axis], axes.channels[value.ndim - 1], kept)
    for axis, numbers in axes.channels.items():
        if axis not in grouped:
            value = np.take(value, np.flatnonzero(kept[numbers]), axis)
    return value


def _cut_groups(value: np.ndarray, axis: int, inputs: np.ndarray, units: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Returns a grouped kernel whose groups have lost inputs, each its own; the output axis, the last, stays whole."""
    parts = np.split(value, inputs.shape[0], axis=-1)
    left = [np.take(part, np.flatnonzero(kept[row]), axis) for part, row in zip(parts, inputs, strict=True)]
    return np.concatenate(left, axis=-1)


def by_channel(value: np.ndarray, axis: int, numbers: np.ndarray) -> np.ndarray:
    """Returns the entries of a weight at each index of an axis, shape (indices, entries).

    Args:
        value: The weight's values, or anything of the same shape.
        axis: The axis.
        numbers: Its channels, or numbers, of shape (indices,); of shape (groups, indices) where each group of output
            units, the last axis, has inputs of its own at the axis. The rows are those of `numbers.reshape(-1)`.
    """
    parts = np.split(value, numbers.shape[0], axis=-1) if numbers.ndim > 1 else [value]
    rows = [np.moveaxis(part, axis, 0).reshape(part.shape[axis], -1) for part in parts]
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


def masked(value: np.ndarray, axes: WeightAxes, kept: np.ndarray) -> np.ndarray:
    """Returns a copy of a weight's values with zeros at all entries of removed channels."""
    value = np.array(value)
    for axis, numbers in axes.channels.items():
        if numbers.ndim == 1:
            np.moveaxis(value, axis, 0)[~kept[numbers]] = 0
            continue
        parts = np.split(value, numbers.shape[0], axis=-1)
        for part, row in zip(parts, numbers, strict=True):
            np.moveaxis(part, axis, 0)[~kept[row]] = 0
        value = np.concatenate(parts, axis=-1)
    return value


def zeroed(channels: Channels, kept: np.ndarray) -> Iterator[tuple[Any, np.ndarray]]:
    """Yields (variable, values with zeros at removed channels) for each weight that loses entries."""
    for axes in channels.links.weights.values():
        if not all(kept[numbers].all() for numbers in axes.channels.values()):
            yield axes.variable, masked(array_of(axes.variable), axes, kept)

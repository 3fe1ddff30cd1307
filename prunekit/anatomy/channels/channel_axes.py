"""Channels as numbers: which channel each index of an axis belongs to, and sizes that depend on the kept channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

# The channel of each index of an axis, shape (length,); None for an axis that keeps its length.
Numbers = np.ndarray | None


@dataclass(frozen=True, eq=False)
class Axes:
    """The axes of a tensor.

    Attributes:
        shape: Shape of the tensor; None where a length is not known.
        channels: For each axis, the channel of each index, or None.
        zero: True if the tensor is zero at a channel once every weight entry of the channel is zero.
    """

    shape: tuple[int | None, ...]
    channels: tuple[Numbers, ...]
    zero: bool = True

    @classmethod
    def fixed(cls, shape: Sequence[int | None]) -> Axes:
        """Returns axes that all keep their length."""
        return cls(tuple(shape), (None,) * len(shape))

    def at(self, axis: int) -> Numbers:
        """Returns the channels of an axis, which may be negative."""
        return self.channels[axis]

    def with_axis(self, axis: int, length: int | None, channels: Numbers) -> Axes:
        """Returns the axes with another length and other channels at one axis."""
        axis %= len(self.shape)
        shape, found = list(self.shape), list(self.channels)
        shape[axis], found[axis] = length, channels
        return replace(self, shape=tuple(shape), channels=tuple(found))

    def without(self, axes: Sequence[int]) -> Axes:
        """Returns the axes without channels at some of them."""
        gone = {axis % len(self.shape) for axis in axes}
        return replace(self, channels=tuple(None if i in gone else n for i, n in enumerate(self.channels)))

    @property
    def labelled(self) -> tuple[int, ...]:
        """The axes that have channels."""
        return tuple(axis for axis, numbers in enumerate(self.channels) if numbers is not None)


# ---- sizes that depend on the kept channels --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Kept:
    """The number of indices whose channels are kept."""

    channels: np.ndarray


@dataclass(frozen=True, eq=False)
class Scaled:
    """`value` times (length of the axis / kept indices) ** `power`."""

    value: float
    channels: np.ndarray
    power: float


@dataclass(frozen=True, eq=False)
class KeptSlice:
    """The slice of the kept indices between two former indices."""

    start: Kept
    stop: Kept


def resolved(structure: Any, kept: np.ndarray) -> Any:
    """Returns a structure of tuples and dicts with numbers in the place of sizes.

    Args:
        structure: Numbers, texts, slices, `Kept`, `Scaled` and `KeptSlice` in tuples, lists and dicts.
        kept: True for each kept channel.
    """
    if isinstance(structure, Kept):
        return int(np.count_nonzero(kept[structure.channels]))
    if isinstance(structure, Scaled):
        left = int(np.count_nonzero(kept[structure.channels]))
        return structure.value * (structure.channels.size / left) ** structure.power
    if isinstance(structure, KeptSlice):
        return slice(resolved(structure.start, kept), resolved(structure.stop, kept))
    if isinstance(structure, dict):
        return {key: resolved(value, kept) for key, value in structure.items()}
    if isinstance(structure, tuple | list):
        return type(structure)(resolved(value, kept) for value in structure)
    return structure


def depends_on(structure: Any) -> list[np.ndarray]:
    """Returns the channels that a structure of sizes depends on."""
    if isinstance(structure, Kept | Scaled):
        return [structure.channels]
    if isinstance(structure, KeptSlice):
        return [structure.start.channels, structure.stop.channels]
    inner = (
        structure.values() if isinstance(structure, dict) else structure if isinstance(structure, tuple | list) else ()
    )
    return [numbers for value in inner for numbers in depends_on(value)]


# ---- arithmetic on numbers -------------------------------------------------------------------------------------------


def components(size: int, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the smallest number of the connected component of each of `size` numbers, shape (size,).

    Args:
        size: How many numbers there are.
        first: One end of each edge, shape (edges,).
        second: The other end of each edge, shape (edges,).
    """
    roots = np.arange(size)
    while True:
        one, other = roots[first], roots[second]
        low, high = np.minimum(one, other), np.maximum(one, other)
        differing = low != high
        if not differing.any():
            return roots
        np.minimum.at(roots, high[differing], low[differing])
        while True:
            above = roots[roots]
            if np.array_equal(above, roots):
                break
            roots = above


def split_axis(numbers: np.ndarray, shape: Sequence[int]) -> tuple[int, np.ndarray]:
    """Chooses the axis that carries the channels when an axis becomes several.

    Removing an index of an axis removes all entries at the index: their channels must be removed together. The last
    axis is chosen if all its indices stay separate (the features of an image), otherwise the axis with the most
    separate ones.

    Args:
        numbers: The channel of each index of the axis, shape (length,).
        shape: Lengths of the new axes; their product is the length.

    Returns:
        (position of the axis in `shape`, channels at each of its indices, shape (indices, entries)).
    """
    whole = numbers.reshape(shape)
    most, best = 0, (0, numbers[:, None])
    for axis, length in enumerate(shape):
        entries = np.moveaxis(whole, axis, 0).reshape(length, -1)
        found, places = np.unique(entries, return_inverse=True)
        places = places.reshape(entries.shape)
        first = np.repeat(places[:, 0], entries.shape[1] - 1)
        roots = components(found.size, first, places[:, 1:].reshape(-1))
        separate = np.unique(roots[places[:, 0]]).size
        if separate > most or (axis == len(shape) - 1 and separate == length > 1):
            most, best = separate, (axis, entries)
    return best


def blocks(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Returns the smallest blocks of neighbouring axes that a reshape keeps together: (axes before, axes after)."""
    sizes, others = np.cumprod(before, dtype=int), np.cumprod(after, dtype=int)
    ends = np.intersect1d(sizes, others)
    of, of_others = np.searchsorted(ends, sizes), np.searchsorted(ends, others)
    return [(np.flatnonzero(of == i).tolist(), np.flatnonzero(of_others == i).tolist()) for i in range(ends.size)]

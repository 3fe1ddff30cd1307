"""Codebooks: the values that the entries of a kernel may have, for the whole kernel or for each run of channels.

NumPy only. Entries that are zero stay zero and belong to no centroid; no other entry becomes zero. "Channels" are the
combinations of indices of a kernel's output axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from prunekit.techniques.cluster.kmeans import kmeans


@dataclass(frozen=True, eq=False)
class Channels:
    """Which entries of a kernel share a codebook.

    Attributes:
        shape: Shape of the kernel.
        out_axes: Its output axes.
        run: Number of consecutive channels that share a codebook; None = all.
    """

    shape: tuple[int, ...]
    out_axes: tuple[int, ...]
    run: int | None = None

    @property
    def count(self) -> int:
        """Number of codebooks."""
        channels = self._channels
        return 1 if self.run is None or not channels else -(-channels // self.run)

    @property
    def _channels(self) -> int:
        return int(np.prod([self.shape[axis] for axis in self.out_axes], dtype=int))

    @property
    def numbers(self) -> np.ndarray:
        """Number of each entry's codebook, broadcast to the shape of the kernel."""
        return np.broadcast_to(self.of_axes, self.shape)

    @cached_property
    def of_axes(self) -> np.ndarray:
        """Number of each entry's codebook, with axes of length 1 along which it is the same."""
        if self.count == 1:
            return np.zeros((1,) * len(self.shape), "intp")
        lengths = [self.shape[axis] for axis in self.out_axes]
        found = (np.arange(self._channels) // (self.run or 1)).reshape(lengths)
        order = np.argsort(self.out_axes)
        wide = [self.shape[axis] if axis in self.out_axes else 1 for axis in range(len(self.shape))]
        return found.transpose(order).reshape(wide)

    def parts(self, kernel: np.ndarray) -> list[np.ndarray]:
        """Returns the entries of each codebook, flat."""
        if self.count == 1:
            return [kernel.ravel()]
        flat = self.numbers.ravel()
        order = np.argsort(flat, kind="stable")
        return np.split(kernel.ravel()[order], np.cumsum(np.bincount(flat, minlength=self.count))[:-1])


@dataclass(frozen=True, eq=False)
class Codebooks:
    """The centroids of a kernel.

    Attributes:
        channels: Which entries share a codebook.
        table: Centroids, ascending in each row, none of them 0, shape (codebooks, centroids), float32; codebooks of
            fewer centroids end with infinities.
    """

    channels: Channels
    table: np.ndarray

    @classmethod
    def fitted(
        cls,
        kernel: np.ndarray,
        channels: Channels,
        clusters: int,
        weights: np.ndarray | None = None,
        start: str = "auto",
        *,
        reserve_zero: bool = False,
    ) -> Codebooks:
        """Returns the codebooks of the smallest squared error that k-means finds.

        Args:
            kernel: The kernel. Its zeros take one of the clusters of their codebook.
            channels: Which entries share a codebook.
            clusters: Largest number of different values in each codebook, zero included; at least 2.
            weights: How much the squared error of each entry counts, the shape of the kernel; None = all alike.
            start: As for `kmeans`.
            reserve_zero: True leaves one of the clusters to zeros that entries become later.
        """
        rows = []
        counts = np.ones(kernel.shape) if weights is None else np.broadcast_to(weights, kernel.shape)
        for entries, own in zip(channels.parts(kernel), channels.parts(counts), strict=True):
            kept = entries != 0
            others = clusters - (reserve_zero or not kept.all())
            rows.append(kmeans(entries[kept], others, own[kept], start))
        return cls(channels, _table(rows))

    def number_of(self, kernel: np.ndarray) -> np.ndarray:
        """Returns the number of the nearest centroid of each entry in its codebook, the shape of the kernel."""
        return self.nearest_in(self.channels.numbers, kernel)

    def nearest_in(self, numbers: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Returns the number of the nearest centroid of each value.

        Args:
            numbers: Numbers of codebooks, which broadcast against the values.
            values: Values.
        """
        if len(self.table) == 1:
            return np.searchsorted(self._borders[0], values, side="left")
        # One comparison for each border, without an array of values x centroids.
        found = np.zeros(np.broadcast_shapes(np.shape(numbers), values.shape), "intp")
        for column in self._borders.T:
            found += values > column[numbers]
        return found

    def values(self, numbers: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Returns the centroids at places of codebooks, float32."""
        return self.table[numbers, places]

    def nearest(self, kernel: np.ndarray) -> np.ndarray:
        """Returns the kernel with each entry's nearest centroid; zeros stay zeros."""
        return np.where(kernel == 0, np.float32(0), self.values(self.channels.numbers, self.number_of(kernel)))

    def holds(self, kernel: np.ndarray) -> bool:
        """Returns True if each entry is zero or a centroid."""
        return bool(np.array_equal(self.nearest(kernel), kernel))

    def sorted(self) -> Codebooks:
        """Returns the same centroids in ascending order."""
        return replace(self, table=np.sort(self.table, axis=1))

    @cached_property
    def _borders(self) -> np.ndarray:
        """Middles of neighbouring centroids, shape (codebooks, centroids - 1), float64; infinite after the last."""
        wide = self.table.astype("float64")
        return (wide[:, 1:] + wide[:, :-1]) / 2


def _table(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Returns rows of centroids as one array in float32, without zeros, completed with infinities."""
    table = np.full((len(rows), max(map(len, rows), default=0) or 1), np.inf, "float32")
    for number, row in enumerate(rows):
        table[number, : len(row)] = without_zeros(row.astype("float32"))
    return table


def without_zeros(centroids: np.ndarray) -> np.ndarray:
    """Returns centroids in which a 0 is the smallest positive number: an entry that is no zero must not become one."""
    return np.where(centroids == 0, np.finfo("float32").tiny, centroids)


def entropy(kernel: np.ndarray) -> float:
    """Returns the bits that an entry takes on average if each value is coded by how often it occurs."""
    _, counts = np.unique(kernel, return_counts=True)
    shares = counts / max(kernel.size, 1)
    return float(-(shares * np.log2(shares)).sum())

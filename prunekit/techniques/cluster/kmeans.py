"""k-means of numbers: a cluster is a run of the sorted values, so that prefix sums give every mean and every error.

NumPy only. Nothing of the size values x clusters is formed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

# Runs that stand for all values where the start of Lloyd's iterations is searched.
_RUNS = 2048
# Lloyd's iterations end when no border moves; on 10 million values after some ten to some hundred.
_ITERATIONS = 1000


@dataclass(frozen=True, eq=False)
class SortedValues:
    """Distinct numbers in ascending order, each with its weight.

    Attributes:
        values: Shape (values,), float64.
        weights: Shape (values,), float64, positive.
    """

    values: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, weights: np.ndarray | None = None) -> SortedValues:
        """Returns the distinct values of an array; the weights of equal values are added.

        Args:
            values: Finite numbers of any shape.
            weights: Weights of the same shape, at least 0; None = 1 for each. Where all are 0, each is 1.
        """
        entries = np.asarray(values).ravel()
        given = None if weights is None else np.asarray(weights).ravel()
        if given is None or not given.size or not given.any() or (given == given[0]).all():
            found, totals = np.unique(entries, return_counts=True)
        else:
            found, places = np.unique(entries, return_inverse=True)
            totals = np.bincount(places.ravel(), given.astype("float64"), len(found))
        found, totals = found.astype("float64"), totals.astype("float64")
        # A value without weight costs nothing, but belongs to a cluster.
        smallest = totals[totals > 0].min(initial=1.0) * 1e-12
        return cls(found, np.maximum(totals, smallest))

    @cached_property
    def sums(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sums of weights, of weights times values and times squared values before each value, about `middle`."""
        centred = self.values - self.middle
        rows = self.weights, self.weights * centred, self.weights * centred**2
        first, second, third = (np.concatenate([[0.0], np.cumsum(row)]) for row in rows)
        return first, second, third

    @cached_property
    def middle(self) -> float:
        """The mean, about which sums lose the fewest digits."""
        return float(np.average(self.values, weights=self.weights)) if len(self.values) else 0.0

    def means(self, borders: np.ndarray) -> np.ndarray:
        """Returns the mean of each run of values between two borders, shape (borders - 1,).

        Args:
            borders: Places in `values`, ascending without repetition, the first 0 and the last their number.
        """
        weight, first, _ = (np.diff(total[borders]) for total in self.sums)
        # Rounding must not carry a mean past the values of its run.
        return np.clip(first / weight + self.middle, self.values[borders[:-1]], self.values[borders[1:] - 1])

    def errors(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Returns the weighted squared distances of runs of values from their means.

        Args:
            starts: Place of the first value of each run.
            stops: Place after the last value of each run.
        """
        weight, first, second = (total[stops] - total[starts] for total in self.sums)
        return np.maximum(second - first**2 / np.where(weight > 0, weight, 1.0), 0.0)

    def runs(self, count: int) -> SortedValues:
        """Returns at most `count` numbers that stand for runs of the values, as fine as good centroids lie.

        The best centroids lie with the cube root of the density (Panter & Dite 1951): the integral of this root is cut
        into equal parts.
        """
        if len(self.values) <= count:
            return self
        root = np.cumsum(np.cbrt(self.weights[1:] * np.diff(self.values) ** 2))
        cuts = np.searchsorted(root, root[-1] * np.arange(1, count) / count) + 1
        borders = np.unique(np.concatenate([[0], cuts, [len(self.values)]]))
        return SortedValues(self.means(borders), np.diff(self.sums[0][borders]))


def kmeans(values: np.ndarray, clusters: int, weights: np.ndarray | None = None, start: str = "auto") -> np.ndarray:
    """Returns the centroids of numbers.

    Args:
        values: Finite numbers of any shape.
        clusters: Largest number of centroids, at least 1.
        weights: Weights of the same shape, at least 0: how much the squared distance of each value counts. None = all
            alike.
        start: "auto": Lloyd's iterations start at the optimum for 2,048 runs of the values. "optimum": the optimum for
            all values, in O(clusters * values * log(values)) steps. "quantile": they start at quantiles.

    Returns:
        Centroids, ascending, float64; fewer than `clusters` only where there are fewer distinct values.

    Sources: Lloyd 1982 (iterations); Wang & Song 2011, "Ckmeans.1d.dp" (dynamic programming), here by divide and
        conquer: the best border of a longer prefix is never further left.
    """
    found = SortedValues.of(values, weights)
    # Also where there are no values.
    if len(found.values) <= clusters:
        return found.values
    if start == "optimum":
        return found.means(_optimum(found, clusters))
    return _lloyd(found, _start(found, clusters, start))


def nearest(values: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Returns the number of the nearest centroid of each value, the lower one halfway, with the shape of `values`.

    Args:
        values: Numbers.
        centroids: Ascending, shape (centroids,).
    """
    return np.searchsorted((centroids[1:] + centroids[:-1]) / 2, values, side="left")


def _start(found: SortedValues, clusters: int, start: str) -> np.ndarray:
    """Returns the first borders."""
    if start == "quantile":
        totals = found.sums[0]
        cuts = np.searchsorted(totals, totals[-1] * np.arange(1, clusters) / clusters)
        return _filled(found, np.unique(np.concatenate([[0], cuts, [len(found.values)]])), clusters)
    if start != "auto":
        raise ValueError(f'`start` is "auto", "optimum" or "quantile". Received: {start!r}.')
    runs = found.runs(max(_RUNS, clusters))
    centroids = runs.means(_optimum(runs, clusters))
    return _filled(found, _borders(found, centroids), clusters)


def _borders(found: SortedValues, centroids: np.ndarray) -> np.ndarray:
    """Returns the borders of the values that are nearest to each centroid, without those of empty clusters."""
    cuts = np.searchsorted(found.values, (centroids[1:] + centroids[:-1]) / 2, side="right")
    return np.unique(np.concatenate([[0], cuts, [len(found.values)]]))


def _filled(found: SortedValues, borders: np.ndarray, clusters: int) -> np.ndarray:
    """Returns borders of exactly `clusters` runs: those of the largest errors are halved."""
    while len(borders) <= clusters:
        starts, stops = borders[:-1], borders[1:]
        errors = np.where(stops - starts > 1, found.errors(starts, stops), -1.0)
        worst = int(np.argmax(errors))
        borders = np.sort(np.append(borders, (starts[worst] + stops[worst] + 1) // 2))
    return borders


def _lloyd(found: SortedValues, borders: np.ndarray) -> np.ndarray:
    """Returns the centroids that Lloyd's iterations end with; an emptied cluster halves that of the largest error."""
    clusters = len(borders) - 1
    centroids = found.means(borders)
    for _ in range(_ITERATIONS):
        moved = _filled(found, _borders(found, centroids), clusters)
        if np.array_equal(moved, borders):
            break
        borders, centroids = moved, found.means(moved)
    return centroids


def _optimum(found: SortedValues, clusters: int) -> np.ndarray:
    """Returns the borders of the smallest error, by dynamic programming.

    Row k of the table has the smallest error of the first i values in k runs. The last border of the best runs never
    moves left as i grows, so that the middle i of a range bounds the borders of both halves.
    """
    count = len(found.values)
    ends = np.arange(count + 1)
    best = found.errors(np.zeros_like(ends), ends)
    last = np.zeros((clusters, count + 1), "int32")
    for number in range(1, clusters):
        best, last[number] = _row(found, best, number)
    borders = [count]
    for number in range(clusters - 1, 0, -1):
        borders.append(int(last[number, borders[-1]]))
    return np.array([0, *borders[::-1]])


def _row(found: SortedValues, before: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the smallest errors of all prefixes in `number` + 1 runs, and the last border of each.

    Args:
        found: The values.
        before: The smallest errors in `number` runs.
        number: Number of runs before the last one.
    """
    count = len(before) - 1
    best, last = np.full(count + 1, np.inf), np.zeros(count + 1, "int32")
    # Ranges [low, high] of prefixes whose last borders lie in [left, right]; all ranges of a level at once.
    low, high = np.array([number + 1]), np.array([count])
    left, right = np.array([number]), np.array([count - 1])
    while low.size:
        middle = (low + high) // 2
        stop = np.minimum(right, middle - 1)
        sizes = stop - left + 1
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        borders = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - left, sizes)
        errors = before[borders] + found.errors(borders, np.repeat(middle, sizes))
        smallest = np.minimum.reduceat(errors, offsets[:-1])
        # The first place of each smallest error.
        hits = np.flatnonzero(errors == np.repeat(smallest, sizes))
        _, firsts = np.unique(np.searchsorted(offsets, hits, side="right"), return_index=True)
        chosen = borders[hits[firsts]]
        best[middle], last[middle] = smallest, chosen
        below, above = low < middle, middle < high
        low, high, left, right = (
            np.concatenate(pair)
            for pair in (
                (low[below], middle[above] + 1),
                (middle[below] - 1, high[above]),
                (left[below], chosen[above]),
                (chosen[below], right[above]),
            )
        )
    return best, last

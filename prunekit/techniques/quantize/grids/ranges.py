"""Rules by which ranges of values are chosen: the extremes, a percentile, the smallest mean squared error.

Every range contains zero, so that zero is a value of the grid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from prunekit.techniques.quantize.grids.grids import PER_TENSOR, Granularity, Grid, IntegerFormat, grid_between

# Entries that are rounded at once: larger parts leave the caches of a processor.
_PART = 1 << 18
# Values of a row that are tried before all of them.
_FEW = 32
# Largest distance from a grid, in steps, of values that lie on it: they are products of a few float32 numbers.
_HELD = 3e-4


@dataclass(frozen=True, eq=False)
class Sample:
    """Values whose ranges are wanted, one row for each scale.

    Attributes:
        values: Finite values, shape (scales, values), float32.
        counts: How often each value occurs, shape (1, values) or (scales, values); None = each once.
    """

    values: np.ndarray
    counts: np.ndarray | None = None


class RangeRule(Protocol):
    """Chooses a range of values for each scale."""

    def __call__(self, sample: Sample, form: IntegerFormat) -> tuple[np.ndarray, np.ndarray]:
        """Returns the lowest and the highest values, each of shape (scales,) and in float64; 0 is between them."""


@dataclass(frozen=True)
class MinMax:
    """The lowest and the highest value: nothing is clipped."""

    def __call__(self, sample: Sample, form: IntegerFormat) -> tuple[np.ndarray, np.ndarray]:
        """See `RangeRule`."""
        low, high = sample.values.min(axis=1, initial=0.0), sample.values.max(axis=1, initial=0.0)
        return low.astype("float64"), high.astype("float64")


@dataclass(frozen=True)
class Percentile:
    """The smallest range that holds a share of the values: of the magnitudes, or of each end if codes are asymmetric.

    Args:
        share: Share of the values that is not clipped, in (0.5, 1].

    Raises:
        ValueError: The share is another.
    """

    share: float = 0.9999

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0.5 < self.share <= 1.0:
            raise ValueError(
                f"share must be the share of values inside the range, in (0.5, 1]. Received: {self.share!r}."
            )

    def __call__(self, sample: Sample, form: IntegerFormat) -> tuple[np.ndarray, np.ndarray]:
        """See `RangeRule`."""
        if form.symmetric:
            high = _quantile(np.abs(sample.values), sample.counts, self.share)
            return -high, high
        low, high = (_quantile(sign * sample.values, sample.counts, self.share) for sign in (-1.0, 1.0))
        return -np.maximum(low, 0.0), np.maximum(high, 0.0)


def _quantile(values: np.ndarray, counts: np.ndarray | None, share: float) -> np.ndarray:
    """Returns the lowest value of each row that at least this share of the row does not exceed."""
    if not values.shape[1]:
        return np.zeros(len(values))
    if counts is None:
        rank = _rank(share, np.float64(values.shape[1]))
        return np.partition(values, int(rank) - 1, axis=1)[:, int(rank) - 1].astype("float64")
    order = np.argsort(values, axis=1)
    counts = np.take_along_axis(np.broadcast_to(counts, values.shape), order, axis=1).astype("float64")
    reached = np.cumsum(counts, axis=1)
    first = np.argmax(reached >= _rank(share, reached[:, -1:]), axis=1)
    return np.take_along_axis(np.take_along_axis(values, order, axis=1), first[:, None], axis=1)[:, 0].astype("float64")


def _rank(share: float, total: Any) -> Any:
    # 0.99 * 100 is 99.00000000000001 in floating point.
    return np.clip(np.ceil(share * total * (1 - 1e-12)), 1, None)


@dataclass(frozen=True)
class MeanSquaredError:
    """The range whose grid rounds and clips with the smallest mean squared error.

    Starts at the extremes, and shrinks both ends by the same factor, then, if codes are asymmetric, each end alone. The
    factors are 2 ** (-k / 8) down to 1 / 16, then steps of a thirty-second of an octave around the best one.

    Source: Sung et al. 2015, arXiv:1511.06488, section 3.1 (the L2 error of a uniform quantizer).
    """

    def __call__(self, sample: Sample, form: IntegerFormat) -> tuple[np.ndarray, np.ndarray]:
        """See `RangeRule`."""
        ends = np.stack(MinMax()(sample, form))
        for moves in ((True, True),) if form.symmetric else ((True, True), (True, False), (False, True)):
            ends = _shrunk(sample, form, ends, np.array(moves)[:, None])
        return ends[0], ends[1]


def _shrunk(sample: Sample, form: IntegerFormat, ends: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """Returns (low, high) with the ends in `moves` shrunk by the best factor for each row."""
    octaves = np.zeros(ends.shape[1])
    best = _error(sample, form, ends)
    # Small samples, as of histograms, are tried with many factors at once.
    at_once = max(_PART // max(sample.values.size, 1), 1)

    def attempt(tried: np.ndarray) -> None:
        nonlocal best, octaves
        for start in range(0, len(tried), at_once):
            some = tried[start : start + at_once]
            shrunk = np.where(moves[..., None], ends[:, None] * 2.0**-some, ends[:, None])
            errors = _error(_repeated(sample, len(some)), form, shrunk.reshape(2, -1)).reshape(some.shape)
            for each, error in zip(some, errors, strict=True):
                octaves, best = np.where(error < best, each, octaves), np.minimum(error, best)

    attempt(np.tile(np.arange(1, 33)[:, None] / 8, len(octaves)))
    attempt(np.maximum(octaves + np.array([-3, -2, -1, 1, 2, 3])[:, None] / 32, 0.0))
    return np.where(moves, ends * 2.0**-octaves, ends)


def _repeated(sample: Sample, times: int) -> Sample:
    """Returns the rows of a sample so many times, one after another."""
    if times == 1:
        return sample
    counts = sample.counts
    if counts is not None and len(counts) > 1:
        counts = np.tile(counts, (times, 1))
    return Sample(np.tile(sample.values, (times, 1)), counts)


def _error(sample: Sample, form: IntegerFormat, ends: np.ndarray) -> np.ndarray:
    """Returns the squared error of each row, summed over its values."""
    grid = grid_between(ends[0, :, None], ends[1, :, None], form)
    total = np.zeros(len(sample.values))
    counts = None if sample.counts is None else np.broadcast_to(sample.counts, sample.values.shape)
    for rows, columns in _parts(*sample.values.shape):
        values, scale = sample.values[rows, columns], grid.scale[rows]
        zero = grid.zero_point[rows].astype("float32")
        # As `steps_within`, whose slightly wider ends round to the same codes; in place, which takes half the time.
        steps = values / scale
        # Two functions take less time than `np.clip`.
        np.maximum(steps, form.lowest - zero, out=steps)
        np.minimum(steps, form.highest - zero, out=steps)
        np.rint(steps, out=steps)
        steps *= scale
        steps -= values
        if counts is None:
            total[rows] += np.einsum("ij,ij->i", steps, steps, dtype="float64")
        else:
            total[rows] += (np.square(steps, dtype="float64") * counts[rows, columns]).sum(axis=1)
    return total


def _parts(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Yields parts of an array of this shape that are contiguous as far as they can be."""
    width = min(max(columns, 1), _PART)
    height = max(_PART // width, 1)
    for first in range(0, rows, height):
        for start in range(0, columns, width):
            yield slice(first, first + height), slice(start, start + width)


def grid_of(
    values: np.ndarray, form: IntegerFormat, granularity: Granularity = PER_TENSOR, rule: RangeRule | None = None
) -> Grid:
    """Returns the grid of an array, such as a weight.

    Args:
        values: The array; converted to float32.
        form: The codes.
        granularity: Which entries share a scale.
        rule: Chooses the ranges; None = `MinMax`.

    Raises:
        ValueError: A value is NaN or infinite, or the array has no axis that `granularity` names.
    """
    values = np.asarray(values).astype("float32", copy=False)
    shape = granularity.parameter_shape(values.shape)
    if not np.isfinite(values).all():
        raise ValueError(
            f"Quantization needs finite values. Received: {np.count_nonzero(~np.isfinite(values))} of {values.size} "
            "values are NaN or infinite."
        )
    low, high = (rule or MinMax())(sample_of(values, granularity), form)
    return grid_between(low.reshape(shape), high.reshape(shape), form, granularity)


def narrowest_grid(values: np.ndarray, forms: Sequence[IntegerFormat], granularity: Granularity = PER_TENSOR) -> Grid:
    """Returns the grid on which all values of an array lie, of the first format that has one; else that of the last.

    Args:
        values: The array; converted to float32.
        forms: The codes, symmetric; those with the fewest bits first.
        granularity: Which entries share a scale.

    Raises:
        ValueError: As for `grid_of`.
    """
    for form in forms[:-1]:
        grid = grid_holding(values, form, granularity)
        if grid.holds(values):
            return grid
    return grid_holding(values, forms[-1], granularity)


def grid_holding(
    values: np.ndarray, form: IntegerFormat, granularity: Granularity = PER_TENSOR, rule: RangeRule | None = None
) -> Grid:
    """Returns a grid on which all values of an array lie; for scales whose values lie on none, that of `grid_of`.

    A weight that was put on a grid need not use the largest code, and a batch normalization that is folded into it
    multiplies each output by a number, so its extremes do not give the scale. It is found by trial: the largest
    magnitude stands for the largest code, for the next smaller one, and so on.

    Args:
        values: The array; converted to float32.
        form: The codes, symmetric.
        granularity: Which entries share a scale.
        rule: As for `grid_of`.

    Raises:
        ValueError: As for `grid_of`.
    """
    grid = grid_of(values, form, granularity, rule)
    rows = np.abs(sample_of(np.asarray(values, "float32"), granularity).values)
    largest = rows.max(axis=1, initial=0.0).astype("float64")
    scale = grid.scale.reshape(-1).astype("float64")
    open_rows = np.flatnonzero(largest)
    for code in range(form.highest, 0, -1):
        tried = largest[open_rows, None] / code
        held = _are_multiples(rows[open_rows, :_FEW], tried)
        held[held] = _are_multiples(rows[open_rows[held]], tried[held])
        scale[open_rows[held]] = largest[open_rows[held]] / code
        open_rows = open_rows[~held]
        if not len(open_rows):
            break
    return replace(grid, scale=scale.reshape(grid.scale.shape).astype("float32"))


def _are_multiples(rows: np.ndarray, scale: np.ndarray) -> np.ndarray:
    steps = rows / scale
    return np.asarray(np.abs(steps - np.round(steps)).max(axis=1, initial=0.0) < _HELD)


def sample_of(values: np.ndarray, granularity: Granularity) -> Sample:
    """Returns an array as one row for each scale, in the order of the flattened scales."""
    rows = granularity.rows(values)
    if rows.size == values.size:
        return Sample(rows)
    return Sample(rows, granularity.rows(np.ones(values.shape, "int8")))

"""LAMP scores: how many entries of each weight are among the largest scores of all weights, without sorting a weight.

A histogram over the leading bits of the importances bounds the scores of each bucket. Exact scores are calculated only
for the buckets whose bounds contain the limit: a few percent of all entries.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from prunekit.sparsity.selection import keep_largest_of_array

# Sign, exponent and 7 bits of the fraction of a float32: the values of a bucket differ by less than 1 %.
_LEADING_BITS = 16
# Entries counted at once: a histogram copies what it counts to 24 bytes per entry.
_PIECE = 1 << 20


class _Buckets(NamedTuple):
    """The entries of one weight by the leading bits of their importances, in ascending order; shapes (buckets,).

    Attributes:
        leading: Leading bits.
        counts: Number of entries.
        above: Sum of the squares of all entries in larger buckets.
        least: Lower bound of the scores.
        most: Upper bound of the scores.
    """

    leading: np.ndarray
    counts: np.ndarray
    above: np.ndarray
    least: np.ndarray
    most: np.ndarray


def entries_kept(importances: Sequence[np.ndarray], kept: int) -> list[int]:
    """Returns the number of entries of each weight that are among the `kept` largest LAMP scores of all weights.

    The score of an entry v is v ** 2 / (sum of u ** 2 over the entries u of the same weight that are not smaller), 0 if
    v is 0. The largest entry of each weight scores 1, a zero as well.

    Args:
        importances: Importances of each weight, at least 0; arrays of any shapes with at least one entry each.
        kept: Number of entries to keep: at least the number of weights, at most the number of all entries.

    Raises:
        ValueError: An importance is negative or NaN.

    Source: Lee et al. 2021, arXiv:2010.07611, eq. 2.
    """
    weights = [_finite(importance.reshape(-1)) for importance in importances]
    buckets = [_buckets(weight) for weight in weights]
    least, most, counts = (np.concatenate([one[column] for one in buckets]) for column in (3, 4, 1))
    # The `kept`-th largest score lies between the same order statistics of the bounds.
    low, high = _kth_largest(least, counts, kept), _kth_largest(most, counts, kept)
    surely = [int(one.counts[one.least > high].sum()) for one in buckets]
    scores = [
        _scores_between(weight, one, np.flatnonzero((one.least <= high) & (one.most >= low)))
        for weight, one in zip(weights, buckets, strict=True)
    ]
    chosen = keep_largest_of_array(np.concatenate(scores), kept - sum(surely))
    parts = np.split(chosen, np.cumsum([len(part) for part in scores])[:-1])
    return [count + int(np.count_nonzero(part)) for count, part in zip(surely, parts, strict=True)]


def _finite(importance: np.ndarray) -> np.ndarray:
    """Returns importances as float32 or float64 whose squares are finite."""
    values = importance if importance.dtype in (np.float32, np.float64) else importance.astype("float32")
    least, largest = values.min(), values.max()
    if not least >= 0:
        raise ValueError(
            f"LAMP needs importances that are at least 0. Received: {least:g}. Choose another criterion or another "
            "allocation."
        )
    if values.dtype == np.float64 and largest > 0:
        return values / largest
    # Squares of float32 neither overflow nor vanish in float64.
    return values if np.isfinite(largest) else np.minimum(values, np.finfo("float32").max)


def _buckets(values: np.ndarray) -> _Buckets:
    histogram = [np.zeros(1 << (_LEADING_BITS - 1), dtype) for dtype in ("int64", "float64")]
    for piece in _pieces(values):
        leading = _leading_bits(piece)
        histogram[0] += np.bincount(leading, minlength=len(histogram[0]))
        squares = np.square(piece, dtype="float64")
        histogram[1] += np.bincount(leading, weights=squares, minlength=len(histogram[1]))
    used = np.flatnonzero(histogram[0])
    counts, squares = (column[used] for column in histogram)
    left = np.cumsum(squares[::-1])[::-1]
    above = np.append(left[1:], 0.0)
    smallest, beyond = (np.square(_values_of(bits, values.dtype)) for bits in (used, used + 1))
    with np.errstate(invalid="ignore"):
        least, most = smallest / left, beyond / (beyond + above)
    # Sums are rounded, here and in the scores. 0 / 0: a weight of zeros.
    least, most = np.nan_to_num(least) * (1 - 1e-9), most * (1 + 1e-9)
    most[-1] = 1.0
    return _Buckets(used, counts, above, least, most)


def _pieces(values: np.ndarray) -> Iterator[np.ndarray]:
    return (values[start : start + _PIECE] for start in range(0, len(values), _PIECE))


def _leading_bits(values: np.ndarray) -> np.ndarray:
    bits = 8 * values.itemsize
    return np.ascontiguousarray(values).view(f"int{bits}") >> (bits - _LEADING_BITS)


def _values_of(leading: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns the smallest value with these leading bits, as float64."""
    bits = 8 * dtype.itemsize
    return (leading.astype(f"int{bits}") << (bits - _LEADING_BITS)).view(dtype).astype("float64")


def _kth_largest(values: np.ndarray, counts: np.ndarray, k: int) -> float:
    """Returns the k-th largest of values that occur `counts` times."""
    order = np.argsort(values)[::-1]
    return values[order[np.searchsorted(np.cumsum(counts[order]), k)]]


def _scores_between(values: np.ndarray, buckets: _Buckets, places: np.ndarray) -> np.ndarray:
    """Returns the scores of the entries in the buckets at `places`, which follow one another; ascending."""
    if not len(places):
        return np.zeros(0)
    first, beyond = _values_of(buckets.leading[places[[0, -1]]] + [0, 1], values.dtype).astype(values.dtype)
    largest = float(values.max()) or 1.0
    # Divided by the largest, so that the scores of equal entries, 1 / 1, 1 / 2, 1 / 3 ..., are exact.
    between = [piece[(piece >= first) & (piece < beyond)] for piece in _pieces(values)]
    squares = np.square(np.sort(np.concatenate(between)) / np.float64(largest))
    left = np.cumsum(squares[::-1])[::-1] + buckets.above[places[-1]] / largest**2
    scores = np.divide(squares, left, out=np.zeros_like(squares), where=left > 0)
    if places[-1] == len(buckets.leading) - 1:
        scores[-1] = 1.0
    return scores

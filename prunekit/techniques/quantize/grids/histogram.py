"""A histogram of values that arrive in batches, from which ranges are chosen as from the values themselves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from keras import ops

from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.quantize.grids.ranges import Sample

# Of 4096 bins, 2048 lie on each side of zero. The magnitudes fill at least half of them: four bins for each step of an
# asymmetric grid of 8 bits, and eight for a symmetric one.
BINS = 4096
# Values that are counted at once, with eight times their memory.
_PART = 1 << 20
# Of tensors with more values in so many examples every n-th value is counted, n times: as precise for a range, and
# faster than the layer itself.
_COUNTED, _EXAMPLES = 1 << 19, 32


def extract_of(tensor: Any) -> tuple[Any, Any, Any, Any]:
    """Returns what a histogram reads of a tensor of shape (examples, ...), by `keras.ops`.

    Returns:
        Lowest value, NaN if one is NaN or infinite; highest value; the values that are counted, every `step`-th one;
        and `step`.
    """
    flat = ops.reshape(ops.cast(tensor, "float32"), (-1,))
    step = _step(math.prod(length or 1 for length in tensor.shape[1:]))
    # The minimum and maximum of XLA pass over some NaN.
    low = ops.where(ops.all(ops.isfinite(flat)), ops.min(flat), math.nan)
    return low, ops.max(flat), flat[::step], step


class Histogram:
    """Counts values in bins of one width, which doubles when a value lies outside.

    Zeros are counted apart, since every grid stores them exactly. The extremes are those of all values; of tensors with
    more than 524,288 values in 32 examples a regular sample is counted.

    Attributes:
        low: Lowest value so far, or 0.
        high: Highest value so far, or 0.
        count: Number of values so far; of sampled tensors nearly.
    """

    def __init__(self) -> None:
        self.low, self.high, self.count = 0.0, 0.0, 0
        self._zeros = 0
        self._bound = 0.0
        self._counts = np.zeros(BINS, "int64")

    def observe(self, low: Any, high: Any, values: Any, step: Any = 1) -> None:
        """Counts what `extract_of` read of a tensor.

        Args:
            low: Lowest value of the tensor.
            high: Highest value.
            values: Every `step`-th value, shape (counted,).
            step: How often each value counts.

        Raises:
            ValueError: An extreme is NaN or infinite; the histogram is not changed.
        """
        low, high, weight = float(array_of(low)), float(array_of(high)), int(step)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError("A range needs finite values. Received: NaN or infinity among them.")
        counted = array_of(values)
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.count += counted.size * weight
        self._widen(max(-low, high))
        for start in range(0, counted.size, _PART):
            self._add(counted[start : start + _PART], weight)

    def _add(self, values: np.ndarray, weight: int) -> None:
        # TensorFlow's minimum and maximum take subnormal numbers for zeros.
        zeros = values.size - int(np.count_nonzero(values) if self._bound else 0)
        self._zeros += weight * zeros
        if zeros == values.size:
            return
        counts = np.bincount(self._bins(values), minlength=BINS)
        counts[BINS // 2] -= zeros
        self._counts += weight * counts

    def _bins(self, values: np.ndarray) -> np.ndarray:
        # The product with a power of two is exact in float32, too, unless it is far below a bin; the smallest and the
        # largest bounds have no factor in float32.
        kind = np.float32 if 2.0**-60 < self._bound < 2.0**60 else np.float64
        places = np.multiply(values, kind(BINS / 2 / self._bound), dtype=kind)
        np.floor(places, out=places)
        return places.astype(np.intp) + BINS // 2

    def sample(self) -> Sample:
        """Returns the centres of the bins that have values, limited to the extremes, and zero, with their counts."""
        used = np.flatnonzero(self._counts)
        centres = (used + 0.5 - BINS // 2) * (self._bound / (BINS // 2))
        # The extremes themselves, so that no rule clips them unasked.
        ends = [end for end in (self.low, self.high) if end]
        values = np.concatenate([np.clip(centres, self.low, self.high), [0.0], ends])
        counts = np.concatenate([self._counts[used], [self._zeros], np.zeros(len(ends), "int64")])
        return Sample(values.astype("float32")[None], counts[None])

    def _widen(self, bound: float) -> None:
        """Doubles the bins until a magnitude lies below their end; counts of neighbouring bins are added."""
        if bound < self._bound or not bound:
            return
        # A power of two, below which the magnitude lies.
        wanted = 2.0 ** math.frexp(bound)[1]
        factor = min(int(wanted / self._bound), BINS) if self._bound else 1
        if factor > 1:
            self._counts = _merged(self._counts, factor)
        self._bound = wanted


def _step(size: int) -> int:
    """Returns the distance of the values that are counted, of tensors with so many values in an example."""
    step = -(-size * _EXAMPLES // _COUNTED)
    # Without a common divisor with the size, the sample has as many values of each channel and of each place.
    while step > 1 and math.gcd(step, size) > 1:
        step += 1
    return step


def _merged(counts: np.ndarray, factor: int) -> np.ndarray:
    """Returns the counts for bins that are wider by a power of two, around the same middle."""
    half = BINS // 2
    merged = np.zeros_like(counts)
    for start, stop, place in ((0, half, -1), (half, BINS, 1)):
        side = counts[start:stop][::place]
        parts = np.add.reduceat(side, np.arange(0, half, factor))
        target = merged[start:stop][::place]
        target[: len(parts)] += parts
    return merged

"""A histogram of values that arrive in batches, from which ranges are chosen as from the values themselves."""

from __future__ import annotations

import math

import numpy as np

from prunekit.techniques.quantize.ranges import Sample

# Of 4096 bins, 2048 lie on each side of zero. The magnitudes fill at least half of them: four bins for each step of an
# asymmetric grid of 8 bits, and eight for a symmetric one.
BINS = 4096
# Values that are counted at once, with eight times their memory.
_PART = 1 << 20
# Of larger arrays every n-th value is counted, n times: as precise for a range, and faster than the layer itself.
_COUNTED = 1 << 19


class Histogram:
    """Counts values in bins of one width, which doubles when a value lies outside.

    Zeros are counted apart, since every grid stores them exactly. The extremes are those of all values; of arrays with
    more than 524,288 values a regular sample is counted.

    Attributes:
        low: Lowest value so far, or 0.
        high: Highest value so far, or 0.
        count: Number of values so far.
    """

    def __init__(self) -> None:
        self.low, self.high, self.count = 0.0, 0.0, 0
        self._zeros = 0
        self._bound = 0.0
        self._counts = np.zeros(BINS, "int64")

    def observe(self, values: np.ndarray) -> None:
        """Counts the values of an array.

        Raises:
            ValueError: A value is NaN or infinite; the histogram is not changed.
        """
        flat = np.asarray(values, "float32").reshape(-1)
        if not flat.size:
            return
        low, high = float(flat.min()), float(flat.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError("A range needs finite values. Received: NaN or infinity among them.")
        self.low, self.high, self.count = min(self.low, low), max(self.high, high), self.count + flat.size
        self._widen(max(-low, high))
        step = _step(flat.size)
        counted = flat[::step]
        for start in range(0, counted.size, _PART):
            self._add(counted[start : start + _PART], step)

    def _add(self, values: np.ndarray, weight: int) -> None:
        present = values[values != 0.0]
        self._zeros += weight * (values.size - present.size)
        if present.size:
            # In float64: the product with a power of two is exact there, also for subnormal numbers.
            bins = np.floor(present * np.float64(BINS / 2 / self._bound)).astype("int64") + BINS // 2
            self._counts += weight * np.bincount(np.minimum(bins, BINS - 1), minlength=BINS)

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
        """Doubles the bins until they reach a magnitude; counts of neighbouring bins are added."""
        if bound <= self._bound or not bound:
            return
        # A power of two, below which the magnitude lies.
        wanted = 2.0 ** math.frexp(bound)[1]
        factor = min(int(wanted / self._bound), BINS) if self._bound else 1
        if factor > 1:
            self._counts = _merged(self._counts, factor)
        self._bound = wanted


def _step(size: int) -> int:
    """Returns the distance of the values that are counted."""
    step = -(-size // _COUNTED)
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

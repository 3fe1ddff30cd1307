"""Quantization written with plain loops, one entry after the other, to compare with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np


def plain_limits(bits: int, symmetric: bool) -> tuple[int, int]:
    """Returns the lowest and the highest code."""
    highest = (1 << bits) // 2 - 1
    return (-highest if symmetric else -highest - 1), highest


def plain_parameters(low: float, high: float, bits: int, symmetric: bool) -> tuple[np.float32, int]:
    """Returns scale and zero point of one range."""
    first, last = plain_limits(bits, symmetric)
    low, high = min(low, 0.0), max(high, 0.0)
    if low == high == 0.0:
        return np.float32(1.0), 0 if symmetric else first
    if symmetric:
        return max(np.float32(max(-low, high) / last), np.finfo("float32").tiny), 0
    scale = max(np.float32((high - low) / (last - first)), np.finfo("float32").tiny)
    exact = first - low / float(scale)
    nearest = math.floor(exact + 0.5) if exact > 0 else math.ceil(exact - 0.5)
    return scale, min(max(nearest, first), last)


def plain_code(value: float, scale: np.float32, zero_point: int, bits: int, symmetric: bool) -> int:
    """Returns the code of one value. Python's `round` takes the even one of two equally near integers."""
    first, last = plain_limits(bits, symmetric)
    steps = float(np.float32(value) / scale)
    return int(round(min(max(steps, first - zero_point), last - zero_point))) + zero_point


def plain_slices(shape, axes=(), group_axis=None, group_size=None) -> Iterator[tuple[tuple[int, ...], tuple]]:
    """Yields the index of each scale and the slices of the entries that share it."""
    choices = []
    for axis, length in enumerate(shape):
        if axis in axes:
            choices.append([(index, slice(index, index + 1)) for index in range(length)])
        elif axis == group_axis:
            starts = range(0, length, group_size)
            choices.append([(n, slice(start, min(start + group_size, length))) for n, start in enumerate(starts)])
        else:
            choices.append([(0, slice(None))])
    for chosen in itertools.product(*choices):
        yield tuple(one for one, _ in chosen), tuple(part for _, part in chosen)


def plain_error(values, low: float, high: float, bits: int, symmetric: bool) -> float:
    """Returns the sum of squared errors of values on the grid over a range."""
    scale, zero_point = plain_parameters(low, high, bits, symmetric)
    total = 0.0
    for value in np.ravel(values):
        code = plain_code(value, scale, zero_point, bits, symmetric)
        total += (float(np.float32(code - zero_point) * scale) - float(value)) ** 2
    return total


def plain_percentile(values, share: float) -> float:
    """Returns the lowest value that at least this share of the values does not exceed."""
    ordered = sorted(float(value) for value in np.ravel(values))
    for position, value in enumerate(ordered, start=1):
        if position >= share * len(ordered) - 1e-9:
            return value
    return math.nan

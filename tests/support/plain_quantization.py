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


def plain_parts(shape, axes=(), group_size=None) -> Iterator[tuple[tuple[int, ...], tuple]]:
    """Yields the index of each scale and the indices of the entries that share it."""
    found: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    counts: dict[tuple[int, ...], int] = {}
    shared = [axis for axis in range(len(shape)) if axis not in axes]
    # In the order of the array: the last axis is the fastest.
    for entry in itertools.product(*map(range, shape)):
        own = tuple(entry[axis] for axis in axes)
        place = counts[own] = counts.get(own, -1) + 1
        index = [entry[axis] if axis in axes else 0 for axis in range(len(shape))]
        if group_size is not None and shared:
            index[shared[-1]] = place // group_size
        found.setdefault(tuple(index), []).append(entry)
    for index, entries in found.items():
        yield index, tuple(np.array(entries).reshape(len(entries), len(shape)).T)


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


def plain_equalization(computed, read) -> list[float]:
    """Returns the factor of each channel with which two layers get the same range: 1 / s.

    Source: Nagel et al. 2019, arXiv:1906.04721, eq. 11.
    """
    factors = []
    for first, second in zip(computed, read, strict=True):
        if first == 0 or second == 0:
            factors.append(1.0)
            continue
        s = math.sqrt(first * second) / second
        factors.append(1 / s)
    return factors


def plain_scaled_error(inputs, matrix, scales, bits: int) -> float:
    """Returns ||(X / s) Q(s W) - X W||^2 for rows X, with a scale of the codes for each output."""
    total = 0.0
    for column in np.asarray(matrix).T:
        scaled = [np.float32(weight) * np.float32(s) for weight, s in zip(column, scales, strict=True)]
        scale, zero_point = plain_parameters(min(scaled), max(scaled), bits, symmetric=True)
        rounded = [float(plain_code(one, scale, zero_point, bits, symmetric=True)) * float(scale) for one in scaled]
        for row in np.asarray(inputs, "float64"):
            exact = sum(float(x) * float(weight) for x, weight in zip(row, column, strict=True))
            found = sum(float(x) / float(s) * one for x, s, one in zip(row, scales, rounded, strict=True))
            total += (found - exact) ** 2
    return total


def plain_awq_scales(inputs, matrix, bits: int, steps: int) -> tuple[list[float], float]:
    """Returns the scales of input channels with the smallest error of the outputs, and this error.

    Source: Lin et al. 2023, arXiv:2306.00978, eq. 4-5.
    """
    magnitudes = [sum(abs(float(x)) for x in column) / len(column) for column in np.asarray(inputs).T]
    best: tuple[list[float], float] | None = None
    for step in range(steps):
        powers = [magnitude ** (step / (steps - 1)) for magnitude in magnitudes]
        middle = math.sqrt(max(powers) * min(powers))
        scales = [power / middle for power in powers]
        error = plain_scaled_error(inputs, matrix, scales, bits)
        if best is None or error < best[1]:
            best = scales, error
    return best if best is not None else ([], math.nan)


def plain_brain_quantization(matrix, hessian, scale, bits: int, *, order, mask=None, damping: float = 0.01):
    """Returns the matrix that optimal brain quantization rounds row after row, with symmetric codes.

    After each row its row and column are eliminated from the inverse Hessian, which is written out.

    Args:
        matrix: Shape (inputs, outputs).
        hessian: Shape (inputs, inputs).
        scale: Shape (inputs, outputs).
        bits: Bits of a code.
        order: Rows in the order in which they are rounded.
        mask: False = 0; None = no zeros.
        damping: Fraction of the mean of the diagonal's positive entries that is added to it.

    Source: Frantar & Alistarh 2022, arXiv:2208.11580, lemma 1 and section 5.
    """
    first, last = plain_limits(bits, True)
    weights, found = np.array(matrix, "float64"), np.zeros(matrix.shape)
    used = hessian.diagonal() > 0
    damped = hessian + np.diag(np.where(used, damping * hessian.diagonal()[used].mean(), 1.0))
    inverse = np.linalg.inv(damped)
    left = list(order)
    for row in order:
        left.remove(row)
        for output in range(matrix.shape[1]):
            value = weights[row, output]
            if mask is None or mask[row, output]:
                steps = value / float(scale[row, output])
                found[row, output] = np.float32(round(min(max(steps, first), last))) * np.float32(scale[row, output])
            error = (value - found[row, output]) / inverse[row, row]
            weights[left, output] -= error * inverse[left, row]
        inverse = inverse - np.outer(inverse[:, row], inverse[row]) / inverse[row, row]
    return found

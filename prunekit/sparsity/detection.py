"""Detects the sparsity pattern of an array's zeros."""

import math

import numpy as np

from prunekit.sparsity.patterns import Axes, Layout

# Sizes of the groups of N:M patterns in use, and the largest probability of chance for these and for other sizes.
_SIZES = (2, 4, 8, 16)
_USUAL, _OTHER = 1e-4, 1e-8


def detect(array: np.ndarray, in_axes: Axes, out_axes: Axes) -> str:
    """Returns the pattern of an array's zeros: the most structured pattern that explains every zero.

    Args:
        array: A weight, or a mask (True = kept).
        in_axes: Input axes of the array.
        out_axes: Output axes of the array.

    Returns:
        "dense" (no zero), "all zero", "channel", "block 4x1" (inputs x outputs; the largest block on a grid from the
        first weight), "2:4" (the smallest group; at most n kept in each, and 95 % of n on average), else
        "unstructured". "n:m" needs groups enough that zeros at random places would show it with a probability below
        1e-4 for m = 2, 4, 8 and 16 and below 1e-8 for another m up to 32: about 10 groups for 2:4, and never one group.
    """
    kept = np.asarray(array) != 0
    if kept.all():
        return "dense"
    if not kept.any():
        return "all zero"
    layout = Layout(kept.shape, in_axes, out_axes)
    kept = kept.transpose(layout.permutation).reshape(layout.positions, layout.inputs, layout.outputs)
    if out_axes and kept[:, :, 0].size > 1 and (kept.all(axis=(0, 1)) | ~kept.any(axis=(0, 1))).all():
        return "channel"
    if in_axes and out_axes:
        rows, columns = _grain(kept, axis=1), _grain(kept, axis=2)
        if rows * columns > 1:
            return f"block {rows}x{columns}"
    return _detect_nm(kept) if in_axes else "unstructured"


def _grain(kept: np.ndarray, axis: int) -> int:
    """Returns the largest block length along an axis with no change inside a block: the gcd of all changes' places."""
    changes = np.flatnonzero(np.diff(kept, axis=axis).any(axis=tuple({0, 1, 2} - {axis}))) + 1
    return int(np.gcd.reduce(changes)) if changes.size else kept.shape[axis]


def _chance(counts: np.ndarray, n: int, m: int) -> float:
    """Returns the probability that kept entries at random places give such counts.

    Args:
        counts: Kept entries of each group, at most n.
        n: Largest count.
        m: Entries of a group.
    """
    density = float(counts.mean()) / m
    possible = [n] if counts.min() == n else range(n + 1)
    one = sum(math.comb(m, k) * density**k * (1 - density) ** (m - k) for k in possible)
    return one**counts.size


def _detect_nm(kept: np.ndarray) -> str:
    positions, inputs, outputs = kept.shape
    for m in range(2, min(inputs, 32) + 1):
        if inputs % m == 0:
            counts = kept.reshape(positions, inputs // m, m, outputs).sum(axis=2, dtype=np.uint8)
            n = int(counts.max())
            # A sparse weight without a pattern also has a largest count below m, but few groups reach it.
            if n < m and counts.mean() >= 0.95 * n and _chance(counts, n, m) < (_USUAL if m in _SIZES else _OTHER):
                return f"{n}:{m}"
    return "unstructured"

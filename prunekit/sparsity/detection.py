"""Detects the sparsity pattern of an array's zeros."""

import math

import numpy as np

from prunekit.sparsity.patterns import Axes, Layout

# Longest group of an N:M pattern that is looked for.
_LONGEST = 16
# Largest probability at which a random mask of the same density may show the N:M pattern that is reported.
_CHANCE = 1e-6


def detect(array: np.ndarray, in_axes: Axes, out_axes: Axes) -> str:
    """Returns the pattern of an array's zeros: the most structured pattern that explains every zero.

    Args:
        array: A weight, or a mask (True = kept).
        in_axes: Input axes of the array.
        out_axes: Output axes of the array.

    Returns:
        "dense" (no zero), "all zero", "channel", "block 4x1" (inputs x outputs; the largest block on a grid from the
        first weight), "2:4" (N:M with the smallest M up to 16; at most N kept in each group, and 95 % of N on average),
        else "unstructured".

    N:M is reported only if a random mask with the same number of zeros would have at most N kept in every group with a
    probability below 1e-6: one group of M weights always has a largest count, and that count proves nothing. The
    probability falls with each group, so this needs about 31 groups for 4:8, 37 for 2:4 and 46 for 1:4. Blocks and
    channels have no such limit: a small array may show them by chance.
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


def _detect_nm(kept: np.ndarray) -> str:
    positions, inputs, outputs = kept.shape
    for m in range(2, min(inputs, _LONGEST) + 1):
        if inputs % m == 0:
            counts = kept.reshape(positions, inputs // m, m, outputs).sum(axis=2, dtype=np.uint8)
            n = int(counts.max())
            # A sparse weight without a pattern also has a largest count below m, but few groups reach it.
            if n < m and counts.mean() >= 0.95 * n and _chance(n, m, counts.size, int(counts.sum())) < _CHANCE:
                return f"{n}:{m}"
    return "unstructured"


def _chance(n: int, m: int, groups: int, kept: int) -> float:
    """Returns an upper bound of the probability that a random mask keeps at most n of m entries in every group.

    The number of kept entries in one group is hypergeometric. Entries that one group keeps are missing in the others,
    so the counts are negatively associated, and the product over the groups is an upper bound.

    Args:
        n: Largest number of kept entries in a group.
        m: Entries in a group.
        groups: Number of groups.
        kept: Number of kept entries of the mask.

    Source: Joag-Dev & Proschan 1983, Annals of Statistics 11(1), section 3.
    """
    size = groups * m
    return sum(_exactly(count, m, kept, size) for count in range(n + 1)) ** groups


def _exactly(count: int, m: int, kept: int, size: int) -> float:
    """Returns the hypergeometric probability that a group of m entries of a random mask has `count` kept entries."""
    ways = [*(kept - i for i in range(count)), *(size - kept - i for i in range(m - count))]
    return math.comb(m, count) * math.prod(way / (size - i) for i, way in enumerate(ways))

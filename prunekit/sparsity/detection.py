"""Detects the sparsity pattern of an array's zeros."""

import math

import numpy as np

from prunekit.sparsity.patterns import Axes, MatrixLayout

# Longest group of an N:M pattern that is looked for.
_GROUP_UP_TO = 16
# Largest probability at which a random mask of the same density may show the N:M pattern that is reported.
_CHANCE = 1e-5


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

    N:M is reported only if a random mask with the same number of zeros would show it with a probability below 1e-5: one
    group of M weights always has a largest count, and that count proves nothing. The probability falls with each group:
    2:4 needs 14 groups if each keeps exactly two, and 31 if some keep fewer. Blocks and channels have no such limit: a
    small array may show them by chance.
    """
    kept = np.asarray(array) != 0
    if kept.all():
        return "dense"
    if not kept.any():
        return "all zero"
    layout = MatrixLayout(kept.shape, in_axes, out_axes)
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
    for m in range(2, min(inputs, _GROUP_UP_TO) + 1):
        if inputs % m == 0:
            counts = kept.reshape(positions, inputs // m, m, outputs).sum(axis=2, dtype=np.uint8)
            n = int(counts.max())
            # A sparse weight without a pattern also has a largest count below m, but few groups reach it.
            if n < m and counts.mean() >= 0.95 * n and _chance(counts, n, m) < _CHANCE:
                return f"{n}:{m}"
    return "unstructured"


def _chance(counts: np.ndarray, n: int, m: int) -> float:
    """Returns an upper bound of the probability that a random mask has such counts.

    If all groups keep n, this is the exact probability of that. Else it bounds the probability of at most n in every
    group: the number of kept entries in one group is hypergeometric, and since entries that one group keeps are missing
    in the others, the counts are negatively associated, and the product over the groups is an upper bound.

    Args:
        counts: Number of kept entries of each group, at most n.
        n: Largest number of kept entries in a group.
        m: Entries in a group.

    Source: Joag-Dev & Proschan 1983, Annals of Statistics 11(1), section 3.
    """
    groups, kept = counts.size, int(counts.sum())
    if kept == n * groups:
        return math.exp(groups * math.log(math.comb(m, n)) - _log_ways(groups * m, kept))
    return sum(_exactly(count, m, kept, groups * m) for count in range(n + 1)) ** groups


def _log_ways(size: int, kept: int) -> float:
    return math.lgamma(size + 1) - math.lgamma(kept + 1) - math.lgamma(size - kept + 1)


def _exactly(count: int, m: int, kept: int, size: int) -> float:
    """Returns the hypergeometric probability that a group of m entries of a random mask has `count` kept entries."""
    ways = [*(kept - i for i in range(count)), *(size - kept - i for i in range(m - count))]
    return math.comb(m, count) * math.prod(way / (size - i) for i, way in enumerate(ways))

"""Shares a number of removed entries between weights so that the sum of their errors is least."""

from collections.abc import Sequence
from typing import Any


def lower_hull(fractions: Sequence[float], errors: Sequence[float]) -> list[int]:
    """Returns the indices of the corners of the lower convex hull of a curve.

    Args:
        fractions: Abscissas, ascending.
        errors: Ordinates.

    >>> lower_hull([0.0, 0.5, 1.0], [0.0, 0.9, 1.0])
    [0, 2]
    """
    corners: list[int] = []
    for at in range(len(fractions)):
        while len(corners) > 1 and _is_above(fractions, errors, corners[-2], corners[-1], at):
            corners.pop()
        corners.append(at)
    return corners


def _is_above(fractions: Sequence[float], errors: Sequence[float], first: int, middle: int, last: int) -> bool:
    slope = (errors[last] - errors[first]) / (fractions[last] - fractions[first])
    return bool(errors[middle] >= errors[first] + slope * (fractions[middle] - fractions[first]))


def least_total(
    removed: int,
    sizes: Sequence[int],
    curves: Sequence[tuple[Any, Any]],
    gone: Sequence[int] | None = None,
) -> list[int]:
    """Returns how many entries each weight loses, so that the sum of the convex hulls of the errors is least.

    The flattest pieces of the hulls come first, so that no count falls when `removed` rises. Of pieces that are equally
    flat, those at lower sparsities come first.

    Args:
        removed: Number of entries to remove in all; each weight keeps at least one entry.
        sizes: Number of entries of each weight.
        curves: Fractions removed, ascending from 0 to 1, and the errors there, for each weight.
        gone: Number of entries that each weight loses in any case; None = 0.

    Source: the bit allocation of Shoham & Gersho 1988, Efficient bit allocation for an arbitrary set of quantizers.
    """
    found = [0] * len(sizes) if gone is None else list(gone)
    pieces = []
    for i, ((fractions, errors), size, least) in enumerate(zip(curves, sizes, tuple(found), strict=True)):
        corners = lower_hull(fractions, errors)
        ends = [max(min(round(fractions[at] * size), size - 1), least) for at in corners]
        for first, last, start, end in zip(corners, corners[1:], ends, ends[1:], strict=False):
            slope = (errors[last] - errors[first]) / (fractions[last] - fractions[first]) / size
            pieces.append((slope, fractions[last], i, end - start))
    for _, _, i, length in sorted(pieces):
        found[i] += min(length, removed - sum(found))
    return found

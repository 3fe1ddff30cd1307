"""Bounds: least and greatest sparsities of single weights, within which an allocation shares the overall sparsity."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prunekit.sparsity.arguments import fraction

# Relative tolerance of the products sparsity * entries: 0.55 * 100 is 55.00000000000001 in floating-point numbers.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Bounds:
    """The least and the greatest final sparsity of a weight, each in [0, 1).

    Attributes:
        min: Least sparsity; during a schedule it rises in proportion to the schedule's sparsity.
        max: Greatest sparsity, at every step; None = no limit.
    """

    min: float = 0.0
    max: float | None = None

    def at(self, progress: float, entries: int) -> tuple[int, int]:
        """Returns the least and the greatest number of pruned entries of a weight of `entries` entries.

        A maximum is rounded down, and a minimum up; below the final sparsity a minimum is rounded down, so that minima
        never sum to more than the overall sparsity removes.

        Args:
            progress: Present overall sparsity / final overall sparsity, in [0, 1].
            entries: Number of entries, or of units of the pattern.
        """
        most = entries if self.max is None else math.floor(self.max * entries * (1 + _ROUNDING))
        least = self.min * progress * entries
        return min(math.ceil(least * (1 - _ROUNDING)) if progress >= 1 else math.floor(least), most), most

    def __str__(self) -> str:
        if self.max is None:
            return f"at least {self.min:g}"
        return f"{self.min:g} to {self.max:g}" if self.min else f"at most {self.max:g}"


def as_bounds(name: str, given: Any) -> Bounds:
    """Returns the `Bounds` for a mapping such as {"min": 0.2, "max": 0.8}; returns `Bounds` unchanged.

    Raises:
        TypeError: `given` is no mapping with the keys min and max, or a value is no number.
        ValueError: A value is outside [0, 1), or min exceeds max.
    """
    if isinstance(given, Bounds):
        return given
    if not isinstance(given, Mapping) or not given or set(given) - {"min", "max"}:
        raise TypeError(f'{name} is a mapping such as {{"min": 0.2, "max": 0.8}}. Received: {given!r}.')
    least = fraction(f"{name}: min", given.get("min", 0.0))
    most = None if given.get("max") is None else fraction(f"{name}: max", given["max"])
    if most is not None and least > most:
        raise ValueError(f"{name} needs min <= max. Received: min={least:g}, max={most:g}.")
    return Bounds(least, most)


def shares_within(
    find: Callable[[dict[int, float]], list[float]],
    entries: Sequence[int],
    limits: Sequence[tuple[int, int]],
    removed: int,
) -> list[float]:
    """Returns an allocation's sparsity of each weight, changed as little as the limits require.

    Weights beyond a limit are fixed there, and the others share the rest anew by the allocation's own rule. Of too many
    and too few pruned entries, the side that is off by more is fixed first, so that the result does not depend on an
    order, and a weight is fixed only where it stays at its limit: the water-filling of CSS flexible lengths.

    Args:
        find: Fixed sparsities by index -> the sparsity of every weight, with the same total.
        entries: Number of entries of each weight.
        limits: Least and greatest number of pruned entries of each weight; together they allow the total.
        removed: Number of entries that the shares then remove exactly, by largest remainders.
    """
    fixed = {i: least / entries[i] for i, (least, most) in enumerate(limits) if least == most}
    while True:
        free = [i for i in range(len(entries)) if i not in fixed]
        rest = removed - sum(round(share * entries[i]) for i, share in fixed.items())
        # Rounded shares of fixed weights may leave the others one entry less or more than their limits allow.
        for side, beyond_limits in ((0, int.__le__), (1, int.__ge__)):
            if beyond_limits(rest, sum(limits[i][side] for i in free)):
                fixed |= {i: limits[i][side] / entries[i] for i in free}
                return _exact([fixed[i] for i in range(len(entries))], entries, limits, removed)
        shares = find(fixed)
        counts = [round(share * n) for share, n in zip(shares, entries, strict=True)]
        off = {i: min(max(counts[i], least), most) - counts[i] for i, (least, most) in enumerate(limits)}
        off = {i: difference for i, difference in off.items() if difference and i not in fixed}
        if not off:
            return _exact(shares, entries, limits, removed)
        total = sum(off.values())
        beyond = [i for i, difference in off.items() if not total or (difference > 0) == (total > 0)]
        fixed |= {i: (counts[i] + off[i]) / entries[i] for i in beyond}


def _exact(
    shares: Sequence[float], entries: Sequence[int], limits: Sequence[tuple[int, int]], removed: int
) -> list[float]:
    """Returns shares of whole entries that remove `removed` entries, or as near to it as the limits allow."""
    wanted = [share * n for share, n in zip(shares, entries, strict=True)]
    counts = [round(share * n) for share, n in zip(shares, entries, strict=True)]
    while missing := removed - sum(counts):
        step = 1 if missing > 0 else -1
        room = [i for i, (least, most) in enumerate(limits) if least <= counts[i] + step <= most]
        if not room:
            break
        room.sort(key=lambda i: step * round(counts[i] - wanted[i], 6))
        for i in room[: abs(missing)]:
            counts[i] += step
    return [count / n for count, n in zip(counts, entries, strict=True)]


def check_total(bounds: Sequence[Bounds], entries: Sequence[int], sparsity: float) -> None:
    """Raises unless the bounds allow the overall sparsity; that they are rounded to whole entries does not count.

    Args:
        bounds: Bounds of each weight; an override is both.
        entries: Number of entries of each weight.
        sparsity: Overall sparsity.

    Raises:
        ValueError: The bounds do not allow it; the message has the range that they allow.
    """
    rows = list(zip(bounds, entries, strict=True))
    total = sum(entries)
    least = sum(bound.min * n for bound, n in rows)
    most = sum(n if bound.max is None else bound.max * n for bound, n in rows)
    rounding = 0.5 + _ROUNDING * total
    if not least - rounding <= sparsity * total <= most + rounding:
        raise ValueError(
            f"The bounds and overrides of single weights allow overall sparsities from {least / total:.4g} to "
            f"{most / total:.4g}. Received: {sparsity:g}. Change them, or the overall sparsity."
        )

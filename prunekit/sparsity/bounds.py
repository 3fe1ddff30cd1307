"""Bounds on the sparsity of single weights, and counts within bounds for any rule that shares a total."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from prunekit.sparsity.arguments import fraction

# Relative tolerance of the products sparsity * units: 0.55 * 100 is 55.00000000000001 in floating-point numbers.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Bounds:
    """Least and greatest sparsity of a weight.

    Args:
        min: Least fraction removed, in [0, 1).
        max: Greatest fraction removed, in [0, 1), at least `min`; None = no bound.
    """

    min: float = 0.0
    max: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "min", fraction("min", self.min))
        if self.max is not None:
            object.__setattr__(self, "max", fraction("max", self.max))
            if self.min > self.max:
                raise ValueError(f"Bounds need min <= max. Received: min={self.min:g} and max={self.max:g}.")

    def __str__(self) -> str:
        if self.max is None:
            return f"at least {self.min:g}"
        return f"{self.min:g} to {self.max:g}" if self.min else f"at most {self.max:g}"


class Counts(NamedTuple):
    """Least and greatest number of units to remove from a weight."""

    least: int
    most: int


def as_bounds(name: str, value: Any) -> Bounds:
    """Returns `Bounds` from {"min": ..., "max": ...}, one of which may be left out; returns `Bounds` unchanged.

    Raises:
        TypeError: `value` is no such mapping, or a bound is not a number.
        ValueError: A bound is not a fraction, or min is greater than max.
    """
    if isinstance(value, Bounds):
        return value
    if not isinstance(value, Mapping) or not value or not set(value) <= {"min", "max"}:
        raise TypeError(f'{name} takes {{"min": FRACTION, "max": FRACTION}}, or one of them. Received: {value!r}.')
    try:
        return Bounds(**value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def units_within(bounds: Bounds, units: int, *, scale: float = 1.0) -> Counts:
    """Returns the whole numbers of units that lie within the bounds of a weight of `units` units.

    Args:
        bounds: The bounds.
        units: Number of entries, blocks or channels of the weight.
        scale: Factor in [0, 1] of the minimum, which is rounded up at 1 and down below.
    """
    asked = bounds.min * scale * units
    least = math.ceil(asked * (1 - _ROUNDING)) if scale >= 1 else math.floor(asked)
    most = units if bounds.max is None else math.floor(bounds.max * units * (1 + _ROUNDING))
    return Counts(least, most)


def shared_within(
    total: int, counts: Sequence[Counts], share: Callable[[int, list[int]], Sequence[float]]
) -> list[int]:
    """Returns how many units to remove from each weight: `total` in all, each within its counts.

    `share` distributes a number over weights by the rule of an allocation. Weights for which the rule gives more than
    their greatest or less than their least number are fixed there, first the side with the larger sum of violations,
    and `share` distributes the rest over the others, until nothing is violated. The result does not depend on the order
    of the weights, except that the lower index wins where rounding leaves a choice. For a rule with a common level,
    such as a threshold, the result is that of the level at which the numbers, cut to their counts, sum to `total`.

    Args:
        total: Number of units to remove; cut to the sums of the counts.
        counts: Least and greatest number of each weight.
        share: (number, indices of weights) -> number for each of these weights, which may be a fraction.
    """
    total = min(max(total, sum(least for least, _ in counts)), sum(most for _, most in counts))
    found = [0.0] * len(counts)
    free = list(range(len(counts)))
    while free:
        rest = total - sum(round(found[i]) for i in range(len(counts)) if i not in set(free))
        for i, number in zip(free, share(rest, free), strict=True):
            found[i] = float(number)
        beyond = {i: min(max(found[i], counts[i].least), counts[i].most) - found[i] for i in free}
        violation = sum(beyond.values())
        fixed = [i for i in free if (beyond[i] and not violation) or beyond[i] * violation > 0]
        for i in fixed:
            found[i] += beyond[i]
        if not fixed:
            break
        free = [i for i in free if i not in fixed]
    return _rounded(found, total, counts)


def _rounded(numbers: Sequence[float], total: int, counts: Sequence[Counts]) -> list[int]:
    """Returns whole numbers of the sum `total`, within the counts, by largest remainders."""
    found = [min(max(math.floor(number), least), most) for number, (least, most) in zip(numbers, counts, strict=True)]
    while missing := total - sum(found):
        step = 1 if missing > 0 else -1
        room = [i for i, (least, most) in enumerate(counts) if least <= found[i] + step <= most]
        room.sort(key=lambda i: step * (found[i] - numbers[i]))
        for i in room[: abs(missing)]:
            found[i] += step
    return found

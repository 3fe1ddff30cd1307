"""One overall sparsity -> a sparsity per weight, in plain Python."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from prunekit.sparsity.selection import pruned_count

Axes = Sequence[int]


class Allocation(ABC):
    """How an overall sparsity is shared between weights. Subclasses are frozen dataclasses.

    `joint` is True where there is no sparsity per weight: one selection runs over the importances of all of them.
    """

    joint: ClassVar[bool] = False

    @abstractmethod
    def sparsities(
        self, sparsity: float, shapes: Sequence[Axes], in_axes: Sequence[Axes], out_axes: Sequence[Axes]
    ) -> list[float]:
        """The sparsity of each weight, such that all of them together have `sparsity`.

        Args:
            sparsity: Overall fraction removed, in [0, 1).
            shapes: Shape of each weight.
            in_axes: Input axes of each weight.
            out_axes: Output axes of each weight.

        Returns:
            One sparsity in [0, 1) per weight; none falls where the overall one rises.

        Raises:
            ValueError: The overall sparsity is outside [0, 1), or cannot be had on these weights.
        """


@dataclass(frozen=True)
class Uniform(Allocation):
    """The same sparsity for every weight. Source: Zhu & Gupta 2017, arXiv:1710.01878, section 3."""

    def sparsities(
        self, sparsity: float, shapes: Sequence[Axes], in_axes: Sequence[Axes], out_axes: Sequence[Axes]
    ) -> list[float]:
        """`sparsity`, once per weight."""
        _check(sparsity, shapes, in_axes, out_axes)
        return [sparsity] * len(shapes)


@dataclass(frozen=True)
class Global(Allocation):
    """Removes the least important units of all weights together, so that importance decides each weight's sparsity.

    Source: Frankle & Carbin 2019, arXiv:1803.03635, section 4 (global pruning).
    """

    joint: ClassVar[bool] = True

    def sparsities(
        self, sparsity: float, shapes: Sequence[Axes], in_axes: Sequence[Axes], out_axes: Sequence[Axes]
    ) -> list[float]:
        """There are none before importances are known: raises ValueError, so that nobody takes them for uniform."""
        raise ValueError(
            "The global allocation has no sparsity per weight: select over the importances of all weights at once. "
            f"Received: sparsity={sparsity} for {len(shapes)} weights."
        )


@dataclass(frozen=True)
class ERK(Allocation):
    """Erdos-Renyi-Kernel: density = e * (inputs + outputs + window lengths) / (their product), at most 1.

    Inputs and outputs are the products of the weight's input and output axes, window lengths its other axes (those of a
    convolution); for dense and convolution kernels that is sum(shape) / prod(shape). e is what meets the overall
    sparsity: what a weight would get beyond density 1 goes to the others. Small and narrow weights stay denser.

    Counts are whole and exact: round(sparsity * n) of all n weights go, each weight keeps at least one, and with rising
    sparsity no weight gets anything back. Kept weights are dealt as seats are in Webster's method, weight i taking its
    k-th one at e = (k - 1/2) / sum_i, which rounds e * sum_i to the nearest count.

    Source: Evci et al. 2020, arXiv:1911.11134, section 3, (1) Sparsity distribution.
    """

    def sparsities(
        self, sparsity: float, shapes: Sequence[Axes], in_axes: Sequence[Axes], out_axes: Sequence[Axes]
    ) -> list[float]:
        """Density in proportion to the sum over the product of a weight's lengths, clamped at 1 and redistributed."""
        _check(sparsity, shapes, in_axes, out_axes)
        sizes = [math.prod(shape) for shape in shapes]
        kept = sum(sizes) - pruned_count(sparsity, sum(sizes))
        if kept < len(shapes):
            raise ValueError(
                f"ERK keeps at least one entry of every weight. Received: sparsity={sparsity} for {len(shapes)} "
                f"weights with {sum(sizes)} entries, which leaves {kept}. Ask for less sparsity, or leave weights out."
            )
        sums = [_sum_of_lengths(*weight) for weight in zip(shapes, in_axes, out_axes, strict=True)]
        counts = _dealt(kept, sizes, sums)
        return [(size - count) / size for size, count in zip(sizes, counts, strict=True)]


def get_allocation(allocation: str | Allocation) -> Allocation:
    """The allocation that a name stands for; an `Allocation` is returned as it is.

    Raises:
        ValueError: An unknown name.
        TypeError: Neither a name nor an allocation; a class instead of an instance.
    """
    if isinstance(allocation, Allocation):
        return allocation
    if not isinstance(allocation, str):
        raise TypeError(
            f"An allocation is one of {', '.join(ALLOCATIONS)}, or an Allocation such as ERK(). Received: "
            f"{allocation!r} of type {type(allocation).__name__}."
        )
    if allocation not in ALLOCATIONS:
        raise ValueError(f"Unknown allocation. Received: {allocation!r}. Valid are: {', '.join(ALLOCATIONS)}.")
    return ALLOCATIONS[allocation]()


ALLOCATIONS: dict[str, type[Allocation]] = {"uniform": Uniform, "global": Global, "erk": ERK}


def _check(sparsity: float, shapes: Sequence[Axes], in_axes: Sequence[Axes], out_axes: Sequence[Axes]) -> None:
    pruned_count(sparsity, 0)  # refuses what is no sparsity
    if not len(shapes) == len(in_axes) == len(out_axes):
        raise ValueError(
            "An allocation needs one shape, and input and output axes, per weight. Received: "
            f"{len(shapes)} shapes, {len(in_axes)} input axes, {len(out_axes)} output axes."
        )
    for shape in shapes:
        if 0 in shape:
            raise ValueError(f"A weight without entries has no sparsity. Received: shape {tuple(shape)}.")


def _sum_of_lengths(shape: Axes, in_axes: Axes, out_axes: Axes) -> int:
    sides = [[axis % len(shape) for axis in axes] for axes in (in_axes, out_axes)]
    window = [length for axis, length in enumerate(shape) if axis not in sides[0] + sides[1]]
    return sum(window) + sum(math.prod(shape[axis] for axis in axes) for axes in sides if axes)


def _dealt(kept: int, sizes: Sequence[int], sums: Sequence[int]) -> list[int]:
    """How many of `kept` each weight gets: those taken at the smallest e, at least 1 and at most its size."""
    e = _common_factor(kept, sizes, sums)
    counts = [max(math.floor(min(e * total, size) + 0.5), 1) for size, total in zip(sizes, sums, strict=True)]

    def taken_at(i: int, k: int) -> tuple[float, int]:
        # The first one comes before all others; ties go to the weight that comes first.
        return ((k - 0.5) / sums[i] if k > 1 else 0.0), i

    def next_given() -> tuple[float, int]:
        free = (taken_at(i, count + 1) for i, count in enumerate(counts) if count < sizes[i])
        return min(free, default=(math.inf, -1))

    def last_taken() -> tuple[float, int]:
        return max((taken_at(i, count) for i, count in enumerate(counts)), default=(0.0, -1))

    # Rounding, and the first one that each has for nothing, leave the total off by at most one per weight.
    while (missing := kept - sum(counts)) > 0:
        counts[next_given()[1]] += 1
    for _ in range(-missing):
        counts[last_taken()[1]] -= 1
    # Where the product above was rounded across a half; without this a weight could get one back later.
    while next_given() < last_taken():
        given, taken = next_given()[1], last_taken()[1]
        counts[given] += 1
        counts[taken] -= 1
    return counts


def _common_factor(kept: int, sizes: Sequence[int], sums: Sequence[int]) -> float:
    """e such that the sum of min(size, e * sum of lengths) is `kept`."""
    full: set[int] = set()
    while len(full) < len(sizes):
        rest = [i for i in range(len(sizes)) if i not in full]
        e = (kept - sum(sizes[i] for i in full)) / sum(sums[i] for i in rest)
        beyond = {i for i in rest if e * sums[i] > sizes[i]}
        if not beyond:
            return e
        full |= beyond
    return math.inf

"""Allocations: functions from one overall sparsity to a sparsity per weight."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import keras
from keras import ops

from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.lamp import entries_kept
from prunekit.sparsity.selection import pruned_count
from prunekit.sparsity.shorthands import ALLOCATIONS

Axes = Sequence[int]


class Weight(Protocol):
    """What an allocation reads of a weight: a `Target` of `prunekit.anatomy.layers.targets`, or a `WeightGeometry`."""

    @property
    def shape(self) -> Axes: ...

    @property
    def in_axes(self) -> Axes: ...

    @property
    def out_axes(self) -> Axes: ...


class WeightGeometry(NamedTuple):
    """Shape, input axes and output axes of a weight."""

    shape: Axes
    in_axes: Axes
    out_axes: Axes


class Allocation(ABC):
    """Distributes an overall sparsity over weights. Subclasses are frozen dataclasses.

    `needs` holds the names of statistics that the allocation reads, as a criterion's `needs` does; `sparsities` then
    takes them as keyword argument `statistics`: one {name: value} per weight.
    `joint` is True for an allocation without a sparsity per weight: the units to prune are selected in one step over
    the importances of all weights. `needs_scores` is True for an allocation that reads the importances of all weights.
    Register a subclass by a row in `prunekit.sparsity.shorthands.ALLOCATIONS` to use its name in options and recipes.
    """

    joint: ClassVar[bool] = False
    needs_scores: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def sparsities(
        self, sparsity: float, targets: Sequence[Weight], scores: Sequence[Any] | None = None
    ) -> list[float]:
        """The sparsity of each weight, such that all weights together have the sparsity `sparsity`.

        Args:
            sparsity: Overall fraction removed, in [0, 1).
            targets: The weights.
            scores: Importance of each entry of each weight, tensors of the weights' shapes; None unless `needs_scores`.

        Returns:
            One sparsity in [0, 1) per weight; each is non-decreasing in the overall sparsity.

        Raises:
            ValueError: `sparsity` is outside [0, 1), or cannot be reached on these weights.
        """

    def shares(
        self,
        sparsity: float,
        targets: Sequence[Weight],
        scores: Sequence[Any] | None = None,
        overrides: Mapping[int, float] | None = None,
        statistics: Sequence[Any] | None = None,
    ) -> list[float]:
        """The sparsity of each weight, where `overrides` fixes some of them; all together have the sparsity `sparsity`.

        Args:
            sparsity: As for `sparsities`.
            targets: As for `sparsities`.
            scores: As for `sparsities`.
            overrides: Index of a weight -> its sparsity. `sparsities` distributes the rest over the other weights.
            statistics: {name: value} of each weight, for the names in `needs`.

        Raises:
            ValueError: As for `sparsities`; the other weights cannot reach the rest.
        """
        if not overrides:
            return self._sparsities(sparsity, targets, scores, statistics)
        sizes = [math.prod(target.shape) for target in targets]
        free = [i for i in range(len(sizes)) if i not in overrides]
        rest = sum(sizes[i] for i in free)
        # Not `pruned_count`: a small weight may be fixed at all of its entries.
        fixed = sum(round(share * sizes[i]) for i, share in overrides.items())
        wanted = pruned_count(sparsity, sum(sizes)) - fixed
        # Each count is rounded, so the fixed counts may exceed the overall count by half an entry per weight.
        if -len(overrides) <= wanted < 0:
            wanted = 0
        if not 0 <= wanted < max(rest, 1):
            raise ValueError(
                f"The weights without an override have {rest:,} entries. Received: overall sparsity {sparsity:g} and "
                f"overrides that remove {fixed:,} entries, so {wanted:,} of the others would be removed. Change the "
                "overrides or the overall sparsity."
            )
        found = dict(overrides)
        of_free = [None if rows is None else [rows[i] for i in free] for rows in (scores, statistics)]
        others = self._sparsities(wanted / max(rest, 1), [targets[i] for i in free], *of_free)
        found |= zip(free, others, strict=True)
        return [found[i] for i in range(len(sizes))]

    def normalized(self, importance: Any) -> Any:
        """The importances of one weight as a joint selection compares them; by default unchanged."""
        return importance

    def _sparsities(self, sparsity, targets, scores, statistics) -> list[float]:
        more = {"statistics": statistics} if self.needs else {}
        return self.sparsities(sparsity, targets, scores, **more)


@dataclass(frozen=True)
class Uniform(Allocation):
    """The same sparsity for every weight. Source: Zhu & Gupta 2017, arXiv:1710.01878, section 3."""

    def sparsities(
        self, sparsity: float, targets: Sequence[Weight], scores: Sequence[Any] | None = None
    ) -> list[float]:
        """`sparsity` for every weight."""
        _check(sparsity, targets)
        return [sparsity] * len(targets)


@dataclass(frozen=True)
class Global(Allocation):
    """Removes the least important units over all weights, so that the importances determine each weight's sparsity.

    Args:
        normalization: What the importances of a weight are divided by before they are compared with those of others:
            "none": nothing; "mean": the mean of their magnitudes; "l2": their L2 norm. Both count all entries of the
            weight, pruned ones included, and leave importances that are all zero as they are.

    Source: Frankle & Carbin 2019, arXiv:1803.03635, section 4 (global pruning); "l2" Molchanov et al. 2017,
        arXiv:1611.06440, section 2.2; "mean" Fang et al. 2023, arXiv:2301.12900, appendix.
    """

    normalization: str = "none"

    joint: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.normalization not in ("none", "mean", "l2"):
            raise ValueError(f"`normalization` is none, mean or l2. Received: {self.normalization!r}.")

    def normalized(self, importance: Any) -> Any:
        """The importances of one weight, divided by their norm: a tensor of the same shape, at least float32."""
        if self.normalization == "none":
            return importance
        magnitude = ops.abs(ops.cast(importance, keras.backend.result_type(importance.dtype, "float32")))
        largest = ops.max(magnitude)
        # Divided by the largest first: squares of small importances underflow.
        scaled = magnitude / ops.where(largest > 0, largest, ops.ones_like(largest))
        mean = ops.mean(scaled) if self.normalization == "mean" else ops.sqrt(ops.sum(ops.square(scaled)))
        norm = mean * largest
        return ops.cast(importance, norm.dtype) / ops.where(norm > 0, norm, ops.ones_like(norm))

    def sparsities(
        self, sparsity: float, targets: Sequence[Weight], scores: Sequence[Any] | None = None
    ) -> list[float]:
        """Raises ValueError: a weight's sparsity is unknown until importances are compared over all weights."""
        raise ValueError(
            "The global allocation has no sparsity per weight: select over the importances of all weights at once. "
            f"Received: sparsity={sparsity} for {len(targets)} weights."
        )


@dataclass(frozen=True)
class ERK(Allocation):
    """Erdos-Renyi-Kernel: density = e * (inputs + outputs + window lengths) / (their product), at most 1.

    "inputs" and "outputs" are the products of the lengths of the weight's input and output axes; "window lengths" are
    the lengths of all other axes (a convolution's window). For dense and convolution kernels the quotient is
    sum(shape) / prod(shape). The factor e is chosen to meet the overall sparsity; density above 1 is redistributed to
    the other weights. Small and narrow weights stay denser.

    Counts are exact integers: round(sparsity * n) of all n entries are removed, fewer only where each weight keeps a
    single entry, and a weight's kept count never grows with rising sparsity. Kept entries are apportioned by Webster's
    method: weight i receives its k-th entry at e = (k - 1/2) / sum_i, which rounds e * sum_i to the nearest count.

    Source: Evci et al. 2020, arXiv:1911.11134, section 3, (1) Sparsity distribution.
    """

    def sparsities(
        self, sparsity: float, targets: Sequence[Weight], scores: Sequence[Any] | None = None
    ) -> list[float]:
        """The sparsity of each weight; densities are proportional to sum / product of lengths, at most 1."""
        _check(sparsity, targets)
        sizes = [math.prod(target.shape) for target in targets]
        kept = max(sum(sizes) - pruned_count(sparsity, sum(sizes)), len(targets))
        sums = [_sum_of_lengths(target.shape, target.in_axes, target.out_axes) for target in targets]
        counts = _dealt(kept, sizes, sums)
        return [(size - count) / size for size, count in zip(sizes, counts, strict=True)]


@dataclass(frozen=True)
class LAMP(Allocation):
    """Layer-adaptive magnitudes: removes the entries that are the smallest part of what would be left of their weight.

    The score of an entry is v ** 2 / (sum of u ** 2 over the entries u of the same weight that are not smaller), where
    v is its importance: |w| with the criterion "magnitude", as in the paper; for other criteria the same formula on
    their importances, which must be at least 0. The least scores over all weights are removed; their numbers are the
    sparsities. The largest entry of a weight scores 1, so no weight is emptied.

    Source: Lee et al. 2021, arXiv:2010.07611, eq. 2.
    """

    needs_scores: ClassVar[bool] = True

    def sparsities(
        self, sparsity: float, targets: Sequence[Weight], scores: Sequence[Any] | None = None
    ) -> list[float]:
        """The sparsity of each weight; round(sparsity * n) of all n entries are removed."""
        _check(sparsity, targets)
        sizes = [math.prod(target.shape) for target in targets]
        removed = min(pruned_count(sparsity, sum(sizes)), sum(sizes) - len(sizes))
        if not targets:
            return []
        counts = entries_kept([array_of(score) for score in scores or ()], sum(sizes) - removed)
        return [(size - count) / size for size, count in zip(sizes, counts, strict=True)]


def get_allocation(allocation: str | Allocation) -> Allocation:
    """Returns the allocation for a name; returns an `Allocation` unchanged.

    Raises:
        ValueError: `allocation` is an unknown name.
        TypeError: `allocation` is neither a name nor an `Allocation` instance (a class is not an instance).
    """
    expected = f"An allocation is one of {', '.join(ALLOCATIONS)}, or an Allocation such as ERK()"
    return ALLOCATIONS.resolve(allocation, Allocation, expected)  # type: ignore[type-abstract]


def _check(sparsity: float, targets: Sequence[Weight]) -> None:
    pruned_count(sparsity, 0)  # raises ValueError unless sparsity is in [0, 1)
    for target in targets:
        if 0 in target.shape:
            raise ValueError(f"A weight without entries has no sparsity. Received: shape {tuple(target.shape)}.")


def _sum_of_lengths(shape: Axes, in_axes: Axes, out_axes: Axes) -> int:
    sides = [[axis % len(shape) for axis in axes] for axes in (in_axes, out_axes)]
    window = [length for axis, length in enumerate(shape) if axis not in sides[0] + sides[1]]
    return sum(window) + sum(math.prod(shape[axis] for axis in axes) for axes in sides if axes)


def _dealt(kept: int, sizes: Sequence[int], sums: Sequence[int]) -> list[int]:
    """The number of kept entries per weight: the `kept` entries with the smallest e; at least 1, at most its size."""
    e = _common_factor(kept, sizes, sums)
    counts = [max(math.floor(min(e * total, size) + 0.5), 1) for size, total in zip(sizes, sums, strict=True)]

    def taken_at(i: int, k: int) -> tuple[float, int]:
        # A weight's first entry precedes all later entries; the weight with the lower index wins ties.
        return ((k - 0.5) / sums[i] if k > 1 else 0.0), i

    def next_given() -> tuple[float, int]:
        free = (taken_at(i, count + 1) for i, count in enumerate(counts) if count < sizes[i])
        return min(free, default=(math.inf, -1))

    def last_taken() -> tuple[float, int]:
        return max((taken_at(i, count) for i, count in enumerate(counts)), default=(0.0, -1))

    # Rounding, and the guaranteed first entry of each weight, leave the total off by at most one per weight.
    while (missing := kept - sum(counts)) > 0:
        counts[next_given()[1]] += 1
    for _ in range(-missing):
        counts[last_taken()[1]] -= 1
    # Corrects e * total rounded across a half; otherwise a weight's kept count could grow with rising sparsity.
    while next_given() < last_taken():
        given, taken = next_given()[1], last_taken()[1]
        counts[given] += 1
        counts[taken] -= 1
    return counts


def _common_factor(kept: int, sizes: Sequence[int], sums: Sequence[int]) -> float:
    """The factor e for which the sum over weights of min(size, e * sum of lengths) equals `kept`."""
    full: set[int] = set()
    while len(full) < len(sizes):
        rest = [i for i in range(len(sizes)) if i not in full]
        e = (kept - sum(sizes[i] for i in full)) / sum(sums[i] for i in rest)
        beyond = {i for i in rest if e * sums[i] > sizes[i]}
        if not beyond:
            return e
        full |= beyond
    return math.inf

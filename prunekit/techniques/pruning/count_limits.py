"""CountLimits: how many units of each target may be removed, by the options `bounds` and `overrides`."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from prunekit.anatomy.targets import Target
from prunekit.sparsity.allocation import Allocation
from prunekit.sparsity.bounds import Bounds, Counts, as_bounds, shared_within, units_within
from prunekit.sparsity.selection import keep_largest_of_array, pruned_count, removed_count
from prunekit.techniques.pruning.options import PruningOptions

# Targets, scores and statistics.
AllocationRows = tuple[Sequence[Any], Sequence[Any] | None, Sequence[Any] | None]


class CountLimits:
    """Least and greatest number of units to remove from each target.

    A unit is an entry, a block or a channel. At the final sparsity a minimum is rounded up and a maximum down to whole
    units. Below it, minima and overrides are in proportion to the sparsity and rounded down, so that the sum of the
    least numbers never exceeds what the sparsity removes; maxima stay.

    Args:
        targets: The weights to prune.
        options: Pruning options; the keys of `bounds` and `overrides` are exact names of targets.
        final_sparsity: Final sparsity of the schedule.
        units: Number of units of each target.

    Raises:
        ValueError: No number of units lies within a target's bounds, or an override lies outside of them.
    """

    def __init__(self, targets: Sequence[Target], options: PruningOptions, final_sparsity: float, units: Sequence[int]):
        self._names = [target.name for target in targets]
        self._sizes = [target.size for target in targets]
        self._final_sparsity, self._units, self._keep_one = final_sparsity, list(units), options.keep_one
        self._bounds = [as_bounds(name, options.bounds.get(name, Bounds())) for name in self._names]
        self._overrides = [options.overrides.get(name) for name in self._names]
        for name, bounds, override in zip(self._names, self._bounds, self._overrides, strict=True):
            if override is not None and not bounds.min <= override <= (1.0 if bounds.max is None else bounds.max):
                raise ValueError(
                    f"The override of a weight lies within its bounds. Received: {override:g} and {bounds} for {name}. "
                    "Change one of them."
                )
        for name, bounds, number, counts in zip(
            self._names, self._bounds, self._units, self.units_at(final_sparsity), strict=True
        ):
            if counts.least > counts.most:
                raise ValueError(
                    f"Bounds contain a sparsity that removes whole units and, with `keep_one`, not all of them. "
                    f"Received: {bounds} for {name}, which has {number:,} units. Widen the bounds."
                )

    def units_at(self, sparsity: float) -> list[Counts]:
        """Returns the least and the greatest number of units of each target at an overall sparsity."""
        scale = min(sparsity / self._final_sparsity, 1.0) if self._final_sparsity else 0.0
        rows = zip(self._bounds, self._overrides, self._units, strict=True)
        return [self._counts(*row, scale) for row in rows]

    def _counts(self, bounds: Bounds, override: float | None, units: int, scale: float) -> Counts:
        if override is not None:
            final = removed_count(override, units, keep_one=self._keep_one)
            fixed = final if scale >= 1 else min(math.floor(override * scale * units), final)
            return Counts(fixed, fixed)
        least, most = units_within(bounds, units, scale=scale)
        return Counts(least, min(most, units - 1) if self._keep_one else most)

    def fractions(
        self, allocation: Allocation, sparsity: float, rows: AllocationRows, pruned: Any = None
    ) -> list[float]:
        """Returns the sparsity of each target: all together have the sparsity `sparsity`, exact to the entry.

        Blocks and channels are counted in whole units, and each target's number is rounded to them within its limits.

        Args:
            allocation: Shares the sparsity between the targets that are not at a limit; not a joint one.
            sparsity: Overall sparsity.
            rows: Targets, scores and statistics, as `Allocation.shares` takes them.
            pruned: Number of entries of each target that are pruned already and stay pruned; None = none.
        """

        def share(number: int, free: list[int]) -> Sequence[float]:
            sizes = [self._sizes[i] for i in free]
            if number >= sum(sizes):
                return sizes
            some = [None if row is None else [row[i] for i in free] for row in rows]
            found = allocation.shares(number / sum(sizes), some[0] or (), some[1], None, some[2])
            return [one * size for one, size in zip(found, sizes, strict=True)]

        counts = zip(self.units_at(sparsity), self._sizes, self._units, strict=True)
        limits = _with_pruned([_in_entries(*row) for row in counts], pruned)
        found = shared_within(pruned_count(sparsity, sum(self._sizes)), limits, share)
        return [count / size for count, size in zip(found, self._sizes, strict=True)]

    def joint_counts(self, sparsity: float, pooled: Sequence[np.ndarray]) -> list[int]:
        """Returns the number of units to remove from each target: the least important ones of all free targets.

        Args:
            sparsity: Overall sparsity.
            pooled: Importance of each unit of each target; -inf marks a unit that is pruned already.
        """
        parts = [np.asarray(part, "float32").reshape(-1) for part in pooled]

        def share(number: int, free: list[int]) -> list[float]:
            together = np.concatenate([parts[i] for i in free])
            kept = keep_largest_of_array(together, len(together) - number)
            ends = np.cumsum([len(parts[i]) for i in free])[:-1]
            return [part.size - int(np.count_nonzero(part)) for part in np.split(kept, ends)]

        gone = [int(np.count_nonzero(part == -np.inf)) for part in parts]
        return shared_within(
            pruned_count(sparsity, sum(self._units)), _with_pruned(self.units_at(sparsity), gone), share
        )

    def check(self, *, joint: bool) -> None:
        """Checks that the final sparsity can be reached within the limits.

        Args:
            joint: Whether units of all targets are counted together; False: entries.

        Raises:
            ValueError: The limits do not allow the final sparsity.
        """
        counts, sizes = self.units_at(self._final_sparsity), self._units
        if not joint:
            counts = [_in_entries(*row) for row in zip(counts, self._sizes, self._units, strict=True)]
            sizes = self._sizes
        least, most = (sum(column) for column in zip(*counts, strict=True))
        wanted = pruned_count(self._final_sparsity, sum(sizes))
        # With keep_one, a sparsity near 1 is cut to one kept unit per target, as without limits.
        spared = [-(-size // units) for size, units in zip(sizes, self._units, strict=True)] if self._keep_one else []
        slack = sum(size for size, limited in zip(spared, self.limited_above, strict=False) if not limited)
        if not least <= wanted <= most + slack:
            low, high = math.ceil(least / sum(sizes) * 1e4) / 1e4, math.floor(most / sum(sizes) * 1e4) / 1e4
            raise ValueError(
                f"`bounds` and `overrides` allow an overall sparsity from {low:g} to {high:g} on these weights. "
                f"Received: {self._final_sparsity:g}. Change the bounds, the overrides or the sparsity."
            )

    @property
    def limited_above(self) -> list[bool]:
        """Whether each target has an override or a maximum."""
        rows = zip(self._bounds, self._overrides, strict=True)
        return [override is not None or bounds.max is not None for bounds, override in rows]


def _with_pruned(counts: Sequence[Counts], pruned: Sequence[int] | np.ndarray | None) -> list[Counts]:
    """Returns the counts, raised to the number that is pruned already, since pruned units do not come back."""
    if pruned is None:
        return list(counts)
    rows = zip(counts, pruned, strict=True)
    return [Counts(max(least, int(gone)), max(most, int(gone))) for (least, most), gone in rows]


def _in_entries(counts: Counts, size: int, units: int) -> Counts:
    least = -(-counts.least * size // units)
    return Counts(least, max(counts.most * size // units, least))

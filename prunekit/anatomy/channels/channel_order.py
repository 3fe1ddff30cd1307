"""The order in which channels are removed: one order for all groups, and how far along it to go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np

from prunekit.anatomy.channels.channels import Group
from prunekit.sparsity.shorthands import ChannelAllocation

ALLOCATIONS = get_args(ChannelAllocation)


class Order:
    """The order in which channels are removed; each beginning of it is a selection.

    A group loses its least important channels first. With "uniform" all groups lose the same share, with "per_kind"
    groups of the same kind are ranked together and each kind loses the same share, with "global" all groups are ranked
    together.

    Args:
        groups: The groups that may shrink.
        importances: Importance of each channel of each group.
        allocation: "uniform", "per_kind" or "global".
        minimum: Smallest number of units that a group keeps.
        multiple: The kept units of each group are rounded up to a multiple of this number.

    Attributes:
        length: How many units can be removed; a unit is one channel, or one of each part of a grouped convolution.
        total: How many units there are.
        sizes: How many units each group has, shape (groups,).
        multiple: The multiple to which the kept channels of each group are rounded up.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        importances: Sequence[np.ndarray],
        allocation: str = "uniform",
        *,
        minimum: int = 1,
        multiple: int = 1,
    ) -> None:
        self._minimum, self.multiple = minimum, multiple
        self._units = [_units(*pair) for pair in zip(groups, importances, strict=True)]
        self.total = sum(len(values) for _, values in self._units)
        pools: dict[object, list[int]] = {}
        for index, group in enumerate(groups):
            pools.setdefault({"uniform": index, "per_kind": _kind(group), "global": ""}[allocation], []).append(index)
        self.sizes = np.array([len(values) for _, values in self._units], int)
        share, owners = (np.concatenate(parts) for parts in zip(*map(self._shares, pools.values()), strict=True))
        self._owners = owners[np.lexsort((owners, share))]
        self.length = int(self._owners.size)

    def _shares(self, pool: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns (the share of the pool that is gone with a unit, its group) for the units that may be removed."""
        owners = np.concatenate([np.full(self.sizes[i], i) for i in pool])
        ranks = np.concatenate([np.arange(self.sizes[i]) for i in pool])
        order = np.lexsort((ranks, owners, np.concatenate([self._units[i][1] for i in pool])))
        share = (np.arange(order.size) + 0.5) / order.size
        allowed = ranks[order] < self.sizes[owners[order]] - self._minimum
        return share[allowed], owners[order][allowed]

    def first(self, length: int) -> np.ndarray:
        """Returns how many of the first `length` units each group has, shape (groups,)."""
        return np.bincount(self._owners[:length], minlength=len(self._units))

    def unimportant(self) -> np.ndarray:
        """Returns how many units of each group may be removed that have no importance: 0 in each part."""
        without = np.array([np.count_nonzero(values == 0) for _, values in self._units], int)
        return np.minimum(without, np.maximum(self.sizes - self._minimum, 0))

    def rounded(self, counts: np.ndarray) -> np.ndarray:
        """Returns how many units each group loses when its kept ones are rounded up to the multiple."""
        kept = -(-(self.sizes - counts) // self.multiple) * self.multiple
        return np.maximum(self.sizes - kept, 0)

    def removed(self, counts: np.ndarray) -> np.ndarray:
        """Returns the channels that are removed when each group loses its `counts` least important units."""
        lost = zip(self._units, self.rounded(counts), strict=True)
        return np.concatenate([units[:count].reshape(-1) for (units, _), count in lost])

    def nearest(self, measure: Callable[[np.ndarray], float], target: float, tolerance: float) -> np.ndarray:
        """Returns how many units each group loses, so that the measure is nearest to the target.

        The first units of the order, and at most one more of a group further on where that is nearer. With a multiple,
        the measure does not fall below the target by more than the tolerance.

        Args:
            measure: Function of the removed channels; it falls with each of them.
            target: The wanted measure.
            tolerance: Largest difference from the target that counts as reached.
        """
        low, high = 0, self.length
        while low < high:
            middle = (low + high + 1) // 2
            if measure(self.removed(self.first(middle))) >= target:
                low = middle
            else:
                high = middle - 1
        found = self.first(low)
        if self.multiple > 1:
            same = self.rounded(found)
            steps = (self.first(length) for length in range(low + 1, self.length + 1))
            below = next((counts for counts in steps if (self.rounded(counts) != same).any()), found)
            return below if abs(measure(self.removed(below)) - target) <= tolerance else found
        if low == self.length:
            return found
        groups = dict.fromkeys(self._owners[low:].tolist())
        one_more = (found + (np.arange(found.size) == group) for group in groups)
        return min([found, *one_more], key=lambda counts: abs(measure(self.removed(counts)) - target))


def _units(group: Group, importance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (channels of each unit, importance of each unit), least important unit first."""
    matrix = group.channels.reshape(group.parts, -1)
    values = importance.reshape(matrix.shape)
    order = np.argsort(values, axis=1, kind="stable")
    units = np.take_along_axis(matrix, order, 1).T
    return units, np.take_along_axis(values, order, 1).mean(axis=0)


def _kind(group: Group) -> tuple[object, ...]:
    """Groups of the same kind have as many channels, in the same axes of weights of the same names."""
    members = tuple((member.weight.rpartition("/")[2], member.axis, member.channels.size) for member in group.members)
    return group.channels.size, group.parts, members

"""SensitivityAllocation: shares the sparsity between weights by a measured scan of their sensitivities."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prunekit.sparsity.allocation import Allocation, Weight
from prunekit.sparsity.convex_shares import least_total
from prunekit.sparsity.selection import pruned_count
from prunekit.sparsity.sensitivity_table import OUTPUT_ERROR, damages_of, read_table

# Halvings of the density beyond the last level of a scan, to which the damage is extrapolated.
_HALVINGS = 12


@dataclass(frozen=True)
class SensitivityAllocation(Allocation):
    """Shares the sparsity so that the sum of the damages that a scan predicts is least.

    The damage of a weight is a curve over its sparsity: zero at 0, measured at the levels of the scan, made
    non-decreasing, and replaced by its lower convex hull, which is linear in between. Beyond the last level each
    halving of the density costs as much as the last piece would, twice as steep. The counts are exact, and no weight's
    count falls when the overall sparsity rises; each weight keeps at least one entry.

    Args:
        file: A sensitivity.json file, a `SensitivityReport`, or its `to_dict()`.
        damage: "output_error": the squared relative error of the model's outputs, since squares of independent errors
            add up. Or the name of a metric of the scan, such as "loss" or "accuracy": by how much it is worse.

    Raises:
        ValueError: The file is no complete scan, or has no such metric.

    Source: the least total by convex hulls is the bit allocation of Shoham & Gersho 1988.
    """

    file: Any = ""
    damage: str = OUTPUT_ERROR
    _curves: tuple[tuple[str, int, tuple[tuple[float, float], ...]], ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        scan = read_table(self.file)
        object.__setattr__(self, "_curves", _curves(scan, self.damage))
        if not isinstance(self.file, str):
            named = os.fspath(self.file) if isinstance(self.file, os.PathLike) else f"scan of {scan.get('model')}"
            object.__setattr__(self, "file", named)

    def sparsities(
        self, sparsity: float, targets: Sequence[Weight], scores: Sequence[Any] | None = None
    ) -> list[float]:
        """One sparsity per weight, for the least sum of damages; round(sparsity * n) of all n entries are removed."""
        known = {name: (size, points) for name, size, points in self._curves}
        curves, sizes = [], []
        for target in targets:
            name, size = getattr(target, "name", None), math.prod(target.shape)
            if name not in known:
                raise ValueError(
                    f"The scan {self.file} measured {_few(known)}. Received: the weight {name!r}, which it did not "
                    "measure. Leave the weight out with `exclude`, give it a sparsity with `overrides`, or scan again."
                )
            if known[name][0] != size:
                raise ValueError(
                    f"The scan {self.file} measured {name!r} with {known[name][0]:,} entries. Received: a weight of "
                    f"{size:,} entries. Scan this model again."
                )
            sizes.append(size)
            curves.append(_extended(known[name][1]))
        total = sum(sizes)
        removed = min(pruned_count(sparsity, total), total - len(sizes))
        return [count / size for count, size in zip(least_total(removed, sizes, curves), sizes, strict=True)]


def _curves(scan: Mapping[str, Any], damage: str) -> tuple[Any, ...]:
    """Returns (name, size, ((fraction removed, damage), ...)) of each weight."""
    return tuple(
        (one.name, one.size, tuple(sorted((entries / one.size, worse) for _, entries, worse in one.points)))
        for one in damages_of(scan, "prune", damage)
    )


def _extended(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Returns the curve from 0 to 1, non-decreasing; beyond the last point it is linear in the log of the density."""
    fractions, errors = [0.0], [0.0]
    for fraction, damage in points:
        worse = max(damage, errors[-1])
        if fraction > fractions[-1]:
            fractions.append(fraction)
            errors.append(worse)
        else:
            errors[-1] = worse
    slope = 0.0
    if len(fractions) > 1:
        # Also of the whole curve: where the last piece is flat, the levels before it say what pruning costs.
        pieces = [(-1, -2), (-1, 0)]
        slope = max((errors[a] - errors[b]) / (fractions[a] - fractions[b]) for a, b in pieces)
    for _ in range(_HALVINGS):
        following = (1.0 + fractions[-1]) / 2
        slope *= 2
        errors.append(errors[-1] + slope * (following - fractions[-1]))
        fractions.append(following)
    if fractions[-1] < 1.0:
        errors.append(errors[-1] + 2 * slope * (1.0 - fractions[-1]))
        fractions.append(1.0)
    return fractions, errors


def _few(names: Mapping[str, Any]) -> str:
    listed = list(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} others" if len(listed) > 5 else "")

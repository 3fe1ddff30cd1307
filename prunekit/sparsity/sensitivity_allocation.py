"""SensitivityAllocation: shares the sparsity between weights by a measured scan of their sensitivities."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prunekit.sparsity.allocation import Allocation, Weight
from prunekit.sparsity.convex_shares import least_total
from prunekit.sparsity.selection import pruned_count
from prunekit.suggestions import did_you_mean

# Version of the files that a scan writes.
SENSITIVITY_VERSION = 1
# Halvings of the density beyond the last level of a scan, to which the damage is extrapolated.
_HALVINGS = 12
# Damage of an output that is no number.
_WORST = 1e300
_OUTPUT_ERROR = "output_error"


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
    damage: str = _OUTPUT_ERROR
    _curves: tuple[tuple[str, int, tuple[tuple[float, float], ...]], ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        scan = _read(self.file)
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


def _read(file: Any) -> Mapping[str, Any]:
    if hasattr(file, "to_dict"):
        return file.to_dict()
    if isinstance(file, Mapping):
        return file
    if not isinstance(file, str | os.PathLike) or not os.fspath(file):
        raise ValueError(
            'The allocation "sensitivity" needs the file of a scan (sensitivity.json, written by prunekit sensitivity) '
            f"or a SensitivityReport. Received: {file!r}."
        )
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"The file of the sensitivity scan does not exist. Received: {os.fspath(file)!r}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"The file {os.fspath(file)!r} of a sensitivity scan cannot be read: {error}.") from error
    if not isinstance(found, Mapping):
        raise ValueError(
            f"A sensitivity scan is a JSON object. Received: {os.fspath(file)!r}, which holds another value."
        )
    return found


def _curves(scan: Mapping[str, Any], damage: str) -> tuple[Any, ...]:
    """Returns (name, size, ((fraction removed, damage), ...)) of each weight."""
    try:
        if scan["sensitivity_version"] != SENSITIVITY_VERSION:
            raise ValueError(f"its sensitivity_version is not {SENSITIVITY_VERSION}; scan again with this prunekit")
        if not scan["complete"]:
            raise ValueError("it is not complete: run the same command again")
        sign = _sign(scan, damage)
        dense = 0.0 if damage == _OUTPUT_ERROR else float(scan["dense"][damage])
        points: dict[str, list[tuple[float, float]]] = {target["name"]: [] for target in scan["targets"]}
        sizes = {target["name"]: int(target["size"]) for target in scan["targets"]}
        for row in scan["rows"]:
            if (row["technique"], row["level"]) == ("prune", "sparsity"):
                value = row[_OUTPUT_ERROR] if damage == _OUTPUT_ERROR else row["metrics"][damage]
                # JSON has no NaN and no infinity; both are null, and the worst damage.
                worse = _WORST if value is None else sign * (float(value) - dense)
                if damage == _OUTPUT_ERROR and value is not None:
                    worse = min(worse * worse, _WORST)
                points[row["target"]].append((int(row["entries"]) / sizes[row["target"]], worse))
    except KeyError as error:
        raise ValueError(f"This is no sensitivity scan: {error} is missing.") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"This sensitivity scan cannot be used: {error}.") from error
    return tuple((name, sizes[name], tuple(sorted(found))) for name, found in points.items())


def _sign(scan: Mapping[str, Any], damage: str) -> float:
    """Returns 1.0 if higher values of a measure are worse, else -1.0."""
    directions = {_OUTPUT_ERROR: "min", **{one["name"]: one["direction"] for one in scan["measures"]}}
    known = [name for name, direction in directions.items() if direction is not None]
    if damage not in known:
        hint = did_you_mean(damage, known)
        raise ValueError(f"`damage` is one of {', '.join(known)}. Received: {damage!r}.{hint}")
    return 1.0 if directions[damage] == "min" else -1.0


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

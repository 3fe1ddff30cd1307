"""Reads the damages that a sensitivity scan measured."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prunekit.suggestions import did_you_mean

# Version of the files that a scan writes.
SENSITIVITY_VERSION = 1
# What a technique varies.
LEVELS = {"prune": "sparsity", "quantize": "bits"}
OUTPUT_ERROR = "output_error"
# Damage of an output that is no number.
WORST = 1e300


@dataclass(frozen=True)
class Damages:
    """What a technique did to a model, weight by weight.

    Attributes:
        name: Name of the weight.
        size: Number of its entries.
        points: (level, changed entries, damage) of each level.
    """

    name: str
    size: int
    points: tuple[tuple[float, int, float], ...]


def read_table(file: Any) -> Mapping[str, Any]:
    """Returns a scan as JSON values.

    Args:
        file: A sensitivity.json file, a `SensitivityReport`, or its `to_dict()`.

    Raises:
        ValueError: The file is missing or damaged.
    """
    if hasattr(file, "to_dict"):
        return file.to_dict()
    if isinstance(file, Mapping):
        return file
    if not isinstance(file, str | os.PathLike) or not os.fspath(file):
        raise ValueError(
            "Expected the file of a scan (sensitivity.json, written by prunekit sensitivity) or a SensitivityReport. "
            f"Received: {file!r}."
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


def damages_of(scan: Mapping[str, Any], technique: str, damage: str = OUTPUT_ERROR) -> list[Damages]:
    """Returns the damages of each weight.

    Args:
        scan: A scan, as `read_table` returns it.
        technique: A key of `LEVELS`.
        damage: "output_error": the squared relative error of the model's outputs. Or the name of a metric of the scan:
            by how much it is worse than that of the model as it is.

    Raises:
        ValueError: The scan is not complete, is of another technique, or has no such metric.
    """
    try:
        if scan["sensitivity_version"] != SENSITIVITY_VERSION:
            raise ValueError(f"its sensitivity_version is not {SENSITIVITY_VERSION}; scan again with this prunekit")
        if not scan["complete"]:
            raise ValueError("it is not complete: run the same command again")
        sign = _sign(scan, damage)
        dense = 0.0 if damage == OUTPUT_ERROR else float(scan["dense"][damage])
        points: dict[str, list[tuple[float, int, float]]] = {target["name"]: [] for target in scan["targets"]}
        for row in scan["rows"]:
            if (row["technique"], row["level"]) == (technique, LEVELS[technique]):
                value = row[OUTPUT_ERROR] if damage == OUTPUT_ERROR else row["metrics"][damage]
                # JSON has no NaN and no infinity; both are null, and the worst damage.
                worse = WORST if value is None else sign * (float(value) - dense)
                if damage == OUTPUT_ERROR and value is not None:
                    worse = min(worse * worse, WORST)
                points[row["target"]].append((float(row["value"]), int(row["entries"]), worse))
        if scan["rows"] and not any(points.values()):
            word = LEVELS[technique]
            raise ValueError(f"it has no rows of {word}; scan with `{word}`")
        sizes = {target["name"]: int(target["size"]) for target in scan["targets"]}
    except KeyError as error:
        raise ValueError(f"This is no sensitivity scan: {error} is missing.") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"This sensitivity scan cannot be used: {error}.") from error
    return [Damages(name, sizes[name], tuple(sorted(found))) for name, found in points.items()]


def _sign(scan: Mapping[str, Any], damage: str) -> float:
    """Returns 1.0 if higher values of a measure are worse, else -1.0."""
    directions = {OUTPUT_ERROR: "min", **{one["name"]: one["direction"] for one in scan["measures"]}}
    known = [name for name, direction in directions.items() if direction is not None]
    if damage not in known:
        hint = did_you_mean(damage, known)
        raise ValueError(f"`damage` is one of {', '.join(known)}. Received: {damage!r}.{hint}")
    return 1.0 if directions[damage] == "min" else -1.0

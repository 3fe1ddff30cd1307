"""Data of a run's pictures: histograms, the line of the requested sparsity, the largest weights. Draws nothing.

Does not import matplotlib, so that building and reading a report does not need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from prunekit.anatomy.records.sections import largest_by
from prunekit.sparsity.schedules import SCHEDULES, Schedule

if TYPE_CHECKING:
    from prunekit.anatomy.records.reports import Event, WeightRow

MOST_BARS = 40
MOST_HISTOGRAMS = 8


def weight_histogram(before: np.ndarray, after: np.ndarray, bins: int = 60) -> dict[str, Any]:
    """Returns histograms of a weight before and after pruning on common bins; exact zeros are counted separately.

    Args:
        before: The weight before pruning, any shape.
        after: The weight after pruning, any shape.
        bins: Number of equal-width bins over the finite non-zero values of both arrays.

    Returns:
        `edges` (bins + 1 floats), `before` and `after` (counts of finite **non-zero** values per bin), `zeros_before`
        and `zeros_after` (values equal to zero), `not_finite_before` and `not_finite_after` (nan and infinities).
    """
    flat = {
        name: np.asarray(values, dtype=np.float64).ravel() for name, values in (("before", before), ("after", after))
    }
    kept = {name: values[np.isfinite(values) & (values != 0)] for name, values in flat.items()}
    both = np.concatenate(list(kept.values()))
    edges = np.histogram_bin_edges(both, bins=bins) if both.size else np.linspace(-1.0, 1.0, bins + 1)
    result: dict[str, Any] = {"edges": edges.tolist()}
    for name, values in flat.items():
        result[name] = np.histogram(kept[name], bins=edges)[0].tolist()
        result[f"zeros_{name}"] = int(np.count_nonzero(values == 0))
        result[f"not_finite_{name}"] = int(np.count_nonzero(~np.isfinite(values)))
    return result


def asked_line(
    schedule: Mapping[str, Any] | None, events: Sequence[Event], until: float = 0, points: int = 200
) -> list[tuple[float, float]]:
    """Returns the requested sparsity as (step, sparsity) points over the steps of `events`.

    The points follow `schedule` if it matches the events' requested sparsities. If the schedule cannot be rebuilt, or
    if the run had several schedules, the line keeps each event's value until the next event.

    Args:
        schedule: Type and fields of the schedule.
        events: The mask updates.
        until: Extends the line to this step if the step is after the last event.
        points: Number of points on a schedule's curve.
    """
    if not events:
        return []
    events = sorted(events, key=lambda event: event.step)
    last = max(events[-1].step, int(until))
    built = _built_schedule(schedule)
    if built is not None and all(abs(built(event.step) - event.asked) < 1e-6 for event in events):
        steps = sorted({round(step) for step in np.linspace(events[0].step, last, points)})
        return [(step, built(step)) for step in steps]
    line = [(float(events[0].step), events[0].asked)]
    for event in events[1:]:
        line += [(event.step, line[-1][1]), (event.step, event.asked)]
    return [*line, (last, line[-1][1])]


def _built_schedule(description: Mapping[str, Any] | None) -> Schedule | None:
    description = description or {}
    kind: Any = SCHEDULES.get(str(description.get("type")))
    if kind is None:
        return None
    known = {field.name for field in fields(kind)}
    try:
        return kind(**{name: _as_tuple(value) for name, value in description.items() if name in known})
    except (TypeError, ValueError):
        return None


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, (list, tuple)) else value


def largest(rows: Sequence[WeightRow], most: int = MOST_BARS) -> list[WeightRow]:
    """Returns the `most` rows with the most parameters, in their original order."""
    return largest_by(rows, lambda row: row.size, most)


def row_sparsities(rows: Sequence[WeightRow]) -> dict[str, float]:
    """Returns the sparsity of each weight, by name."""
    return {row.name: row.sparsity for row in rows}

"""Compares the bounds of an `expect` step with the measured values."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prunekit.delivery.reports.metrics import Metric, inferred
from prunekit.operations.export import ExportRow
from prunekit.recipe.settings.export_settings import Expect

# Metrics are measured in float32: the accuracy of 96 of 100 examples is 0.95999998.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Measured:
    """Values that bounds are compared with.

    Attributes:
        metrics: The metrics of the run, the main one first.
        values: Metrics and loss of the current model, by name.
        before: The same just before the first step that prunes, makes the model smaller or quantizes.
        sparsity: Sparsity over all targets, and its rounding tolerance.
        exports: Exports so far; the last export of a format counts.
    """

    metrics: Sequence[Metric]
    values: Mapping[str, float]
    before: Mapping[str, float]
    sparsity: tuple[float, float]
    exports: Sequence[ExportRow]

    def drop(self, name: str, relative: bool = False) -> float | None:
        """Returns by how much a metric is worse than before pruning; None if it was not measured.

        Args:
            name: Name of the metric.
            relative: True for a fraction of the value before.
        """
        now, was = self.values.get(name), self.before.get(name)
        if now is None or was is None:
            return None
        metric = next((metric for metric in self.metrics if metric.name == name), inferred(name))
        drop = metric.drop(was, now)
        if not relative:
            return drop
        return drop / abs(was) if was else 0.0 if drop <= 0 else math.inf

    def rounding(self, name: str) -> float:
        """Returns the rounding tolerance of a metric and of its drop."""
        values = (values.get(name) for values in (self.values, self.before))
        return _ROUNDING * max(
            (abs(value) for value in values if value is not None and math.isfinite(value)), default=0
        )


def checked(settings: Expect, measured: Measured) -> list[dict[str, Any]]:
    """Returns a row {"what", "bound", "measured", "met"} per bound.

    A bound is met at the bound itself, up to rounding, and never by a value that was not measured or that is NaN.
    """
    rows: list[dict[str, Any]] = []
    for name, bound in (settings.metrics or {}).items():
        rows += _rows(name, measured.values.get(name), bound.min, bound.max, measured.rounding(name))
    relative = settings.drops_are_relative
    for name, most in settings.drops.items():
        what = f"{'relative ' if relative else ''}drop of {name}"
        slack = _ROUNDING if relative else measured.rounding(name)
        rows += _rows(what, measured.drop(name, relative), None, most, slack)
    if settings.sparsity is not None:
        value, slack = measured.sparsity
        rows += _rows("sparsity", value, settings.sparsity.min, settings.sparsity.max, slack)
    for name, size in (settings.bytes or {}).items():
        row = next(row for row in reversed(measured.exports) if row.format == name)
        rows += _rows(f"bytes of {name}", row.bytes, None, size.max)
        rows += _rows(f"bytes of {name} with gzip", row.gzip_bytes, None, size.gzip_max)
        rows += _rows(f"bytes of {name} packed", row.packed_bytes, None, size.packed_max)
    return rows


def _rows(
    what: str, measured: float | None, minimum: float | None, maximum: float | None, slack: float = 0.0
) -> Iterator[dict[str, Any]]:
    if minimum is not None:
        met = measured is not None and measured + slack >= minimum
        yield {"what": what, "bound": {"min": minimum}, "measured": measured, "met": met}
    if maximum is not None:
        met = measured is not None and measured - slack <= maximum
        yield {"what": what, "bound": {"max": maximum}, "measured": measured, "met": met}


def failure_text(row: dict[str, Any]) -> str:
    """Returns an unmet expectation as text: "accuracy 0.912 is below the expected 0.96"."""
    (kind, bound), measured = next(iter(row["bound"].items())), row["measured"]
    side = "below" if kind == "min" else "above"
    if measured is None:
        return f"{row['what']} was not measured, expected at {'least' if kind == 'min' else 'most'} {bound:,}"
    shown = f"{measured:,}" if isinstance(measured, int) else f"{measured:.4f}"
    wanted = f"{bound:,}" if isinstance(measured, int) else f"{bound:g}"
    return f"{row['what']} {shown} is {side} the expected {wanted}"

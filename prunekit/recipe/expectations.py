"""Compares the bounds of an `expect` step with the measured values."""

from collections.abc import Iterator, Sequence
from typing import Any

from prunekit.delivery.export import ExportRow
from prunekit.recipe.step_settings import Expect


def checked(
    settings: Expect,
    accuracy: float | None,
    drop: float | None,
    sparsity: tuple[float, float],
    exports: Sequence[ExportRow],
) -> list[dict[str, Any]]:
    """Returns a row {"what", "bound", "measured", "met"} per bound; a value that was not measured is not met.

    Args:
        settings: Settings of the step.
        accuracy: Current accuracy.
        drop: Loss of accuracy since just before the first prune step.
        sparsity: Sparsity over all targets, and its rounding tolerance.
        exports: Exports so far; the last export of a format counts.
    """
    rows: list[dict[str, Any]] = []
    if settings.accuracy is not None:
        rows += _rows("accuracy", accuracy, settings.accuracy.min, None)
    if settings.accuracy_drop is not None:
        rows += _rows("accuracy drop", drop, None, settings.accuracy_drop.max)
    if settings.sparsity is not None:
        measured, slack = sparsity
        rows += _rows("sparsity", measured, settings.sparsity.min, settings.sparsity.max, slack)
    for name, size in (settings.bytes or {}).items():
        row = next(row for row in reversed(exports) if row.format == name)
        rows += _rows(f"bytes of {name}", row.bytes, None, size.max)
        rows += _rows(f"bytes of {name} with gzip", row.gzip_bytes, None, size.gzip_max)
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

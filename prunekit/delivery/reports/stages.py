"""Speed and size of a run's models: the comparison of the exported files with the model before, and the section."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from prunekit.anatomy.records.sections import Column, Picture, Section
from prunekit.delivery.reports.formatting import is_number, latency, ratio, share, size
from prunekit.delivery.reports.metrics import Metric
from prunekit.delivery.reports.rows import DISK, DOWNLOAD, INTEGER_FORMAT, RuntimeAdvice, StageRow

TITLE = "Speed and size"
# A ratio of two latencies within this distance of 1 is no difference: repeated measurements differ as much.
_NOISE = 0.05
# Of files within this distance of the fastest, the smallest is named.
_ALIKE = 0.03
# Format of the file that every stage has: an exported one differs from it by the run's steps alone.
_PLAIN = "litert"


def before_of(stages: Sequence[StageRow]) -> StageRow | None:
    """Returns the row of the model before pruning; None without such a row."""
    return next((row for row in stages if row.kind == "before"), None)


def best_file(stages: Sequence[StageRow], figure: str) -> StageRow | None:
    """Returns the exported file with the lowest `figure` ("latency", "bytes", "gzip_bytes"); None without a figure.

    Of files that are about as fast as the fastest, the smallest is taken.
    """
    rows = [row for row in stages if row.kind == "file" and is_number(getattr(row, figure))]
    lowest = min(rows, key=lambda row: getattr(row, figure), default=None)
    if lowest is None or figure != "latency":
        return lowest
    alike = [row for row in rows if (row.latency or 0) <= (lowest.latency or 0) * (1 + _ALIKE)]
    return min(alike, key=lambda row: row.bytes or 0)


def speed_up(stages: Sequence[StageRow], row: StageRow | None) -> float | None:
    """Returns the latency of the model before, divided by that of `row`; None if one of them was not measured."""
    before = before_of(stages)
    if before is None or row is None or not before.latency or not row.latency:
        return None
    return before.latency / row.latency


def speed_line(stages: Sequence[StageRow]) -> str:
    """Returns in one sentence how fast the fastest exported file is; "" if not measured."""
    before, best = before_of(stages), best_file(stages, "latency")
    faster = speed_up(stages, best)
    if before is None or best is None or faster is None:
        return ""
    figures = f"{latency(best.latency)} per call as {best.name}, {latency(before.latency)} before"
    if faster <= 1 + _NOISE:
        return f"Not faster: {figures} ({ratio(faster)})."
    plain = next((row for row in stages if row.kind == "file" and row.name == _PLAIN), None)
    like = speed_up(stages, plain)
    also = f"; {ratio(like)} as fast in the same format, {_PLAIN}" if like is not None and plain is not best else ""
    return f"Faster: {figures}: {ratio(faster)} as fast{also}."


def size_line(stages: Sequence[StageRow]) -> str:
    """Returns in one sentence how small the smallest exported files are, plain and after gzip; "" if not measured."""
    before = before_of(stages)
    found = [(what, _size_clause(before, best_file(stages, what), what)) for what in ("bytes", "gzip_bytes")]
    clauses = [f"{'after gzip ' * (what == 'gzip_bytes')}{clause}" for what, clause in found if clause]
    if not clauses:
        return ""
    best = best_file(stages, "bytes")
    is_smaller = before is not None and best is not None and (best.bytes or 0) < (before.bytes or 0)
    return f"{'Smaller' if is_smaller else 'Not smaller'}: {'; '.join(clauses)}."


def _size_clause(before: StageRow | None, best: StageRow | None, figure: str) -> str:
    if before is None or best is None or not is_number(getattr(before, figure)):
        return ""
    old, new = getattr(before, figure), getattr(best, figure)
    return f"{size(new)} as {best.name}, {size(old)} before ({share(new, old)})"


def latency_card(stages: Sequence[StageRow]) -> list[tuple[str, str, str]]:
    """Returns the summary card of the fastest exported file: label, figure, comparison; [] if not measured."""
    before, best = before_of(stages), best_file(stages, "latency")
    faster = speed_up(stages, best)
    if before is None or best is None or faster is None:
        return []
    what = f"{best.name}; {ratio(faster)} as fast as before ({latency(before.latency)})"
    return [("LiteRT latency", latency(best.latency), what)]


def with_measured_sizes(advice: Sequence[RuntimeAdvice], stages: Sequence[StageRow]) -> tuple[RuntimeAdvice, ...]:
    """Returns the advice on runtimes with measured sizes of files in the place of estimates, where there are any."""
    before, figures = before_of(stages), {DOWNLOAD: "gzip_bytes", DISK: "bytes"}
    measured = {name: _size_clause(before, best_file(stages, figure), figure) for name, figure in figures.items()}
    return tuple(
        replace(line, what_it_buys=f"measured: {measured[line.runtime]}") if measured.get(line.runtime) else line
        for line in advice
    )


# ---- the section -----------------------------------------------------------------------------------------------------


def stage_section(stages: Sequence[StageRow], main: Metric | None, notes: Sequence[str] = ()) -> Section | None:
    """Returns the section on speed and size: two lines, a table of all models, and a picture of each figure.

    Args:
        stages: Models of the run, in the order of the run.
        main: The main metric; None if none was measured.
        notes: How the figures were measured, or the reason why there are none.
    """
    if not stages:
        return Section(TITLE, notes=tuple(notes)) if notes else None
    columns = (
        Column("Model"),
        Column("Point", "count", under="Model"),
        *([] if main is None else [Column(main.heading, main.column)]),
        Column("Latency", "latency"),
        Column("Speed", "number", under="Latency", keep=3),
        Column("Bytes", "bytes"),
        Column("gzip -9", "bytes", under="Bytes"),
    )
    rows = tuple(
        (
            row.name if row.kind != "file" else f"exported: {row.name}",
            number,
            *([] if main is None else [row.metrics.get(main.name)]),
            row.latency,
            ratio(speed_up(stages, row)),
            row.bytes,
            row.gzip_bytes,
        )
        for number, row in enumerate(stages, start=1)
    )
    text = "Each row is a LiteRT file: float32 and dense before and after the steps, then the exported files. "
    text += "Latency: the duration of one call. Speed: compared with the first row."
    drawn = [] if main is None else [_picture(stages, main, figure) for figure in ("latency", "bytes")]
    pictures = tuple(picture for picture in drawn if picture is not None)
    table = Section("Model by model", columns, rows, explanation=text, pictures=pictures, notes=tuple(notes))
    lines = tuple(line for line in (speed_line(stages), size_line(stages)) if line)
    return Section(TITLE, notes=lines, parts=(table,))


def _picture(stages: Sequence[StageRow], main: Metric, figure: str) -> Picture | None:
    """Returns the picture of the main metric against latency or bytes; None with fewer than two points to draw."""
    points = [
        {
            "number": number,
            "name": row.name,
            "kind": "integer" if row.kind == "file" and row.name.startswith(INTEGER_FORMAT) else row.kind,
            "value": row.metrics[main.name],
            "figure": getattr(row, figure),
            "second": row.gzip_bytes if figure == "bytes" else None,
        }
        for number, row in enumerate(stages, start=1)
        if is_number(row.metrics.get(main.name)) and is_number(getattr(row, figure))
    ]
    if len(points) < 2:
        return None
    text = latency if figure == "latency" else size
    what = "latency" if figure == "latency" else "size"
    told = "; ".join(
        f"{point['number']} {point['name']}: {main.text(point['value'])} at {text(point['figure'])}"
        + (f", {size(point['second'])} after gzip" if point["second"] else "")
        for point in points
    )
    caption = "Numbers: points of the table. Dashed: the order of the steps."
    if figure == "bytes":
        caption += " Filled: the file; hollow: after gzip."
    data = {"points": points, "figure": figure, "metric": main.title, "better": main.better, "fraction": main.fraction}
    label = f"Scatter chart of {main.title} against {what}. {told}. The table has all figures."
    return Picture(f"{main.heading} against {what}", caption, label, "stages", data, wide=True)

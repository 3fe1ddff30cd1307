"""Makes the sections of a run's report from its record, once for the terminal and for the page.

Each maker is a function record -> `Section`, or None if the record has nothing for it. A step of a recipe adds its own
sections as `sections` of its entry in `RunReport.steps`; they follow the table of the steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from prunekit.anatomy.records.plain_data import plain
from prunekit.anatomy.records.sections import Column, Picture, Section
from prunekit.anatomy.records.tables import at_least
from prunekit.delivery.reports import formatting
from prunekit.delivery.reports.formatting import MISSING, count, is_number, number, share, short_count, size, sparsity
from prunekit.delivery.reports.metrics import Metric
from prunekit.delivery.reports.model_sections import skipped_weights, weights
from prunekit.delivery.reports.plot_data import MOST_HISTOGRAMS, largest, row_sparsities
from prunekit.delivery.reports.rows import ExportRow
from prunekit.delivery.reports.run_report import RunReport
from prunekit.delivery.reports.stages import latency_card, stage_section

# Metrics that have a card of their own; the table of the metrics has all.
_CARDS_OF_METRICS = 2


def sections_of(report: RunReport) -> list[Section]:
    """Returns the sections of a report in reading order, without the summary.

    Raises:
        ValueError: A section of a step's entry is damaged.
        TypeError: Likewise.
    """
    found: list[Section | None] = [stage_section(report.stages, report.main, report.stage_notes)]
    found += [pictures(report), metrics(report), weights(report), steps(report)]
    found += step_sections(report)
    found += [make(report) for make in (expectations, exports, runtimes, skipped, reproduction)]
    return [section for section in found if section is not None]


def summary(report: RunReport) -> Section:
    """Returns the summary: quantity, figure, and what the figure is compared with."""
    columns = (Column("Quantity"), Column("Figure", "number"), Column("Compared with", "text"))
    return Section("Summary", columns, tuple(cards(report)))


def cards(report: RunReport) -> list[tuple[str, str, str]]:
    """Returns (label, figure, comparison) for each summary card of the page, the most important first."""
    metrics = _metric_cards(report)
    found = [*metrics[:1], *latency_card(report.stages)]
    best = report.smallest
    if best is not None:
        packed = "" if best.packed_bytes is None else f", packed {size(best.packed_bytes)}"
        beside = f"{best.format}; gzip {size(best.gzip_bytes)}{packed}"
        found.append(("Smallest file that runs", size(best.bytes), beside))
    found.append(
        (
            "Sparsity of the pruned weights",
            sparsity(report.pruned_sparsity) if report.pruned else MISSING,
            f"over the whole model {sparsity(report.after.sparsity)}, before {sparsity(report.before.sparsity)}",
        )
    )
    if report.parameters_left:
        left = share(report.after.parameters, report.before.parameters)
        found.append(
            ("Parameters", count(report.after.parameters), f"{left} of {count(report.before.parameters)} before")
        )
    return [card for card in (*found, *metrics[1:], *_weight_cards(report), _macs_card(report)) if card]


def _weight_cards(report: RunReport) -> list[tuple[str, str, str]]:
    raw = "zeros still take room here" if report.after.zeros else ""
    found = [("Weights, raw", size(report.after.bytes), f"before {size(report.before.bytes)}; {raw}".rstrip("; "))]
    before, after = report.gzip_total("before"), report.gzip_total("after")
    if after is not None:
        found.append(("Weights, gzip", size(after), f"{share(after, before)} of {size(before)} before"))
    return found


def _macs_card(report: RunReport) -> tuple[str, str, str] | None:
    macs, kept, complete = report.after.macs, report.after.sparse_macs, report.after.macs_complete
    if macs == 0:
        return None
    what = "not known: see the notes"
    if macs is not None:
        dense = at_least(macs, complete, short_count)
        what = f"{share(kept, macs)} of {dense} dense; skipped only by some runtimes, see below"
    return "MACs without zeros", at_least(kept, complete, short_count), what


def _metric_cards(report: RunReport) -> list[tuple[str, str, str]]:
    found = []
    for metric in report.measures[:_CARDS_OF_METRICS]:
        before, after = report.metric_values(metric)
        was = "not measured before pruning"
        if is_number(before):
            was = f"before pruning {metric.text(before)}"
            was += f" ({metric.change_text(before, after)})" if is_number(after) else ""
        found.append((metric.heading, metric.text(after), was))
    return found


def metrics(report: RunReport) -> Section | None:
    """Returns the table of all metrics before pruning and after the run; None if none was measured."""
    if not report.measures:
        return None
    columns = (
        Column("Metric"),
        Column("Before pruning"),
        Column("After"),
        Column("Change"),
        Column("Direction", keep=2),
    )
    rows = []
    for metric in report.measures:
        before, after = report.metric_values(metric)
        name = f"{metric.name} (main)" if metric is report.main and len(report.measures) > 1 else metric.name
        change = metric.change_text(before, after)
        rows.append((name, metric.text(before), metric.text(after), change, metric.better))
    return Section("Metrics", columns, tuple(rows), explanation="Measured on the test data.")


# ---- pictures --------------------------------------------------------------------------------------------------------


def pictures(report: RunReport) -> Section:
    """Returns the pictures of the pruning: sparsities, schedule, histograms."""
    drawn = [picture for picture in (_sparsities(report), _schedule(report)) if picture is not None]
    histograms = _histograms(report)
    if not drawn and histograms is None:
        text = "Nothing was pruned, so there is nothing to draw."
        return Section("Pictures", explanation=text, shown="page")
    parts = () if histograms is None else (histograms,)
    return Section("Pictures", pictures=tuple(drawn), parts=parts, shown="page")


def _sparsities(report: RunReport) -> Picture | None:
    if not report.pruned:
        return None
    shown = largest(report.pruned)
    overall = report.pruned_sparsity
    caption = f"Dashed: {formatting.sparsity(overall)} over all pruned weights."
    if len(shown) < len(report.pruned):
        caption = f"The {len(shown)} largest of {len(report.pruned)}, in model order. {caption}"
    low, high = (formatting.sparsity(bound(row.sparsity for row in shown)) for bound in (min, max))
    label = f"Bar chart of sparsity per weight: {len(shown)} weights between {low} and {high}."
    label += " The table below has them all."
    data = {"sparsities": row_sparsities(shown), "overall": overall}
    return Picture("Sparsity per weight", caption, label, "sparsity", data, wide=True)


def _schedule(report: RunReport) -> Picture | None:
    if not report.events:
        return None
    last = report.events[-1]
    updates = "1 mask update" if len(report.events) == 1 else f"{len(report.events):,} mask updates"
    caption = f"{updates}; the last at step {last.step:,} asked {formatting.sparsity(last.asked)} "
    caption += f"and reached {formatting.sparsity(last.reached)}."
    points = [value for _, value in report.curve if is_number(value)]
    label = f"Line chart of sparsity against training step. {caption}"
    main = report.main
    if points and main is not None:
        label += f" Validation {main.title} from {main.text(points[0])} to {main.text(points[-1])}."
    data = {
        "events": [dataclasses.asdict(event) for event in report.events],
        "schedule": report.schedule,
        "curve": report.curve,
        "baseline": None if main is None else report.metric_values(main)[0],
        "metric": "accuracy" if main is None else main.title,
    }
    return Picture("Sparsity schedule: requested and reached", caption, label, "schedule", data, wide=True)


def _histograms(report: RunReport) -> Section | None:
    if not report.histograms:
        return None
    sizes = {row.name: row.size for row in report.after.weights}
    names = sorted(report.histograms, key=lambda name: -sizes.get(name, 0))[:MOST_HISTOGRAMS]
    chosen = {name: values for name, values in report.histograms.items() if name in names}
    total = len(report.pruned)
    limit = f" The {len(chosen)} largest of {total} pruned weights." if len(chosen) < total else ""
    return Section(
        "Values of the weights before and after",
        explanation="Exact zeros have a bar and a scale of their own, so that they do not hide the other values."
        + limit,
        pictures=tuple(_histogram(name, values) for name, values in chosen.items()),
    )


def _histogram(name: str, values: Mapping[str, Any]) -> Picture:
    caption = f"{count(values['zeros_after'])} exact zeros, {count(values['zeros_before'])} before"
    strange = values.get("not_finite_before", 0) + values.get("not_finite_after", 0)
    caption += f"; {count(strange)} values that are not finite are not drawn" if strange else ""
    label = f"Histogram of {name} before and after pruning, with exact zeros as a bar of their own: {caption}."
    return Picture(name, caption, label, "histogram", values)


# ---- steps -----------------------------------------------------------------------------------------------------------


def steps(report: RunReport) -> Section:
    """Returns the table of the executed steps, with the course of each metric."""
    if not report.steps:
        return Section("Steps taken", notes=("No step was recorded.",))
    main = report.main
    columns = (
        Column("Step"),
        Column("Name", "text"),
        Column("Duration", "seconds"),
        Column("Epochs", "count", keep=3),
        Column(f"{_heading(report)} after", "number" if main is None else main.column),
        Column("Metrics", "text", under="Name", keep=1),
    )
    rows = []
    for index, step in enumerate(report.steps, start=1):
        history = step.get("history") or {}
        epochs = max((len(values) for values in history.values()), default=0)
        courses = "; ".join(f"{metric} {_course(values)}" for metric, values in history.items() if values)
        figures = (step.get("seconds"), epochs or None, _value_after(step, main))
        rows.append((f"{index}. {step.get('kind', '')}", step.get("name") or step.get("kind"), *figures, courses))
    total = sum(step["seconds"] for step in report.steps if is_number(step.get("seconds")))
    return Section(
        "Steps taken",
        columns,
        tuple(rows),
        ("Total", "", total, "", "", ""),
        explanation="Metrics: first epoch → last epoch.",
    )


def _heading(report: RunReport) -> str:
    return "Accuracy" if report.main is None else report.main.heading


def _value_after(step: Mapping[str, Any], main: Metric | None) -> Any:
    """Returns the main metric after a step; entries of older reports have only the accuracy."""
    if main is None or "metrics" not in step:
        return step.get("accuracy")
    return step["metrics"].get(main.name)


def _course(values: Sequence[Any]) -> str:
    if len(values) == 1:
        return number(values[0])
    return f"{number(values[0])} → {number(values[-1])}"


def step_sections(report: RunReport) -> list[Section]:
    """Returns the sections that the steps added, with the step in the title."""
    found = []
    for index, step in enumerate(report.steps, start=1):
        for item in step.get("sections") or ():
            section = item if isinstance(item, Section) else Section.from_dict(item)
            title = f"{section.title} (step {index}, {step.get('kind', '')})"
            found.append(dataclasses.replace(section, title=title))
    return found


# ---- results ---------------------------------------------------------------------------------------------------------


def expectations(report: RunReport) -> Section:
    """Returns the table of the expectations with the measured values."""
    if not report.expectations:
        return Section("Expectations", notes=("The recipe states no expectations.",))
    columns = (
        Column("Quantity"),
        Column("Result", "status"),
        Column("Expected"),
        Column("Measured", "number", digits=6),
    )
    rows = tuple(
        (
            row.get("what", ""),
            "met" if row.get("met") else "not met",
            bound_text(row.get("bound")),
            row["measured"] if is_number(row.get("measured")) else "not measured",
        )
        for row in report.expectations
    )
    rounded = any(
        row.get("what") == "sparsity" and row.get("met") and _is_beyond(row.get("measured"), row.get("bound"))
        for row in report.expectations
    )
    notes = (
        ("A sparsity is met up to rounding: of each weight, a whole number of entries is pruned.",) if rounded else ()
    )
    return Section("Expectations", columns, rows, notes=notes)


def bound_text(bound: Any) -> str:
    """Returns a bound as text: "at least 0.96", "between 0.5 and 0.9"."""
    if isinstance(bound, Mapping):
        low, high = bound.get("min"), bound.get("max")
        if low is not None and high is not None:
            return f"between {number(low, 6)} and {number(high, 6)}"
        if low is not None or high is not None:
            return f"at least {number(low, 6)}" if low is not None else f"at most {number(high, 6)}"
    return number(bound, 6) if is_number(bound) else str(bound)


def _is_beyond(measured: Any, bound: Any) -> bool:
    if not (is_number(measured) and isinstance(bound, Mapping)):
        return False
    low, high = (bound.get(side) for side in ("min", "max"))
    return bool((is_number(low) and measured < low) or (is_number(high) and measured > high))


def exports(report: RunReport) -> Section:
    """Returns the table of the exported files with the results of their checks."""
    if not report.exports:
        return Section("Exported files", notes=("The recipe exports nothing.",))
    return export_section(report.exports, report.main, _heading(report))


def export_section(rows: Sequence[ExportRow], main: Metric | None = None, heading: str = "Accuracy") -> Section:
    """Returns the table of exported files.

    Args:
        rows: The files.
        main: Metric to show; None shows the accuracy.
        heading: Title of its column.
    """
    columns = (
        Column("Format"),
        Column("File", "name", under="Format", keep=2),
        Column("Status", "status"),
        Column("Bytes", "bytes"),
        Column("gzip -9", "bytes"),
        Column("Largest error", "number", keep=3, digits=2),
        Column("Agreement", "fraction", keep=4),
        Column(heading, "fraction" if main is None else main.column),
        Column("Note", "text", keep=5),
    )
    cells = tuple(
        (
            row.format,
            row.file or "no file",
            row.status,
            row.bytes,
            row.gzip_bytes,
            row.max_error,
            row.agreement,
            row.accuracy if row.metrics is None or main is None else row.metrics.get(main.name),
            row.note or "",
        )
        for row in rows
    )
    text = (
        "Each file was opened again and run on real inputs. Largest error: against the Keras model, as a fraction of "
        "the range of its outputs. Agreement: the fraction of inputs with the same most likely class."
    )
    return Section("Exported files", columns, cells, explanation=text)


def runtimes(report: RunReport) -> Section:
    """Returns the table of the runtimes with the benefit of the zeros on each."""
    title = "Where sparsity pays off"
    if not report.advice:
        return Section(title, notes=("No runtime was assessed.",))
    columns = (Column("Runtime"), Column("Benefit"), Column("Why", "text", keep=1))
    return Section(title, columns, tuple((row.runtime, row.what_it_buys, row.why) for row in report.advice))


def skipped(report: RunReport) -> Section:
    """Returns the table of the skipped weights, one row per reason."""
    return skipped_weights(report.after.skipped)


def reproduction(report: RunReport) -> Section:
    """Returns the section on repeating the run: versions, seed, hashes, the locked recipe."""
    facts = (("seed", str(report.seed)), *report.versions.items())
    parts = [Section("Versions and seed", (Column("Name"), Column("Value", "text")), facts)]
    if report.hashes:
        parts.append(Section("SHA-256", (Column("Part"), Column("SHA-256", "code")), tuple(report.hashes.items())))
    parts.append(Section("The locked recipe", text=_as_yaml(report.recipe), shown="folded"))
    return Section("How to reproduce this run", parts=tuple(parts), shown="page")


def _as_yaml(recipe: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(plain(recipe), sort_keys=False, allow_unicode=True, width=100)

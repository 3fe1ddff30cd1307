"""Makes the sections of a run's report from its record, once for the terminal and for the page.

Each maker is a function record -> `Section`, or None if the record has nothing for it. A step of a recipe adds its own
sections as `sections` of its entry in `RunReport.steps`; they follow the table of the steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prunekit.anatomy.sections import Column, Picture, Section, Value
from prunekit.anatomy.tables import at_least
from prunekit.delivery import formatting
from prunekit.delivery.formatting import count, is_number, number
from prunekit.delivery.plot_data import MOST_HISTOGRAMS, largest, row_sparsities
from prunekit.delivery.run_report import RunReport, bound_text, json_ready

if TYPE_CHECKING:
    from prunekit.anatomy.reports import Report, WeightRow


def sections_of(report: RunReport) -> list[Section]:
    """Returns the sections of a report in reading order, without the summary.

    Raises:
        ValueError: A section of a step's entry is damaged.
        TypeError: Likewise.
    """
    found: list[Section | None] = [pictures(report), weights(report), steps(report), *step_sections(report)]
    found += [make(report) for make in (expectations, exports, runtimes, skipped, reproduction)]
    return [section for section in found if section is not None]


def summary(report: RunReport) -> Section:
    """Returns the summary: quantity, figure, and what the figure is compared with."""
    columns = (Column("Quantity"), Column("Figure", "number"), Column("Compared with", "text"))
    return Section("Summary", columns, tuple(report.cards()))


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
    if points:
        label += f" Validation accuracy from {formatting.accuracy(points[0])} to {formatting.accuracy(points[-1])}."
    data = {
        "events": [dataclasses.asdict(event) for event in report.events],
        "schedule": report.schedule,
        "curve": report.curve,
        "baseline": report.metrics.get("accuracy_before"),
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


# ---- weights ---------------------------------------------------------------------------------------------------------


def weights(report: RunReport) -> Section:
    """Returns the table of the pruned weights, and of the other weights as a part."""
    pruned = report.pruned or list(report.after.weights)
    names = {row.name for row in pruned}
    others = [row for row in report.after.weights if row.name not in names]
    table = weight_table("Pruned weights" if report.pruned else "Weights", report.after, pruned, run=report)
    text = (
        "Sparse MACs leave out multiplications by zero. gzip: each weight compressed by itself, level 9. Moved per "
        "update: L2 norm of what an optimizer update changed, over that of the weight, on average."
    )
    parts: tuple[Section, ...] = ()
    if others:
        figures = (sum(row.size for row in others), sum(row.zeros for row in others))
        title = "{}: {} parameters, {} of them zero".format(
            "1 other weight" if len(others) == 1 else f"{len(others)} other weights", *map(count, figures)
        )
        parts = (dataclasses.replace(weight_table(title, report.after, others, run=report), total=(), shown="folded"),)
    return dataclasses.replace(table, explanation=text, parts=parts)


def model_weights(report: Report) -> Section:
    """Returns the table of all weights of a model; a star marks the weights that an operation pruned."""
    return weight_table(f"Model {report.model}", report, report.weights, marked=report.targets)


def weight_table(
    title: str,
    report: Report,
    rows: Sequence[WeightRow],
    *,
    run: RunReport | None = None,
    marked: Sequence[str] = (),
) -> Section:
    """Returns a table of weights; the figures from before the run, of gzip and of updates only if `run` has them.

    Args:
        title: Title of the section.
        report: The report that `rows` are from; its figures are the total.
        rows: The weights to show.
        run: The run that `report` is from.
        marked: Names of the weights to mark with a star.
    """
    before = {} if run is None else {row.name: row for row in run.before.weights}
    star = set(marked)
    cells = tuple(
        (row.name + (" *" if row.name in star else ""), *_weight_figures(row, before.get(row.name), run))
        for row in rows
    )
    old = run.before if run is not None and before else None
    gzip = (None, None) if run is None else (run.gzip_total("before"), run.gzip_total("after"))
    total = (
        *("Whole model", f"{len(report.weights)} weights", "", report.sparsity, "", report.parameters),
        *(
            getattr(old, "zeros", None),
            report.zeros,
            _macs(report.macs, report),
            None if old is None else _macs(old.sparse_macs, old),
            _macs(report.sparse_macs, report),
        ),
        *(report.bytes, *gzip, None),
    )
    return _without_empty_columns(_weight_columns(bool(before)), title, cells, total)


def _macs(total: int | None, report: Report) -> int | str | None:
    return total if report.macs_complete or total is None else at_least(total, False, formatting.short_count)


def _weight_columns(compared: bool) -> tuple[Column, ...]:
    """Returns the columns of a table of weights; `compared` groups figures from before the run with figures of now."""

    def pair(name: str, kind: str, keep: int) -> tuple[Column, Column]:
        now = Column("after", kind, group=name, keep=keep) if compared else Column(name, kind, keep=keep)
        return Column("before", kind, group=name, keep=1), now

    return (
        Column("Weight", "name"),
        Column("Shape", "shape", under="Weight", keep=3),
        Column("Role", under="Weight", keep=2),
        Column("Sparsity", "sparsity"),
        Column("Pattern", under="Sparsity"),
        Column("Parameters", "count", keep=6),
        *pair("Zeros", "count", 9),
        Column("MACs", "short_count", keep=5),
        *pair("Sparse MACs", "short_count", 2),
        Column("Bytes, raw", "bytes", keep=4),
        *pair("Bytes, gzip", "bytes", 1),
        Column("Moved per update", "number", keep=1, digits=2),
    )


def _weight_figures(row: WeightRow, old: WeightRow | None, run: RunReport | None) -> tuple[Value, ...]:
    compressed = {} if run is None else run.compressed.get(row.name, {})
    return (
        *(row.shape, row.role.replace("_", " "), row.sparsity, row.pattern, row.size),
        *(
            getattr(old, "zeros", None),
            row.zeros,
            row.macs,
            getattr(old, "sparse_macs", None),
            row.sparse_macs,
            row.bytes,
        ),
        *(compressed.get("before"), compressed.get("after")),
        None if run is None else run.relative_change(row.name),
    )


def _without_empty_columns(
    columns: tuple[Column, ...], title: str, rows: Sequence[tuple[Value, ...]], total: tuple[Value, ...]
) -> Section:
    """Returns a table without the columns whose value is unknown in every row, other than the column "MACs"."""
    kept = [
        index
        for index, column in enumerate(columns)
        if column.name == "MACs" or any(row[index] is not None for row in rows)
    ]
    return Section(
        title,
        tuple(columns[index] for index in kept),
        tuple(tuple(row[index] for index in kept) for row in rows),
        tuple("" if total[index] is None and columns[index].kind != "short_count" else total[index] for index in kept),
    )


# ---- steps -----------------------------------------------------------------------------------------------------------


def steps(report: RunReport) -> Section:
    """Returns the table of the executed steps, with the course of each metric."""
    if not report.steps:
        return Section("Steps taken", notes=("No step was recorded.",))
    columns = (
        Column("Step"),
        Column("Name", "text"),
        Column("Duration", "seconds"),
        Column("Epochs", "count", keep=3),
        Column("Accuracy after", "fraction"),
        Column("Metrics", "text", under="Name", keep=1),
    )
    rows = []
    for index, step in enumerate(report.steps, start=1):
        history = step.get("history") or {}
        epochs = max((len(values) for values in history.values()), default=0)
        metrics = "; ".join(f"{metric} {_course(values)}" for metric, values in history.items() if values)
        figures = (step.get("seconds"), epochs or None, step.get("accuracy"))
        rows.append((f"{index}. {step.get('kind', '')}", step.get("name") or step.get("kind"), *figures, metrics))
    total = sum(step["seconds"] for step in report.steps if is_number(step.get("seconds")))
    return Section(
        "Steps taken",
        columns,
        tuple(rows),
        ("Total", "", total, "", "", ""),
        explanation="Metrics: first epoch → last epoch.",
    )


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
    return Section("Expectations", columns, rows)


def exports(report: RunReport) -> Section:
    """Returns the table of the exported files with the results of their checks."""
    if not report.exports:
        return Section("Exported files", notes=("The recipe exports nothing.",))
    columns = (
        Column("Format"),
        Column("File", "name", under="Format", keep=2),
        Column("Status", "status"),
        Column("Bytes", "bytes"),
        Column("gzip -9", "bytes"),
        Column("Largest error", "number", keep=3, digits=2),
        Column("Agreement", "fraction", keep=4),
        Column("Accuracy", "fraction"),
        Column("Note", "text", keep=5),
    )
    rows = tuple(
        (
            row.format,
            row.file or "no file",
            row.status,
            row.bytes,
            row.gzip_bytes,
            row.max_error,
            row.agreement,
            row.accuracy,
            row.note or "",
        )
        for row in report.exports
    )
    text = (
        "Each file was opened again and run on real inputs. Largest error: against the Keras model, as a fraction of "
        "the range of its outputs. Agreement: the fraction of inputs with the same most likely class."
    )
    return Section("Exported files", columns, rows, explanation=text)


def runtimes(report: RunReport) -> Section:
    """Returns the table of the runtimes with the benefit of the zeros on each."""
    title = "Where sparsity pays off"
    if not report.advice:
        return Section(title, notes=("No runtime was assessed.",))
    columns = (Column("Runtime"), Column("Benefit"), Column("Why", "text", keep=1))
    return Section(title, columns, tuple((row.runtime, row.what_it_buys, row.why) for row in report.advice))


def skipped(report: RunReport) -> Section:
    """Returns the table of the skipped weights, one row per reason."""
    title = "Skipped weights, with reasons"
    if not report.skipped_reasons:
        return Section(title, notes=("No weight was skipped.",))
    columns = (Column("Reason"), Column("Weights", "count"), Column("Names", "names"))
    rows = tuple((reason, len(names), tuple(names)) for reason, names in report.skipped_reasons.items())
    return Section(title, columns, rows)


def reproduction(report: RunReport) -> Section:
    """Returns what the run can be repeated with: versions, seed, hashes, the locked recipe."""
    facts = (("seed", str(report.seed)), *report.versions.items())
    parts = [Section("Versions and seed", (Column("Name"), Column("Value", "text")), facts)]
    if report.hashes:
        parts.append(Section("SHA-256", (Column("Part"), Column("SHA-256", "code")), tuple(report.hashes.items())))
    parts.append(Section("The locked recipe", text=_as_yaml(report.recipe), shown="folded"))
    return Section("How to reproduce this run", parts=tuple(parts), shown="page")


def _as_yaml(recipe: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(json_ready(recipe), sort_keys=False, allow_unicode=True, width=100)

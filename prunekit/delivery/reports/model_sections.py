"""Makes the sections that describe a model: its weights, with or without a run that changed them, and its costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prunekit.anatomy.records.reports import layer_error_section
from prunekit.anatomy.records.sections import Column, Section, Value
from prunekit.anatomy.records.tables import at_least
from prunekit.delivery.reports import formatting
from prunekit.delivery.reports.formatting import count
from prunekit.delivery.reports.run_report import RunReport

if TYPE_CHECKING:
    from prunekit.anatomy.cost.cost import Cost
    from prunekit.anatomy.records.reports import Skipped, SparsityReport, WeightRow


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


def model_sections(report: SparsityReport) -> tuple[Section, ...]:
    """Returns the table of all weights of a model, a star at those that an operation pruned, and what it skipped."""
    table = weight_table(f"Model {report.model_name}", report, report.weights, marked=report.targets)
    errors = (layer_error_section(report.layer_errors),) if report.layer_errors else ()
    skipped = (skipped_weights(report.skipped),) if report.skipped else ()
    return dataclasses.replace(table, parts=errors), *skipped


def weight_table(
    title: str,
    report: SparsityReport,
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


def _macs(total: int | None, report: SparsityReport) -> int | str | None:
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


def skipped_weights(items: Sequence[Skipped]) -> Section:
    """Returns the table of the skipped weights, one row per reason."""
    reasons: dict[str, list[str]] = {}
    for item in items:
        reasons.setdefault(item.reason, []).append(item.name)
    columns = (Column("Reason"), Column("Weights", "count"), Column("Names", "names"))
    rows = tuple((reason, len(names), tuple(names)) for reason, names in reasons.items())
    notes = () if rows else ("No weight was skipped.",)
    return Section("Skipped weights, with reasons", columns if rows else (), rows, notes=notes)


# ---- costs -----------------------------------------------------------------------------------------------------------


def cost_sections(cost: Cost) -> tuple[Section, ...]:
    """Returns the table of the costs of a model's layers, with totals and the unknown figures."""
    figures = (
        Column("Parameters", "count", keep=6),
        Column("MACs", "short_count"),
        Column("Sparse MACs", "short_count", keep=5),
        Column("MACs backward", "short_count", keep=4),
        Column("Sparse MACs backward", "short_count", keep=1),
        Column("Bytes of outputs", "bytes", keep=3),
        Column("Bytes backward", "bytes", keep=2),
    )
    names = ["parameters", "macs", "sparse_macs", "backward_macs", "sparse_backward_macs"]
    names += ["activation_bytes", "backward_activation_bytes"]
    rows = tuple((row.layer, row.type, *(getattr(row, name) for name in names)) for row in cost.layers)
    section = Section(
        f"Costs of {cost.model_name}",
        (Column("Layer", "name"), Column("Type", under="Layer", keep=2), *figures),
        rows,
        ("Total", "", *(_total(cost, name, column) for name, column in zip(names, figures, strict=True))),
        explanation=f"Forward and backward pass on a batch of {count(cost.batch_size)}.",
        notes=tuple(f"Not known: {item.name}: {item.reason}" for item in cost.unknown),
    )
    return (section,)


def _total(cost: Cost, name: str, column: Column) -> Value:
    total = getattr(cost, name)
    return total if cost.is_complete(name) else at_least(total, False, lambda value: formatting.cell(value, column))

"""Results of a sweep: the points with their figures, the Pareto front, and the table."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from prunekit.anatomy.records.display import Displayed, data_frame
from prunekit.anatomy.records.plain_data import plain
from prunekit.anatomy.records.sections import Column, Section
from prunekit.delivery.reports import formatting
from prunekit.delivery.reports.formatting import clean, is_number
from prunekit.delivery.reports.metrics import Metric, inferred, measured_in, with_main_first
from prunekit.delivery.reports.run_report import RunReport
from prunekit.delivery.reports.terminal_report import FittedTable

if TYPE_CHECKING:
    from rich.console import Console

SWEEP_VERSION = 1
SMALLEST = "smallest"
WEIGHTS = "weights-gzip"
Outcome: TypeAlias = Literal["done", "not met", "failed", "waiting"]


@dataclass(frozen=True)
class SweptPoint:
    """One combination of values, with the result of its run.

    Attributes:
        name: Name of the run directory.
        values: Variable -> value.
        outcome: "done", "not met" (the run is complete, but an expectation is not met), "failed" (there is no
            run directory) or "waiting".
        reason: Reason why the outcome is not "done", in one line.
        metrics: Figures of the run, such as accuracy_before and accuracy_after.
        sparsity: Fraction of zeros in the pruned weights.
        sizes: Bytes by format; "FORMAT-gzip" is the file after `gzip -9`, "weights-gzip" all weights after gzip.
        size: The size that the sweep compares, in bytes.
        size_of: The format that `size` belongs to.
        seconds: Duration of the run's steps.
        measures: The metrics of `metrics`, the main one first.
    """

    name: str
    values: Mapping[str, Any]
    outcome: Outcome = "waiting"
    reason: str = ""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    sparsity: float | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    size: int | None = None
    size_of: str = ""
    seconds: float | None = None
    measures: tuple[Metric, ...] = ()

    def __post_init__(self) -> None:
        """Infers the metrics of points that name none."""
        if not self.measures:
            object.__setattr__(self, "measures", measured_in(self.metrics))

    @property
    def main(self) -> float | None:
        """Main metric of the final model on the whole test part; None if not measured."""
        value = self.metrics.get(f"{self.measures[0].name}_after") if self.measures else None
        return value if is_number(value) else None

    @property
    def accuracy(self) -> float | None:
        """Accuracy of the final model on the whole test part; None if not measured."""
        value = self.metrics.get("accuracy_after")
        return value if is_number(value) else None

    @property
    def label(self) -> str:
        """The values as readable text: "final 0.8, width 16"."""
        return ", ".join(f"{name} {formatting.literal(value)}" for name, value in self.values.items())


@dataclass(frozen=True)
class Swept:
    """Progress event of a sweep: the point that just ended or was found finished, with the counts of points."""

    point: SweptPoint
    ended: int
    points: int


@dataclass(frozen=True)
class SweepReport(Displayed):
    """Results of a sweep, with the points in grid order.

    Attributes:
        title: Name of the recipe.
        directory: Folder of the run directories.
        over: Variable -> its values.
        size: Meaning of `SweptPoint.size`: "smallest", "weights-gzip" or a format.
        points: All points, including waiting and failed points.
    """

    derived: ClassVar = ("sweep_version", "main", "pareto")
    sweep_version: ClassVar = SWEEP_VERSION

    title: str
    directory: Path
    over: Mapping[str, Sequence[Any]]
    size: str
    points: tuple[SweptPoint, ...]

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics of all points, the main one first."""
        found = {metric.name: metric for point in reversed(self.points) for metric in point.measures}
        first = next((point.measures for point in self.points if point.measures), ())
        return with_main_first(found.values(), first[0].name) if first else ()

    @property
    def main(self) -> Metric:
        """The main metric, by which points are compared; the accuracy while no point has ended."""
        return next(iter(self.metrics), inferred("accuracy"))

    @property
    def pareto(self) -> tuple[SweptPoint, ...]:
        """Pareto front: no other point has as good a main metric and as small a size, and is better in one of the two.

        Sorted by size, smallest first. Points without the main metric or a size are excluded.
        """
        sign = -1.0 if self.main.direction == "max" else 1.0
        measured = [point for point in self.points if point.main is not None and point.size is not None]
        ordered = sorted(measured, key=lambda point: (point.size or 0, sign * (point.main or 0.0)))
        front: list[SweptPoint] = []
        for point in ordered:
            # Sorted by size: a point is on the front only if its metric is better, or if both figures are equal.
            best = front[-1] if front else None
            if best is None or self.main.is_better(point.main or 0.0, best.main or 0.0) or _alike(point, best):
                front.append(point)
        return tuple(front)

    @property
    def complete(self) -> bool:
        """True if every point ran to the end and met all expectations of its recipe."""
        return all(point.outcome == "done" for point in self.points)

    def verdict(self) -> str:
        """Returns one sentence: how many points ended, and which are on the Pareto front."""
        done = sum(point.outcome == "done" for point in self.points)
        front = "; ".join(point.label for point in self.pareto)
        return f"{done} of {len(self.points)} points done" + (f"; on the Pareto front: {front}." if front else ".")

    def to_dataframe(self) -> Any:
        """Returns the points as a `pandas.DataFrame`, one row per point, indexed by its name.

        Columns: the variables, outcome, each figure of the metrics, sparsity, size, size_of, pareto, seconds.

        Raises:
            ImportError: pandas is not installed.
        """
        front = {point.name for point in self.pareto}
        figures = ("sparsity", "size", "size_of")
        rows = [
            {
                "name": point.name,
                **point.values,
                "outcome": point.outcome,
                **point.metrics,
                **{name: getattr(point, name) for name in figures},
                "pareto": point.name in front,
                "seconds": point.seconds,
            }
            for point in self.points
        ]
        return data_frame(rows, "name")

    def sections(self) -> tuple[Section, ...]:
        """Returns the table of the points."""
        return (sweep_table(self).section,)

    def to_dict(self) -> dict[str, Any]:
        """Returns the whole report as strict JSON values; the Pareto front as names of points."""
        points = [{**plain(point), "directory": str(self.directory / point.name)} for point in self.points]
        return {**super().to_dict(), "points": points, "pareto": [point.name for point in self.pareto]}


def _alike(point: SweptPoint, other: SweptPoint) -> bool:
    return (point.size, point.main) == (other.size, other.main)


def swept_point(name: str, values: Mapping[str, Any], report: RunReport, size: str) -> SweptPoint:
    """Returns the point of a finished run.

    Args:
        name: Name of the run directory.
        values: Variable -> value.
        report: Report of the run.
        size: Meaning of the size, as in `SweepReport`.
    """
    # Of several exports in one format the last counts: it is closest to the measured model.
    last = replace(report, exports=tuple({row.format: row for row in report.exports}.values()))
    sizes: dict[str, int] = {}
    for row in last.exports:
        if row.status == "ok":
            found = {row.format: row.bytes, f"{row.format}-gzip": row.gzip_bytes}
            sizes |= {key: value for key, value in found.items() if value is not None}
    weights = report.gzip_total("after")
    sizes |= {} if weights is None else {WEIGHTS: weights}
    smallest = last.smallest
    size_of = size if size != SMALLEST else "" if smallest is None else smallest.format
    failed = [str(row.get("what")) for row in report.failed]
    return SweptPoint(
        name=name,
        values=dict(values),
        outcome="not met" if failed else "done",
        reason=f"not as expected: {', '.join(failed)}" if failed else "",
        metrics=dict(report.metrics),
        sparsity=report.pruned_sparsity if report.pruned else None,
        sizes=sizes,
        size=sizes.get(size_of),
        size_of=size_of if size_of in sizes else "",
        seconds=sum(step["seconds"] for step in report.steps if is_number(step.get("seconds"))),
        measures=report.measures,
    )


# ---- the table -------------------------------------------------------------------------------------------------------


def sweep_table(report: SweepReport) -> FittedTable:
    """Returns a table with one row per point, in grid order; a star marks the points on the Pareto front."""
    front = {point.name for point in report.pareto}
    metrics = report.metrics or (report.main,)
    columns = (
        *(Column(name, "number" if all(map(is_number, values)) else "label") for name, values in report.over.items()),
        Column(metrics[0].name, metrics[0].column),
        *(Column(metric.name, metric.column, keep=0) for metric in metrics[1:]),
        Column("sparsity", "sparsity", keep=4),
        Column("size", "bytes"),
        Column("of", keep=3),
        Column("best", keep=8),
        Column("took", "seconds", keep=2),
        Column("outcome", "status", keep=8),
        Column("why", "text", keep=1),
    )
    rows = tuple(
        (
            *(formatting.literal(value) for value in point.values.values()),
            *(point.metrics.get(f"{metric.name}_after") for metric in metrics),
            point.sparsity,
            point.size,
            point.size_of,
            "*" if point.name in front else "",
            point.seconds,
            point.outcome,
            point.reason,
        )
        for point in report.points
    )
    return FittedTable(Section("Points", columns, rows))


def show_sweep(report: SweepReport, console: Console) -> None:
    """Prints the table; in a pipe, lines are neither wrapped nor cut."""
    table = sweep_table(report)
    if console.is_terminal:
        console.print(table)
        return
    for line in table.plain_lines():
        console.print(line, soft_wrap=True, markup=False)


def point_line(event: Swept) -> str:
    """Returns one line of text on a point that ended."""
    point = event.point
    figures = [f"{point.measures[0].name} {point.measures[0].text(point.main)}"] if point.main is not None else []
    figures += [f"{formatting.size(point.size)} {point.size_of}"] if point.size is not None else []
    told = [point.outcome, *figures, *([point.reason] if point.reason else [])]
    return clean(f"[{event.ended}/{event.points}] {point.label}: {', '.join(told)}")


def sweep_csv(report: SweepReport) -> str:
    """Returns the table as CSV with unrounded figures: one row per point, one column per format for its bytes."""
    front = {point.name for point in report.pareto}
    formats = list(dict.fromkeys(name for point in report.points for name in point.sizes))
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    metrics = dict.fromkeys([metric.name for metric in report.metrics] or ["accuracy"])
    # An accuracy of another name is also in the column that every sweep of a classifier has.
    metrics |= {"accuracy": None} if any(point.accuracy is not None for point in report.points) else {}
    figures = [column for name in metrics for column in (name, f"{name}_before")]
    figures += ["sparsity", "size", "size_of", "pareto", "seconds"]
    writer.writerow([*report.over, "outcome", *figures, *(f"bytes {name}" for name in formats), "directory", "reason"])
    for point in report.points:
        values = [point.metrics.get(f"{name}_{when}") for name in metrics for when in ("after", "before")]
        measured = (*values, point.sparsity, point.size, point.size_of)
        writer.writerow(
            [
                *(formatting.literal(value) for value in point.values.values()),
                point.outcome,
                *("" if value is None else value for value in measured),
                "yes" if point.name in front else "no",
                "" if point.seconds is None else round(point.seconds, 3),
                *(point.sizes.get(name, "") for name in formats),
                point.name,
                point.reason,
            ]
        )
    return stream.getvalue()

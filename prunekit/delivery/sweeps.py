"""What a parameter grid gave: the points with their figures, which of them no other beats, and the table of all."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from prunekit.delivery import formatting
from prunekit.delivery.formatting import clean, is_number
from prunekit.delivery.run_report import RunReport, json_ready
from prunekit.delivery.terminal_report import Column, FittedTable

if TYPE_CHECKING:
    from rich.console import Console

SWEEP_VERSION = 1
SMALLEST = "smallest"
WEIGHTS = "weights-gzip"
Outcome: TypeAlias = Literal["done", "not met", "failed", "waiting"]


@dataclass(frozen=True)
class SweptPoint:
    """One combination of values, and what became of it.

    Attributes:
        name: Of its run directory.
        values: By variable.
        outcome: "done", "not met" (the run is whole, an expectation of the recipe is not met), "failed" (there is no
            run directory) or "waiting".
        reason: Why it is not "done", in one line.
        metrics: Of its run, such as accuracy_before and accuracy_after.
        sparsity: Fraction of zeros in the pruned weights.
        sizes: Bytes by format; "FORMAT-gzip" is the file after `gzip -9`, "weights-gzip" all weights after gzip.
        size: The bytes that the sweep compares.
        size_of: The format that these are of.
        seconds: That its steps took.
    """

    name: str
    values: Mapping[str, Any]
    outcome: Outcome = "waiting"
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    sparsity: float | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    size: int | None = None
    size_of: str = ""
    seconds: float | None = None

    @property
    def accuracy(self) -> float | None:
        """Of the model at the end of its run, on the whole test part; None where it was not measured."""
        value = self.metrics.get("accuracy_after")
        return value if is_number(value) else None

    @property
    def label(self) -> str:
        """Its values as people read them: "final 0.8, width 16"."""
        return ", ".join(f"{name} {formatting.literal(value)}" for name, value in self.values.items())


@dataclass(frozen=True)
class Swept:
    """Told as a sweep goes on: the point that has just ended, or was found finished, and how many of all have."""

    point: SweptPoint
    ended: int
    points: int


@dataclass(frozen=True)
class SweepReport:
    """A sweep: its points in the order of the grid.

    Attributes:
        title: Name of the recipe.
        directory: Where the run directories are.
        over: The values of each variable.
        size: What `SweptPoint.size` counts: "smallest", "weights-gzip" or a format.
        points: All of them, those that wait or failed too.
    """

    title: str
    directory: Path
    over: Mapping[str, Sequence[Any]]
    size: str
    points: tuple[SweptPoint, ...]

    @property
    def pareto(self) -> tuple[SweptPoint, ...]:
        """The points that no other beats: none is at least as accurate and as small, and better in one of the two.

        Smallest first. Points without an accuracy or a size do not take part.
        """
        measured = [point for point in self.points if point.accuracy is not None and point.size is not None]
        ordered = sorted(measured, key=lambda point: (point.size or 0, -(point.accuracy or 0.0)))
        front: list[SweptPoint] = []
        for point in ordered:
            # By size, so that only a gain in accuracy earns a place; two points alike in both share one.
            best = front[-1] if front else None
            if best is None or (point.accuracy or 0.0) > (best.accuracy or 0.0) or _alike(point, best):
                front.append(point)
        return tuple(front)

    @property
    def complete(self) -> bool:
        """Whether every point ran to its end and met what its recipe expects."""
        return all(point.outcome == "done" for point in self.points)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as strict JSON can hold it; the front as names of points."""
        points = [{**asdict(point), "directory": str(self.directory / point.name)} for point in self.points]
        return json_ready(
            {
                "sweep_version": SWEEP_VERSION,
                "title": self.title,
                "directory": str(self.directory),
                "over": self.over,
                "size": self.size,
                "points": points,
                "pareto": [point.name for point in self.pareto],
            }
        )


def _alike(point: SweptPoint, other: SweptPoint) -> bool:
    return (point.size, point.accuracy) == (other.size, other.accuracy)


def swept_point(name: str, values: Mapping[str, Any], report: RunReport, size: str) -> SweptPoint:
    """The point of a finished run.

    Args:
        name: Of its run directory.
        values: By variable.
        report: Of the run.
        size: What its size is, as in `SweepReport`.
    """
    # A format that several steps export counts as it was exported last, which is nearest to the measured model.
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
    )


# ---- the table -------------------------------------------------------------------------------------------------------


def sweep_table(report: SweepReport) -> FittedTable:
    """One row for each point in the order of the grid; a star marks those that no other beats."""
    front = {point.name for point in report.pareto}
    columns = (
        *(Column(name, right=all(map(is_number, values))) for name, values in report.over.items()),
        Column("accuracy", right=True),
        Column("sparsity", keep=4, right=True),
        Column("size", right=True),
        Column("of", keep=3),
        Column("best", keep=8),
        Column("took", keep=2, right=True),
        Column("outcome", keep=8),
        Column("why", keep=1),
    )
    rows = [
        (
            *(formatting.literal(value) for value in point.values.values()),
            formatting.accuracy(point.accuracy),
            formatting.sparsity(point.sparsity),
            formatting.size(point.size),
            point.size_of,
            "*" if point.name in front else "",
            formatting.duration(point.seconds),
            point.outcome,
            point.reason,
        )
        for point in report.points
    ]
    return FittedTable(columns, rows)


def show_sweep(report: SweepReport, console: Console) -> None:
    """Prints the table; in a pipe its lines are as long as they are."""
    table = sweep_table(report)
    if console.is_terminal:
        console.print(table)
        return
    for line in table.plain_lines():
        console.print(line, soft_wrap=True, markup=False)


def point_line(event: Swept) -> str:
    """A point that has ended, in one line."""
    point = event.point
    figures = [f"accuracy {formatting.accuracy(point.accuracy)}"] if point.accuracy is not None else []
    figures += [f"{formatting.size(point.size)} {point.size_of}"] if point.size is not None else []
    told = [point.outcome, *figures, *([point.reason] if point.reason else [])]
    return clean(f"[{event.ended}/{event.points}] {point.label}: {', '.join(told)}")


def sweep_csv(report: SweepReport) -> str:
    """The table with unrounded figures, one row for each point, columns for the bytes of each format."""
    front = {point.name for point in report.pareto}
    formats = list(dict.fromkeys(name for point in report.points for name in point.sizes))
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    figures = ("accuracy", "accuracy_before", "sparsity", "size", "size_of", "pareto", "seconds")
    writer.writerow([*report.over, "outcome", *figures, *(f"bytes {name}" for name in formats), "directory", "reason"])
    for point in report.points:
        measured = (point.accuracy, point.metrics.get("accuracy_before"), point.sparsity, point.size, point.size_of)
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

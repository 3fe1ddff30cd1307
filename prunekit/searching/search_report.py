"""The report of a search: the file, the points it was chosen from, and what each layer got."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.plain_data import Record
from prunekit.anatomy.records.reports import Skipped
from prunekit.anatomy.records.sections import Column, Picture, Section
from prunekit.delivery.reports.metrics import Metric


@dataclass(frozen=True)
class SearchPoint(Record):
    """A mixture whose file was made and run.

    Attributes:
        predicted_error: Sum of the errors of the table.
        error: Squared error of the file's outputs on the examples for the choice.
        counted_bytes: Bytes that were counted of its weights.
        bytes: Bytes of the file.
        drop: By how much the metric is worse than that of the model, on the examples for the choice.
        delivered: True for the one that was delivered.
    """

    predicted_error: float
    error: float
    counted_bytes: float
    bytes: int
    drop: float
    delivered: bool = False


@dataclass(frozen=True)
class SearchedWeight(Record):
    """What a weight got.

    Attributes:
        name: Its name.
        shape: Its shape in the model.
        sparsity: Share of zeros in the file.
        bits: Bits of its codes.
        rate: Price of a bit in the choice of the codes.
        error: Squared error of the outputs that this alone makes, in the table.
    """

    name: str
    shape: tuple[int, ...]
    sparsity: float
    bits: int
    rate: float
    error: float


@dataclass(frozen=True)
class SearchedGroup(Record):
    """How many channels of a group are left.

    Attributes:
        name: Name of the layer that computes them.
        channels: How many there were.
        kept: How many are left.
        error: Squared error of the outputs that this alone makes, in the table.
    """

    name: str
    channels: int
    kept: int
    error: float


@dataclass(frozen=True)
class SearchReport(Displayed):
    """What `pk.search` found.

    Attributes:
        model_name: Name of the model.
        target: "litert" or "packed".
        metric: The metric that the drop is one of.
        before: The metric of the model on the examples that no choice has seen.
        after: That of the file.
        asked_drop: The largest drop that was asked for; None if none was.
        asked_bytes: The most bytes that were asked for; None if none were.
        examples: Numbers of examples: fitted, measured, choosing, judging.
        bytes_before: Bytes of the model's weights in float32.
        bytes: Bytes of the file.
        gap: How far the counted bytes, or the error, may be above the least possible, relative to them.
        points: All files that were made, by their bytes.
        weights: What each weight got.
        groups: How many channels each group keeps.
        skipped: Weights that no level was chosen for, with reasons.
        notes: Remarks.
    """

    derived: ClassVar[tuple[str, ...]] = ("drop", "rank_correlation")
    main_items: ClassVar[str] = "weights"

    model_name: str
    target: str
    metric: Metric
    before: float
    after: float
    asked_drop: float | None
    asked_bytes: int | None
    examples: tuple[int, int, int, int]
    bytes_before: int
    bytes: int
    gap: float
    points: tuple[SearchPoint, ...]
    weights: tuple[SearchedWeight, ...]
    groups: tuple[SearchedGroup, ...]
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def drop(self) -> float:
        """By how much the file is worse than the model, on examples that no choice has seen."""
        return self.metric.drop(self.before, self.after)

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's correlation of predicted and measured errors of the files; None for fewer than three."""
        if len(self.points) < 3:
            return None
        from scipy.stats import spearmanr

        pairs = [(point.predicted_error, point.error) for point in self.points]
        return float(spearmanr(*zip(*pairs, strict=True))[0])

    def verdict(self) -> str:
        """Returns one sentence: bytes and the metric before and after."""
        times = self.bytes_before / self.bytes
        change = f"{self.metric.title} {self.metric.text(self.before)} -> {self.metric.text(self.after)}"
        return f"{self.bytes:,} bytes, {times:.1f} times smaller than the weights in float32; {change}."

    def sections(self) -> tuple[Section, ...]:
        """Returns the result, the files that were made, weights and groups."""
        return self._result(), self._points(), self._weights(), self._groups()

    def _result(self) -> Section:
        kind = self.metric.column
        columns = (
            Column("Bytes", "bytes"),
            Column("In float32", "bytes"),
            Column(self.metric.heading, kind),
            Column("Of the model", kind),
            Column("Drop", "number"),
            Column("Allowed", "number", keep=5),
        )
        row = (self.bytes, self.bytes_before, self.after, self.before, self.drop, self.asked_drop)
        fitted, measured, choosing, judging = self.examples
        return Section(
            "The file",
            columns,
            (row,),
            explanation=f"Measured by running the LiteRT file on {judging:,} examples that no choice has seen. "
            f"{fitted:,} others were fitted to, {measured:,} measured errors of single levels, {choosing:,} chose the "
            "file.",
            notes=self.notes,
        )

    def _points(self) -> Section:
        columns = (
            Column("", "status"),
            Column("Bytes", "bytes"),
            Column("Counted", "bytes", keep=4),
            Column("Drop", "number"),
            Column("Predicted error", "number", keep=5, digits=3),
            Column("Measured error", "number", keep=5, digits=3),
        )
        rows = tuple(
            (
                "delivered" if one.delivered else "",
                one.bytes,
                round(one.counted_bytes),
                one.drop,
                one.predicted_error,
                one.error,
            )
            for one in self.points
        )
        ranks = self.rank_correlation
        notes = () if ranks is None else (f"Rank correlation of predicted and measured errors: {ranks:.2f}.",)
        return Section(
            "Files that were made",
            columns,
            rows,
            explanation="Drops are those on the examples for the choice. Errors are squared changes of the outputs, "
            "relative to how they differ between examples; predicted: the sum over levels that were measured one at a "
            "time.",
            notes=notes,
            pictures=(self.picture,),
        )

    @property
    def picture(self) -> Picture:
        """The drop against bytes."""
        allowed = self.asked_drop
        files = [
            {
                "bytes": one.bytes,
                "drop": one.drop,
                "held": allowed is None or one.drop <= allowed,
                "delivered": one.delivered,
            }
            for one in self.points
        ]
        listed = ", ".join(f"{one.bytes:,} bytes: {one.drop:.4g}" for one in self.points)
        return Picture(
            "Drop against bytes",
            "Of all files that were made, on the examples for the choice.",
            f"Drop of {self.metric.title} by bytes: {listed}.",
            "files",
            {"files": files, "allowed": allowed, "metric": self.metric.title},
            wide=True,
        )

    def _weights(self) -> Section:
        columns = (
            Column("Weight", "name"),
            Column("Shape", "shape", keep=4),
            Column("Zeros", "sparsity"),
            Column("Bits", "count"),
            Column("Error", "number", keep=5, digits=3),
        )
        rows = tuple((one.name, one.shape, one.sparsity, one.bits, one.error) for one in self.weights)
        notes = tuple(f"{one.name}: {one.reason}." for one in self.skipped)
        return Section("Weights", columns, rows, notes=notes)

    def _groups(self) -> Section:
        columns = (
            Column("Channels of", "name"),
            Column("Before", "count"),
            Column("Kept", "count"),
            Column("Error", "number", keep=5, digits=3),
        )
        rows = tuple((one.name, one.channels, one.kept, one.error) for one in self.groups)
        return Section("Channels", columns, rows, notes=() if rows else ("No channels can be removed.",))

"""The report of a search: the file, the points it was chosen from, and what each layer got."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.plain_data import Record
from prunekit.anatomy.records.reports import Skipped
from prunekit.anatomy.records.sections import Column, Picture, Section
from prunekit.delivery.reports.formatting import latency
from prunekit.delivery.reports.metrics import Metric
from prunekit.searching.judge import AGREEMENT, OUTPUT_ERROR


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
        trained: True if it was trained.
        seconds: Seconds of a call on this machine; None if they were not measured.
        counted_seconds: The sum of those of its layers, each as a file of its own.
        arena: Bytes of memory for its activations; None if they were not measured.
        techniques: What was done with the model.
        proven: True if it is within the drop on the examples that judge, too, or no drop was asked for.
    """

    predicted_error: float
    error: float
    counted_bytes: float
    bytes: int
    drop: float
    delivered: bool = False
    trained: bool = False
    seconds: float | None = None
    counted_seconds: float | None = None
    arena: int | None = None
    techniques: tuple[str, ...] = ()
    proven: bool = True


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
        rank: Number of values between the two layers in the place of its layer; None = the layer itself.
    """

    name: str
    shape: tuple[int, ...]
    sparsity: float
    bits: int
    rate: float
    error: float
    rank: int | None = None


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
class TechniqueAlone(Record):
    """What some techniques reach at the predicted error of the file; counted, not made.

    Attributes:
        techniques: Their names.
        error: The predicted error.
        bytes: Counted bytes, and what the delivered file has beside those of its weights.
        seconds: Counted seconds; None where no layer was measured.
    """

    techniques: str
    error: float
    bytes: float
    seconds: float | None = None


@dataclass(frozen=True)
class SearchReport(Displayed):
    """What `pk.search` found.

    Attributes:
        model_name: Name of the model.
        target: "litert", "packed" or "microcontroller".
        metric: The metric in which the drop is measured.
        before: The metric of the model on the held-out examples, which accept or reject each file.
        after: That of the file.
        asked_drop: The largest drop that was asked for; None if none was.
        asked_bytes: The most bytes that were asked for; None if none were.
        examples: Numbers of examples: fitted, measured, choosing, judging; files are fitted to those measured, too.
        bytes_before: Bytes of the model's weights in float32.
        bytes: Bytes of the file.
        gap: How far the counted bytes, or the error, may be above the least possible, relative to them.
        points: All files that were made, by their bytes.
        weights: What each weight got.
        groups: How many channels each group keeps.
        skipped: Weights that no level was chosen for, with reasons.
        notes: Remarks.
        profile: What was minimised within the drop: "small", "balanced" or "fast".
        asked_seconds: The most seconds of a call that were asked for; None if none were.
        seconds: Seconds of a call of the file; None if latency was not asked about.
        seconds_before: Those of the model's LiteRT file in float32.
        alone: What each technique alone, and all of them, reach at the same predicted error.
        asked_arena: The most bytes for activations that were asked for; None if none were.
        arena: Bytes of memory that the file needs for its activations; None if neither they nor a
            microcontroller was asked about.
    """

    derived: ClassVar[tuple[str, ...]] = ("drop", "rank_correlation", "front")
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
    profile: str = "small"
    asked_seconds: float | None = None
    seconds: float | None = None
    seconds_before: float | None = None
    alone: tuple[TechniqueAlone, ...] = ()
    asked_arena: int | None = None
    arena: int | None = None

    @property
    def front(self) -> tuple[SearchPoint, ...]:
        """The files that no other one is better than in bytes, seconds, arena and drop, by their bytes."""

        def costs(one: SearchPoint) -> tuple[float, ...]:
            return one.bytes, one.seconds or 0.0, one.arena or 0, one.drop

        def beaten(one: SearchPoint) -> bool:
            return any(
                costs(other) != costs(one) and all(a <= b for a, b in zip(costs(other), costs(one), strict=True))
                for other in self.points
            )

        return tuple(one for one in self.points if not beaten(one))

    @property
    def drop(self) -> float:
        """By how much the file is worse than the model, on the held-out examples."""
        return self.metric.drop(self.before, self.after)

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's correlation of predicted and measured errors of files without training.

        None for fewer than three, and for equal ones. What a training gives back is not predicted.
        """
        pairs = [(point.predicted_error, point.error) for point in self.points if not point.trained]
        if len(pairs) < 3 or any(len(set(values)) == 1 for values in zip(*pairs, strict=True)):
            return None
        from scipy.stats import spearmanr

        return float(spearmanr(*zip(*pairs, strict=True))[0])

    def verdict(self) -> str:
        """Returns one sentence: bytes and the metric before and after."""
        size = _times(self.bytes_before, self.bytes, "smaller", "larger")
        change = f"{self.metric.title} {self.metric.text(self.before)} -> {self.metric.text(self.after)}"
        time = "" if self.seconds is None else f" {latency(self.seconds)} a call"
        if self.seconds and self.seconds_before:
            time += f", {_times(self.seconds_before, self.seconds, 'faster', 'slower')} than the file in float32;"
        return f"{self.bytes:,} bytes, {size} than the weights in float32;{time} {change}."

    def sections(self) -> tuple[Section, ...]:
        """Returns the result, the files that were made, techniques alone, weights and groups."""
        alone = (self._alone(),) if self.alone else ()
        return self._result(), self._points(), *alone, self._weights(), self._groups()

    def _result(self) -> Section:
        kind = self.metric.column
        columns: tuple[Column, ...] = (
            Column("Bytes", "bytes"),
            Column("Weights in float32", "bytes"),
            Column(self.metric.heading, kind),
            Column("Of the model", kind),
            Column("Drop", "number"),
            Column("Allowed", "number", keep=5),
        )
        row: tuple[Any, ...] = (self.bytes, self.bytes_before, self.after, self.before, self.drop, self.asked_drop)
        if self.seconds is not None:
            columns += (
                Column("Call", "latency"),
                Column("File in float32", "latency"),
                Column("Allowed", "latency", keep=5),
            )
            row += (self.seconds, self.seconds_before, self.asked_seconds)
        if self.arena is not None:
            columns += (Column("Arena", "bytes"), Column("Allowed", "bytes", keep=5))
            row += (self.arena, self.asked_arena)
        fitted, measured, choosing, judging = self.examples
        without = " Without labels, the agreement with the model is measured." if self.metric.name == AGREEMENT else ""
        return Section(
            "The file",
            columns,
            (row,),
            explanation=f"Measured by running the LiteRT file on {judging:,} held-out examples, which accept or reject "
            f"a file. Layers were fitted to {fitted:,} others, {measured:,} of which measured errors of single levels; "
            f"{choosing:,} more chose the file.{without}",
            notes=(*self.notes, *self._slower()),
        )

    def _slower(self) -> tuple[str, ...]:
        """Returns a note where the processor computes the file slower than the one in float32."""
        if not self.seconds or not self.seconds_before or self.seconds <= self.seconds_before:
            return ()
        return (
            "LiteRT has slower kernels for these integers than for float32 on this processor: time the file where it "
            "will run, or search for the fewest bytes.",
        )

    def _points(self) -> Section:
        columns: tuple[Column, ...] = (
            Column("File", "label"),
            Column("Bytes", "bytes"),
            Column("Of weights", "bytes", keep=4),
            Column("Drop", "number"),
            Column("Predicted error", "number", keep=5, digits=3),
            Column("Measured error", "number", keep=5, digits=3),
            Column("Techniques", "label", keep=4),
        )
        timed = any(one.seconds is not None for one in self.points)
        if timed:
            columns += (Column("Call", "latency"), Column("Counted call", "latency", keep=4))
        planned = any(one.arena is not None for one in self.points)
        columns += (Column("Arena", "bytes"),) if planned else ()
        rows = tuple(
            (
                ", ".join(word for word, is_so in self._words(one) if is_so),
                one.bytes,
                round(one.counted_bytes),
                one.drop,
                one.predicted_error,
                one.error,
                ", ".join(one.techniques),
                *((one.seconds, one.counted_seconds) if timed else ()),
                *((one.arena,) if planned else ()),
            )
            for one in self.points
        )
        ranks = self.rank_correlation
        notes: tuple[str, ...] = (
            () if ranks is None else (f"Rank correlation of predicted and measured errors: {ranks:.2f}.",)
        )
        notes += self._fit_of_latency()
        with_labels = self.metric.name not in (AGREEMENT, OUTPUT_ERROR)
        if with_labels and self.asked_drop is not None and not any(one.trained for one in self.points):
            notes += (
                "None was trained: after a training (`training`, `--epochs`), far smaller ones may hold the drop.",
            )
        return Section(
            "Files that were made",
            columns,
            rows,
            explanation="Drops are those on the examples for the choice; a file that is not proven loses more than "
            "allowed on those that judge. Errors are squared changes of the outputs, "
            "relative to how they differ between examples; predicted: the sum over levels that were measured one at a "
            "time.",
            notes=notes,
            pictures=(self.picture,),
        )

    def _words(self, one: SearchPoint) -> tuple[tuple[str, bool], ...]:
        """Returns what may be said of a file, and whether it is so."""
        chosen = self.asked_drop is not None and one.drop <= self.asked_drop
        return ("delivered", one.delivered), ("trained", one.trained), ("not proven", chosen and not one.proven)

    def _fit_of_latency(self) -> tuple[str, ...]:
        """Returns a note on how well the sum over the layers says the latency of files."""
        timed = [one for one in self.points if None not in (one.seconds, one.counted_seconds)]
        pairs = np.array([(one.counted_seconds, one.seconds) for one in timed], float).reshape(-1, 2)
        if len(pairs) < 3 or np.ptp(pairs[:, 0]) == 0:
            return ()
        slope, start = np.polyfit(pairs[:, 0], pairs[:, 1], 1)
        left = pairs[:, 1] - slope * pairs[:, 0] - start
        share = 1 - np.square(left).sum() / max(np.square(pairs[:, 1] - pairs[:, 1].mean()).sum(), 1e-30)
        return (
            f"A call takes {slope:.2f} times the sum over its layers {'+' if start >= 0 else '-'} "
            f"{latency(abs(start))} (R2 {share:.2f}).",
        )

    def _alone(self) -> Section:
        """Returns what techniques alone would reach."""
        timed = any(one.seconds is not None for one in self.alone)
        columns = (
            Column("Techniques", "label"),
            Column("Counted bytes", "bytes"),
            Column("Predicted error", "number", keep=5, digits=3),
            *((Column("Counted call", "latency"),) if timed else ()),
        )
        rows = tuple(
            (one.techniques, round(one.bytes), one.error, *((one.seconds,) if timed else ())) for one in self.alone
        )
        return Section(
            "Techniques alone",
            columns,
            rows,
            explanation="Each at its best setting for the predicted error of the file that was delivered; counted, "
            "with what that file has beside its weights, and not made.",
        )

    @property
    def picture(self) -> Picture:
        """The drop against bytes and time."""
        allowed = self.asked_drop
        files = [
            {
                "bytes": one.bytes,
                "seconds": one.seconds,
                "drop": one.drop,
                "held": allowed is None or (one.drop <= allowed and one.proven),
                "delivered": one.delivered,
                "trained": one.trained,
            }
            for one in self.points
        ]
        # The last row has all techniques.
        alone = [{"techniques": one.techniques, "bytes": one.bytes, "seconds": one.seconds} for one in self.alone[:-1]]
        model = {"bytes": self.bytes_before, "seconds": self.seconds_before}
        listed = ", ".join(f"{one.bytes:,} bytes: {one.drop:.4g}" for one in self.points)
        return Picture(
            "Drop against cost",
            "Of all files that were made, on the examples for the choice.",
            f"Drop of {self.metric.title} by bytes: {listed}.",
            "files",
            {"files": files, "alone": alone, "model": model, "allowed": allowed, "metric": self.metric.title},
            wide=True,
        )

    def _weights(self) -> Section:
        columns = (
            Column("Weight", "name"),
            Column("Shape", "shape", keep=4),
            Column("Zeros", "sparsity"),
            Column("Bits", "count"),
            Column("Rank", "count"),
            Column("Error", "number", keep=5, digits=3),
        )
        rows = tuple((one.name, one.shape, one.sparsity, one.bits, one.rank, one.error) for one in self.weights)
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


def _times(before: float, after: float, less: str, more: str) -> str:
    """Returns by how many times a value is less or more than before, in words."""
    return f"{before / after:.1f} times {less}" if after <= before else f"{after / before:.1f} times {more}"

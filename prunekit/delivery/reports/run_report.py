"""Report of one run: a frozen record that converts to and from strict JSON, with a one-sentence verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from prunekit.anatomy.records.display import Displayed, data_frame
from prunekit.anatomy.records.plain_data import from_plain
from prunekit.anatomy.records.reports import Event, SparsityReport, WeightRow
from prunekit.delivery.litert.gzip_size import gzip_size
from prunekit.delivery.reports.formatting import (
    count,
    is_number,
    size,
    sparsity,
)
from prunekit.delivery.reports.metrics import Metric, measured_in
from prunekit.delivery.reports.rows import ExportRow, RuntimeAdvice, StageRow

REPORT_VERSION = 1
# Settings of a recipe that name a run and do not change its result.
TEXTS = ("name", "description")


@dataclass(frozen=True)
class RunReport(Displayed):
    """Actions and measurements of one run of a recipe.

    Attributes:
        title: Name of the run.
        recipe: The locked recipe, with all defaults written out.
        versions: Program or package -> version, and other facts of the environment that the result depends on.
        seed: The seed of the run.
        steps: One mapping per executed step: kind, name, seconds, history (metric -> value per epoch), metrics (name ->
            value after the step), accuracy, and optionally sections (`Section`s, or the results of their `to_dict`)
            that the step adds to the report.
        before: `inspect` report of the model before the first pruning.
        after: `inspect` report of the final model, with its targets and skipped weights.
        metrics: Figures of the whole run, as pairs such as accuracy_before and accuracy_after.
        schedule: Type and fields of the first prune step's schedule, in optimizer updates.
        events: Every mask update.
        curve: (step, value of the main metric on the validation data).
        exports: Export result of each format.
        expectations: Mappings with what (the quantity), bound ({"min": x} or {"max": x}), measured, met.
        histograms: `plot_data.weight_histogram` of the largest targets, by name.
        hashes: SHA-256 of recipe, data and weights.
        notes: Remarks on the figures.
        advice: Benefit of the zeros on each runtime.
        compressed: `compressed_sizes` of the weights; empty if not measured.
        changes: Change of each weight by optimizer updates, by name, over the whole run; "relative" is the L2 norm of
            an update's change divided by the weight's L2 norm, averaged. Empty if not measured.
        measures: The metrics of `metrics`, the main one first. Empty: they are inferred from the names.
        stages: Speed and size of the model before pruning, after each step and as exported; empty if not measured.
        stage_notes: How the stages were measured, or the reason why they were not.
    """

    derived: ClassVar = ("report_version",)
    makes: ClassVar = "prunekit.delivery.reports.report_sections:sections_of"
    report_version: ClassVar = REPORT_VERSION

    title: str
    recipe: dict[str, Any]
    versions: dict[str, str]
    seed: int
    steps: tuple[dict[str, Any], ...]
    before: SparsityReport
    after: SparsityReport
    metrics: Mapping[str, float | None]
    schedule: dict[str, Any] | None = None
    events: tuple[Event, ...] = ()
    curve: tuple[tuple[int, float | None], ...] = ()
    exports: tuple[ExportRow, ...] = ()
    expectations: tuple[dict[str, Any], ...] = ()
    histograms: dict[str, dict[str, Any]] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    advice: tuple[RuntimeAdvice, ...] = ()
    compressed: dict[str, dict[str, int]] = field(default_factory=dict)
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    measures: tuple[Metric, ...] = ()
    stages: tuple[StageRow, ...] = ()
    stage_notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Infers the metrics of reports that name none."""
        if not self.measures:
            object.__setattr__(self, "measures", measured_in(self.metrics))

    def to_dataframe(self) -> Any:
        """Returns the weights as a `pandas.DataFrame`, one row per weight, indexed by its name.

        Columns: those of `pk.inspect(...).to_dataframe()`; pruned, True for weights that the run pruned; zeros_before;
        sparsity_before.

        Raises:
            ImportError: pandas is not installed.
        """
        before, pruned = {row.name: row for row in self.before.weights}, {row.name for row in self.pruned}
        rows = []
        for row in self.after.weights:
            old = before.get(row.name)
            was = {name: getattr(old, name, None) for name in ("zeros", "sparsity")}
            now = {**dataclasses.asdict(row), "sparsity": row.sparsity, "pruned": row.name in pruned}
            rows.append(now | {f"{name}_before": value for name, value in was.items()})
        return data_frame(rows, "name")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunReport:
        """Returns the report from the result of `to_dict`. Unknown keys are ignored.

        Raises:
            ValueError: `values` is not a run report, or a newer prunekit wrote it.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"A report is a JSON object. Received: {type(values).__name__}.")
        version = values.get("report_version", REPORT_VERSION)
        if version != REPORT_VERSION:
            raise ValueError(
                f"This prunekit reads reports of version {REPORT_VERSION}. Received: report_version={version!r}. "
                "Use the prunekit that wrote it."
            )
        try:
            found: RunReport = from_plain(
                cls, {**values} | {name: _renamed(values.get(name)) for name in ("before", "after")}
            )
        except ValueError as error:
            raise ValueError(f"These values are no report of a run: {error}.") from error
        return found

    # ---- texts shared by the page and the terminal -------------------------------------------------------------------

    @property
    def main(self) -> Metric | None:
        """The main metric; None if none was measured."""
        return next(iter(self.measures), None)

    def metric_values(self, metric: Metric) -> tuple[float | None, float | None]:
        """Returns the value of a metric before pruning and that of the final model; None for one not measured."""
        return self.metrics.get(f"{metric.name}_before"), self.metrics.get(f"{metric.name}_after")

    @property
    def pruned(self) -> list[WeightRow]:
        """Rows of the pruned weights; if the report names no targets, of all weights with a pattern of zeros."""
        names = set(self.after.targets)
        if names:
            return [row for row in self.after.weights if row.name in names]
        found = [row for row in self.after.weights if row.zeros and row.role not in ("bias", "normalization", "other")]
        if any(step.get("kind") == "quantize" for step in self.steps):
            # Rounding makes zeros, too: those that were there before the run are of an earlier pruning.
            former = {row.name for row in self.before.weights if row.zeros}
            found = [row for row in found if row.name in former]
        return found

    @property
    def pruned_sparsity(self) -> float:
        """Fraction of zeros over all `pruned` weights; 0.0 if no weight was pruned."""
        total = sum(row.size for row in self.pruned)
        return sum(row.zeros for row in self.pruned) / total if total else 0.0

    def relative_change(self, name: str) -> float | None:
        """Mean change of a weight per update, relative to its L2 norm; None if not measured."""
        return self.changes.get(name, {}).get("relative")

    @property
    def all_notes(self) -> list[str]:
        """All notes without duplicates."""
        return list(dict.fromkeys([*self.notes, *self.after.notes, *self.before.notes]))

    @property
    def skipped_reasons(self) -> dict[str, list[str]]:
        """Skipped weights by reason: reason -> names."""
        reasons: dict[str, list[str]] = {}
        for item in self.after.skipped:
            reasons.setdefault(item.reason, []).append(item.name)
        return reasons

    @property
    def failed(self) -> list[dict[str, Any]]:
        """The expectations that were not met."""
        return [row for row in self.expectations if not row.get("met")]

    @property
    def smallest(self) -> ExportRow | None:
        """Smallest exported file that passed its check; the Keras file only if no other passed; None without files."""
        good = [row for row in self.exports if row.status == "ok" and is_number(row.bytes)]
        return min([row for row in good if row.format != "keras"] or good, key=lambda row: row.bytes or 0, default=None)

    def gzip_total(self, when: str) -> int | None:
        """Sum of the gzip sizes of all weights, `when` = "before" or "after" pruning; None if not measured."""
        sizes = [row.get(when) for row in self.compressed.values()]
        return sum(one for one in sizes if one is not None) if any(one is not None for one in sizes) else None

    def verdict(self) -> str:
        """Returns the result of the run in one sentence with figures."""
        rows = self.pruned
        if not rows:
            done = f"The model is smaller: {self.parameters_left}." if self.parameters_left else "No weight was pruned."
            return done + self._metric_clause(" The ", ".")
        zeros, total = sum(row.zeros for row in rows), sum(row.size for row in rows)
        where = "1 weight matrix" if len(rows) == 1 else f"{len(rows)} weight matrices"
        text = (
            f"{count(zeros)} of {count(total)} weights in {where} are exactly zero (sparsity {sparsity(zeros / total)})"
        )
        text += self._metric_clause("; the ", "")
        best = self.smallest
        if best is not None:
            text += f"; the smallest file that runs is {best.format}, {size(best.bytes)}"
            smaller = {"with gzip": best.gzip_bytes, "packed": best.packed_bytes}
            sizes = ", ".join(f"{size(one)} {how}" for how, one in smaller.items() if is_number(one))
            text += f" ({sizes})" if sizes else ""
            text += f", where the weights before pruning take {size(self.before.bytes)}"
        if self.parameters_left:
            text += f"; the model is smaller: {self.parameters_left}"
        return text + "."

    @property
    def parameters_left(self) -> str:
        """Parameters that are left of a model that became smaller, as text; "" for a model of the same size."""
        before, after = self.before.parameters, self.after.parameters
        return f"{count(after)} of {count(before)} parameters are left" if after < before else ""

    def _metric_clause(self, start: str, end: str) -> str:
        if self.main is None:
            return ""
        before, after = self.metric_values(self.main)
        if not is_number(after):
            return ""
        when = "before pruning" if self.pruned or not self.parameters_left else "before"
        was = f", {self.main.text(before)} {when}" if is_number(before) else ""
        return f"{start}{self.main.title} is {self.main.text(after)}{was}{end}"


def compressed_sizes(before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> dict[str, dict[str, int]]:
    """Returns each weight's size after separate gzip, level 9: {name: {"before": bytes, "after": bytes}}.

    Args:
        before: Weights before pruning, by name.
        after: Weights at the end, by name.
    """
    names = dict.fromkeys([*after, *before])
    pairs = (("before", before), ("after", after))
    return {
        name: {
            when: gzip_size([np.ascontiguousarray(arrays[name]).tobytes()]) for when, arrays in pairs if name in arrays
        }
        for name in names
    }


def _renamed(report: Any) -> Any:
    """Returns the values of a report on weights, which older versions wrote with the key "model"."""
    return {"model_name": report.get("model"), **report} if isinstance(report, Mapping) else report

"""Results of a sensitivity scan: a row for each weight and level, tables, JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from prunekit.anatomy.records.display import Displayed, data_frame
from prunekit.anatomy.records.plain_data import Figure, from_plain
from prunekit.anatomy.records.reports import Skipped
from prunekit.anatomy.records.sections import Column, Section
from prunekit.delivery.reports.metrics import Metric
from prunekit.delivery.reports.model_sections import skipped_weights
from prunekit.sparsity.sensitivity_table import LEVELS, OUTPUT_ERROR, SENSITIVITY_VERSION


@dataclass(frozen=True)
class ScannedWeight:
    """A weight of a scan.

    Attributes:
        name: Readable name, unique in the model.
        shape: Shape.
        size: Number of entries.
    """

    name: str
    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class SensitivityRow:
    """The model with one weight changed and all others as they are.

    Attributes:
        target: Name of the weight.
        technique: "prune" or "quantize".
        level: What the technique varies: "sparsity", a fraction in [0, 1), or "bits".
        value: Its value.
        entries: Number of entries of the weight that the technique changed: those removed, or those moved.
        metrics: Metrics and loss by name.
        output_error: L2 norm of the change of the model's outputs over all examples, relative to that of the outputs.
    """

    target: str
    technique: str
    level: str
    value: float
    entries: int
    metrics: Mapping[str, Figure]
    output_error: Figure


@dataclass(frozen=True)
class SensitivityReport(Displayed):
    """What pruning, or rounding to few bits, one weight at a time costs.

    Attributes:
        model_name: Name of the model.
        settings: What determines the rows: criterion, pattern, levels, number of examples; the technique unless it is
            "prune".
        targets: The weights, in the order in which the model calls them.
        measures: The metrics, the main one first, the loss last.
        dense: Metrics and loss of the model as it is.
        rows: One row for each weight and level; the levels of a weight are measured together.
        skipped: The weights that are left out, with reasons.
        notes: Remarks on the scan.
        hashes: SHA-256 of "model", "architecture" and "data".
    """

    derived: ClassVar = ("sensitivity_version", "complete")
    sensitivity_version: ClassVar = SENSITIVITY_VERSION

    model_name: str
    settings: Mapping[str, Any]
    targets: tuple[ScannedWeight, ...]
    measures: tuple[Metric, ...]
    dense: Mapping[str, Figure]
    rows: tuple[SensitivityRow, ...]
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()
    hashes: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def technique(self) -> str:
        """What changes the weights: "prune" or "quantize"."""
        return str(self.settings.get("technique", "prune"))

    @property
    def level(self) -> str:
        """What the technique varies: "sparsity" or "bits"."""
        return LEVELS[self.technique]

    @property
    def levels(self) -> tuple[float, ...]:
        """The sparsities or numbers of bits, ascending."""
        return tuple(self.settings["levels"])

    @property
    def complete(self) -> bool:
        """True if every weight is measured."""
        return len({row.target for row in self.rows}) == len(self.targets)

    def verdict(self) -> str:
        """Returns one sentence: how many weights at which levels."""
        measured = len({row.target for row in self.rows})
        levels = ", ".join(f"{level:g}" for level in self.levels)
        return f"{measured} of {len(self.targets)} weights measured, each alone, at {self.level} {levels}."

    def values(self, measure: str) -> dict[str, tuple[float | None, ...]]:
        """Returns {weight: value at each level} of a metric, or of "output_error"; None for what is not measured.

        Raises:
            ValueError: There is no such measure.
        """
        known = [OUTPUT_ERROR, *(metric.name for metric in self.measures)]
        if measure not in known:
            raise ValueError(f"A measure of this scan is one of {', '.join(known)}. Received: {measure!r}.")
        found: dict[tuple[str, float], float | None] = {
            (row.target, row.value): row.output_error if measure == OUTPUT_ERROR else row.metrics.get(measure)
            for row in self.rows
            if (row.technique, row.level) == (self.technique, self.level)
        }
        return {target.name: tuple(found.get((target.name, level)) for level in self.levels) for target in self.targets}

    def sections(self) -> tuple[Section, ...]:
        """Returns one table for each metric and one for the output error, and the weights that are left out."""
        found = [self._metric_section(metric) for metric in self.measures]
        done = "pruned" if self.technique == "prune" else "put on the nearest values of so many bits"
        text = (
            f"Each row is one weight, {done} alone. The output error is the L2 norm of the change of the model's "
            "outputs, relative to the L2 norm of the outputs."
        )
        columns = (Column("Weight", "name"), *self._columns("number"))
        errors = tuple((name, *values) for name, values in self.values(OUTPUT_ERROR).items())
        found.append(Section(f"Output error by {self.level}", columns, errors, explanation=text, notes=self.notes))
        if self.skipped:
            found.append(skipped_weights(self.skipped))
        return tuple(found)

    def _metric_section(self, metric: Metric) -> Section:
        columns = (Column("Weight", "name"), Column("Dense", metric.column), *self._columns(metric.column))
        dense = self.dense.get(metric.name)
        rows = tuple((name, dense, *values) for name, values in self.values(metric.name).items())
        return Section(f"{metric.heading} by {self.level}", columns, rows)

    def _columns(self, kind: str) -> tuple[Column, ...]:
        # A narrow terminal drops the lowest sparsities and the most bits, which do the least, first.
        count, falls = len(self.levels), self.technique == "quantize"
        return tuple(
            Column(f"{level:g}", kind, digits=3, keep=min(count - at if falls else 1 + at, 8))
            for at, level in enumerate(self.levels)
        )

    def to_dataframe(self) -> Any:
        """Returns the rows as a `pandas.DataFrame`, indexed by the name of the weight.

        Raises:
            ImportError: pandas is not installed.
        """
        rows = [self._flat(row) for row in self.rows]
        return data_frame(rows, "target")

    def _flat(self, row: SensitivityRow) -> dict[str, Any]:
        values = asdict(row)
        metrics = values.pop("metrics")
        return {**values, **{f"{metric.name}": metrics.get(metric.name) for metric in self.measures}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SensitivityReport:
        """Returns the report from the result of `to_dict`.

        Raises:
            ValueError: The values are of another version, or are no report.
        """
        try:
            version = values["sensitivity_version"]
            if version != SENSITIVITY_VERSION:
                raise ValueError(
                    f"this version of prunekit reads sensitivity_version {SENSITIVITY_VERSION}, not {version}"
                )
            found: SensitivityReport = from_plain(cls, {"model_name": values.get("model"), **values})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"These values are no sensitivity scan: {reason}.") from error
        return found

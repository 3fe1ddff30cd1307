"""Compares finished runs: their figures, the settings in which they differ, and the sparsity of each weight."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.plain_data import plain
from prunekit.anatomy.records.sections import Column, Section
from prunekit.delivery.reports.formatting import literal, sparsity
from prunekit.delivery.reports.metrics import Metric, inferred
from prunekit.delivery.reports.run_report import TEXTS, RunReport
from prunekit.delivery.reports.stages import best_file
from prunekit.delivery.reports.sweeps import SMALLEST, SweepReport, SweptPoint, sweep_table, swept_point
from prunekit.suggestions import did_you_mean

COMPARISON_VERSION = 1
_RUN = "run"


@dataclass(frozen=True)
class RunComparison(Displayed):
    """Finished runs side by side.

    Attributes:
        figures: Each run as a point, with its metrics, sizes and the Pareto front.
        settings: Path of a setting of the locked recipes -> its value in each run, for the settings that differ; None
            where a recipe lacks the setting. Steps are named by kind: "prune.epochs", "prune 2.epochs". A step that
            some recipes lack is one setting, whose value is its text.
        sparsities: Name of a weight -> its sparsity in each run, for weights whose sparsity differs as it is shown;
            None where a run has no such weight.
        latencies: Seconds of one call of the fastest exported file of each run; None if not measured.
        notes: Reasons why figures may not be comparable.
    """

    figures: SweepReport
    settings: Mapping[str, tuple[Any, ...]]
    sparsities: Mapping[str, tuple[float | None, ...]]
    notes: tuple[str, ...]
    latencies: tuple[float | None, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the runs."""
        return tuple(point.name for point in self.figures.points)

    def sections(self) -> tuple[Section, ...]:
        """Returns the tables: figures, settings that differ, sparsity of the weights."""
        table = sweep_table(self.figures).section
        columns, rows = table.columns, table.rows
        if any(one is not None for one in self.latencies):
            columns = (*columns, Column("latency", "latency"))
            rows = tuple((*row, one) for row, one in zip(rows, self.latencies, strict=True))
        found = [Section("Runs", columns, rows, notes=self.notes)]
        columns = (Column("Setting", "name"), *(Column(name, "text") for name in self.names))
        rows = tuple(
            (path, *("–" if value is None else literal(value) for value in values))
            for path, values in self.settings.items()
        )
        equal = () if rows else ("The recipes have the same settings.",)
        found.append(Section("Settings that differ", columns, rows, notes=equal))
        if self.sparsities:
            columns = (Column("Weight", "name"), *(Column(name, "sparsity") for name in self.names))
            cells = tuple((name, *values) for name, values in self.sparsities.items())
            found.append(Section("Sparsity of the weights", columns, cells))
        return tuple(found)

    def to_dataframe(self) -> Any:
        """Returns the figures as a `pandas.DataFrame`, one row per run, indexed by its name.

        Raises:
            ImportError: pandas is not installed.
        """
        return self.figures.to_dataframe().drop(columns=[_RUN])

    def to_dict(self) -> dict[str, Any]:
        """Returns the whole comparison as strict JSON values."""
        figures = self.figures.to_dict()
        # A run's name is its only value, and its directory is not known here.
        left_out = ("values", "directory")
        points = [{key: value for key, value in point.items() if key not in left_out} for point in figures["points"]]
        values: dict[str, Any] = plain(
            {
                "comparison_version": COMPARISON_VERSION,
                "main": figures["main"],
                "runs": points,
                "pareto": figures["pareto"],
                "settings": {path: dict(zip(self.names, row, strict=True)) for path, row in self.settings.items()},
                "sparsities": {name: dict(zip(self.names, row, strict=True)) for name, row in self.sparsities.items()},
                "latencies": dict(zip(self.names, self.latencies, strict=True)),
                "notes": self.notes,
            }
        )
        return values


def compared_runs(reports: Mapping[str, RunReport], size: str = SMALLEST) -> RunComparison:
    """Returns the comparison of finished runs.

    Args:
        reports: Name of each run -> its report; the first run's main metric is the one of the comparison.
        size: The size to compare: "smallest", "weights-gzip", a format, or a format after gzip ("litert-gzip").

    Raises:
        ValueError: There are fewer than two runs, or none has a file of this `size`.
    """
    if len(reports) < 2:
        raise ValueError(f"A comparison needs at least two runs. Received: {', '.join(reports) or 'none'}.")
    names, runs = list(reports), list(reports.values())
    main = next((report.main for report in runs if report.main is not None), inferred("accuracy"))
    points = tuple(_point(name, report, size, main) for name, report in reports.items())
    sizes = list(dict.fromkeys([SMALLEST, *(one for point in points for one in point.sizes)]))
    if size not in sizes:
        hint = did_you_mean(size, sizes)
        raise ValueError(f"No run has a size {size!r}.{hint} Sizes of these runs: {', '.join(sizes)}.")
    figures = SweepReport("runs", Path(), {_RUN: names}, size, points)
    zeros = _differing([{row.name: row.sparsity for row in report.after.weights} for report in runs])
    shown = {name: row for name, row in zeros.items() if len({sparsity(one) for one in row}) > 1}
    fastest = [best_file(report.stages, "latency") for report in runs]
    latencies = tuple(None if row is None else row.latency for row in fastest)
    return RunComparison(figures, _settings(runs), shown, tuple(_notes(reports)), latencies)


def _point(name: str, report: RunReport, size: str, main: Metric) -> SweptPoint:
    """Returns a run as a point; `main` is the main metric of every point, also of runs that did not measure it."""
    point = swept_point(name, {_RUN: name}, report, size)
    others = [metric for metric in point.measures if metric.name != main.name]
    return replace(point, measures=(main, *others))


def _settings(runs: Sequence[RunReport]) -> dict[str, tuple[Any, ...]]:
    """Returns the settings that differ, as in `RunComparison`."""
    steps = [_steps(report) for report in runs]
    shared = [name for name in steps[0] if all(name in found for found in steps)]
    rows = []
    for report, found in zip(runs, steps, strict=True):
        others = {name: value for name, value in report.recipe.items() if name not in (*TEXTS, "steps")}
        order = {"order of the steps": ", ".join(name for name in found if name in shared)}
        of_steps = {name: found[name][0] for name in shared}
        texts = {name: text for name, (_, text) in found.items() if name not in shared}
        rows.append(dict(_flat({**others, **order, **of_steps, **texts})))
    return _differing(rows)


def _steps(report: RunReport) -> dict[str, tuple[Any, str]]:
    """Returns the steps by kind, the second of a kind as "prune 2": their settings, and their text in the report."""
    found: dict[str, tuple[Any, str]] = {}
    for index, step in enumerate(report.recipe.get("steps") or ()):
        for kind, settings in step.items():
            number = 1 + sum(name.split(" ")[0] == kind for name in found)
            text = str(report.steps[index].get("name", "yes")) if index < len(report.steps) else "yes"
            found[kind if number == 1 else f"{kind} {number}"] = (settings, text)
    return found


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields ("steps[1].prune.epochs", 3) for each value inside mappings and lists of mappings."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flat(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, Sequence) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _flat(item, f"{path}[{index}]")
    else:
        yield path, value


def _differing(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Returns the keys whose values are not equal in all mappings, with the value in each; None for a missing one."""
    found = {name: tuple(row.get(name) for row in rows) for row in rows for name in row}
    return {name: values for name, values in found.items() if len({json.dumps(value) for value in values}) > 1}


def _notes(reports: Mapping[str, RunReport]) -> Iterator[str]:
    facts: dict[str, dict[str, Any]] = {
        "data": {name: report.hashes.get("data") for name, report in reports.items()},
        "main metric": {name: report.main and report.main.name for name, report in reports.items()},
        "version of prunekit": {name: report.versions.get("prunekit") for name, report in reports.items()},
        "version of Keras": {name: report.versions.get("keras") for name, report in reports.items()},
    }
    consequences = {
        "data": ": figures of different data are not comparable.",
        "main metric": ": runs without the first run's main metric have no place in the picture.",
    }
    for fact, values in facts.items():
        if len(set(values.values())) > 1:
            # Digests of data mean nothing to a reader.
            shown = "" if fact == "data" else f" ({', '.join(f'{name} {value}' for name, value in values.items())})"
            yield f"The runs differ in their {fact}{shown}{consequences.get(fact, '.')}"

"""Speed and size of a run's models: keeps a LiteRT file of each, and times the files when the run ends."""

import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import keras

from prunekit.core.runtime import environment
from prunekit.delivery.litert.gzip_size import gzip_size
from prunekit.delivery.litert.latency import (
    ConversionError,
    Latencies,
    ScriptFailed,
    input_arrays,
    measured_latencies,
    plain_file,
)
from prunekit.delivery.reports.rows import INTEGER_FORMAT, StageRow
from prunekit.operations.export import ExportRow
from prunekit.recipe.state.export_samples import export_samples, measures_all, metrics_on_samples, sample_count
from prunekit.recipe.state.run_inputs import RunInputs
from prunekit.recipe.state.run_state import RunState

# Duration of all measurements together.
_SECONDS = 2.0
_NOT_MEASURED = "Speed and size of the models were not measured"


class StageFiles:
    """Keeps LiteRT files of a run's models until they are timed.

    Only a recipe that exports a LiteRT file pays for the conversions.

    Args:
        run: Model, data and settings of the run.
        folder: Folder for the files, which outlives an interruption; None keeps none.
        steps: Indices of the steps that run.

    Attributes:
        reason: Why nothing is measured; "" if it is.
    """

    def __init__(self, run: RunInputs, folder: Path | None, steps: Collection[int]):
        self._run, self._folder = run, folder
        self._exported = _exported(run)
        formats = [name for index in steps for name in run.recipe.steps[index].settings.written_formats]
        self.reason = ""
        if keras.backend.backend() != "tensorflow":
            self.reason = (
                f"{_NOT_MEASURED}: LiteRT files are made with Keras's TensorFlow backend, and this run used "
                f"{keras.backend.backend()}."
            )
        elif folder is None or not any(name.startswith("litert") for name in formats):
            self.reason = f"{_NOT_MEASURED}: the recipe exports no LiteRT file."

    def keep_before(self, model: keras.Model, state: RunState) -> None:
        """Keeps the file of the model before the first pruning."""
        self._keep(StageRow("before", "before"), model, state)

    def keep_after(self, index: int, model: keras.Model, state: RunState) -> None:
        """Keeps the file of the model after a step, unless the step or an export step writes the model's file.

        Models of the steps before the first pruning are not kept.
        """
        kind = self._run.recipe.steps[index].kind
        if state.pruning_since is not None and index not in self._exported:
            self._keep(StageRow(f"after {index + 1}. {kind}", "step"), model, state)

    def _keep(self, row: StageRow, model: keras.Model, state: RunState) -> None:
        if self.reason or self._folder is None:
            return
        samples, _ = export_samples(model, self._run.data, self._run.recipe.seed)
        row = replace(row, metrics=metrics_on_samples(self._run, model, samples, state.metrics))
        try:
            content = plain_file(model, samples)
        except ConversionError as error:
            state.stages.append(replace(row, note=f"the conversion failed: {error}"))
            return
        name = f"{len(state.stages)}.tflite"
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / name).write_bytes(content)
        state.stages.append(replace(row, file=name, bytes=len(content), gzip_bytes=gzip_size([content])))

    def measured(self, model: keras.Model, state: RunState, exports: Path) -> tuple[list[StageRow], list[str]]:
        """Returns the rows of all models with their latencies, and notes on how they were measured.

        Args:
            model: The model at the end of the run.
            state: Results of the steps.
            exports: Folder of the exported files.
        """
        if self.reason or self._folder is None:
            return [], [self.reason]
        if not state.stages:
            return [], [f"{_NOT_MEASURED}: no step pruned the model or removed channels."]
        rows = [*state.stages, *_file_rows(state.exports)]
        paths = [(exports if row.kind == "file" else self._folder) / (row.file or "") for row in rows]
        timed = [index for index, path in enumerate(paths) if path.is_file()]
        notes = [f"{row.name}: {row.note}" for row in rows if row.note] + self._notes_on_metrics(rows)
        # One process of several times its files: together they would slow one another down.
        if not self._run.replicas.chief or not timed:
            return rows, notes
        inputs = input_arrays(model, export_samples(model, self._run.data, self._run.recipe.seed)[0])
        try:
            found = measured_latencies([paths[index] for index in timed], [inputs] * len(timed), _SECONDS)
        except ScriptFailed as failure:
            return rows, [*notes, f"Latency was not measured: a file converts, but {failure}."]
        for place, index in enumerate(timed):
            rows[index] = replace(rows[index], latency=found.seconds(place))
        return rows, [_conditions(len(next(iter(inputs.values()))), found), *notes]

    def _notes_on_metrics(self, rows: Sequence[StageRow]) -> list[str]:
        data = self._run.data
        if data is None or measures_all(data) or not any(row.metrics for row in rows):
            return []
        return [
            f"Metrics of all rows: on the first {sample_count(data):,} of {data.test.examples:,} test examples, as the "
            "exported files are measured."
        ]


def _exported(run: RunInputs) -> set[int]:
    """Returns the indices of the steps whose model an export step writes as the format "litert", and of quantize steps.

    The metrics after a quantize step are those of the integer file that it writes, not of the model in floating point.
    """
    found, last = set(), None
    for index, step in enumerate(run.recipe.steps):
        if step.settings.changes_weights:
            last = index
        if INTEGER_FORMAT in step.settings.written_formats:
            found.add(index)
        elif last is not None and "litert" in step.settings.written_formats:
            found.add(last)
    return found


def _file_rows(exports: Sequence[ExportRow]) -> list[StageRow]:
    """Returns a row for each exported LiteRT file that runs."""
    rows = [row for row in exports if row.status == "ok" and row.format.startswith("litert")]
    several = {row.format for row in rows if sum(row.format == other.format for other in rows) > 1}
    return [
        StageRow(
            f"{row.format}, {row.file}" if row.format in several else row.format,
            "file",
            _known(row.metrics),
            row.bytes,
            row.gzip_bytes,
            file=row.file,
        )
        for row in rows
    ]


def _known(metrics: Mapping[str, float] | None) -> dict[str, float]:
    return dict(metrics or {})


def _conditions(batch: int, found: Latencies) -> str:
    call = "1 example" if batch == 1 else f"{batch} examples"
    runtime = f"ai-edge-litert {environment.version_of('ai-edge-litert')}"
    return (
        f"Latency: median processor time of a call with {call}, {len(found.turns)} turns of all files, one thread, "
        f"{runtime}, on this machine ({platform.machine()})."
    )

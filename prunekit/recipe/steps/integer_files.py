"""Integer files that steps write, and the metrics before, in the simulation and of the file."""

from collections.abc import Mapping, Sequence
from typing import Any

from prunekit.anatomy.records.sections import Column, Section, Value
from prunekit.delivery.integers.integer_io import FloatEndError
from prunekit.delivery.integers.integer_report import IntegerExportError
from prunekit.delivery.integers.integer_writing import KnownOutputs, export_integers
from prunekit.delivery.reports.rows import INTEGER_FORMAT, ExportRow
from prunekit.recipe.state.export_samples import measures_all, metrics_on_samples
from prunekit.recipe.state.workspace import Workspace
from prunekit.recipe.steps.export_step import measure_of_files


def written_integers(  # noqa: PLR0913
    found: Any,
    samples: Any,
    floats: Any,
    workspace: Workspace,
    labels: Any,
    file: str,
    integer_io: Sequence[str] = (),
    *,
    sparse: bool = False,
) -> tuple[ExportRow, Sequence[Section], str]:
    """Writes the file of a quantized model; returns its row in the report, sections, and a line for the terminal.

    Args:
        found: The quantized model.
        samples: Test examples on which files are compared.
        floats: What the model before computes for them; None compares with the simulation alone.
        workspace: Metrics, and the folder of the file.
        labels: Classes of the samples, or None.
        file: Name of the file.
        integer_io: As for `export_integers`.
        sparse: As for `export_integers`.
    """
    target = workspace.exports / file
    try:
        made, answers = export_integers(
            found, samples, target, KnownOutputs(floats), labels, integer_io=integer_io, sparse=sparse
        )
    except (IntegerExportError, FloatEndError) as error:
        row = ExportRow(INTEGER_FORMAT, None, None, None, "failed", str(error), None, None, None)
        return row, [], f"the file failed: {error}"
    measure = measure_of_files(workspace)
    metrics = None if measure is None else measure(answers)
    compared = made.float_model or made.simulation
    row = ExportRow(
        INTEGER_FORMAT,
        target.name,
        made.bytes,
        made.gzip_bytes,
        "ok",
        "; ".join(made.notes),
        compared.max_error,
        compared.agreement,
        compared.accuracy,
        metrics,
    )
    return row, made.sections(), f"{found.report.verdict()} {target.name}: {made.bytes:,} bytes"


def metrics_before(workspace: Workspace, samples: Any) -> dict[str, float | None]:
    """Returns the metrics of the model before the step; unknown ones of a run that resumes inside the training."""
    known, run = workspace.state.metrics, workspace.run
    if workspace.step.resumed.epoch and not measures_all(run.data):
        return dict.fromkeys(known)
    return dict(metrics_on_samples(run, workspace.model, samples, known))


def metrics_sections(before: Mapping[str, float | None], simulated: dict[str, float], row: ExportRow) -> list[Section]:
    """Returns the table of the metrics of the float model, of the simulation and of the file."""
    if not before:
        return []
    in_file = row.metrics or {}
    rows: tuple[tuple[Value, ...], ...] = tuple(
        (name, value, simulated.get(name), in_file.get(name)) for name, value in before.items()
    )
    columns = (
        Column("Metric", "label"),
        Column("Before", "number"),
        Column("Simulated", "number"),
        Column("File", "number"),
    )
    explanation = (
        "Before: the model in floating point. Simulated: the model computes as the integer file. File: the file. All "
        "on the test examples on which exported files are compared."
    )
    return [Section("Metrics of the integer model", columns, rows, explanation=explanation)]

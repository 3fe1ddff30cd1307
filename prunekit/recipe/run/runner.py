"""Runs recipes: `compress` runs a recipe into a run directory, `verify` repeats a run and compares the weights."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.files.digests import architecture_digest, model_digest, weight_arrays
from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.sections import Section
from prunekit.core.runtime import environment
from prunekit.core.runtime.arguments import require_positive
from prunekit.core.runtime.partial_files import save_model
from prunekit.delivery.pages.html_report import render_html
from prunekit.delivery.reports.run_report import RunReport
from prunekit.delivery.reports.stages import with_measured_sizes
from prunekit.recipe.run.build_report import device_notes, report_of, versions
from prunekit.recipe.run.execution import Execution
from prunekit.recipe.run.plan import Plan, PlannedStep, PlannedTarget, plan
from prunekit.recipe.run.preparation import Prepared, prepare, settled_recipe
from prunekit.recipe.state.checkpoint import Checkpoints, note_start, start_differences
from prunekit.recipe.state.directory import (
    EXPORTS,
    LOCK,
    MODEL,
    PAGE,
    REPORT,
    check_output,
    check_run,
    clear_up,
    is_finished,
    read_report,
    run_directory,
    standing_at,
    unfinished,
)
from prunekit.recipe.state.models import check_model_file, load_model, load_weights
from prunekit.recipe.state.progress import Listener, Progress
from prunekit.recipe.state.replicas import distributed
from prunekit.recipe.steps.expectations import failure_text
from prunekit.recipe.text.loader import RecipeError, dump_recipe, load_recipe, located
from prunekit.recipe.text.presence import check_sources_kept
from prunekit.sparsity.arguments import check_functions

__all__ = [
    "ExpectationError",
    "Plan",
    "PlannedStep",
    "PlannedTarget",
    "Progress",
    "RunResult",
    "Verification",
    "compress",
    "plan",
    "verify",
]


@dataclass(frozen=True, eq=False)
class RunResult(Displayed):
    """Result of a run: the model, the report, and the run directory if this process wrote it.

    It is shown as its report is.
    """

    model: keras.Model
    report: RunReport
    directory: Path | None

    def verdict(self) -> str:
        """Returns the report in one sentence."""
        return self.report.verdict()

    def sections(self) -> tuple[Section, ...]:
        """Returns the sections of the report."""
        return self.report.sections()

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as strict JSON values."""
        return self.report.to_dict()

    def to_dataframe(self) -> Any:
        """Returns the weights as `RunReport.to_dataframe` does."""
        return self.report.to_dataframe()


class ExpectationError(Exception):
    """Raised when a run does not meet the recipe's expectations; its report and directory are complete.

    Attributes:
        result: Result of the run.
    """

    def __init__(self, message: str, result: RunResult):
        super().__init__(message)
        self.result = result


@dataclass(frozen=True)
class Verification:
    """Result of repeating a run: whether the weights are identical, and the differences.

    Attributes:
        identical: True if every weight has the same bytes, and the run started from the same model and data.
        differences: One line for each different weight and for each possible cause.
        directory: Path of the run directory.
    """

    identical: bool
    differences: tuple[str, ...]
    directory: Path

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON-compatible values."""
        return {**asdict(self), "directory": str(self.directory), "differences": list(self.differences)}


def compress(  # noqa: PLR0913
    recipe: Any,
    model: Any = None,
    data: Any = None,
    output: str | os.PathLike[str] | None = None,
    *,
    overrides: Mapping[str, object] | None = None,
    force: bool = False,
    resume: bool = False,
    checkpoint_every: int = 1,
    trust: bool = False,
    progress: Listener | None = None,
) -> RunResult:
    """Runs a recipe, after checking the recipe, model, data and output before any weight changes.

    With an output, the run saves checkpoints in `OUTPUT.unfinished`. An interrupted or killed run continues with
    `resume`, and gives the same bytes as a run without the interruption.

    Args:
        recipe: A path, the name of a built-in recipe, a mapping or a `Recipe`.
        model: Keras model, or path of a `.keras` file; replaces the recipe's model. A model given as an object is
            compiled, trained and pruned in place.
        data: ((train inputs, labels), (test inputs, labels)); replaces the recipe's data, used unchanged.
        output: Path of the run directory; None writes nothing.
        overrides: Values for variables that the recipe declares.
        force: True replaces an older run directory at `output` once the new run directory is complete, and deletes an
            unfinished run unless `resume` is set.
        resume: True continues the unfinished run into `output`, or starts a run if none exists. A finished run of the
            same recipe, model and data is returned.
        checkpoint_every: Epochs between checkpoints inside a step; each step ends with a checkpoint.
        trust: True allows importing and calling the Python factories that the recipe names.
        progress: Function called with a `Progress` at steps, at epochs and between them.

    Raises:
        RecipeError: The recipe, model, data or output is invalid; nothing has been trained or written.
        ExpectationError: The result does not meet an `expect` step.
        OSError: Writing failed, for example on a full disk, or another process of the run was lost
            (`ConnectionError`). The checkpoints are kept for `resume`.
    """
    check_functions(progress=progress)
    found = settled_recipe(recipe, model, data, overrides)
    if output is None and resume:
        raise RecipeError("`resume` needs the output directory of an unfinished run. Received: no `output`.")
    require_positive(checkpoint_every=checkpoint_every)
    path = None if output is None else check_output(output, force=force, resume=resume)
    if path is not None:
        check_sources_kept(found, path, unfinished(path))
    with distributed(found, progress) as replicas:
        with located(recipe):
            prepared = prepare(found, model, data, trust=trust, replicas=replicas)
        return _run(prepared, path, force=force, resume=resume, every=checkpoint_every, progress=progress)


def _run(
    prepared: Prepared, path: Path | None, *, force: bool, resume: bool, every: int, progress: Listener | None
) -> RunResult:
    replicas, hashes = prepared.replicas, _hashes_at_start(prepared)
    finished, standing = None, standing_at(path) if path is not None and resume else ""
    if path is not None and resume and is_finished(path):
        finished = _finished(path, prepared, hashes, force=force)
    options, seen = f"{path is None} {force} {resume} {every}", f"{finished is not None} {standing}"
    # Compare before any process changes the output folder, which the other processes read.
    replicas.agree({"model": hashes["model"], "data": hashes.get("data", ""), "options": options, "output": seen})
    # Only the chief writes. The other processes run the same steps, since replicas wait for one another.
    written = path if replicas.chief else None
    if finished is not None:
        if written is not None:
            clear_up(written)
        return _expected(replace(finished, directory=written), finished.report.failed)
    with _folder(written, force=force, resume=resume) as folder:
        reads = replicas.chief or bool(standing)
        checkpoints = None
        if path is not None:
            checkpoints = Checkpoints(unfinished(path), folder, every, replicas=replicas, reads=reads)
        with _with_checkpoint_hint(checkpoints):
            if checkpoints is not None and reads:
                note_start(checkpoints.folder, _start(prepared, hashes))
            kept = folder if written is None else unfinished(written)
            execution = Execution(prepared, folder / EXPORTS, progress, checkpoints=checkpoints, kept=kept)
            _tell_data_notes(prepared, progress)
            record = execution.run()
            record.notes += [*_data_notes(prepared), *device_notes(record), *replicas.notes()]
            report = report_of(prepared, execution.model, record, hashes, execution.workspace.metrics)
            rows, notes = execution.measured_stages()
            advice = with_measured_sizes(report.advice, rows)
            report = replace(report, stages=tuple(rows), stage_notes=tuple(notes), advice=advice)
            if written is not None:
                _write(folder, prepared, execution.model, report)
    return _expected(RunResult(execution.model, report, written), record.failures)


def _data_notes(prepared: Prepared) -> tuple[str, ...]:
    return () if prepared.data is None else prepared.data.notes


def _tell_data_notes(prepared: Prepared, progress: Listener | None) -> None:
    """Reports how the data were read and split at the start of the first step."""
    steps = prepared.recipe.steps
    if progress is not None:
        for note in _data_notes(prepared):
            progress(Progress(1, len(steps), steps[0].kind, 0.0, note))


def _expected(result: RunResult, failures: Sequence[dict[str, Any]]) -> RunResult:
    if failures:
        raise ExpectationError("; ".join(map(failure_text, failures)), result)
    return result


def _finished(path: Path, prepared: Prepared, hashes: Mapping[str, str], *, force: bool) -> RunResult | None:
    """Returns model and report of the finished run at `path`; None if `force` replaces another run.

    The model is the run's model with its final weights, or the saved model if steps of the recipe return new models.

    Raises:
        RecipeError: `path` holds a different run and `force` is False, or the run directory is damaged.
    """
    values = _recorded(path)
    # Compare the recipe itself instead of its digest, so that the message can name the difference.
    now = {**hashes, "recipe": prepared.recipe.model_dump(mode="json", exclude_none=True)}
    differences = start_differences({**values["hashes"], "recipe": values["recipe"]}, now)
    if differences and force:
        return None
    if differences:
        raise RecipeError(
            f"{path} holds a finished run with other settings: {'; '.join(differences)}. Choose another output "
            "directory, or replace it with --force (force=True)."
        )
    if any(step.settings.returns_new_model for step in prepared.recipe.steps):
        model = load_model(path / MODEL, prepared.models)
    else:
        model = prepared.model
        load_weights(model, path / MODEL)
    return RunResult(model, RunReport.from_dict(values), None)


def verify(
    directory: str | os.PathLike[str],
    *,
    model: Any = None,
    data: Any = None,
    trust: bool = False,
    progress: Listener | None = None,
) -> Verification:
    """Runs the locked recipe of a run directory again, and compares the weights byte by byte.

    Skips steps that change no weight (`export`, `expect`). Writes nothing.

    Args:
        directory: Run directory that `compress` wrote.
        model: Model with its weights from before the run; required if the run's model was given in Python.
        data: Data of the run; required if the run's data were given in Python.
        trust: As in `compress`.
        progress: As in `compress`.

    Raises:
        RecipeError: `directory` is not a run directory, or the run used a model or data that must be given in Python.
    """
    path = check_run(directory)
    # The report records whether data were given in Python; the recipe does not, so do not require data here.
    recipe = load_recipe(path / LOCK, data_given=True)
    recorded = _recorded(path)
    for what, value in {"model": model, "data": data}.items():
        if what in recorded["given"] and value is None:
            raise RecipeError(
                f"{directory} was made with {what} passed as Python objects, which are not saved. Verify it in Python, "
                f"with verify(directory, {what}=...)."
            )
    found = settled_recipe(recipe, model, data)
    with distributed(found, progress) as replicas:
        prepared = prepare(found, model, data, trust=trust, replicas=replicas)
        check_model_file(path / MODEL, prepared.models)
        hashes = _hashes_at_start(prepared)
        differences = [
            f"{what} {'is' if what == 'model' else 'are'} not what the run started from"
            for what in ("model", "data")
            if what in hashes and what in recorded["hashes"] and hashes[what] != recorded["hashes"][what]
        ]
        changing = [index for index, step in enumerate(recipe.steps) if step.settings.changes_weights]
        execution = Execution(prepared, path / EXPORTS, progress, only=changing)
        execution.run()
    now = weight_arrays(execution.model)
    load_weights(execution.model, path / MODEL)
    differences += _weight_differences(weight_arrays(execution.model), now)
    if differences:
        differences += _version_differences(recorded["versions"])
    return Verification(identical=not differences, differences=tuple(differences), directory=path)


# ---- the run directory -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _folder(path: Path | None, *, force: bool, resume: bool) -> Iterator[Path]:
    """Yields the folder that a run writes into: the future run directory, or a temporary folder if `path` is None."""
    if path is not None:
        with run_directory(path, force=force, resume=resume) as folder:
            yield folder
        return
    with tempfile.TemporaryDirectory(prefix="prunekit-") as name:
        yield Path(name)


@contextlib.contextmanager
def _with_checkpoint_hint(checkpoints: Checkpoints | None) -> Iterator[None]:
    """Adds the state of the checkpoints to the message of an OSError raised inside the block."""
    try:
        yield
    except OSError as error:
        if checkpoints is None:
            raise
        reason = error.strerror or (str(error).strip() or type(error).__name__).splitlines()[0]
        where = checkpoints.folder if error.filename is None else error.filename
        raise OSError(error.errno, f"{reason}. {checkpoints.kept()}", os.fspath(where)) from error


def _write(folder: Path, prepared: Prepared, model: keras.Model, report: RunReport) -> None:
    save_model(model, folder / MODEL)
    (folder / EXPORTS).mkdir(exist_ok=True)
    (folder / LOCK).write_text(dump_recipe(prepared.recipe), encoding="utf-8")
    values = {**report.to_dict(), "given": list(prepared.given)}
    (folder / REPORT).write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (folder / PAGE).write_text(render_html(report), encoding="utf-8")


def _recorded(path: Path) -> dict[str, Any]:
    values = read_report(path)
    found = dict(values) if isinstance(values, dict) else {}
    for name, default in (("recipe", {}), ("hashes", {}), ("versions", {}), ("given", [])):
        found[name] = values.get(name, default) if isinstance(values, dict) else None
        if type(found[name]) is not type(default):
            raise RecipeError(f"{path / REPORT} is damaged: the run's {name} is missing.")
    return found


def _hashes_at_start(prepared: Prepared) -> dict[str, str]:
    lock = dump_recipe(prepared.recipe)
    found = {"recipe": hashlib.sha256(lock.encode()).hexdigest(), "model": model_digest(prepared.model)}
    return found if prepared.data is None else {**found, "data": prepared.data.digest}


def _start(prepared: Prepared, hashes: Mapping[str, str]) -> dict[str, Any]:
    """Returns the values that an unfinished run is compared with before it resumes."""
    found = environment.versions()
    backend = keras.backend.backend()
    return {
        "recipe": prepared.recipe.model_dump(mode="json", exclude_none=True),
        "model": [hashes["model"], architecture_digest(prepared.model)],
        "data": hashes.get("data"),
        "versions": {
            "backend": backend,
            **{name: found[name] for name in ("python", "prunekit", "keras", "tensorflow", backend, "numpy")},
            **({} if prepared.replicas.kind is None else {"replicas": prepared.replicas.count}),
        },
    }


# ---- comparing -------------------------------------------------------------------------------------------------------


def _weight_differences(then: dict[str, np.ndarray], now: dict[str, np.ndarray]) -> list[str]:
    found = []
    for name, old in then.items():
        new = now[name]
        if old.tobytes() != new.tobytes():
            differing = int(np.count_nonzero(old != new))
            largest = float(np.max(np.abs(old.astype("float64") - new.astype("float64")), initial=0.0))
            found.append(f"{name}: {differing:,} of {old.size:,} values differ, by at most {largest:.3g}")
    return found


def _version_differences(then: Mapping[str, str]) -> list[str]:
    now = versions()
    return [
        f"the run was made with {name} {then[name]}, this is {now.get(name, 'unknown')}"
        for name in then
        if then[name] != now.get(name)
    ]

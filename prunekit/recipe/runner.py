"""Runs a recipe: `compress` from the start to a run directory, `verify` once more to compare."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from prunekit.core import environment
from prunekit.core.arguments import require_positive
from prunekit.delivery.html_report import render_html
from prunekit.delivery.terminal_report import RunReport
from prunekit.recipe.build_report import device_notes, report_of, versions
from prunekit.recipe.checkpoint import Checkpoints, note_start, start_differences
from prunekit.recipe.directory import (
    EXPORTS,
    LOCK,
    MODEL,
    PAGE,
    REPORT,
    check_output,
    check_run,
    clear_up,
    is_finished,
    run_directory,
    standing_at,
    unfinished,
)
from prunekit.recipe.execution import Execution
from prunekit.recipe.expectations import failure_text
from prunekit.recipe.loader import RecipeError, dump_recipe, load_recipe
from prunekit.recipe.models import architecture_digest, check_model_file, load_weights, model_digest, weight_arrays
from prunekit.recipe.plan import Plan, PlannedStep, PlannedTarget, plan
from prunekit.recipe.preparation import Prepared, prepare, settled_recipe
from prunekit.recipe.progress import Listener, Progress
from prunekit.recipe.read_report import read_report
from prunekit.recipe.replicas import distributed

__all__ = [
    "ExpectationFailed",
    "Plan",
    "PlannedStep",
    "PlannedTarget",
    "Progress",
    "Result",
    "Verification",
    "compress",
    "plan",
    "verify",
]


@dataclass(frozen=True, eq=False)
class Result:
    """What a run leaves: the model, the report, and the run directory where this process wrote one."""

    model: keras.Model
    report: RunReport
    directory: Path | None


class ExpectationFailed(Exception):
    """A run whose result is not what the recipe expects; its report and directory are whole all the same.

    Attributes:
        result: What the run left.
    """

    def __init__(self, message: str, result: Result):
        super().__init__(message)
        self.result = result


@dataclass(frozen=True)
class Verification:
    """Whether a locked recipe gave the same weights again, and where not.

    Attributes:
        identical: Every weight has the same bytes.
        differences: One line for each weight that differs, and for what could explain it.
        directory: The run directory.
    """

    identical: bool
    differences: tuple[str, ...]
    directory: Path

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
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
) -> Result:
    """Runs a recipe. Whatever can be refused is refused before a weight moves.

    With an output, the run is saved as it goes, in `OUTPUT.unfinished`. One that was interrupted or killed goes on with
    `resume`, and ends with the bytes with which it would have ended.

    Args:
        recipe: A path, the name of a built-in recipe, a mapping or a `Recipe`.
        model: A Keras model, or the path of a `.keras` file; instead of the recipe's. A model given as an object is
            compiled, trained and pruned in place.
        data: ((train inputs, labels), (test inputs, labels)); instead of the recipe's, used as they are.
        output: The run directory; None writes nothing.
        overrides: Values for variables that the recipe declares.
        force: An older run directory at `output` is replaced, once the new one is whole. An unfinished run is deleted,
            unless it is resumed.
        resume: Goes on with the unfinished run into `output`; begins where there is none. A finished run of the same
            recipe, model and data is returned.
        checkpoint_every: Epochs from one checkpoint inside a step to the next; each step ends with one.
        trust: Python factories that the recipe names may be imported and called.
        progress: Called with a `Progress` at steps, epochs and in between.

    Raises:
        RecipeError: A mistake in recipe, model, data or output; nothing has been trained and nothing written.
        ExpectationFailed: The result is not what an `expect` step asks for.
        OSError: The disk is full, say, or another process of the run was lost (`ConnectionError`). What was saved is
            kept, for `resume`.
    """
    found = settled_recipe(recipe, model, data, overrides)
    if output is None and resume:
        raise RecipeError("`resume` goes on with the run into an output directory. Received: no `output`.")
    require_positive(checkpoint_every=checkpoint_every)
    path = None if output is None else check_output(output, force=force, resume=resume)
    with distributed(found, progress) as replicas:
        prepared = prepare(found, model, data, trust=trust, replicas=replicas)
        return _run(prepared, path, force=force, resume=resume, every=checkpoint_every, progress=progress)


def _run(
    prepared: Prepared, path: Path | None, *, force: bool, resume: bool, every: int, progress: Listener | None
) -> Result:
    replicas, hashes = prepared.replicas, _hashes_at_start(prepared)
    finished, standing = None, standing_at(path) if path is not None and resume else ""
    if path is not None and resume and is_finished(path):
        finished = _finished(path, prepared, hashes, force=force)
    options, seen = f"{path is None} {force} {resume} {every}", f"{finished is not None} {standing}"
    # Before one of them changes what the others look at.
    replicas.agree({"model": hashes["model"], "data": hashes.get("data", ""), "options": options, "output": seen})
    # One process writes; the others run the same steps, since replicas wait for one another.
    written = path if replicas.chief else None
    if finished is not None:
        if written is not None:
            clear_up(written)
        return _expected(Result(prepared.model, finished, written), finished.failed)
    with _folder(written, force=force, resume=resume) as folder:
        reads = replicas.chief or bool(standing)
        checkpoints = None
        if path is not None:
            checkpoints = Checkpoints(unfinished(path), folder, every, replicas=replicas, reads=reads)
        with _disk_errors_told(checkpoints):
            if checkpoints is not None and reads:
                note_start(checkpoints.folder, _start(prepared, hashes))
            record = Execution(prepared, folder / EXPORTS, progress, checkpoints=checkpoints).run()
            record.notes += device_notes(record) + replicas.notes()
            report = report_of(prepared, record, hashes)
            if written is not None:
                _write(folder, prepared, report)
    return _expected(Result(prepared.model, report, written), record.failures)


def _expected(result: Result, failures: Sequence[dict[str, Any]]) -> Result:
    if failures:
        raise ExpectationFailed("; ".join(map(failure_text, failures)), result)
    return result


def _finished(path: Path, prepared: Prepared, hashes: Mapping[str, str], *, force: bool) -> RunReport | None:
    """The report of the finished run at `path`, whose weights the model has now; None where another run replaces it.

    Raises:
        RecipeError: It is another run's, and may not be replaced; it is damaged.
    """
    values = _recorded(path)
    # The recipe itself in the place of its digest, so that the difference can be named.
    now = {**hashes, "recipe": prepared.recipe.model_dump(mode="json", exclude_none=True)}
    differences = start_differences({**values["hashes"], "recipe": values["recipe"]}, now)
    if differences and force:
        return None
    if differences:
        raise RecipeError(
            f"{path} holds a finished run of something else: {'; '.join(differences)}. Choose another output "
            "directory, or replace it with --force."
        )
    load_weights(prepared.model, path / MODEL)
    return RunReport.from_dict(values)


def verify(
    directory: str | os.PathLike[str],
    *,
    model: Any = None,
    data: Any = None,
    trust: bool = False,
    progress: Listener | None = None,
) -> Verification:
    """Runs the locked recipe of a run directory once more, and compares the weights byte by byte.

    Steps that change no weight (`export`, `expect`) are left out. Nothing is written.

    Args:
        directory: What `compress` wrote.
        model: Needed where the run was given a model in Python; its weights as they were before that run.
        data: Needed where the run was given data in Python.
        trust: As in `compress`.
        progress: As in `compress`.

    Raises:
        RecipeError: It is not a run directory, or the run needs what only Python can give.
    """
    path = check_run(directory)
    check_model_file(path / MODEL)
    # What the run had is told by its report: the recipe alone cannot say that data were given in Python.
    recipe = load_recipe(path / LOCK, data_given=True)
    recorded = _recorded(path)
    for what, value in {"model": model, "data": data}.items():
        if what in recorded["given"] and value is None:
            raise RecipeError(
                f"{directory} was made with {what} given in Python, which no file holds: verify it there, with "
                f"verify(directory, {what}=...)."
            )
    found = settled_recipe(recipe, model, data)
    with distributed(found, progress) as replicas:
        prepared = prepare(found, model, data, trust=trust, replicas=replicas)
        hashes = _hashes_at_start(prepared)
        differences = [
            f"{what} {'is' if what == 'model' else 'are'} not what the run started from"
            for what in ("model", "data")
            if what in hashes and what in recorded["hashes"] and hashes[what] != recorded["hashes"][what]
        ]
        changing = [index for index, step in enumerate(recipe.steps) if step.trains or step.prune is not None]
        Execution(prepared, path / EXPORTS, progress, only=changing).run()
    now = weight_arrays(prepared.model)
    load_weights(prepared.model, path / MODEL)
    differences += _weight_differences(weight_arrays(prepared.model), now)
    if differences:
        differences += _version_differences(recorded["versions"])
    return Verification(identical=not differences, differences=tuple(differences), directory=path)


# ---- the run directory -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _folder(path: Path | None, *, force: bool, resume: bool) -> Iterator[Path]:
    """Where a run writes: a folder that becomes the run directory, or one that goes."""
    if path is not None:
        with run_directory(path, force=force, resume=resume) as folder:
            yield folder
        return
    with tempfile.TemporaryDirectory(prefix="prunekit-") as name:
        yield Path(name)


@contextlib.contextmanager
def _disk_errors_told(checkpoints: Checkpoints | None) -> Iterator[None]:
    """Inside, an error of the disk says in one line what became of the run."""
    try:
        yield
    except OSError as error:
        if checkpoints is None:
            raise
        reason = error.strerror or (str(error).strip() or type(error).__name__).splitlines()[0]
        where = checkpoints.folder if error.filename is None else error.filename
        raise OSError(error.errno, f"{reason}. {checkpoints.kept()}", os.fspath(where)) from error


def _write(folder: Path, prepared: Prepared, report: RunReport) -> None:
    prepared.model.save(folder / MODEL)
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
            raise RecipeError(f"{path / REPORT} is damaged: it does not say the run's {name}.")
    return found


def _hashes_at_start(prepared: Prepared) -> dict[str, str]:
    lock = dump_recipe(prepared.recipe)
    found = {"recipe": hashlib.sha256(lock.encode()).hexdigest(), "model": model_digest(prepared.model)}
    return found if prepared.data is None else {**found, "data": prepared.data.digest}


def _start(prepared: Prepared, hashes: Mapping[str, str]) -> dict[str, Any]:
    """What an unfinished run is proved to be the same by."""
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

"""Runs a recipe: `compress` from the start to a run directory, `verify` once more to compare."""

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.inspection import inspect
from prunekit.anatomy.targets import Skipped
from prunekit.delivery.export import runtime_advice
from prunekit.delivery.plots import MOST_HISTOGRAMS, weight_histogram
from prunekit.delivery.report import RunReport, compressed_sizes, render_html
from prunekit.recipe.directory import EXPORTS, LOCK, MODEL, PAGE, REPORT, check_output, check_run, run_directory
from prunekit.recipe.execution import Execution, Record, failure_text
from prunekit.recipe.loader import RecipeError, dump_recipe, load_recipe
from prunekit.recipe.models import model_digest, weight_arrays
from prunekit.recipe.plan import Plan, PlannedStep, PlannedTarget, plan
from prunekit.recipe.preparation import Prepared, prepare, settled_recipe
from prunekit.recipe.progress import Listener, Progress
from prunekit.sparsity.schedules import SCHEDULES
from prunekit.training import environment

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
    """What a run leaves: the model, the report, and the run directory where one was asked for."""

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
    trust: bool = False,
    progress: Listener | None = None,
) -> Result:
    """Runs a recipe. Whatever can be refused is refused before a weight moves.

    Args:
        recipe: A path, the name of a built-in recipe, a mapping or a `Recipe`.
        model: A Keras model, or the path of a `.keras` file; instead of the recipe's. A model given as an object is
            compiled, trained and pruned in place.
        data: ((train inputs, labels), (test inputs, labels)); instead of the recipe's, used as they are.
        output: The run directory; None writes nothing.
        overrides: Values for variables that the recipe declares.
        force: An older run directory at `output` is replaced, once the new one is whole.
        trust: Python factories that the recipe names may be imported and called.
        progress: Called with a `Progress` at steps, epochs and in between.

    Raises:
        RecipeError: A mistake in recipe, model, data or output; nothing has been trained and nothing written.
        ExpectationFailed: The result is not what an `expect` step asks for.
    """
    found = settled_recipe(recipe, model, data, overrides)
    path = None if output is None else check_output(output, force=force)
    prepared = prepare(found, model, data, trust=trust)
    with _folder(path, force=force) as folder:
        hashes = _hashes_at_start(prepared)
        record = Execution(prepared, folder / EXPORTS, progress).run()
        record.notes += _device_notes(record)
        report = _report(prepared, record, hashes)
        if path is not None:
            _write(folder, prepared, report)
    result = Result(prepared.model, report, None if output is None else Path(output))
    if record.failures:
        raise ExpectationFailed("; ".join(map(failure_text, record.failures)), result)
    return result


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
    # What the run had is told by its report: the recipe alone cannot say that data were given in Python.
    recipe = load_recipe(path / LOCK, data_given=True)
    recorded = _recorded(path)
    for what, value in {"model": model, "data": data}.items():
        if what in recorded["given"] and value is None:
            raise RecipeError(
                f"{directory} was made with {what} given in Python, which no file holds: verify it there, with "
                f"verify(directory, {what}=...)."
            )
    prepared = prepare(settled_recipe(recipe, model, data), model, data, trust=trust)
    hashes = _hashes_at_start(prepared)
    differences = [
        f"{what} {'is' if what == 'model' else 'are'} not what the run started from"
        for what in ("model", "data")
        if what in hashes and what in recorded["hashes"] and hashes[what] != recorded["hashes"][what]
    ]
    changing = [index for index, step in enumerate(recipe.steps) if step.trains or step.prune is not None]
    Execution(prepared, path / EXPORTS, progress, only=changing).run()
    now = weight_arrays(prepared.model)
    try:
        prepared.model.load_weights(path / MODEL)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise RecipeError(f"{path / MODEL} does not hold the weights of this recipe's model: {error}") from error
    differences += _weight_differences(weight_arrays(prepared.model), now)
    if differences:
        differences += _version_differences(recorded["versions"])
    return Verification(identical=not differences, differences=tuple(differences), directory=path)


# ---- the run directory -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _folder(path: Path | None, *, force: bool) -> Iterator[Path]:
    """Where a run writes: a temporary folder that becomes the run directory, or one that goes."""
    if path is not None:
        with run_directory(path, force=force) as folder:
            yield folder
        return
    with tempfile.TemporaryDirectory(prefix="prunekit-") as name:
        yield Path(name)


def _write(folder: Path, prepared: Prepared, report: RunReport) -> None:
    prepared.model.save(folder / MODEL)
    (folder / EXPORTS).mkdir(exist_ok=True)
    (folder / LOCK).write_text(dump_recipe(prepared.recipe), encoding="utf-8")
    values = {**report.to_dict(), "given": list(prepared.given)}
    (folder / REPORT).write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (folder / PAGE).write_text(render_html(report), encoding="utf-8")


def _recorded(path: Path) -> dict[str, Any]:
    try:
        values = json.loads((path / REPORT).read_text(encoding="utf-8"))
        return {name: values.get(name, default) for name, default in (("hashes", {}), ("versions", {}), ("given", []))}
    except (ValueError, AttributeError) as error:
        raise RecipeError(f"{path / REPORT} is damaged: {error}.") from error


# ---- the report ------------------------------------------------------------------------------------------------------


def _report(prepared: Prepared, record: Record, hashes: dict[str, str]) -> RunReport:
    recipe = prepared.recipe
    after = dataclasses.replace(
        inspect(prepared.model),
        targets=tuple(record.targets),
        skipped=_skipped(record),
        events=tuple(record.events),
        notes=tuple(record.notes),
    )
    now = weight_arrays(prepared.model)
    metrics = {"accuracy_before": record.accuracy_before, "accuracy_after": record.accuracy}
    return RunReport(
        title=recipe.name,
        recipe=recipe.model_dump(mode="json", exclude_none=True),
        versions=versions(),
        seed=recipe.seed,
        steps=tuple(record.steps),
        before=record.before,
        after=after,
        metrics={name: value for name, value in metrics.items() if value is not None},
        schedule=_schedule(prepared),
        events=tuple(record.events),
        curve=tuple(record.curve),
        exports=tuple(record.exports),
        expectations=tuple(record.expectations),
        histograms=_histograms(now, record),
        hashes={**hashes, "weights": model_digest(prepared.model)},
        notes=tuple(record.notes),
        advice=tuple(runtime_advice(after, prepared.model)),
        compressed=compressed_sizes(record.weights_before, now),
        changes=record.changes,
    )


def _skipped(record: Record) -> tuple[Skipped, ...]:
    return tuple(item for name, item in record.skipped.items() if name not in record.targets)


def _schedule(prepared: Prepared) -> dict[str, Any] | None:
    """The first prune step's schedule, in optimizer updates."""
    for index in sorted(prepared.pruning):
        schedule = prepared.pruning[index].schedule
        kind = next(name for name, kind in SCHEDULES.items() if kind is type(schedule))
        return {"type": kind, **asdict(schedule)}  # type: ignore[call-overload]
    return None


def _histograms(now: Mapping[str, np.ndarray], record: Record) -> dict[str, dict[str, Any]]:
    largest = sorted(record.targets, key=lambda name: -now[name].size)[:MOST_HISTOGRAMS]
    chosen = [name for name in now if name in largest and name in record.weights_before]
    return {name: weight_histogram(record.weights_before[name], now[name]) for name in chosen}


def _hashes_at_start(prepared: Prepared) -> dict[str, str]:
    lock = dump_recipe(prepared.recipe)
    found = {"recipe": hashlib.sha256(lock.encode()).hexdigest(), "model": model_digest(prepared.model)}
    return found if prepared.data is None else {**found, "data": prepared.data.digest}


def _device_notes(record: Record) -> list[str]:
    if not any(step["history"] for step in record.steps) or not _gpus():
        return []
    return [
        "Trained with a GPU in sight, where sums may run in another order each time: the same recipe and seed give the "
        "same bytes of weights on processors only."
    ]


def _gpus() -> list[str]:
    try:
        return keras.distribution.list_devices("gpu")
    except (NotImplementedError, RuntimeError):
        # The PyTorch backend has no such list, and JAX raises where there is no such platform.
        return []


def versions() -> dict[str, str]:
    """What a run's result depends on besides the recipe."""
    packages = environment.versions()
    taking_part = ("python", "prunekit", "keras", "tensorflow", "numpy")
    return {
        **{name: packages[name] or "not installed" for name in taking_part},
        "backend": keras.backend.backend(),
        "platform": platform.platform(),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
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

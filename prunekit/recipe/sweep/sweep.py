"""Runs a recipe over a grid of values; writes a run directory per point, and one table and picture of all points."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prunekit.core.runtime.partial_files import checked_folder, replace_file, replace_json
from prunekit.core.runtime.ray_tasks import load_ray
from prunekit.delivery.plots.plots import to_png
from prunekit.delivery.plots.sweep_plot import sweep_figure
from prunekit.delivery.reports.run_report import RunReport
from prunekit.delivery.reports.sweeps import SMALLEST, WEIGHTS, SweepReport, Swept, SweptPoint, sweep_csv, swept_point
from prunekit.recipe.datasets import data as data_module
from prunekit.recipe.run.preparation import settled_recipe
from prunekit.recipe.settings.fields import nearest, shown
from prunekit.recipe.settings.schema import Recipe, Variable
from prunekit.recipe.state.directory import LOCK, REPORT, check_output, check_run, read_report, unfinished
from prunekit.recipe.sweep import workers
from prunekit.recipe.sweep.sweep_process import NOT_MET, Ending, Task
from prunekit.recipe.sweep.workers import Jobs
from prunekit.recipe.text.grid import Point, grid
from prunekit.recipe.text.loader import RecipeError, dump_recipe, load_recipe, require_trust
from prunekit.recipe.text.presence import check_sources_kept
from prunekit.recipe.text.yaml_reader import first_difference
from prunekit.sparsity.arguments import check_functions

TABLE = "sweep.json"
SHEET = "sweep.csv"
PICTURE = "sweep.png"
_RECIPES = "recipes"
_LOGS = "logs"
_LOCKED = ".sweep.lock"


def sweep(  # noqa: PLR0913
    recipe: str | os.PathLike[str] | Mapping[str, Any],
    over: Mapping[str, Iterable[Variable]],
    output: str | os.PathLike[str],
    *,
    overrides: Mapping[str, Any] | None = None,
    model: str | os.PathLike[str] | None = None,
    jobs: int | Jobs = 1,
    size: str | None = None,
    trust: bool = False,
    force: bool = False,
    progress: Callable[[Swept], None] | None = None,
) -> SweepReport:
    """Runs a recipe at every combination of values; does not repeat points that are finished at `output`.

    Args:
        recipe: Path of a recipe file, name of a built-in recipe, or mapping.
        over: Name of a variable that the recipe declares -> values of the variable.
        output: Folder for the run directories, the table (sweep.json, sweep.csv) and the picture (sweep.png).
        overrides: Values of other variables, equal at every point.
        model: Path of a `.keras` file; replaces the recipe's model.
        jobs: Number of simultaneous points on this machine, or a `Jobs` object.
        size: Size that the points are compared by: "smallest" (smallest exported file other than the Keras file), a
            format, a format after gzip ("litert-gzip"), or "weights-gzip". None means "smallest" if every point
            exports a file other than the Keras file, else "weights-gzip".
        trust: True allows importing and calling the Python factories that the recipe names.
        force: True replaces points made with another recipe by new runs.
        progress: Function called with a `Swept` each time a point has ended.

    Raises:
        RecipeError: The recipe, values, model or output is invalid; nothing was run.
        ImportError: `jobs` requires Ray, which is not installed.
    """
    check_functions(progress=progress)
    points = grid(recipe, over, overrides)
    return run_points(
        points, output, model=model, jobs=jobs, size=size, trust=trust, force=force, progress=progress
    )  # fmt: skip


def run_points(  # noqa: PLR0913
    points: Sequence[Point],
    output: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | None = None,
    jobs: int | Jobs = 1,
    size: str | None = None,
    trust: bool = False,
    force: bool = False,
    progress: Callable[[Swept], None] | None = None,
) -> SweepReport:
    """Runs the points from `grid`; otherwise the same as `sweep`."""
    jobs = jobs if isinstance(jobs, Jobs) else Jobs(at_once=jobs)
    if model is not None and not isinstance(model, str | os.PathLike):
        raise TypeError(
            "a sweep runs its points in other processes, so `model` must be the path of a .keras file. "
            f"Received: {type(model).__name__}."
        )
    if jobs.by_ray:
        load_ray(workers.PURPOSE)
    points = [_settled(point, model, trust) for point in points]
    size = _size(size, points)
    folder = _checked_folder(output)
    tables = [folder / name for name in (TABLE, SHEET, PICTURE)]
    for one in points:
        check_sources_kept(one.recipe, folder / one.name, unfinished(folder / one.name), *tables)
    with _alone(folder):
        known = _known(points, folder, size, force)
        report = SweepReport(points[0].recipe.name, folder, _over(points), size, known)
        _write_tables(report)
        tell = progress or (lambda event: None)
        for ended, point in enumerate(_ended(known), start=1):
            tell(Swept(point, ended, len(points)))
        waiting = [index for index, point in enumerate(known) if point.outcome == "waiting"]
        tasks = [_task(points[index], folder, trust, force) for index in waiting]
        with contextlib.closing(workers.endings(tasks, jobs)) as endings:
            for number, ending in endings:
                index = waiting[number]
                swept = _outcome(points[index], folder, size, ending)
                report = replace(report, points=(*report.points[:index], swept, *report.points[index + 1 :]))
                _write_tables(report)
                tell(Swept(swept, len(_ended(report.points)), len(points)))
        _draw(report)
        with contextlib.suppress(OSError):
            # Removes the folder only if it is empty, that is, if no point failed and left a log.
            (folder / _LOGS).rmdir()
    return report


def _over(points: Sequence[Point]) -> dict[str, list[Variable]]:
    # Key by type and value: 1 and True are the same dictionary key.
    found: dict[str, dict[tuple[type, Variable], Variable]] = {name: {} for name in points[0].values}
    for point in points:
        for name, value in point.values.items():
            found[name][type(value), value] = value
    return {name: list(values.values()) for name, values in found.items()}


def _ended(points: Sequence[SweptPoint]) -> list[SweptPoint]:
    return [point for point in points if point.outcome != "waiting"]


# ---- before anything runs --------------------------------------------------------------------------------------------


def _settled(point: Point, model: Any, trust: bool) -> Point:
    recipe = settled_recipe(point.recipe, model)
    if recipe.data is not None:
        data_module.check_files(recipe.data)
    require_trust(recipe, trust)
    return replace(point, recipe=recipe)


def _size(size: str | None, points: Sequence[Point]) -> str:
    formats = [_formats(point.recipe) for point in points]
    common = [name for name in formats[0] if all(name in others for others in formats)]
    files = all(any(name != "keras" for name in names) for names in formats)
    if size is None:
        return SMALLEST if files else WEIGHTS
    valid = [SMALLEST] if all(formats) else []
    valid += [WEIGHTS, *(f"{name}{end}" for name in common for end in ("", "-gzip"))]
    if size not in valid:
        raise RecipeError(f"size {shown(size)} is not written by every point of this recipe.{nearest(size, valid)}")
    return size


def _formats(recipe: Recipe) -> list[str]:
    return list(dict.fromkeys(name for step in recipe.steps for name in step.settings.written_formats))


def _checked_folder(output: str | os.PathLike[str]) -> Path:
    try:
        path = checked_folder(output, "sweep", (TABLE, SHEET, PICTURE))
    except ValueError as error:
        raise RecipeError(str(error)) from None
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Locks the folder against a second sweep; the system releases the lock whenever this process ends."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (folder / _LOCKED).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecipeError(f"another sweep is running on {folder}: wait for it, or choose another folder.") from None
        except OSError:
            # Some network file systems do not support locks.
            pass
        yield


def _known(points: Sequence[Point], folder: Path, size: str, force: bool) -> tuple[SweptPoint, ...]:
    """Returns every point with its present outcome: finished or waiting."""
    found = []
    for point in points:
        finished = _is_finished(point, folder / point.name, force)
        found.append(_read(point, folder, size) if finished else SweptPoint(point.name, dict(point.values)))
    return tuple(found)


def _is_finished(point: Point, path: Path, force: bool) -> bool:
    if not path.exists():
        return False
    try:
        check_run(path)
        locked = load_recipe(path / LOCK, data_given=True)
    except RecipeError:
        if not force:
            raise
        check_output(path, force=True)
        return False
    difference = first_difference(locked.model_dump(mode="json"), point.recipe.model_dump(mode="json"))
    if difference is None:
        return True
    if force:
        return False
    place, then, now = difference
    raise RecipeError(
        f"{path} was made with another recipe: {place} was {shown(then)} then, and is {shown(now)} now. "
        "Choose another output directory, or run such points again with --force (force=True)."
    )


# ---- one point -------------------------------------------------------------------------------------------------------


def _task(point: Point, folder: Path, trust: bool, force: bool) -> Task:
    """Returns the task of a point; writes its recipe now, so later edits of the recipe file have no effect."""
    recipe = folder / _RECIPES / f"{point.name}.yaml"
    log = folder / _LOGS / f"{point.name}.log"
    for path in (recipe, log):
        path.parent.mkdir(exist_ok=True)
    replace_file(recipe, dump_recipe(point.recipe).encode())
    return Task(str(recipe), str(folder / point.name), str(log), trust=trust, force=force)


def _outcome(point: Point, folder: Path, size: str, ending: Ending) -> SweptPoint:
    reason = ending.reason
    if ending.code in (0, NOT_MET):
        try:
            return _read(point, folder, size)
        except RecipeError as error:
            reason = error.message
    return SweptPoint(point.name, dict(point.values), "failed", reason)


def _read(point: Point, folder: Path, size: str) -> SweptPoint:
    path = check_run(folder / point.name)
    try:
        report = RunReport.from_dict(read_report(path))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RecipeError(
            f"{path / REPORT} is damaged: {error}. Remove that run directory; the sweep then runs the point again."
        ) from error
    return swept_point(point.name, point.values, report, size)


# ---- table and picture -----------------------------------------------------------------------------------------------


def _write_tables(report: SweepReport) -> None:
    replace_json(report.directory / TABLE, report.to_dict())
    replace_file(report.directory / SHEET, sweep_csv(report).encode("utf-8", "backslashreplace"))


def _draw(report: SweepReport) -> None:
    if report.pareto:
        replace_file(report.directory / PICTURE, to_png(sweep_figure(report)))
    else:
        # A picture of an earlier sweep would be mistaken for this sweep's picture.
        (report.directory / PICTURE).unlink(missing_ok=True)

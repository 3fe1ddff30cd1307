"""The command line: prunekit compress | sweep | check | inspect | report | verify | recipes | convert | doctor.

Keras, TensorFlow, pydantic and rich are imported inside the commands that use them: --help starts fast.
Exit codes: 0 success; 1 an expectation was not met, a point of a sweep failed, a run was not reproduced or an
essential feature is missing; 2 a user error (one line); 70 a defect of prunekit (with a traceback).
"""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prunekit.options import (
    AtLeast,
    grid_option,
    input_shape_option,
    json_option,
    model_option,
    recipe_argument,
    set_option,
    trust_option,
)
from prunekit.terminal import TRACEBACK, Display, console, load_keras_quietly, show_point, warnings_in_lines
from prunekit.version import __version__

if TYPE_CHECKING:
    from prunekit.recipe.schema import Recipe

DEFECT = 70


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and ends the process with its exit code."""
    try:
        code = run(arguments)
    except Exception:  # noqa: BLE001
        # Python's own exit code would be 1, which has another meaning here.
        traceback.print_exc()
        code = DEFECT
    sys.exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: Arguments after `prunekit`; None means the arguments of the process.

    Returns:
        The exit code.
    """
    try:
        with warnings_in_lines():
            code = cli.main(
                args=None if arguments is None else list(arguments), prog_name="prunekit", standalone_mode=False
            )
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        return 2
    except click.ClickException as error:
        return _mistake(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        click.echo("error: interrupted.", err=True)
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has closed the pipe; without this, Python reports the error again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        _traceback_wanted()
        return _mistake(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except (ValueError, TypeError, ImportError) as error:
        _traceback_wanted()
        return _mistake(str(error) or type(error).__name__)


def _no_run(directory: str, reason: str) -> click.UsageError:
    from prunekit.recipe.directory import kept_checkpoints_line

    return click.UsageError(f"{directory}: {reason}. {kept_checkpoints_line(directory)}".rstrip())


def _mistake(message: str) -> int:
    from prunekit.recipe.yaml_reader import one_line

    click.echo(f"error: {one_line(message)}", err=True)
    return 2


def _traceback_wanted() -> None:
    """Re-raises the exception being handled where the environment asks for tracebacks."""
    if os.environ.get(TRACEBACK):
        raise


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"prunekit {__version__}")
        context.exit()


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=f"Set {TRACEBACK}=1 to see the traceback of an error.",
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Version.")
def cli() -> None:
    """Prunes Keras models; pruned weights stay exactly zero during training and in exported files."""


@cli.command()
@recipe_argument
@click.option("-o", "--output", metavar="DIR", help="The run directory.  [default: runs/NAME-OF-RECIPE]")
@set_option
@model_option
@click.option("--dry-run", is_flag=True, help="Print the plan; train nothing, write nothing.")
@click.option("--force", is_flag=True, help="Replace an existing run directory; restart an unfinished run.")
@click.option("--resume", is_flag=True, help="Resume the unfinished run of that directory, if there is one.")
@click.option(
    "--checkpoint-every",
    metavar="EPOCHS",
    type=AtLeast(1),
    default=1,
    help="Epochs between checkpoints inside a step.  [default: 1]",
)
@trust_option
@json_option
def compress(recipe: str, output: str | None, dry_run: bool, as_json: bool, **options: Any) -> int:
    """Run a recipe.

    RECIPE is a file, or the name of a built-in recipe such as digits."""
    from prunekit.recipe.loader import load_recipe

    model, overrides = options.pop("model"), options.pop("overrides")
    if dry_run:
        return _print_plan(recipe, as_json, overrides, model, options["trust"])
    loaded = load_recipe(recipe, overrides)
    _check_model(loaded, model)
    load_keras_quietly()
    from prunekit.delivery.terminal_report import render_terminal
    from prunekit.recipe import runner
    from prunekit.recipe.directory import kept_checkpoints_line

    directory = os.path.join("runs", loaded.name) if output is None else output
    failure: runner.ExpectationFailed | None = None
    with Display() as display:
        try:
            result = runner.compress(loaded, model, None, directory, progress=display, **options)
        except runner.ExpectationFailed as error:
            failure, result = error, error.result
        except KeyboardInterrupt:
            click.echo(kept_checkpoints_line(directory), err=True, nl=False)
            raise
    if as_json:
        _print_json(
            {
                "directory": result.directory and str(result.directory),
                "met": failure is None,
                "report": result.report.to_dict(),
            }
        )
    else:
        render_terminal(result.report, console())
        written = f"Written to {result.directory}; open {result.directory}/report.html in a browser."
        click.echo(
            f"\n{written}"
            if result.directory is not None
            else "\nThe chief process writes the run directory; this process is not the chief."
        )
    if failure is not None:
        click.echo(f"error: expectation not met: {failure}", err=True)
        return 1
    return 0


@cli.command()
@recipe_argument
@grid_option
@set_option
@click.option("-o", "--output", metavar="DIR", help="Folder of the sweep.  [default: runs/NAME-OF-RECIPE-sweep]")
@model_option
@click.option("--jobs", type=AtLeast(1), help="Number of simultaneous points.  [default: 1; with --ray: all that fit]")
@click.option("--threads", type=AtLeast(1), help="Compute threads of each point; with --ray, CPUs of each point.")
@click.option("--ray", is_flag=False, flag_value="", metavar="[ADDRESS]", help="Run on a Ray cluster.")
@click.option("--gpus", type=click.FloatRange(0), default=0.0, help="With --ray: GPUs of each point.")
@click.option("--size", metavar="FORMAT", help="Size to compare: that of FORMAT, FORMAT-gzip or weights-gzip.")
@click.option("--force", is_flag=True, help="Repeat points that were made with another recipe.")
@trust_option
@json_option
def sweep(recipe: str, over: dict[str, list[Any]], overrides: dict[str, Any], as_json: bool, **options: Any) -> int:
    """Run a recipe at each combination of values.

    RECIPE is a file, or the name of a built-in recipe such as digits. Finished points are not run again. The
    exit code is 1 if a point failed or did not meet an expectation."""
    from prunekit.recipe.grid import grid

    points = grid(recipe, over, overrides)
    _check_model(points[0].recipe, options["model"])
    load_keras_quietly()
    from prunekit.delivery.sweeps import show_sweep
    from prunekit.recipe.sweep import PICTURE, run_points
    from prunekit.recipe.workers import Jobs

    output = options.pop("output")
    output = os.path.join("runs", f"{points[0].recipe.name}-sweep") if output is None else output
    at_once, threads, ray, gpus = (options.pop(name) for name in ("jobs", "threads", "ray", "gpus"))
    jobs = Jobs(at_once=at_once, threads=threads, ray=ray or ray is not None, gpus=gpus)
    report = run_points(points, output, jobs=jobs, progress=show_point, **options)
    if as_json:
        _print_json(report.to_dict())
    else:
        show_sweep(report, console())
        click.echo(f"\nWritten to {output}" + (f"; the picture is {output}/{PICTURE}." if report.pareto else "."))
    return 0 if report.complete else 1


@cli.command()
@recipe_argument
@click.option("--plan", "with_plan", is_flag=True, help="Also build the model and the data, and print every target.")
@set_option
@model_option
@trust_option
@json_option
def check(recipe: str, with_plan: bool, as_json: bool, **options: Any) -> int:
    """Check a recipe for errors.

    RECIPE is a file, or the name of a built-in recipe such as digits. The files that the recipe
    names must exist; no step is run."""
    from prunekit.recipe.loader import RecipeError, load_recipe
    from prunekit.recipe.presence import check_named_files

    if not with_plan and (options["model"] or options["trust"]):
        raise click.UsageError("--model and --trust need --plan, which builds the model.")
    try:
        loaded = load_recipe(recipe, options["overrides"])
        if not with_plan:
            # A plan reads the named files itself, and --model may replace the recipe's model.
            check_named_files(loaded, recipe)
    except RecipeError as error:
        if as_json:
            place = {"source": error.source, "line": error.line, "column": error.column}
            _print_json({"ok": False, "error": {"message": error.message, **place}})
        raise
    if with_plan:
        return _print_plan(recipe, as_json, **options)
    if as_json:
        _print_json({"ok": True, "recipe": loaded.model_dump(mode="json", exclude_none=True)})
        return 0
    from prunekit.recipe.summary import source_text, step_text

    kinds = ", ".join(step.kind for step in loaded.steps)
    click.echo(f"OK: {loaded.name}, {len(loaded.steps)} step{'s' if len(loaded.steps) > 1 else ''} ({kinds})")
    click.echo(f"  model: {source_text(loaded, 'model') or 'none; pass --model FILE'}")
    click.echo(f"  data: {source_text(loaded, 'data') or 'none'}")
    if loaded.distribute is not None:
        click.echo(f"  distribute: {loaded.distribute}")
    for i, step in enumerate(loaded.steps, start=1):
        click.echo(f"  {i}. {step_text(step)}")
    return 0


@cli.command()
@click.argument("model")
@input_shape_option
@json_option
def inspect(model: str, inputs: Any, as_json: bool) -> int:
    """Show the weights of a model.

    MODEL is a .keras file. The table has zeros, pattern, multiplications and bytes of each weight. The multiplications
    of a model whose inputs have no fixed size need --input-shape."""
    if not Path(model).is_file():
        raise click.UsageError(f"{model}: no such file.")
    load_keras_quietly()
    from prunekit.anatomy.inspection import inspect as inspect_model
    from prunekit.anatomy.model_files import load_model

    # Not compiled: a custom loss or metric must not prevent the inspection.
    report = inspect_model(load_model(model, compile=False), inputs=inputs)
    if as_json:
        _print_json(report.to_dict())
        return 0
    from prunekit.delivery.terminal_report import inspect_table

    console().print(inspect_table(report))
    for note in report.notes:
        click.echo(f"note: {note}")
    return 0


@cli.command()
@click.argument("directory", metavar="RUN")
@json_option
def report(directory: str, as_json: bool) -> int:
    """Show the report of a run.

    RUN is a run directory written by compress."""
    file = Path(directory) / "report.json"
    if not file.is_file():
        raise _no_run(directory, "not a run directory (no report.json in it)")
    from prunekit.recipe.read_report import read_report

    data = read_report(directory)
    if as_json:
        _print_json(data)
        return 0
    from prunekit.delivery.run_report import RunReport
    from prunekit.delivery.terminal_report import render_terminal

    terminal = console()
    try:
        # Capture the whole output first: an error may occur only in the report's last line.
        with terminal.capture() as captured:
            render_terminal(RunReport.from_dict(data), terminal)
    except (KeyError, IndexError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise click.UsageError(f"{file}: not a report that this version of prunekit reads: {reason}") from error
    click.echo(captured.get(), nl=False)
    page = Path(directory) / "report.html"
    if page.is_file():
        click.echo(f"\nWith pictures: {page}")
    return 0


@cli.command()
@click.argument("directory", metavar="RUN")
@trust_option
@json_option
def verify(directory: str, trust: bool, as_json: bool) -> int:
    """Repeat a run and compare the results.

    RUN is a run directory written by compress. Its locked recipe is run again. The exit code is 0 if the
    results are bit-identical on this machine, and 1 otherwise."""
    if not Path(directory).is_dir():
        raise _no_run(directory, "no such directory")
    load_keras_quietly()
    from prunekit.recipe import runner

    with Display() as display:
        outcome = runner.verify(directory, trust=trust, progress=display)
    if as_json:
        _print_json(outcome.to_dict())
    elif outcome.identical:
        click.echo(f"{directory}: reproduced, bit for bit.")
    else:
        click.echo(f"{directory}: NOT reproduced:")
        for difference in outcome.differences:
            click.echo(f"  {difference}")
    return 0 if outcome.identical else 1


@cli.command()
@click.argument("name", required=False)
@click.option("-o", "--output", metavar="PATH", help="Copy the recipe NAME to this file or folder.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@json_option
def recipes(name: str | None, output: str | None, force: bool, as_json: bool) -> int:
    """List built-in recipes.

    With NAME, print that recipe, or copy it to a file (-o)."""
    from prunekit.recipe.fields import nearest
    from prunekit.recipe.loader import builtin_recipes, load_recipe

    found = builtin_recipes()
    if name is None:
        if output is not None or force:
            raise click.UsageError("to copy a recipe, name it: prunekit recipes NAME -o PATH.")
        rows = [{"name": key, "description": load_recipe(path).description} for key, path in found.items()]
        if as_json:
            _print_json([row | {"path": str(found[row["name"]])} for row in rows])
        else:
            width = max((len(key) for key in found), default=0)
            for row in rows:
                click.echo(f"{row['name']:<{width}}  {row['description']}")
        return 0
    if name not in found:
        raise click.UsageError(f"no built-in recipe {name!r}.{nearest(name, found)}")
    text = found[name].read_text(encoding="utf-8")
    if output is None:
        click.echo(json.dumps({"name": name, "text": text}) if as_json else text.rstrip("\n"))
        return 0
    if not output.strip():
        raise click.UsageError("-o takes a file or a folder. Received: an empty name.")
    target = Path(output)
    target = target / f"{name}.yaml" if target.is_dir() or output.endswith(os.sep) else target
    _copy(text, target, force)
    click.echo(json.dumps({"name": name, "path": str(target)}) if as_json else f"Copied to {target}")
    return 0


@cli.command()
@click.argument("old")
@click.argument("new", metavar="NEW.keras")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@json_option
def convert(old: str, new: str, force: bool, as_json: bool) -> int:
    """Convert a tf_keras model to Keras 3.

    OLD is a .h5, .hdf5 or .keras file or a SavedModel folder. Wrappers of tensorflow-model-optimization are
    removed; their settings, and the parts that cannot be converted, are printed."""
    load_keras_quietly()
    from prunekit.interop.tfmot.conversion import convert as convert_model

    converted = convert_model(old, new, force=force)
    if as_json:
        _print_json({"path": new, **converted.to_dict()})
    else:
        click.echo(f"{converted}\nWritten to {new}")
    return 0


@cli.command()
@json_option
def doctor(as_json: bool) -> int:
    """Check which features run on this machine.

    Missing features are listed with a remedy. The exit code is 1 if models cannot be pruned and trained here."""
    # If Keras does not start, `examine` reports the reason.
    with contextlib.suppress(Exception):
        load_keras_quietly()
    from prunekit.doctor import examine, show_examination

    found = examine()
    if as_json:
        _print_json(found.to_dict())
    else:
        show_examination(found, console())
    return 0 if found.ok else 1


def _copy(text: str, target: Path, force: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with target.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise click.UsageError(f"{target} exists already. Pass --force to replace it.") from None


def _check_model(recipe: "Recipe", model: str | None) -> None:
    if recipe.model is None and model is None:
        raise click.UsageError(f"recipe {recipe.name!r} names no model. Pass --model FILE.")


def _print_plan(recipe: str, as_json: bool, overrides: dict[str, Any], model: str | None, trust: bool) -> int:
    from prunekit.recipe.loader import load_recipe

    loaded = load_recipe(recipe, overrides)
    _check_model(loaded, model)
    load_keras_quietly()
    from prunekit.recipe import runner

    plan = runner.plan(loaded, model, None, trust=trust)
    if as_json:
        _print_json(plan.to_dict())
    else:
        from prunekit.recipe.plan import show_plan

        show_plan(plan, console())
    return 0


def _print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2, ensure_ascii=True))


if __name__ == "__main__":
    main()

"""Commands that run recipes, or check them: compress, sweep, check, verify.

Keras, TensorFlow, pydantic and rich are imported inside the commands that use them: --help starts fast.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prunekit.commands.output import no_run, noting_new_folder, print_json
from prunekit.options import (
    SIZE,
    AtLeast,
    grid_option,
    json_option,
    model_option,
    recipe_argument,
    set_option,
    trust_option,
)
from prunekit.terminal import Display, console, load_keras_quietly, show_point

if TYPE_CHECKING:
    from prunekit.recipe.settings.schema import Recipe


@click.command()
@recipe_argument
@click.option("-o", "--output", metavar="DIR", show_default="runs/RECIPE", help="The run directory.")
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
    help="Epochs between checkpoints inside a step, from which --resume goes on.",
)
@trust_option
@json_option
def compress(recipe: str, output: str | None, dry_run: bool, as_json: bool, **options: Any) -> int:
    """Run a recipe: train, prune, quantize, export, report.

    RECIPE is a .yaml file, such as `prunekit init` writes, or the name of a built-in recipe: see `prunekit recipes`.
    The run directory has the final model, the exported files, the report and the recipe as it was run. An existing run
    is kept unless --force is given; an unfinished one continues with --resume. The exit code is 1 if an expectation of
    the recipe is not met."""
    from prunekit.recipe.text.loader import load_recipe, located

    model, overrides = options.pop("model"), options.pop("overrides")
    if dry_run:
        return _print_plan(recipe, as_json, overrides, model, options["trust"])
    loaded = load_recipe(recipe, overrides)
    _check_model(loaded, model)
    load_keras_quietly()
    from prunekit.delivery.reports.terminal_report import render_terminal
    from prunekit.recipe.run import runner
    from prunekit.recipe.state.directory import kept_checkpoints_line

    directory = os.path.join("runs", loaded.name) if output is None else output
    failure: runner.ExpectationError | None = None
    with noting_new_folder(Path(directory).parent), located(recipe), Display() as display:
        try:
            result = runner.compress(loaded, model, None, directory, progress=display, **options)
        except runner.ExpectationError as error:
            failure, result = error, error.result
        except KeyboardInterrupt:
            click.echo(kept_checkpoints_line(directory), err=True, nl=False)
            raise
    if as_json:
        place = result.directory and str(result.directory)
        print_json({"directory": place, "met": failure is None, "report": result.report.to_dict()})
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


@click.command()
@recipe_argument
@grid_option
@set_option
@click.option("-o", "--output", metavar="DIR", show_default="runs/RECIPE-sweep", help="Folder of the sweep.")
@model_option
@click.option(
    "--jobs", type=AtLeast(1), show_default="1; with --ray all that fit", help="How many points run at the same time."
)
@click.option("--threads", type=AtLeast(1), help="Compute threads of each point; with --ray, CPUs of each point.")
@click.option(
    "--ray", is_flag=False, flag_value="", metavar="[ADDRESS]", help="Run on a Ray cluster, or on one started here."
)
@click.option("--gpus", type=click.FloatRange(0), default=0.0, metavar="N", help="With --ray: GPUs of each point.")
@click.option("--size", metavar="FORMAT", help=SIZE)
@click.option("--force", is_flag=True, help="Repeat points that were made with another recipe.")
@trust_option
@json_option
def sweep(recipe: str, over: dict[str, list[Any]], overrides: dict[str, Any], as_json: bool, **options: Any) -> int:
    """Run a recipe at each combination of values.

    RECIPE is a .yaml file, or the name of a built-in recipe such as digits. Each combination is a point, with a run
    directory of its own; a table and a picture compare them. Finished points are not run again. The
    exit code is 1 if a point failed or did not meet an expectation."""
    from prunekit.recipe.text.grid import grid

    points = grid(recipe, over, overrides)
    _check_model(points[0].recipe, options["model"])
    load_keras_quietly()
    from prunekit.delivery.reports.sweeps import show_sweep
    from prunekit.recipe.sweep.sweep import PICTURE, run_points
    from prunekit.recipe.sweep.workers import Jobs

    output = options.pop("output")
    output = os.path.join("runs", f"{points[0].recipe.name}-sweep") if output is None else output
    at_once, threads, ray, gpus = (options.pop(name) for name in ("jobs", "threads", "ray", "gpus"))
    jobs = Jobs(at_once=at_once, threads=threads, ray=ray or ray is not None, gpus=gpus)
    with noting_new_folder(Path(output)):
        report = run_points(points, output, jobs=jobs, progress=show_point, **options)
    if as_json:
        print_json(report.to_dict())
    else:
        show_sweep(report, console())
        click.echo(f"\nWritten to {output}" + (f"; the picture is {output}/{PICTURE}." if report.pareto else "."))
    return 0 if report.complete else 1


@click.command()
@recipe_argument
@click.option("--plan", "with_plan", is_flag=True, help="Also build the model and the data, and print every target.")
@set_option
@model_option
@trust_option
@json_option
def check(recipe: str, with_plan: bool, as_json: bool, **options: Any) -> int:
    """Check a recipe for errors, and show what it would do.

    RECIPE is a .yaml file, or the name of a built-in recipe such as digits. The files that the recipe names must exist;
    no step is run. Names of layers and shapes are checked with --plan."""
    from prunekit.recipe.text.loader import RecipeError, load_recipe
    from prunekit.recipe.text.presence import check_named_files

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
            print_json({"ok": False, "error": {"message": error.message, **place}})
        raise
    if with_plan:
        return _print_plan(recipe, as_json, **options)
    if as_json:
        print_json({"ok": True, "recipe": loaded.model_dump(mode="json", exclude_none=True)})
        return 0
    from prunekit.recipe.settings.schema import source_text, step_text

    kinds = ", ".join(step.kind for step in loaded.steps)
    click.echo(f"OK: {loaded.name}, {len(loaded.steps)} step{'s' if len(loaded.steps) > 1 else ''} ({kinds})")
    click.echo(f"  model: {source_text(loaded, 'model') or 'none; pass --model FILE'}")
    click.echo(f"  data: {source_text(loaded, 'data') or 'none'}")
    if loaded.distribute is not None:
        click.echo(f"  distribute: {loaded.distribute}")
    for i, step in enumerate(loaded.steps, start=1):
        click.echo(f"  {i}. {step_text(step)}")
    return 0


@click.command()
@click.argument("directory", metavar="RUN")
@trust_option
@json_option
def verify(directory: str, trust: bool, as_json: bool) -> int:
    """Repeat a run and compare the results.

    RUN is a run directory written by compress. Its locked recipe is run again. The exit code is 0 if the
    results are bit-identical on this machine, and 1 otherwise."""
    if not Path(directory).is_dir():
        raise no_run(directory, "no such directory")
    load_keras_quietly()
    from prunekit.recipe.run import runner

    with Display() as display:
        outcome = runner.verify(directory, trust=trust, progress=display)
    if as_json:
        print_json(outcome.to_dict())
    elif outcome.identical:
        click.echo(f"{directory}: reproduced, bit for bit.")
    else:
        click.echo(f"{directory}: NOT reproduced:")
        for difference in outcome.differences:
            click.echo(f"  {difference}")
    return 0 if outcome.identical else 1


def _check_model(recipe: "Recipe", model: str | None) -> None:
    if recipe.model is None and model is None:
        raise click.UsageError(f"recipe {recipe.name!r} names no model. Pass --model FILE.")


def _print_plan(recipe: str, as_json: bool, overrides: dict[str, Any], model: str | None, trust: bool) -> int:
    from prunekit.recipe.text.loader import load_recipe, located

    loaded = load_recipe(recipe, overrides)
    _check_model(loaded, model)
    load_keras_quietly()
    from prunekit.recipe.run import runner

    with located(recipe):
        plan = runner.plan(loaded, model, None, trust=trust)
    if as_json:
        print_json(plan.to_dict())
    else:
        from prunekit.recipe.run.plan import show_plan

        show_plan(plan, console())
    return 0

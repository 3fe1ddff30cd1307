"""Commands that show finished runs and what is built in: report, compare, recipes.

Modules that take long to import are imported inside the commands: --help starts fast.
"""

import contextlib
import json
import os
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prunekit.commands.output import check_new, make_folder, no_run, print_json, write_new
from prunekit.options import SIZE, json_option
from prunekit.terminal import console

if TYPE_CHECKING:
    from prunekit.delivery.reports.sweeps import SweepReport


@click.command()
@click.argument("directory", metavar="RUN")
@click.option("--open", "open_page", is_flag=True, help="Open the page of the report in a browser.")
@json_option
def report(directory: str, open_page: bool, as_json: bool) -> int:
    """Show the report of a run.

    RUN is a run directory written by compress."""
    data = _stored_report(directory)
    page = Path(directory) / "report.html"
    if open_page:
        _open(page)
    if as_json:
        print_json(data)
        return 0
    from prunekit.delivery.reports.run_report import RunReport
    from prunekit.delivery.reports.terminal_report import render_terminal

    terminal = console()
    with _damage_named(directory), terminal.capture() as captured:
        # Capture the whole output first: an error may occur only in the report's last line.
        render_terminal(RunReport.from_dict(data), terminal)
    click.echo(captured.get(), nl=False)
    if page.is_file():
        click.echo(f"\nWith pictures: {page}")
    return 0


@click.command()
@click.argument("directories", metavar="RUN RUN ...", nargs=-1, required=True)
@click.option("-o", "--output", metavar="FILE.png", help="Write a picture of the main metric against the size.")
@click.option("--size", metavar="FORMAT", default="smallest", help=SIZE)
@click.option("--force", is_flag=True, help="Replace an existing picture.")
@json_option
def compare(directories: tuple[str, ...], output: str | None, size: str, force: bool, as_json: bool) -> int:
    """Compare finished runs.

    RUN are run directories written by compress. The tables have the metrics and sizes of each run, the settings
    in which the recipes differ, and the sparsity of each weight."""
    if len(directories) < 2:
        raise click.UsageError(f"a comparison needs at least two runs. Received: {directories[0]}.")
    if output is not None and not output.endswith(".png"):
        raise click.UsageError(f"the picture is a .png file. Received: -o {output}.")
    if output is not None:
        check_new(output, force)
    from prunekit.delivery.reports.comparison import compared_runs
    from prunekit.delivery.reports.run_report import RunReport
    from prunekit.delivery.reports.terminal_report import print_section

    reports = {}
    for name, directory in _distinct_names(directories).items():
        with _damage_named(directory):
            reports[name] = RunReport.from_dict(_stored_report(directory))
    found = compared_runs(reports, size)
    if output is not None:
        _draw(found.figures, Path(output))
    if as_json:
        print_json(found.to_dict())
        return 0
    for section in found.sections():
        print_section(section, console())
    if output is not None:
        click.echo(f"\nThe picture is {output}.")
    return 0


def _draw(figures: "SweepReport", target: Path) -> None:
    from prunekit.core.runtime.partial_files import replace_file
    from prunekit.delivery.plots.plots import to_png
    from prunekit.delivery.plots.sweep_plot import sweep_figure

    if not figures.pareto:
        raise click.UsageError("a picture needs runs with the main metric and a size: leave out -o, or choose --size.")
    make_folder(target)
    replace_file(target, to_png(sweep_figure(figures)))


def _distinct_names(directories: tuple[str, ...]) -> dict[str, str]:
    """Returns the shortest ends of the paths that differ -> path."""
    paths = [Path(directory).resolve() for directory in directories]
    if len(set(paths)) < len(paths):
        twice = next(given for given, path in zip(directories, paths, strict=True) if paths.count(path) > 1)
        raise click.UsageError(f"a run is compared with other runs. Received twice: {twice}.")
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return dict(zip(names, directories, strict=True))


def _stored_report(directory: str) -> Any:
    if not (Path(directory) / "report.json").is_file():
        raise no_run(directory, "not a run directory (no report.json in it)")
    from prunekit.recipe.state.directory import read_report

    return read_report(directory)


@contextlib.contextmanager
def _damage_named(directory: str) -> Iterator[None]:
    """Turns errors of damaged reports into one line that names the file."""
    try:
        yield
    except (KeyError, IndexError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        file = Path(directory) / "report.json"
        raise click.UsageError(f"{file}: not a report that this version of prunekit reads: {reason}") from error


def _open(page: Path) -> None:
    if not page.is_file():
        raise click.UsageError(f"{page} is missing, so there is no page to open. Leave out --open.")
    if not webbrowser.open(page.resolve().as_uri()):
        click.echo(f"warning: no browser was found; open {page} yourself.", err=True)


@click.command()
@click.argument("name", required=False)
@click.option("-o", "--output", metavar="PATH", help="Copy the recipe NAME to this file or folder.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@json_option
def recipes(name: str | None, output: str | None, force: bool, as_json: bool) -> int:
    """List built-in recipes.

    With NAME, print that recipe, or copy it to a file (-o)."""
    from prunekit.recipe.settings.fields import nearest
    from prunekit.recipe.text.loader import builtin_recipes, load_recipe

    found = builtin_recipes()
    if name is None:
        if output is not None or force:
            raise click.UsageError("to copy a recipe, name it: prunekit recipes NAME -o PATH.")
        rows = [{"name": key, "description": load_recipe(path).description} for key, path in found.items()]
        if as_json:
            print_json([row | {"path": str(found[row["name"]])} for row in rows])
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
    write_new(text, target, force)
    click.echo(json.dumps({"name": name, "path": str(target)}) if as_json else f"Copied to {target}")
    return 0

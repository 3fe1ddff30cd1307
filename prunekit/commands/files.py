"""What commands share that read a model and data, and write a model: options, checks of files, progress."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click

from prunekit.commands.output import check_new, note_new_folder, print_json, print_sections
from prunekit.options import AtLeast, Parsed, assignments, words
from prunekit.sparsity.arguments import MEMORY, number_of_bytes
from prunekit.sparsity.shorthands import CRITERIA, PATTERNS, Misfits, sources_of
from prunekit.terminal import load_keras_quietly, with_time_left

Command = Callable[..., Any]


def with_options(*options: Command) -> Callable[[Command], Command]:
    """Returns a decorator that adds options, in this order."""

    def decorated(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorated


force_option = click.option("--force", is_flag=True, help="Replace an existing file.")


examples_option = click.option(
    "--examples", type=AtLeast(1), default=1024, help="How many examples of --data are read, drawn at random."
)


memory_option = click.option(
    "--memory",
    type=Parsed(partial(number_of_bytes, "--memory")),
    default=MEMORY,
    metavar="BYTES",
    show_default=f"{MEMORY / 1e9:g}GB",
    help="Memory for outputs of layers that are kept, such as 500MB; less takes more time.",
)


def criterion_option(once: bool) -> Command:
    """Returns the option --criterion.

    Args:
        once: True leaves out the criteria that select in several rounds.
    """
    names = [
        name
        for name, row in CRITERIA.items()
        if "training" not in sources_of(row.needs) and not (once and "rounds" in row.options)
    ]
    return click.option("--criterion", default="auto", metavar="NAME", help=f"Which weights go: {words(names)}.")


pattern_option = click.option(
    "--pattern", default="unstructured", metavar="PATTERN", help=f"How zeros lie in a weight: {PATTERNS}."
)


def misfits_option(default: str, text: str) -> Command:
    """Returns the option --misfits with the help text `text`."""
    return click.option("--misfits", type=click.Choice(get_args(Misfits)), default=default, help=f"{text}.")


def other_option(function: str, example: str) -> Command:
    """Returns the option --set, for what the Python function can and the command has no option for."""
    text = f"Any other option of {function} in Python, such as {example}. May be repeated."
    return click.option("--set", "others", metavar="NAME=VALUE", multiple=True, callback=assignments, help=text)


def other_options(options: dict[str, Any]) -> dict[str, Any]:
    """Takes what --set was given out of the options, and returns it; UsageError if an option has its own name."""
    others: dict[str, Any] = options.pop("others")
    own = {*click.get_current_context().params, "data", "progress"}
    for name in others:
        if name in own:
            raise click.UsageError(f"--set is for options without a name here. Received: {name}. Use its own option.")
    return others


def pattern_options(verb: str, matched: str) -> Callable[[Command], Command]:
    """Returns a decorator with --include and --exclude.

    Args:
        verb: What the command does, in help texts.
        matched: What the patterns match.
    """
    kinds = "by name, by a glob such as conv_*, or re:REGEX"
    return with_options(
        click.option(
            "--include", multiple=True, metavar="PATTERN", help=f"{matched} to {verb}, {kinds}. May be repeated."
        ),
        click.option(
            "--exclude", multiple=True, metavar="PATTERN", help=f"{matched} to leave as they are. May be repeated."
        ),
    )


def write_model(model: Any, target: Path) -> None:
    """Writes a .keras file; an interruption leaves no part of it."""
    from prunekit.core.runtime.partial_files import replace_model

    target.parent.mkdir(parents=True, exist_ok=True)
    replace_model(target, model)


def write_and_report(model: Any, report: Any, output: str, as_json: bool) -> int:
    """Writes a changed model and prints its report; returns the exit code."""
    write_model(model, Path(output))
    if as_json:
        print_json({"path": output, "report": report.to_dict()})
        return 0
    print_sections(report)
    for note in report.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"\n{report.verdict()} Written to {output}")
    return 0


def data_options(purpose: str, required: bool = False) -> Callable[[Command], Command]:
    """Returns a decorator with --data and --label.

    Args:
        purpose: What the data are and are for, in the help text.
        required: True if the command needs data.
    """
    kinds = (
        "a .csv or .npz file; a folder with one folder of images for each class; a folder that "
        "tf.data.Dataset.save wrote; or digits, diabetes or fashion-mnist."
    )
    return with_options(
        click.option("--data", metavar="DATA", required=required, help=f"{purpose}: {kinds}"),
        click.option(
            "--label",
            metavar="COLUMN",
            help="Of a .csv file, the column of the labels; of a saved data set, their key.",
        ),
    )


def loaded(model: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """Returns a model, not compiled, and training examples drawn with seed 0, or None; takes their options out."""
    name, label, count = (options.pop(option) for option in ("data", "label", "examples"))
    if label is not None and name is None:
        raise click.UsageError("--label needs --data.")
    load_keras_quietly()
    from prunekit.anatomy.files.model_files import load_model
    from prunekit.anatomy.graph.example_inputs import input_names
    from prunekit.recipe.datasets.data import training_examples
    from prunekit.recipe.start.starting_recipe import named_source

    found = load_model(model, compile=False)
    return found, None if name is None else training_examples(
        named_source(name, label, found), count, input_names(found)
    )


@contextlib.contextmanager
def showing_progress(verb: str) -> Iterator[Callable[[int, int, str], None]]:
    """Yields a function that shows how much is done, and the time left, if standard error is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from prunekit.recipe.state.progress import TimeLeft

    errors = Console(stderr=True)
    columns = (TextColumn("{task.fields[verb]}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("", total=None, verb=verb)
        left = TimeLeft()

        def show(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=with_time_left(name, left.after(done, total)))

        yield show


def check_files(
    model: str, output: str, force: bool, suffixes: Sequence[str] = (".keras",), option: str = "-o"
) -> None:
    """Checks the names of a model to read and of a file to write.

    Args:
        model: The model's file.
        output: The file to write.
        force: True if the file to write may exist.
        suffixes: Endings that the file to write may have.
        option: The option that names it.

    Raises:
        UsageError: The model does not exist; the file to write has another ending, exists, cannot be written, or is
            the model's own file, whatever `force` is.
    """
    endings = " or ".join(suffixes)
    check_model(model)
    if Path(output).is_dir():
        raise click.UsageError(f"{option} takes the name of a {endings} file. Received: the folder {output!r}.")
    if not output.endswith(tuple(suffixes)):
        raise click.UsageError(f"{option} takes the name of a {endings} file. Received: {output!r}.")
    check_distinct((model, "MODEL"), (output, option))
    check_new(output, force)
    note_new_folder(Path(output))


def check_model(model: str) -> None:
    """Raises a usage error unless there is a file of a model."""
    if Path(model).is_dir():
        raise click.UsageError(f"MODEL takes the name of a .keras file. Received: the folder {model!r}.")
    if not Path(model).is_file():
        raise click.UsageError(f"{model}: no such file.")


def check_distinct(one: tuple[str, str], other: tuple[str, str]) -> None:
    """Raises a usage error if two arguments, each a path and its option, name the same file."""
    (first, of_first), (second, of_second) = one, other
    both = os.path.exists(first) and os.path.exists(second)
    if os.path.samefile(first, second) if both else Path(first).resolve() == Path(second).resolve():
        raise click.UsageError(
            f"{of_second} names a new file; {of_first} is another one. Received: {second!r} for both. "
            "Choose another name."
        )

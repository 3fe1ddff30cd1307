"""What commands share that read a model and data, and write a model: options, checks of files, progress."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import click

from prunekit.commands.output import check_new, note_new_folder
from prunekit.options import assignments
from prunekit.sparsity.arguments import MEMORY, number_of_bytes
from prunekit.sparsity.shorthands import Misfits

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
    "--examples", type=click.IntRange(1), default=1024, help="Examples to read of --data.  [default: 1024]"
)


class Bytes(click.ParamType):
    """A number of bytes: 1e9, 500MB or 1GB."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Returns the number of bytes."""
        try:
            return number_of_bytes("--memory", value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


memory_option = click.option(
    "--memory",
    type=Bytes(),
    default=MEMORY,
    metavar="BYTES",
    help="Activations to keep, such as 500MB; less takes more time.  [default: 1GB]",
)


def misfits_option(default: str, text: str) -> Command:
    """Returns the option --misfits with the help text `text`."""
    return click.option(
        "--misfits", type=click.Choice(get_args(Misfits)), default=default, help=f"{text}.  [default: {default}]"
    )


def other_option(example: str) -> Command:
    """Returns the option --set, for what the Python function can and the command has no option for."""
    text = f"Any other option of the Python function, such as {example}. May be repeated."
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
    return with_options(
        click.option("--include", multiple=True, metavar="PATTERN", help=f"{matched} to {verb}. May be repeated."),
        click.option("--exclude", multiple=True, metavar="PATTERN", help=f"{matched} to leave. May be repeated."),
    )


def write_model(model: Any, target: Path) -> None:
    """Writes a .keras file; an interruption leaves no part of it."""
    from prunekit.core.runtime.partial_files import replace_model

    target.parent.mkdir(parents=True, exist_ok=True)
    replace_model(target, model)


def data_options(purpose: str, required: bool = False) -> Callable[[Command], Command]:
    """Returns a decorator with --data and --label.

    Args:
        purpose: What the data are and are for, in the help text.
        required: True if the command needs data.
    """
    kinds = "digits, diabetes or fashion-mnist; a .csv or .npz file; a folder of images or of a saved data set."
    return with_options(
        click.option("--data", metavar="DATA", required=required, help=f"{purpose}: {kinds}"),
        click.option("--label", metavar="COLUMN", help="The column or part of --data that holds the labels."),
    )


def read_examples(name: str, label: str | None, count: int, model: Any) -> Any:
    """Returns training examples for a model, drawn at random with seed 0."""
    from prunekit.anatomy.graph.example_inputs import input_names
    from prunekit.recipe.datasets.data import training_examples
    from prunekit.recipe.start.starting_recipe import named_source

    return training_examples(named_source(name, label, model), count, input_names(model))


@contextlib.contextmanager
def showing_progress(verb: str, shown: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Yields a function that shows how much is done, and the time left, if standard error is a terminal and `shown`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from prunekit.recipe.state.progress import TimeLeft
    from prunekit.terminal import with_time_left

    errors = Console(stderr=True)
    columns = (TextColumn("{task.fields[verb]}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=errors, transient=True, disable=not (shown and errors.is_terminal)) as bar:
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

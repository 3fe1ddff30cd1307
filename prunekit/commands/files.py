"""What commands share that read a model and data, and write a model: options, checks of files, progress."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

Command = Callable[..., Any]


def with_options(*options: Command) -> Callable[[Command], Command]:
    """Returns a decorator that adds options, in this order."""

    def decorated(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorated


force_option = click.option("--force", is_flag=True, help="Replace an existing file.")


def examples_option(default: int) -> Command:
    text = f"Examples to read of --data.  [default: {default}]"
    return click.option("--examples", type=click.IntRange(1), default=default, help=text)


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
    target.parent.mkdir(parents=True, exist_ok=True)
    # Keras chooses the format by the ending of the name.
    partial = target.with_name(f".unfinished-{target.name}")
    try:
        model.save(partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def read_examples(name: str, count: int, model: Any) -> Any:
    """Returns training examples for a model, drawn at random with seed 0."""
    from prunekit.anatomy.example_inputs import input_names
    from prunekit.recipe.data import training_examples
    from prunekit.recipe.data_source import DataSource

    if not (name.endswith(".npz") or Path(name).is_dir()):
        raise click.UsageError(f"--data takes an .npz file or a folder of tf.data.Dataset.save. Received: {name!r}.")
    path = os.path.abspath(name)
    source = DataSource(npz=path) if name.endswith(".npz") else DataSource(tfds_saved=path)
    return training_examples(source, count, input_names(model))


@contextlib.contextmanager
def showing_progress(verb: str, shown: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Yields a function that shows how much is done, if it is to be shown and standard error is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    errors = Console(stderr=True)
    columns = (TextColumn("{task.fields[verb]}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=errors, transient=True, disable=not (shown and errors.is_terminal)) as bar:
        task = bar.add_task("", total=None, verb=verb)
        yield lambda done, total, name: bar.update(task, completed=done, total=total, description=name)


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
        UsageError: The model does not exist; the file to write has another ending, exists, or cannot be written.
    """
    endings = " or ".join(suffixes)
    for name, path, ending in (("MODEL", model, ".keras"), (option, output, endings)):
        if Path(path).is_dir():
            raise click.UsageError(f"{name} takes the name of a {ending} file. Received: the folder {path!r}.")
    if not Path(model).is_file():
        raise click.UsageError(f"{model}: no such file.")
    if not output.endswith(tuple(suffixes)):
        raise click.UsageError(f"{option} takes the name of a {endings} file. Received: {output!r}.")
    if Path(output).exists() and not force:
        raise click.UsageError(f"{output} exists already. Pass --force to replace it.")
    folder = next(parent for parent in Path(output).absolute().parents if parent.exists())
    if not folder.is_dir():
        raise click.UsageError(f"{output} cannot be written: {folder} is a file, not a folder.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise click.UsageError(f"{output} cannot be written: no permission to write in {folder}.")

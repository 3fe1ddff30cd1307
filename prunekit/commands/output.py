"""Prints JSON and sections, writes new files, and words errors that several commands have."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from prunekit.core.runtime.partial_files import replace_file, write_problem
from prunekit.terminal import with_time_left


def print_json(data: Any) -> None:
    """Prints data as JSON."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=True))


def write_new(text: str, target: Path, force: bool) -> None:
    """Writes a text file.

    Raises:
        UsageError: The file exists, and `force` is False.
    """
    check_new(target, force)
    make_folder(target)
    replace_file(target, text.encode())


def check_new(target: str | os.PathLike[str], force: bool) -> None:
    """Raises a usage error if a file to write exists, unless `force` is True, or cannot be written."""
    if os.path.lexists(target) and not force:
        raise click.UsageError(f"{target} exists already. Pass --force to replace it.")
    check_writable(target)


def check_writable(target: str | os.PathLike[str], *, folder: bool = False) -> None:
    """Raises a usage error if a file, or a folder, cannot be written."""
    problem = write_problem(target, folder=folder)
    if problem is not None:
        raise click.UsageError(f"{target} cannot be written: {problem}.")


def make_folder(target: Path) -> None:
    """Makes the folder of a file to write, and says so on standard error if it did not exist."""
    is_new = not target.parent.exists()
    target.parent.mkdir(parents=True, exist_ok=True)
    if is_new:
        _say_new(target.parent)


def note_new_folder(target: Path) -> None:
    """Says on standard error that the folder of a file to write does not exist yet."""
    if not target.parent.exists():
        _say_new(target.parent)


@contextlib.contextmanager
def noting_new_folder(folder: Path) -> Iterator[None]:
    """Says on standard error, at the end of the block, that a folder was made in it that did not exist before."""
    is_new = not folder.exists()
    try:
        yield
    finally:
        if is_new and folder.exists():
            _say_new(folder)


def _say_new(folder: Path) -> None:
    click.echo(f"note: the folder {folder} does not exist; it is made.", err=True)


def no_run(directory: str, reason: str) -> click.UsageError:
    """Returns the error for a folder that is no finished run; names checkpoints that it holds."""
    from prunekit.recipe.state.directory import kept_checkpoints_line

    return click.UsageError(f"{directory}: {reason}. {kept_checkpoints_line(directory)}".rstrip())


def step_lines() -> Callable[[int, int, str], None]:
    """Returns a function that tells each step of a long command on standard error, with the time that is left.

    The function takes the number of steps that are done, the number of all, and a text. Another number of all steps is
    another operation, whose steps take a time of their own.
    """
    from prunekit.recipe.state.progress import TimeLeft

    left: dict[int, TimeLeft] = {}

    def say(done: int, total: int, text: str) -> None:
        seconds = left.setdefault(total, TimeLeft()).after(done, total)
        click.echo(with_time_left(f"[{done}/{total}] {text}", seconds), err=True)

    return say


@contextlib.contextmanager
def keeping_scan(table: Path) -> Iterator[None]:
    """Says on standard error, if the block is interrupted, that the same command continues with a table of measures."""
    try:
        with noting_new_folder(table.parent):
            yield
    except KeyboardInterrupt:
        if table.is_file():
            click.echo(f"What was measured is kept in {table.parent}: the same command continues.", err=True, nl=False)
        raise


def print_sections(report: Any) -> None:
    """Prints the sections of a report as tables."""
    from prunekit.delivery.reports.terminal_report import print_section
    from prunekit.terminal import console

    for section in report.sections():
        print_section(section, console())

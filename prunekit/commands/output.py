"""Prints JSON and sections, writes new files, and words errors that several commands have."""

import json
from pathlib import Path
from typing import Any

import click


def print_json(data: Any) -> None:
    """Prints data as JSON."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=True))


def write_new(text: str, target: Path, force: bool) -> None:
    """Writes a text file.

    Raises:
        UsageError: The file exists, and `force` is False.
    """
    make_folder(target)
    try:
        with target.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise click.UsageError(f"{target} exists already. Pass --force to replace it.") from None


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


def _say_new(folder: Path) -> None:
    click.echo(f"note: the folder {folder} does not exist; it is made.", err=True)


def no_run(directory: str, reason: str) -> click.UsageError:
    """Returns the error for a folder that is no finished run; names checkpoints that it holds."""
    from prunekit.recipe.directory import kept_checkpoints_line

    return click.UsageError(f"{directory}: {reason}. {kept_checkpoints_line(directory)}".rstrip())


def print_sections(report: Any) -> None:
    """Prints the sections of a report as tables."""
    from prunekit.delivery.terminal_report import print_section
    from prunekit.terminal import console

    for section in report.sections():
        print_section(section, console())

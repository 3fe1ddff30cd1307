"""Run directories: written under a temporary name, renamed when whole, so that what looks finished is finished."""

import contextlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from prunekit.recipe.loader import RecipeError

MODEL = "model.keras"
EXPORTS = "exports"
REPORT = "report.json"
PAGE = "report.html"
LOCK = "recipe.lock.yaml"
CONTENTS = frozenset({MODEL, EXPORTS, REPORT, PAGE, LOCK})


def check_output(output: str | os.PathLike[str], *, force: bool) -> Path:
    """The absolute path of a run directory that can be written; nothing is written yet.

    Args:
        output: The run directory. A symbolic link is followed.
        force: An older run directory, or an empty folder, may be replaced.

    Raises:
        RecipeError: It exists, or holds what no run has written, or its parent is no folder that can be written.
    """
    path = Path(os.path.realpath(output))
    if path.is_dir():
        if not force:
            raise RecipeError(f"{output} exists. Choose another output directory, or replace it with --force.")
        _check_replaceable(path)
    elif path.exists():
        raise RecipeError(f"{output} is a file. Choose another output directory.")
    parent = next((folder for folder in path.parents if folder.exists()), path)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise RecipeError(f"{output} cannot be made: {parent} is not a folder that you may write to.")
    return path


def check_run(directory: str | os.PathLike[str]) -> Path:
    """The path of a finished run directory.

    Raises:
        RecipeError: It is not there, or not a run directory.
    """
    path = Path(directory)
    if not path.is_dir():
        raise RecipeError(f"{directory} is not a run directory: no such folder.")
    for name in (LOCK, REPORT, MODEL):
        if not (path / name).is_file():
            raise RecipeError(f"{directory} is not a run directory: it has no {name}.")
    return path


@contextlib.contextmanager
def run_directory(path: Path, *, force: bool) -> Iterator[Path]:
    """A temporary folder to write a run into; it becomes `path` when the block ends.

    An older run directory at `path` stays as it is until then, and goes only once the new one is in its place. When the
    block raises, or is interrupted, the temporary folder goes and `path` is as it was.

    Args:
        path: As `check_output` returned it.
        force: `path` may be replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path)
    partial = _beside(path, "partial")
    partial.mkdir()
    try:
        yield partial
        _put_in_place(partial, path, force=force)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_leftovers(path: Path) -> None:
    """Clears what runs into `path` left behind that were killed on this machine; an older run they moved comes back."""
    mark = re.compile(rf"\.{re.escape(path.name)}\.(partial|older)-{re.escape(_host())}-(\d+)-[0-9a-f]+")
    for entry in sorted(path.parent.iterdir()):
        match = mark.fullmatch(entry.name)
        if match is None or _is_running(int(match[2])):
            continue
        if match[1] == "older" and not path.exists():
            entry.rename(path)
        else:
            shutil.rmtree(entry, ignore_errors=True)


def _put_in_place(partial: Path, path: Path, *, force: bool) -> None:
    if not path.exists():
        partial.rename(path)
        return
    if not force:
        raise RecipeError(f"{path} was made by somebody else during this run. Run again with another output directory.")
    _check_replaceable(path)
    older = _beside(path, "older")
    path.rename(older)
    try:
        partial.rename(path)
    except BaseException:
        older.rename(path)
        raise
    shutil.rmtree(older, ignore_errors=True)


def _check_replaceable(path: Path) -> None:
    strangers = sorted(entry.name for entry in path.iterdir() if entry.name not in CONTENTS)
    if strangers:
        raise RecipeError(
            f"{path} holds {strangers[0]!r}, which no run has written, so it is not replaced. "
            "Choose another output directory."
        )


def _beside(path: Path, kind: str) -> Path:
    return path.parent / f".{path.name}.{kind}-{_host()}-{os.getpid()}-{secrets.token_hex(4)}"


def _host() -> str:
    # On a folder that machines share, a process number says nothing about another machine's processes.
    return re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

"""Run directories: written under a temporary name and renamed when complete, so a run directory is always complete.

The temporary name is kept after an interruption: `runs/mine.unfinished` becomes `runs/mine`.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prunekit.core.runtime import partial_files
from prunekit.core.runtime.partial_files import LOCK, UNFINISHED, write_problem
from prunekit.core.runtime.snapshot import PARTIAL, Snapshots, sync_folder
from prunekit.recipe.text.loader import RecipeError

MODEL = "model.keras"
EXPORTS = "exports"
REPORT = "report.json"
PAGE = "report.html"
LARGEST_REPORT = 1 << 26
CONTENTS = frozenset({MODEL, EXPORTS, REPORT, PAGE, LOCK})
# Endings of the files in the folder of exports.
_EXPORTED = frozenset({".keras", ".tflite"})
CHECKPOINT = "checkpoint"
# What to do about an unfinished run, on the command line and in Python.
START_OVER, CONTINUE = "start over with --force (force=True)", "continue with --resume (resume=True)"
START = "start.json"
# Folders of an unfinished run: LiteRT files that are timed at its end, and what a step goes on with when it is resumed.
STAGES, KEPT = "stages", "kept"
# Inside an unfinished run: the future run directory, and the lock file of the process that runs it.
_RUN, _LOCK = "run", "lock"
# File names in an unfinished run's folder, with the suffix of a partly written file.
_OWN = re.compile(rf"({_RUN}|{_LOCK}|{STAGES}|{KEPT}|({re.escape(START)}|{CHECKPOINT}-\d+)({re.escape(PARTIAL)})?)")


def output_path(output: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of an output option; follows symbolic links.

    Raises:
        RecipeError: As for `partial_files.output_path`.
    """
    try:
        return partial_files.output_path(output)
    except ValueError as error:
        raise RecipeError(str(error)) from None


def check_output(output: str | os.PathLike[str], *, force: bool, resume: bool = False) -> Path:
    """Checks that a run directory can be written, without writing; returns its absolute path.

    Args:
        output: The run directory. A symbolic link is followed.
        force: An older run directory, or an empty folder, may be replaced; an unfinished run is deleted, unless it is
            resumed.
        resume: True continues an unfinished run, and permits a finished run at the path.

    Raises:
        RecipeError: The path exists, or holds files that no run wrote, or its parent is not a writable folder; an
            unfinished run exists and neither `force` nor `resume` is set; a folder that is not an unfinished
            run has the name of an unfinished run.
    """
    path = output_path(output)
    work = unfinished(path)
    if not os.path.lexists(work):
        _check_writable(work, output)
    _check_own(work)
    waiting = _can_be_resumed(work)
    if path.is_dir():
        if not force and not (resume and is_finished(path)):
            remedy = (
                "replace it at the end of the resumed run with --resume --force (resume=True, force=True)"
                if waiting
                else "replace it with --force (force=True), or, for the result of the same run, --resume (resume=True)"
            )
            raise RecipeError(f"{output} exists. Choose another output directory, or {remedy}.")
        _check_replaceable(path)
    elif path.exists() or path.is_symlink():
        raise RecipeError(f"{output} is a file, or a circular link. Choose another output directory.")
    if waiting and not (resume or force):
        raise RecipeError(f"{work} contains an unfinished run: {CONTINUE}, or {START_OVER}, which deletes it.")
    _check_writable(path.parent, output)
    return path


def _check_writable(folder: Path, output: str | os.PathLike[str]) -> None:
    problem = write_problem(folder, folder=True)
    if problem is not None:
        raise RecipeError(f"{output} cannot be written: {problem}. Choose another output directory.")


def is_finished(path: Path) -> bool:
    """Returns True if `path` is a complete run directory without an unfinished run that would replace it."""
    whole = all((path / name).is_file() for name in (LOCK, REPORT, MODEL))
    return whole and not _can_be_resumed(unfinished(path))


def check_run(directory: str | os.PathLike[str]) -> Path:
    """Returns the path of a finished run directory.

    Raises:
        RecipeError: The path does not exist or is not a run directory.
    """
    path = Path(directory)
    if not path.is_dir():
        raise RecipeError(f"{directory} is not a run directory: no such folder.")
    for name in (LOCK, REPORT, MODEL):
        if not (path / name).is_file():
            raise RecipeError(f"{directory} is not a run directory: it has no {name}.")
    return path


def unfinished(path: Path) -> Path:
    """Returns the folder of the unfinished run into `path`."""
    return path.with_name(f"{path.name}{UNFINISHED}")


def kept_checkpoints_line(output: str | os.PathLike[str]) -> str:
    """Returns a line on the progress that an interrupted run into `output` leaves; "" if it leaves nothing."""
    work = unfinished(output_path(output))
    return f"The checkpoints are kept in {work}: continue with --resume.\n" if _can_be_resumed(work) else ""


def standing_at(path: Path) -> str:
    """Returns the resume point of the unfinished run into `path`, equal in all processes; "" without such a run."""
    work = unfinished(path)
    return " ".join(sorted(entry.name for entry in work.glob(f"{CHECKPOINT}-*"))) if _can_be_resumed(work) else ""


@contextlib.contextmanager
def run_directory(path: Path, *, force: bool, resume: bool = False) -> Iterator[Path]:
    """Yields a folder for the files of a run; renames it to `path` when the block ends.

    An older run directory at `path` is removed only after the new directory is in its place. If the
    block raises, or is interrupted, `path` is unchanged; the unfinished run is removed, unless checkpoints exist in the
    folder's parent. Only one process can be in the block.

    Args:
        path: Result of `check_output`.
        force: True permits replacing `path`.
        resume: True keeps the files of an unfinished run; False deletes them first.

    Raises:
        RecipeError: Another process is in the block.
        OSError: The folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path)
    work = unfinished(path)
    with _locked(work):
        if not (resume and _can_be_resumed(work)):
            _clear(work)
        folder = work / _RUN
        folder.mkdir(exist_ok=True)
        try:
            yield folder
            _sync(folder)
            _put_in_place(folder, path, force=force)
        except BaseException:
            if not _can_be_resumed(work):
                _remove(work)
            raise
        _remove(work)


def clear_up(path: Path) -> None:
    """Removes files next to `path` that remain if a run was killed while it was renamed into place."""
    work = unfinished(path)
    if work.is_dir():
        with _locked(work):
            if not _can_be_resumed(work):
                _remove(work)
    remove_leftovers(path)


def _can_be_resumed(work: Path) -> bool:
    # A missing folder next to an existing run directory means that the run finished and only the clean-up is missing.
    path = work.with_name(work.name.removesuffix(UNFINISHED))
    return work.is_dir() and bool(Snapshots(work, CHECKPOINT)) and ((work / _RUN).is_dir() or not path.exists())


def _check_own(work: Path) -> None:
    if not work.is_dir():
        if os.path.lexists(work):
            raise RecipeError(
                f"{work} is not a folder, but an unfinished run needs that name. Move it away, or choose another "
                "output directory."
            )
        return
    strangers = sorted(entry.name for entry in work.iterdir() if not _OWN.fullmatch(entry.name))
    if strangers:
        raise RecipeError(
            f"{work} holds {strangers[0]!r}, which no run has written. An unfinished run has that folder for itself, "
            "and removes it at the end: move it away, or choose another output directory."
        )


def _remove(work: Path) -> None:
    """Removes the files of an unfinished run; keeps unknown files in its folder."""
    with contextlib.suppress(OSError):
        _clear(work)
        (work / _LOCK).unlink(missing_ok=True)
        work.rmdir()


def _clear(work: Path) -> None:
    # Remove checkpoints first: a folder without checkpoints is not taken for an unfinished run.
    for entry in sorted(work.iterdir(), key=lambda entry: (not entry.name.startswith(CHECKPOINT), entry.is_dir())):
        if entry.name == _LOCK or not _OWN.fullmatch(entry.name):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


@contextlib.contextmanager
def _locked(work: Path) -> Iterator[None]:
    """Locks the unfinished run for this process; the system releases the lock if the process is killed."""
    try:
        import fcntl
    except ImportError:
        # Windows does not have these locks.
        work.mkdir(exist_ok=True)
        yield
        return
    while True:
        work.mkdir(exist_ok=True)
        with open(work / _LOCK, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RecipeError(
                    f"another process works on the run in {work}. Wait for it, or choose another output directory."
                ) from None
            # The previous holder may have removed the folder just before it released the lock.
            if not _is_same(file.fileno(), work / _LOCK):
                continue
            yield
            return


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _sync(folder: Path) -> None:
    for root, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(root, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(root))


def remove_leftovers(path: Path) -> None:
    """Removes leftovers of runs into `path` killed on this machine; restores an older run that they had moved."""
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
        raise RecipeError(
            f"{path} was created by another process during this run. Run again with another output directory."
        )
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
    exported = path / EXPORTS
    if exported.is_dir():
        strangers += sorted(f"{EXPORTS}/{one.name}" for one in exported.iterdir() if one.suffix not in _EXPORTED)
    if strangers:
        raise RecipeError(
            f"{path} holds {strangers[0]!r}, which no run has written, so it is not replaced. "
            "Choose another output directory."
        )


def _beside(path: Path, kind: str) -> Path:
    return path.parent / f".{path.name}.{kind}-{_host()}-{os.getpid()}-{secrets.token_hex(4)}"


def _host() -> str:
    # On a shared folder, process numbers of other machines have no meaning here.
    return re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def read_report(directory: str | os.PathLike[str]) -> Any:
    """Returns the values in a run's report.json, which is read as an untrusted file.

    Raises:
        RecipeError: The file is too large, or not JSON.
        OSError: The file cannot be read.
    """
    path = Path(directory) / REPORT
    with path.open("rb") as file:
        raw = file.read(LARGEST_REPORT + 1)
    if len(raw) > LARGEST_REPORT:
        raise RecipeError(f"{path}: expected a report of at most {LARGEST_REPORT:,} bytes; this file is larger.")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: not a report, or damaged: {error}.") from error

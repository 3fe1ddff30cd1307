"""Writes files under another name until they are whole, with errors that name the file asked for."""

import contextlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# The file that makes a folder a run directory, which holds nothing else than the run.
LOCK = "recipe.lock.yaml"
# Ending of the name of the folder of a run that is not finished.
UNFINISHED = ".unfinished"
# Keras's conversion of a variable to NumPy, under NumPy 2: nothing that a user can act on.
_OF_KERAS = "__array__ implementation doesn't accept a copy keyword"


def write_problem(path: str | os.PathLike[str], *, folder: bool = False) -> str | None:
    """Returns why a file cannot be written, in words behind "PATH cannot be written: "; None if it can be.

    A file without a name is made for a moment in the nearest folder that exists: permissions alone do not tell that a
    file system is read-only or virtual, as /proc is.

    Args:
        path: The file, or folder, which may exist; missing folders above it can be made.
        folder: True for a folder that files are written into.
    """
    target = Path(path)
    try:
        # Also where a name is too long for the file system.
        if target.exists() and target.is_dir() and not folder:
            return "it is a folder"
        folders = [target, *target.parents] if folder else [*target.parents]
        nearest = next((one for one in folders if os.path.lexists(one)), Path.cwd())
        if not nearest.is_dir():
            return f"{nearest} is not a folder"
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except (OSError, ValueError) as error:
        return f"no file can be made there ({getattr(error, 'strerror', None) or error})"


def output_path(output: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of an output option; follows symbolic links.

    Raises:
        ValueError: `output` is empty, which would be the working directory, or has the name of an unfinished run,
            which is removed when that run is complete.
    """
    if not os.fspath(output):
        raise ValueError("expected the path of an output directory. Received: an empty text.")
    path = Path(os.path.realpath(output))
    if path.name.endswith(UNFINISHED):
        raise ValueError(
            f"{path} has the name of an unfinished run into {path.name.removesuffix(UNFINISHED)}. Pass that name to "
            "resume it, or choose another output directory."
        )
    return path


def checked_folder(output: str | os.PathLike[str], purpose: str, files: Iterable[str]) -> Path:
    """Returns the absolute path of a folder that files can be written into, and that may exist; writes nothing.

    Args:
        output: The folder. A symbolic link is followed.
        purpose: What is written there, such as "sweep".
        files: Names of the files.

    Raises:
        ValueError: As for `output_path`; the path is a run directory or a file, cannot be written, or holds a folder of
            the name of a file.
    """
    path, remedy = output_path(output), f"Choose another output directory for the {purpose}."
    problem = write_problem(path, folder=True)
    if problem is not None:
        raise ValueError(f"{output} cannot be written: {problem}. {remedy}")
    if (path / LOCK).exists():
        raise ValueError(f"{output} is a run directory. {remedy}")
    for name in files:
        if (path / name).is_dir():
            raise ValueError(f"{path / name} is a folder. {remedy}")
    return path


@contextlib.contextmanager
def scratch_file(path: Path, name: str) -> Iterator[Path]:
    """Yields a path beside `path`, and removes the file that remains there at the end.

    Args:
        path: The file asked for.
        name: Name of the other file.

    Raises:
        OSError: A file cannot be written; the error names `path`.
    """
    partial = path.with_name(name)
    try:
        yield partial
    except OSError as error:
        if name in str(error.filename) and error.errno is not None:
            # A new one: an error of two files, as that of a renaming, keeps the arrow between them.
            raise OSError(error.errno, error.strerror, str(path)) from error
        # Some libraries, such as HDF5, put the name into the text alone.
        error.args = tuple(one.replace(name, path.name) if isinstance(one, str) else one for one in error.args)
        raise
    finally:
        # Where nothing can be written, nothing can be removed, and that error would replace the one that says why.
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def partial_file(path: Path, name: str) -> Iterator[Path]:
    """Yields the path to write; renames the written file to `path`, or removes it after an exception.

    Raises:
        OSError: As for `scratch_file`.
    """
    with scratch_file(path, name) as partial:
        yield partial
        os.replace(partial, path)


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file under another name and renames it, so that the file is never incomplete.

    Raises:
        OSError: As for `scratch_file`.
    """
    with partial_file(path, f".{path.name}.partial") as partial:
        partial.write_bytes(content)


def replace_json(path: Path, values: Any) -> None:
    """Writes values that JSON has, in place of an older file."""
    replace_file(path, (json.dumps(values, indent=1) + "\n").encode())


def save_model(model: Any, path: Path) -> None:
    """Saves a Keras model, without warnings of Keras's own code that no user can act on.

    Raises:
        OSError: The file cannot be written.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _OF_KERAS, DeprecationWarning)
        model.save(path)


def replace_model(path: Path, model: Any) -> None:
    """Writes a .keras file under another name and renames it.

    Raises:
        OSError: As for `scratch_file`.
    """
    # Keras chooses the format by the ending of the name.
    with partial_file(path, f".unfinished-{path.name}") as partial:
        save_model(model, partial)

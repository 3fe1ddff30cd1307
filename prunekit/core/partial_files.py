"""Writes files under another name until they are whole, with errors that name the file asked for."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


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
        # Some libraries, such as HDF5, put the name into the text alone.
        error.args = tuple(one.replace(name, path.name) if isinstance(one, str) else one for one in error.args)
        if name in str(error.filename):
            error.filename, error.filename2 = str(path), None
        raise
    finally:
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

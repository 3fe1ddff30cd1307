"""Checks of what users pass to training loops: arrays of examples, and counts."""

import os
from pathlib import Path
from typing import Any

import keras

from prunekit.core.runtime.partial_files import write_problem
from prunekit.sparsity.arguments import whole


def examples_in(**arrays: Any) -> int:
    """The number of examples in arrays, or structures of them, that lie along their first axes; None counts nothing.

    Raises:
        ValueError: There are no examples, or the lengths differ.
    """
    found = {
        name: sorted({len(leaf) for leaf in keras.tree.flatten(array) if leaf is not None})
        for name, array in arrays.items()
    }
    lengths = {length for each in found.values() for length in each}
    if len(lengths) != 1 or 0 in lengths:
        listed = ", ".join(f"{name} with {' and '.join(map(str, each))}" for name, each in found.items() if each)
        raise ValueError(f"Arrays have one row per example, and at least one. Received: {listed}.")
    return lengths.pop()


def writable_folder(path: str | os.PathLike[str], name: str = "path") -> Path:
    """Returns the path of a folder that files are going to be written into; folders that are missing can be made.

    Raises:
        ValueError: The path is a file, or no file can be written into the folder.
    """
    return _writable(path, name, write_problem(path, folder=True), "a folder")


def writable_file(path: str | os.PathLike[str], name: str = "path") -> Path:
    """Returns the path of a file that is going to be written; folders that are missing can be made.

    Raises:
        ValueError: The path is empty or a folder, or the file cannot be written.
    """
    if not os.fspath(path) or os.path.isdir(path):
        raise ValueError(f"`{name}` is the name of a file. Received: the folder {os.fspath(path)!r}.")
    return _writable(path, name, write_problem(path), "a file in a folder")


def _writable(path: str | os.PathLike[str], name: str, problem: str | None, kind: str) -> Path:
    if problem is not None:
        raise ValueError(
            f"`{name}` is {kind} that you may write to. Received: {os.fspath(path)!r}, which cannot be written: "
            f"{problem}."
        )
    return Path(path)


def require_positive(**numbers: float | None) -> None:
    """Refuses counts that are not whole numbers above zero; None passes.

    Raises:
        ValueError: A number is not a whole number above zero.
    """
    for name, value in numbers.items():
        if value is not None:
            # A limit of bytes may be written as 1e9.
            number = int(value) if isinstance(value, float) and value.is_integer() else value
            whole(name, number, 1, wrong_type=ValueError)

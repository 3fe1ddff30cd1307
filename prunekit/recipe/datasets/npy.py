"""Reads npy and npz files of plain numbers; rejects pickled objects, which can run code when loaded."""

import math
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import BinaryIO, cast

import numpy as np

from prunekit.anatomy.files.archives import FileRefused, checked_archive
from prunekit.recipe.text.loader import RecipeError

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_DAMAGED = (ValueError, EOFError, TypeError, KeyError, zipfile.BadZipFile, zlib.error)


def read_npy(path: str | os.PathLike[str]) -> np.ndarray:
    """Returns the array in an npy file; a header that declares more data than the file has is an error.

    Raises:
        RecipeError: The file is damaged, of another kind, or holds objects.
        OSError: The file cannot be read.
    """
    if zipfile.is_zipfile(path):
        raise RecipeError(f"{path} is an npz file, not an npy file: give it as data: {{npz: ...}}.")
    with open(path, "rb") as file, _plain_numbers(path, "npy"):
        _check_header(file, os.fstat(file.fileno()).st_size)
        file.seek(0)
        return np.load(file, allow_pickle=False)


def read_npz(path: str | os.PathLike[str], names: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Returns arrays of an npz file, by the keys of `names`.

    Args:
        path: Path of the npz file.
        names: Key of the result -> name of the array inside the file.

    Raises:
        RecipeError: The file is damaged or unsafe, holds objects, or lacks an array of `names`.
        OSError: The file cannot be read.
    """
    found = {}
    with _plain_numbers(path, "npz"), checked_archive(path) as archive:
        held = [name.removesuffix(".npy") for name in archive.namelist()]
        for part, name in names.items():
            if name not in held:
                raise RecipeError(
                    f"{path} has no array {name!r} for {part}; it has {', '.join(map(repr, held))}. "
                    f"Name them: data: {{npz: ..., arrays: {{{part}: ...}}}}."
                )
            member = archive.getinfo(f"{name}.npy" if f"{name}.npy" in archive.namelist() else name)
            with archive.open(member) as stream:
                _check_header(cast(BinaryIO, stream), member.file_size)
            with archive.open(member) as stream:
                found[part] = np.lib.format.read_array(stream, allow_pickle=False)
                # Read to the end of the member: zipfile verifies the checksum only there.
                if stream.read(1):
                    raise ValueError(f"the array {name!r} is followed by other data")
    return found


def npz_names(path: str | os.PathLike[str]) -> list[str]:
    """Returns the names of the arrays of an npz file, in the order of the file.

    Raises:
        RecipeError: The file is damaged or unsafe.
        OSError: The file cannot be read.
    """
    with _plain_numbers(path, "npz"), checked_archive(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


@contextmanager
def _plain_numbers(path: str | os.PathLike[str], kind: str) -> Iterator[None]:
    try:
        yield
    except RecipeError:
        raise
    except (FileRefused, *_DAMAGED) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        line = line.removeprefix(f"{path}").lstrip(": ")
        raise RecipeError(f"{path} is not a whole {kind} file of plain numbers: {line}.") from error


def _check_header(stream: BinaryIO, size: int) -> None:
    """Raises ValueError if the header declares objects, or more data than the rest of the `size` bytes."""
    version = np.lib.format.read_magic(stream)
    if version not in _HEADERS:
        raise ValueError(f"a header of version {version[0]}.{version[1]}")
    shape, _, kind = _HEADERS[version](stream)
    if kind.hasobject:
        raise ValueError("it holds Python objects, which are never loaded")
    declared, held = math.prod(shape) * kind.itemsize, size - stream.tell()
    if min(shape, default=0) < 0 or declared > held:
        raise ValueError(f"its header declares {declared:,} bytes for shape {shape}, and {held:,} follow")

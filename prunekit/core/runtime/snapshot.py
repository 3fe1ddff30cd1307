"""Snapshots: named arrays and plain values in one file, written atomically and verified by a digest."""

import errno
import hashlib
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prunekit.core.runtime.partial_files import partial_file

_MAGIC = b"prunekit snapshot 1 "
_HEADER = len(_MAGIC) + 64 + 1 + 16 + 1
_PIECE = 1 << 22
# Suffix of a file's name until the file is complete.
PARTIAL = ".partial"


class DamagedSnapshot(ValueError):
    """Raised when a file is not a snapshot, or is incomplete or changed."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The content of a snapshot.

    Attributes:
        values: JSON-serializable values; floats are restored bit for bit.
        arrays: Name -> array; arrays read from a file are read-only memory maps of the file.
    """

    values: dict[str, Any]
    arrays: Mapping[str, np.ndarray]


def arrays_under(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Returns the arrays whose names start with `prefix`, without the prefix."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def write_snapshot(path: str | os.PathLike[str], snapshot: Snapshot) -> None:
    """Writes a snapshot atomically: to a temporary file that is synced to disk and then renamed.

    Args:
        path: The file; an older file stays until the new file replaces it.
        snapshot: The snapshot; its arrays hold numbers and may be memory maps of files.

    Raises:
        OSError: The folder cannot be written or the disk is full; `path` is unchanged, and no other file remains.
    """
    _write_whole(Path(path), lambda file: _write(file, snapshot))


def write_bytes(path: str | os.PathLike[str], content: Any) -> None:
    """Writes a file atomically, as `write_snapshot` does.

    Raises:
        OSError: The folder cannot be written or the disk is full; `path` is unchanged, and no other file remains.
    """
    _write_whole(Path(path), lambda file: file.write(content))


def _write_whole(path: Path, write: Callable[[Any], Any]) -> None:
    with partial_file(path, path.name + PARTIAL) as partial, open(partial, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def read_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """Reads a snapshot that `write_snapshot` wrote.

    Raises:
        DamagedSnapshot: The file is not a snapshot, is truncated or changed, or its description does not match its
            content. The last is checked too, because anyone who can write the file can write a valid digest.
        OSError: The file cannot be read.
    """
    with open(path, "rb") as file:
        head = file.read(_HEADER)
        length = head[-17:].strip()
        if not head.startswith(_MAGIC) or not length.isdigit():
            raise DamagedSnapshot(f"{os.fspath(path)} is not a snapshot of this version of prunekit")
        total = hashlib.sha256()
        while piece := file.read(_PIECE):
            total.update(piece)
        # The size first: `read(length)` allocates that much memory, even if the file is shorter.
        if int(length) > file.tell() - _HEADER or head != _head(total, int(length)):
            raise DamagedSnapshot(f"{os.fspath(path)} is truncated or was modified")
        file.seek(_HEADER)
        described = file.read(int(length))
    try:
        return _described(json.loads(described), np.memmap(path, np.uint8, "r"), _HEADER + int(length))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise DamagedSnapshot(f"{os.fspath(path)} has a header that does not match its contents ({error})") from error


def _write(file: Any, snapshot: Snapshot) -> None:
    rows = [
        {"name": name, "dtype": dtype_name(array.dtype), "shape": array.shape}
        for name, array in snapshot.arrays.items()
    ]
    described = json.dumps({"values": snapshot.values, "arrays": rows}).encode()
    total = hashlib.sha256()
    file.write(bytes(_HEADER))
    for raw in (described, *map(_raw, snapshot.arrays.values())):
        for start in range(0, len(raw), _PIECE):
            piece = bytes(raw[start : start + _PIECE])
            file.write(piece)
            total.update(piece)
    file.seek(0)
    file.write(_head(total, len(described)))


def _head(total: Any, length: int) -> bytes:
    """Returns the header, of fixed size: the digest of all later bytes and `length`, then `length`, the JSON's size."""
    whole = total.copy()
    whole.update(b"%d" % length)
    return _MAGIC + whole.hexdigest().encode() + b" %16d\n" % length


def _raw(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _described(described: Any, data: np.ndarray, start: int) -> Snapshot:
    """Returns the snapshot that `described` describes; its arrays begin at byte `start` of `data`.

    Raises:
        ValueError, TypeError, KeyError, OverflowError: `described` does not match `data`.
    """
    values, rows = described["values"], described["arrays"]
    arrays = dict(_arrays(data, rows, start))
    if not isinstance(values, dict) or len(arrays) != len(rows):
        raise ValueError("values without names, or two arrays with the same name")
    return Snapshot(values, arrays)


def _arrays(data: np.ndarray, rows: list[dict[str, Any]], start: int) -> Iterator[tuple[str, np.ndarray]]:
    for row in rows:
        name, dtype, shape = row["name"], _numbers(row["dtype"]), row["shape"]
        if not isinstance(name, str) or not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError(f"an array of shape {str(shape)[:60]}")
        end = start + math.prod(shape) * dtype.itemsize
        if end > len(data):
            raise ValueError(f"{end:,} bytes, and there are {len(data):,}")
        # Arrays are not aligned to their item size, so files copy byte for byte.
        yield name, data[start:end].view(dtype).reshape(shape)
        start = end
    if start != len(data):
        raise ValueError(f"{start:,} bytes, and there are {len(data):,}")


def _numbers(name: Any) -> np.dtype:
    """Returns the numeric dtype of this name; raises for Python objects, text and structured dtypes."""
    dtype = np.dtype(name) if isinstance(name, str) else None
    if dtype is None or dtype.kind not in "biufcV" or dtype_name(dtype) != name:
        raise ValueError(f"numbers of type {str(name)[:60]}")
    return dtype


def lacking(values: Mapping[str, Any], kinds: Mapping[str, Any]) -> str | None:
    """Returns the first name whose value is missing or of another kind: the file has another origin or version.

    Args:
        values: The values of a snapshot.
        kinds: Name -> expected class, or tuple of classes.
    """
    return next((name for name, kind in kinds.items() if not isinstance(values.get(name), kind)), None)


def dtype_name(dtype: np.dtype) -> str:
    """Returns the name from which `np.dtype` recreates the dtype."""
    # bfloat16 and similar dtypes are not part of NumPy: their `str` gives only their number of bytes.
    return dtype.name if dtype.kind == "V" else dtype.str


def sync_folder(folder: Path) -> None:
    """Syncs a folder's entries to disk, if its file system supports that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


class Snapshots:
    """The two newest snapshots of a series, in files of one folder.

    If the newest snapshot is damaged, the previous snapshot is used, with a warning.

    Args:
        folder: Folder of the files; created with the first snapshot.
        stem: Prefix of the file names.
    """

    KEPT = 2

    def __init__(self, folder: str | os.PathLike[str], stem: str):
        self._folder, self._stem = Path(folder), stem
        self._name = re.compile(rf"{re.escape(stem)}-(\d{{6,}})")
        # Number of a snapshot that is known to be intact.
        self._whole: int | None = None

    def newest(self) -> Snapshot | None:
        """Returns the newest intact snapshot, or None if there is no intact snapshot."""
        found, damaged, used = None, [], "no other is left"
        for number in sorted(self._numbers(), reverse=True):
            try:
                found = read_snapshot(self._path(number))
            except DamagedSnapshot as error:
                damaged.append(str(error))
                continue
            self._whole, used = number, f"{self._path(number).name} is used"
            break
        if damaged:
            warnings.warn(f"{'; '.join(damaged)}: {used}.", stacklevel=3)
        return found

    def __bool__(self) -> bool:
        """Returns True if the folder has any file of the series, intact or damaged."""
        return bool(self._numbers())

    def write(self, snapshot: Snapshot) -> None:
        """Writes a new snapshot and removes all snapshots before the last two.

        Raises:
            OSError: The snapshot cannot be written; the earlier snapshots remain.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        numbers = self._numbers()
        number = max(numbers, default=0) + 1
        write_snapshot(self._path(number), snapshot)
        # Not by number alone: snapshots between this one and the last intact one may be damaged.
        kept = {number, self._whole if self._whole is not None else number - 1}
        for old in numbers:
            if old not in kept:
                self._path(old).unlink(missing_ok=True)
        self._whole = number

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._stem}-{number:06d}"

    def _numbers(self) -> list[int]:
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return []
        return [int(match[1]) for match in map(self._name.fullmatch, names) if match]

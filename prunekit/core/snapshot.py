"""Snapshots: named arrays and plain values in one file, which is whole or not there; a digest tells."""

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

_MAGIC = b"prunekit snapshot 1 "
_HEADER = len(_MAGIC) + 64 + 1 + 16 + 1
_PIECE = 1 << 22
# What a name ends with until its file is whole.
PARTIAL = ".partial"


class DamagedSnapshot(ValueError):
    """A file that is no snapshot, or not all of one."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What a snapshot holds.

    Attributes:
        values: Whatever JSON can say; floats come back bit for bit.
        arrays: By name; read from a file they are maps of it, read-only.
    """

    values: dict[str, Any]
    arrays: Mapping[str, np.ndarray]


def write_snapshot(path: str | os.PathLike[str], snapshot: Snapshot) -> None:
    """Writes a snapshot: under another name, to the disk itself, and only then under its own.

    Args:
        path: The file; an older one is there until the new one takes its place.
        snapshot: Its arrays are of numbers, and may be maps of files.

    Raises:
        OSError: The folder cannot be written or the disk is full; `path` is as it was, and nothing else is left.
    """
    _write_whole(Path(path), lambda file: _write(file, snapshot))


def write_bytes(path: str | os.PathLike[str], content: Any) -> None:
    """Writes a file as `write_snapshot` does: whole or not at all.

    Raises:
        OSError: The folder cannot be written or the disk is full; `path` is as it was, and nothing else is left.
    """
    _write_whole(Path(path), lambda file: file.write(content))


def _write_whole(path: Path, write: Callable[[Any], Any]) -> None:
    partial = path.with_name(path.name + PARTIAL)
    try:
        with open(partial, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def read_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """What `write_snapshot` wrote.

    Raises:
        DamagedSnapshot: The file is no snapshot, cut short, or changed, or describes what it does not hold: whoever
            can write a file can write its digest.
        OSError: It cannot be read.
    """
    with open(path, "rb") as file:
        head = file.read(_HEADER)
        length = head[-17:].strip()
        if not head.startswith(_MAGIC) or not length.isdigit():
            raise DamagedSnapshot(f"{os.fspath(path)} is no snapshot of this version of prunekit")
        total = hashlib.sha256()
        while piece := file.read(_PIECE):
            total.update(piece)
        # The size first: to read so many bytes takes so much memory, whether they are there or not.
        if int(length) > file.tell() - _HEADER or head != _head(total, int(length)):
            raise DamagedSnapshot(f"{os.fspath(path)} is cut short or was changed")
        file.seek(_HEADER)
        described = file.read(int(length))
    try:
        return _described(json.loads(described), np.memmap(path, np.uint8, "r"), _HEADER + int(length))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise DamagedSnapshot(f"{os.fspath(path)} describes what it does not hold ({error})") from error


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
    """Of fixed size: the digest of all that follows it and of this number, which says how much of that is JSON."""
    whole = total.copy()
    whole.update(b"%d" % length)
    return _MAGIC + whole.hexdigest().encode() + b" %16d\n" % length


def _raw(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _described(described: Any, data: np.ndarray, start: int) -> Snapshot:
    """What `described` says of `data`, whose arrays begin at `start`.

    Raises:
        ValueError, TypeError, KeyError, OverflowError: The two do not fit.
    """
    values, rows = described["values"], described["arrays"]
    arrays = dict(_arrays(data, rows, start))
    if not isinstance(values, dict) or len(arrays) != len(rows):
        raise ValueError("values without names, or two arrays of one name")
    return Snapshot(values, arrays)


def _arrays(data: np.ndarray, rows: list[dict[str, Any]], start: int) -> Iterator[tuple[str, np.ndarray]]:
    for row in rows:
        name, dtype, shape = row["name"], _numbers(row["dtype"]), row["shape"]
        if not isinstance(name, str) or not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError(f"an array of shape {str(shape)[:60]}")
        end = start + math.prod(shape) * dtype.itemsize
        if end > len(data):
            raise ValueError(f"{end:,} bytes, and there are {len(data):,}")
        # Numbers need not begin where a processor likes to read them, so that files copy byte for byte.
        yield name, data[start:end].view(dtype).reshape(shape)
        start = end
    if start != len(data):
        raise ValueError(f"{start:,} bytes, and there are {len(data):,}")


def _numbers(name: Any) -> np.dtype:
    """The type of numbers with this name: no Python objects, texts, or types made of others."""
    dtype = np.dtype(name) if isinstance(name, str) else None
    if dtype is None or dtype.kind not in "biufcV" or dtype_name(dtype) != name:
        raise ValueError(f"numbers of type {str(name)[:60]}")
    return dtype


def lacking(values: Mapping[str, Any], kinds: Mapping[str, Any]) -> str | None:
    """The first name without a value of its kind: the file was whole, and somebody else's or another version's.

    Args:
        values: Of a snapshot.
        kinds: Name -> a class, or several.
    """
    return next((name for name, kind in kinds.items() if not isinstance(values.get(name), kind)), None)


def dtype_name(dtype: np.dtype) -> str:
    """What `np.dtype` makes the type from again."""
    # bfloat16 and its like are not NumPy's own: their strings say only how many bytes they have.
    return dtype.name if dtype.kind == "V" else dtype.str


def sync_folder(folder: Path) -> None:
    """Has the disk keep the names in a folder, as far as its file system can."""
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

    Where the newest is damaged, the one before it is used, with a warning.

    Args:
        folder: Where; made with the first snapshot.
        stem: What their names begin with.
    """

    KEPT = 2

    def __init__(self, folder: str | os.PathLike[str], stem: str):
        self._folder, self._stem = Path(folder), stem
        self._name = re.compile(rf"{re.escape(stem)}-(\d{{6,}})")
        # The number of one that is known to be whole.
        self._whole: int | None = None

    def newest(self) -> Snapshot | None:
        """The newest that is whole; None where there is none."""
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
        """Whether there is any file of the series, whole or not."""
        return bool(self._numbers())

    def write(self, snapshot: Snapshot) -> None:
        """Adds one, and removes those before the last two.

        Raises:
            OSError: It cannot be written; those that were there still are.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        numbers = self._numbers()
        number = max(numbers, default=0) + 1
        write_snapshot(self._path(number), snapshot)
        # Not by number alone: between this one and the last whole one, some may be damaged.
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

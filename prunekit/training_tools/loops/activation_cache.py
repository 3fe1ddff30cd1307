"""Caches arrays by key in memory or files, up to a limit in bytes; the least recently used arrays are evicted first."""

import errno
import hashlib
import json
import math
import os
import secrets
import shutil
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prunekit.core.runtime.snapshot import dtype_name

_MANIFEST = "manifest.json"
_WHOLE = ".activations"
_PARTIAL = ".partial"
_PIECE = 1 << 24
# Age in seconds after which a partial folder belongs to a killed process: a live process would have touched it.
_LEFT_BEHIND = 24 * 3600.0


class TooLargeError(ValueError):
    """Raised for arrays with more bytes than the cache's limit."""


@dataclass(frozen=True, eq=False)
class Kept:
    """The arrays cached under one key.

    Attributes:
        arrays: Read-only arrays of shape (examples, ...).
        sizes: Number of examples of each batch in which the arrays were computed.
    """

    arrays: tuple[np.ndarray, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Total bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)


Batches = Iterator[list[np.ndarray]]


class MemoryStore:
    """Caches arrays in memory.

    Args:
        limit: Maximum total bytes of all arrays.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._kept: dict[str, Kept] = {}

    @property
    def size(self) -> int:
        """Total bytes of the cached arrays."""
        return sum(kept.size for kept in self._kept.values())

    def find(self, key: str) -> Kept | None:
        """Returns the key's arrays and marks them as most recently used; None if the key is not cached."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._kept[key] = kept
        return kept

    def keep(self, key: str, batches: Batches, examples: int | None = None) -> Kept:
        """Caches all batches, lists of arrays of shape (batch, ...), under the key and returns the cached arrays.

        Args:
            key: The key for `find`.
            batches: The batches to cache.
            examples: Total number of examples in the batches, if known in advance.

        Raises:
            TooLargeError: The batches take more bytes than the limit; nothing is cached.
            ValueError: The arrays of the batches cannot be joined.
        """
        tally = _BatchTally(self._limit, examples)
        parts: list[list[np.ndarray]] = []
        for batch in batches:
            tally.add(batch)
            self._make_room(tally.needed)
            parts.append(tally.placed(batch))
        tally.check_some()
        kept = Kept(tally.joined(parts), tuple(tally.sizes))
        for array in kept.arrays:
            array.flags.writeable = False
        self._kept[key] = kept
        return kept

    def clear(self) -> None:
        """Removes all arrays from the cache."""
        self._kept.clear()

    def _make_room(self, needed: int) -> None:
        while self._kept and self.size + needed > self._limit:
            del self._kept[next(iter(self._kept))]


class _BatchTally:
    """Tallies sizes and bytes of one data set's batches, and checks that their arrays can be joined."""

    def __init__(self, limit: int, examples: int | None):
        self._limit, self._examples = limit, examples
        self.sizes: list[int] = []
        self.kinds: list[tuple[np.dtype, tuple[int, ...]]] = []
        self._room: tuple[np.ndarray, ...] = ()
        self.needed = 0

    def add(self, batch: list[np.ndarray]) -> None:
        if any(array.dtype.hasobject for array in batch):
            raise ValueError(
                f"Only numeric arrays are cached. Received: {', '.join(str(array.dtype) for array in batch)}."
            )
        kinds = [(array.dtype, array.shape[1:]) for array in batch]
        if self.sizes and kinds != self.kinds:
            raise ValueError(
                "Activations of one data set are kept as one array, so all batches have one shape but for the number "
                f"of examples. Received: {_listed(self.kinds)}, then {_listed(kinds)}. Pad the inputs to one shape."
            )
        self.kinds = kinds
        self.sizes.append(len(batch[0]))
        row = sum(array.nbytes for array in batch) / max(len(batch[0]), 1)
        self.needed = math.ceil(row * max(self._examples or 0, sum(self.sizes)))
        if self.needed > self._limit:
            more = "" if self._examples else " or more"
            raise TooLargeError(
                f"The activations of this data set take {self.needed:,} bytes{more}, and the limit is "
                f"{self._limit:,}. Received: limit={self._limit}. Raise `limit` (with `directory` it counts bytes on "
                "disk), name a boundary where the activations are smaller, or pass fewer examples."
            )

    def placed(self, batch: list[np.ndarray]) -> list[np.ndarray]:
        """Returns a copy of the batch; with a known number of examples, copies into shared arrays and returns []."""
        if self._examples is None:
            return [np.array(array) for array in batch]
        if not self._room:
            self._room = tuple(np.empty((self._examples, *shape), dtype) for dtype, shape in self.kinds)
        begin = sum(self.sizes[:-1])
        for room, array in zip(self._room, batch, strict=True):
            room[begin : begin + len(array)] = array
        return []

    def check_some(self) -> None:
        if not self.sizes:
            raise ValueError("Activations need at least one batch. Received: an empty data set.")

    def joined(self, parts: list[list[np.ndarray]]) -> tuple[np.ndarray, ...]:
        return self._room or tuple(np.concatenate(column) for column in zip(*parts, strict=True))


def _listed(kinds: list[tuple[np.dtype, tuple[int, ...]]]) -> str:
    return " and ".join(f"{dtype.name} of shape (batch, {', '.join(map(str, shape))})" for dtype, shape in kinds)


class FileStore:
    """Caches arrays in files of a folder and returns them as memory maps.

    Each key's files have their own folder, which is written under a temporary name and renamed when it is complete.
    Contents are compared with their checksums when a process first reads them; damaged contents count as missing, with
    a warning. Several processes may use one folder. Files that the store did not write stay untouched.

    Args:
        folder: Folder of the files; created when the first arrays are cached.
        limit: Maximum total bytes of all arrays.
    """

    def __init__(self, folder: str | os.PathLike[str], limit: int):
        self._folder, self._limit = Path(folder), limit
        self._open: dict[str, Kept] = {}

    def find(self, key: str) -> Kept | None:
        """Returns the key's arrays and marks them as most recently used; None if missing or damaged."""
        entry = self._entry(key)
        if not os.path.isdir(entry):
            self._open.pop(key, None)
            return None
        try:
            kept = self._open.get(key) or _read(entry, key)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            if not os.path.isdir(entry):
                # Another process removed it meanwhile.
                return None
            warnings.warn(f"{entry} is damaged ({error}), so its activations are computed again.", stacklevel=4)
            return None
        self._open[key] = kept
        try:
            os.utime(entry)
        except OSError:
            # In a read-only folder nothing is ever removed, so the time of the last use is not needed.
            pass
        return kept

    def keep(self, key: str, batches: Batches, examples: int | None = None) -> Kept:
        """Caches all batches under the key, as `MemoryStore.keep` does.

        Raises:
            OSError: The folder cannot be written, or the disk is full; no partial files remain.
            TooLargeError: As `MemoryStore.keep`.
            ValueError: As `MemoryStore.keep`.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = self._folder / f"{key}-{os.getpid()}-{secrets.token_hex(4)}{_PARTIAL}"
        partial.mkdir()
        try:
            self._write(partial, key, batches, _BatchTally(self._limit, examples))
            # Opened before the rename, after which other processes may remove it. Maps survive renaming and removal.
            kept = _read(partial, key, trusted=True)
            self._put_in_place(partial, self._entry(key))
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        self._open[key] = kept
        return kept

    def clear(self) -> None:
        """Closes the open memory maps; the files remain."""
        self._open.clear()

    def _entry(self, key: str) -> Path:
        return self._folder / f"{key}{_WHOLE}"

    def _write(self, partial: Path, key: str, batches: Batches, tally: _BatchTally) -> None:
        files: list[Any] = []
        digests: list[Any] = []
        try:
            for batch in batches:
                tally.add(batch)
                self._make_room(tally.needed)
                if not files:
                    files = [open(partial / str(number), "wb") for number in range(len(batch))]
                    digests = [hashlib.sha256() for _ in batch]
                for file, digest, array in zip(files, digests, batch, strict=True):
                    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                    file.write(raw)
                    digest.update(raw)
        finally:
            # Closing flushes buffers, so the error of a full disk may occur here.
            for file in files:
                file.close()
        tally.check_some()
        rows = sum(tally.sizes)
        manifest = {
            "key": key,
            "sizes": tally.sizes,
            "arrays": [
                {"dtype": dtype_name(dtype), "shape": [rows, *shape], "sha256": digest.hexdigest()}
                for (dtype, shape), digest in zip(tally.kinds, digests, strict=True)
            ],
        }
        (partial / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")

    def _put_in_place(self, partial: Path, entry: Path) -> None:
        # If another process is faster in all attempts, its folder has the same content.
        for _ in range(3):
            try:
                partial.rename(entry)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                # The other process's folder may be damaged; this one is complete, so it replaces the other.
                self._remove(entry)

    def _make_room(self, needed: int) -> None:
        entries = sorted(self._entries(), key=lambda row: row[1])
        total = sum(size for _, _, size in entries)
        for entry, _, size in entries:
            if total + needed <= self._limit:
                break
            self._remove(entry)
            total -= size

    def _entries(self) -> Iterator[tuple[Path, float, int]]:
        """Yields (folder, time of last use, bytes) of each cached key; removes partial folders of killed processes."""
        for path in self._folder.iterdir():
            try:
                used = path.stat().st_mtime
                if path.suffix == _WHOLE:
                    yield path, used, sum(file.stat().st_size for file in path.iterdir() if file.name != _MANIFEST)
                elif path.suffix == _PARTIAL and time.time() - used > _LEFT_BEHIND:
                    shutil.rmtree(path, ignore_errors=True)
            except OSError:
                # Another process removed the folder during the iteration.
                continue

    def _remove(self, entry: Path) -> None:
        # Renamed first, so that no other process finds a partly removed folder.
        doomed = entry.with_name(f"{entry.stem}-{os.getpid()}-{secrets.token_hex(4)}{_PARTIAL}")
        try:
            entry.rename(doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed, ignore_errors=True)


def _read(entry: Path, key: str, *, trusted: bool = False) -> Kept:
    """Returns the arrays of a folder; raises if the files do not match the manifest."""
    manifest = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
    if manifest["key"] != key:
        raise ValueError("it belongs to another key")
    arrays = tuple(_mapped(entry / str(number), row, trusted) for number, row in enumerate(manifest["arrays"]))
    sizes = tuple(int(size) for size in manifest["sizes"])
    if not arrays or any(len(array) != sum(sizes) for array in arrays):
        raise ValueError("its arrays have wrong lengths")
    return Kept(arrays, sizes)


def _mapped(path: Path, row: dict[str, Any], trusted: bool) -> np.ndarray:
    dtype, shape = np.dtype(row["dtype"]), tuple(int(length) for length in row["shape"])
    expected = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or min(shape) < 0 or path.stat().st_size != expected:
        raise ValueError(f"{path.name} has another size than {expected:,} bytes")
    if not trusted and _file_digest(path) != row["sha256"]:
        raise ValueError(f"the checksum of {path.name} is another one")
    # A memory map of zero bytes raises an error.
    return np.memmap(path, dtype, "r", shape=shape) if expected else np.empty(shape, dtype)


def _file_digest(path: Path) -> str:
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            total.update(piece)
    return total.hexdigest()

"""Reads idx files, the format of MNIST and its relatives, raw or gzip.

Source: the format's description on the MNIST page, http://yann.lecun.com/exdb/mnist/, section "FILE FORMATS".
"""

import gzip
import math
import os
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from prunekit.anatomy.files.archives import LIMITS
from prunekit.recipe.text.loader import RecipeError

# Code in the third byte -> type; numbers are big-endian.
_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP_MAGIC = b"\x1f\x8b"
_PIECE = 1 << 22
_MOST_AXES = 32


def read_idx(path: str | os.PathLike[str]) -> np.ndarray:
    """Reads the array in an idx file, in native byte order.

    Never allocates more memory than the file's content, even if its header is wrong; for gzip files, not more than
    `anatomy.files.archives.LIMITS` allows.

    Args:
        path: File, raw or gzip (recognised by its first bytes, not by its name).

    Raises:
        RecipeError: The file is not an idx file, or its length differs from its header.
        OSError: The file cannot be read.
    """
    path = Path(path)
    with open(path, "rb") as file:
        packed = file.read(2) == _GZIP_MAGIC
        file.seek(0)
        try:
            if not packed:
                return _parse(file, path)
            with gzip.open(file) as stream:
                return _parse(stream, path)  # type: ignore[arg-type]
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise RecipeError(f"{path} is a damaged gzip file: {error}. Fetch it again.") from error


def _parse(stream: BinaryIO, path: Path) -> np.ndarray:
    start = stream.read(4)
    if len(start) < 4 or start[:2] != b"\0\0" or start[2] not in _TYPES or not 0 < start[3] <= _MOST_AXES:
        raise RecipeError(
            f"{path} is not an idx file: one starts with two zero bytes, a type code and a number of dimensions. "
            f"Received: {start!r}."
        )
    kind, rank = np.dtype(_TYPES[start[2]]), start[3]
    header = stream.read(4 * rank)
    if len(header) < 4 * rank:
        raise RecipeError(f"{path} ends inside its header of {4 + 4 * rank} bytes: it is cut off. Fetch it again.")
    shape = tuple(int(length) for length in np.frombuffer(header, ">u4"))
    expected = math.prod(shape) * kind.itemsize
    stored = os.path.getsize(path)
    if isinstance(stream, gzip.GzipFile) and expected > LIMITS.allowance(stored):
        raise RecipeError(
            f"{path} declares {expected:,} bytes, more than {LIMITS.expansion} times the file's {stored:,}: unpack it "
            "first if you trust it."
        )
    body = _read(stream, expected)
    if len(body) < expected:
        raise RecipeError(
            f"{path} is cut off: its header declares {expected:,} bytes for shape {shape}. "
            f"Received: {len(body):,}. Fetch it again."
        )
    if stream.read(1):
        raise RecipeError(
            f"{path} has more data after the {expected:,} bytes that its header declares for shape {shape}."
        )
    return np.frombuffer(body, kind).reshape(shape).astype(kind.newbyteorder("="))


def _read(stream: BinaryIO, size: int) -> bytearray:
    """Reads at most `size` bytes in pieces: one read would allocate the full size that a damaged header states."""
    body = bytearray()
    while len(body) < size:
        piece = stream.read(min(_PIECE, size - len(body)))
        if not piece:
            break
        body += piece
    return body

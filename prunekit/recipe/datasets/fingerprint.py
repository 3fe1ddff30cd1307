"""Fingerprints of the files of a data set: all bytes of small sets; names, sizes and ends of files of large sets."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

# Total size up to which every byte is read.
READ_WHOLE = 1 << 30
_END = 1 << 12
_PIECE = 1 << 20


def fingerprint(paths: Iterable[Path], root: Path) -> str:
    """Returns the SHA-256 over relative names, sizes and contents of files.

    Above `READ_WHOLE` bytes in all, of each file only the first and the last 4 KiB are read, so a change inside a file
    that keeps its size is not seen.

    Args:
        paths: Files of a data set.
        root: Folder from which names count, so that a copy of the folder has the same fingerprint.

    Raises:
        OSError: A file cannot be read.
    """
    rows = sorted((path.relative_to(root).as_posix(), path, path.stat().st_size) for path in paths)
    whole = sum(size for _, _, size in rows) <= READ_WHOLE
    total = hashlib.sha256()
    for name, path, size in rows:
        total.update(f"{name}\0{size}\0".encode())
        with open(path, "rb") as file:
            if whole:
                while piece := file.read(_PIECE):
                    total.update(piece)
            else:
                total.update(file.read(_END))
                file.seek(max(size - _END, 0))
                total.update(file.read(_END))
    return total.hexdigest()


def fingerprint_notes(paths: Iterable[Path]) -> tuple[str, ...]:
    """Returns a note if the fingerprint of these files does not cover every byte, or ()."""
    if sum(path.stat().st_size for path in paths) <= READ_WHOLE:
        return ()
    return (
        "data: the files have more than 1 GiB, so their fingerprint covers names, sizes and the first and last 4 KiB "
        "of each file.",
    )

"""Checks the members that a zip archive (`.keras`, `.npz`) declares before any member is read."""

import os
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prunekit.sparsity.arguments import whole

_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 0x1


class FileRefused(ValueError):
    """Raised for a file that is damaged, hostile or beyond the limits; the message is one line and names the file."""

    def __init__(self, message: str):
        """Stores the message, with line breaks and terminal control characters written as escapes."""
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in message))


@dataclass(frozen=True)
class Limits:
    """Limits on the sizes that a file may declare; SECURITY.md gives the reason for each limit.

    Attributes:
        members: Maximum number of entries of an archive.
        expanded_bytes: Unpacked bytes that an archive may always take, at any compression ratio.
        expansion: Unpacked bytes may exceed `expanded_bytes` up to this multiple of the bytes of the file.
        config_bytes: Maximum bytes of a model's description (`config.json`).
        config_levels: Maximum nesting depth of lists and mappings in `config.json`.
        objects: Maximum number of groups and datasets of an HDF5 file.
    """

    members: int = 10_000
    expanded_bytes: int = 1 << 30
    expansion: int = 100
    config_bytes: int = 1 << 26
    config_levels: int = 200
    objects: int = 1_000_000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            whole(name, value, 1, wrong_type=ValueError)

    def allowance(self, stored: int) -> int:
        """Returns the maximum number of unpacked bytes of a file with `stored` bytes."""
        return max(self.expanded_bytes, self.expansion * stored)


LIMITS = Limits()


@contextmanager
def checked_archive(path: str | os.PathLike[str], limits: Limits = LIMITS) -> Iterator[zipfile.ZipFile]:
    """Yields the open archive after all its members passed the checks; unpacks nothing.

    Args:
        path: The file.
        limits: Limits on the sizes that the file may declare.

    Raises:
        FileRefused: The file is not a complete zip archive, or a member is refused; the message names the member.
        OSError: The file cannot be opened.
    """
    path = os.fspath(path)
    with open(path, "rb") as file:
        try:
            archive = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError, EOFError) as error:
            raise FileRefused(f"{path} is not a complete zip archive: {str(error).rstrip('.')}.") from error
        with archive:
            _check(path, archive, os.fstat(file.fileno()).st_size, limits)
            yield archive


def _check(path: str, archive: zipfile.ZipFile, size: int, limits: Limits) -> None:
    members = archive.infolist()
    if len(members) > limits.members:
        raise FileRefused(f"{path}: expected at most {limits.members:,} members. Received: {len(members):,}.")
    names: set[str] = set()
    for member in members:
        problem = _problem(member)
        if problem is None and member.filename in names:
            problem = "is in the archive twice"
        if problem is not None:
            raise FileRefused(f"{path}: the member {ascii(member.filename)[:80]} {problem}.")
        names.add(member.filename)
    # Compared with the file's size, not the members' packed sizes: several members may claim the same bytes.
    unpacked = sum(member.file_size for member in members)
    if unpacked > limits.allowance(size):
        raise FileRefused(
            f"{path}: its members declare {unpacked:,} bytes, more than {limits.expansion} times the file's {size:,}: "
            "the archive may be intended to fill memory or disk. If you trust the file, save it again without "
            "compression."
        )


def _problem(member: zipfile.ZipInfo) -> str | None:
    """Returns the reason to refuse the member, or None."""
    name, kind = member.orig_filename, stat.S_IFMT(member.external_attr >> 16)
    parts = name.replace("\\", "/").split("/")
    if not name.isprintable() or "\\" in name or ":" in parts[0] or not parts[0] or ".." in parts:
        return "has a name that is not a path inside the archive"
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "is a link or a device, not a file"
    if member.flag_bits & _ENCRYPTED:
        return "is encrypted"
    if member.compress_type not in _COMPRESSIONS:
        return "uses a compression other than stored or deflated"
    if member.compress_type == zipfile.ZIP_STORED and member.compress_size != member.file_size:
        return "is stored uncompressed, but has two different sizes"
    return None

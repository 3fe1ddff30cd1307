"""What a zip archive (`.keras`, `.npz`) says about its members, checked before anything in it is read."""

import os
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 0x1


class FileRefused(ValueError):
    """A file that is damaged, hostile, or beyond what is read; the text is one line that names the file."""

    def __init__(self, message: str):
        """The message, with what would break the line or steer a terminal written as an escape."""
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in message))


@dataclass(frozen=True)
class Limits:
    """How much of a file is believed; SECURITY.md says why each is what it is.

    Attributes:
        members: Most entries of an archive.
        expanded_bytes: Unpacked, an archive may always take so many bytes, however well it is packed.
        expansion: Beyond that, at most so many times the bytes of the file.
        config_bytes: Most bytes of a model's description (`config.json`).
        config_levels: Most levels of lists and mappings in it.
        objects: Most groups and datasets of an HDF5 file.
    """

    members: int = 10_000
    expanded_bytes: int = 1 << 30
    expansion: int = 100
    config_bytes: int = 1 << 26
    config_levels: int = 200
    objects: int = 1_000_000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is not int or value < 1:
                raise ValueError(f"a limit is a positive whole number. Received: {name}={value!r}.")

    def allowance(self, stored: int) -> int:
        """The most bytes that `stored` bytes may become."""
        return max(self.expanded_bytes, self.expansion * stored)


LIMITS = Limits()


@contextmanager
def checked_archive(path: str | os.PathLike[str], limits: Limits = LIMITS) -> Iterator[zipfile.ZipFile]:
    """The open archive, none of whose members is out of bounds; nothing is unpacked.

    Args:
        path: The file.
        limits: How much of it is believed.

    Raises:
        FileRefused: It is no whole zip archive, or one that is refused, with the name of the member.
        OSError: It cannot be opened.
    """
    path = os.fspath(path)
    with open(path, "rb") as file:
        try:
            archive = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError, EOFError) as error:
            raise FileRefused(f"{path} is not a whole zip archive: {str(error).rstrip('.')}.") from error
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
            problem = "stands in the archive twice"
        if problem is not None:
            raise FileRefused(f"{path}: the member {ascii(member.filename)[:80]} {problem}.")
        names.add(member.filename)
    # Against the size of the file and not of the packed members: those may claim the same bytes for themselves.
    unpacked = sum(member.file_size for member in members)
    if unpacked > limits.allowance(size):
        raise FileRefused(
            f"{path}: its members promise {unpacked:,} bytes, more than {limits.expansion} times the file's {size:,}: "
            "an archive that is meant to fill memory or disk. If you trust it, save it again without compression."
        )


def _problem(member: zipfile.ZipInfo) -> str | None:
    """Why this member is refused."""
    name, kind = member.orig_filename, stat.S_IFMT(member.external_attr >> 16)
    parts = name.replace("\\", "/").split("/")
    if not name.isprintable() or "\\" in name or ":" in parts[0] or not parts[0] or ".." in parts:
        return "has a name that is no path inside the archive"
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "is a link or a device, not a file"
    if member.flag_bits & _ENCRYPTED:
        return "is encrypted"
    if member.compress_type not in _COMPRESSIONS:
        return "is packed in a way other than stored or deflated"
    if member.compress_type == zipfile.ZIP_STORED and member.compress_size != member.file_size:
        return "is stored, and yet has two sizes"
    return None

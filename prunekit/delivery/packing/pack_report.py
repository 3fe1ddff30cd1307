"""The report of a packing: bytes beside those of other compressors."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.plain_data import Record
from prunekit.anatomy.records.sections import Column, Picture, Section


def _zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=22).compress(data)


def _brotli(data: bytes) -> bytes:
    import brotli

    return brotli.compress(data)


# Name -> function of bytes, which raises ImportError where its package is not installed.
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip -9": lambda data: gzip.compress(data, 9, mtime=0),
    "xz -9e": lambda data: lzma.compress(data, preset=9 | lzma.PRESET_EXTREME),
    "zstd -22": _zstd,
    "brotli -q 11": _brotli,
}


@dataclass(frozen=True)
class PackedSize(Record):
    """Bytes of a file after one compressor.

    Attributes:
        name: The compressor, with its options.
        bytes: Bytes of its output.
    """

    name: str
    bytes: int


@dataclass(frozen=True)
class PackReport(Displayed):
    """What `pk.pack` did.

    Attributes:
        file: The packed file.
        kind: "litert" or "keras": the file that `pk.unpack` restores.
        bytes_before: Bytes of the file that was packed.
        bytes: Bytes of the packed file.
        entries: Number of entries of all tensors of weights.
        kept: How many of them are not zero.
        ideal_bits: Bits of the entries by their frequencies in each context, and of what is not coded.
        text_bytes: Bytes of the rest: the graph or configuration, and tables of frequencies.
        others: Bytes of the same file after other compressors.
    """

    main_items: ClassVar[str] = "others"

    file: str
    kind: str
    bytes_before: int
    bytes: int
    entries: int
    kept: int
    ideal_bits: float
    text_bytes: int
    others: tuple[PackedSize, ...]

    def verdict(self) -> str:
        """Returns one sentence: bytes before and after."""
        beside = ", ".join(f"{one.name} {one.bytes:,}" for one in self.others)
        text = f"{self.bytes_before:,} -> {self.bytes:,} bytes, {self.bytes_before / self.bytes:.1f} times smaller"
        return f"{text} ({beside})." if beside else f"{text}."

    def sections(self) -> tuple[Section, ...]:
        """Returns the table of bytes beside those of other compressors, and what the bytes hold."""
        columns = (Column("Compressor", "name"), Column("Bytes", "bytes"), Column("Packed / these", "number"))
        rows = [("prunekit pack", self.bytes, 1.0), *((o.name, o.bytes, self.bytes / o.bytes) for o in self.others)]
        rows.append(("not compressed", self.bytes_before, self.bytes / self.bytes_before))
        titles = {"Weights": "count", "Not zero": "count", "Ideal": "bytes", "Rest": "bytes", "File": "bytes"}
        contents = tuple(Column(title, kind) for title, kind in titles.items())
        row = (self.entries, self.kept, round(self.ideal_bits / 8), self.text_bytes, self.bytes)
        return (
            Section("Packed file", columns, tuple(rows), pictures=(self._picture(),)),
            Section(
                "Contents",
                contents,
                (row,),
                explanation="Ideal: bytes of the weights by their frequencies in each context. Rest: bytes of the "
                "graph of a LiteRT file or the configuration of a Keras model, and of tables of frequencies.",
            ),
        )

    def _picture(self) -> Picture:
        sizes = [("not compressed", self.bytes_before), *((one.name, one.bytes) for one in self.others)]
        sizes.append(("prunekit pack", self.bytes))
        return Picture(
            "Bytes of the file",
            "After each compressor, and packed.",
            f"Bars: {', '.join(f'{name} {size:,} bytes' for name, size in sizes)}.",
            "sizes",
            {"sizes": [{"name": name, "bytes": size} for name, size in sizes]},
            wide=True,
        )

    def __str__(self) -> str:
        lines = [f"{self.file}: {self.verdict()}"]
        lines.append(
            f"  {self.kept:,} of {self.entries:,} weights are not zero: {self.ideal_bits / 8:,.0f} bytes, ideal"
        )
        return "\n".join([*lines, f"  the rest of the file: {self.text_bytes:,} bytes"])


def sizes_of_others(data: bytes, names: Iterable[str]) -> tuple[PackedSize, ...]:
    """Returns the bytes of data after each compressor that is installed."""
    found = []
    for name in names:
        try:
            found.append(PackedSize(name, len(COMPRESSORS[name](data))))
        except ImportError:
            continue
    return tuple(found)

"""pack, unpack: a LiteRT or Keras file in fewer bytes, from which it is restored."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from prunekit.anatomy.files.archives import FileRefused
from prunekit.core.runtime.arguments import writable_file
from prunekit.core.runtime.partial_files import partial_file, replace_file, save_model
from prunekit.delivery.packing.decoder import KERAS, LITERT, PRIMES, Damaged, decode
from prunekit.delivery.packing.encoder import Piece, encode
from prunekit.delivery.packing.keras_tensors import keras_pieces, write_keras
from prunekit.delivery.packing.litert_tensors import litert_pieces
from prunekit.delivery.packing.pack_report import COMPRESSORS, PackReport, sizes_of_others
from prunekit.sparsity.arguments import number_of_bytes
from prunekit.suggestions import did_you_mean

_LITERT_MARK = b"TFL3"
LARGEST_FILE = 1 << 30


def pack(model: Any, output: str | os.PathLike[str], *, compare: str | Sequence[str] = ("gzip -9",)) -> PackReport:
    """Writes a LiteRT or Keras file in fewer bytes, without loss; returns a `PackReport`.

    `pk.unpack` gives a LiteRT file back byte by byte, and of a Keras file equal configurations and weights, bit by
    bit. The file pays off for downloads: no runtime computes with it. It becomes small by what came before: zeros, few
    bits, few values.

    Args:
        model: A .tflite or .keras file, or a Keras model, which is packed as its .keras file.
        output: The file to write, such as "small.pack". An existing file is replaced.
        compare: Other compressors whose sizes the report has beside: "gzip -9", "xz -9e", "zstd -22" and
            "brotli -q 11"; the last two where their packages (zstandard, brotli) are installed. All but gzip take
            longer than the packing: up to two seconds for each MB.

    Raises:
        ValueError: The file does not exist, is damaged or of another kind, or `output` cannot be written.
        TypeError: `model` is neither a path nor a Keras model.

    Source: Martin 1979, "Range encoding"; Mahoney 2005 for the text. docs/packing.md has the format.
    """
    target = writable_file(output, "output")
    if not isinstance(compare, Iterable):
        raise TypeError(f"`compare` is a list of names, such as {list(COMPRESSORS)[:2]}. Received: {compare!r}.")
    names = (compare,) if isinstance(compare, str) else tuple(compare)
    for name in names:
        if name not in COMPRESSORS:
            raise ValueError(
                f"`compare` takes {', '.join(COMPRESSORS)}. Received: {name!r}.{did_you_mean(str(name), COMPRESSORS)}"
            )
    if isinstance(model, str | os.PathLike):
        if target.exists() and Path(model).exists() and target.samefile(model):
            raise ValueError(f"`output` is another file than `model`. Received: {os.fspath(output)!r} for both.")
        return _pack_file(Path(model), target, names)
    if not hasattr(model, "get_config"):
        raise TypeError(f"`model` is a .tflite or .keras file, or a Keras model. Received: {type(model).__name__}.")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.keras")
        save_model(model, file)
        return _pack_file(file, target, names)


def _pack_file(path: Path, target: Path, compare: Sequence[str]) -> PackReport:
    if not path.is_file():
        raise FileRefused(f"expected a .tflite or .keras file. Received: {path}, which is no file.")
    data = path.read_bytes()
    kind = _kind(path, data)
    if len(data) > LARGEST_FILE:
        raise FileRefused(f"{path} has {len(data):,} bytes; a packed file holds at most {LARGEST_FILE:,}.")
    pieces, whole = litert_parts(path, data) if kind == "litert" else keras_pieces(path)
    packed = encode(pieces, whole, LITERT if kind == "litert" else KERAS)
    decode(packed.data)
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, packed.data)
    entries, kept = sum(piece.weights for piece in pieces), sum(piece.kept for piece in pieces)
    others = sizes_of_others(data, compare)
    sizes = (len(data), len(packed.data), entries, kept, packed.ideal_bits, packed.text_bytes)
    return PackReport(target.name, kind, *sizes, others)


def litert_parts(path: Path, data: bytes) -> tuple[list[Piece], bytes]:
    """Returns the parts of a LiteRT file.

    Raises:
        FileRefused: The file is damaged.
    """
    try:
        return litert_pieces(data), data
    except Exception as error:  # a damaged flatbuffer makes its reader raise exceptions of every kind
        raise FileRefused(f"{path} cannot be packed: it is not a whole LiteRT file.") from error


def _kind(path: Path, data: bytes) -> str:
    if data[4:8] == _LITERT_MARK:
        return "litert"
    if data[:2] == b"PK":
        return "keras"
    if data[:4] in PRIMES:
        raise FileRefused(f"{path} is a packed file already: unpack it with pk.unpack or prunekit unpack.")
    raise FileRefused(f"expected a .tflite or .keras file. Received: {path}, which is neither.")


def unpack(
    path: str | os.PathLike[str], output: str | os.PathLike[str], *, largest: float | str = LARGEST_FILE
) -> Path:
    """Writes the LiteRT or Keras file that was packed; returns its path.

    Args:
        path: A packed file.
        output: The file to write, which ends with .tflite or .keras as the file did that was packed. An existing file
            is replaced.
        largest: Most bytes that the file may become, a number or a text such as "500MB". Memory is bounded by some five
            times as many.

    Raises:
        ValueError: The packed file does not exist, is damaged or hostile, or holds the other kind of file; `output`
            cannot be written.
        TypeError: `path` is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"`path` is a packed file. Received: {type(path).__name__}.")
    source, target, most = Path(path), writable_file(output, "output"), int(number_of_bytes("largest", largest))
    if not source.is_file():
        raise FileRefused(f"expected a packed file. Received: {source}, which is no file.")
    try:
        found = decode(source.read_bytes(), most)
    except Damaged as error:
        raise FileRefused(f"{source} cannot be unpacked: {error}.") from error
    ending = ".tflite" if isinstance(found, bytes) else ".keras"
    if target.suffix != ending:
        raise ValueError(f"{source} holds a {ending} file. Received: output={os.fspath(output)!r}.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with partial_file(target, f".unfinished-{target.name}") as partial:
        if isinstance(found, bytes):
            partial.write_bytes(found)
        else:
            write_keras(partial, found)
    return target

"""Packs tensors: their forms, the classes of their rows and columns, one sequence of symbols, one text."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from prunekit.delivery.packing.coding import Small, encode_mixed, encode_symbols, encode_text, levels_of
from prunekit.delivery.packing.context_classes import Classes, symbol_bits
from prunekit.delivery.packing.decoder import (
    DTYPES,
    LARGEST,
    MIXED_SMALL,
    MIXED_TEXT,
    MOST_CONTEXTS,
    MOST_EXPANSION,
    PRIMES,
    PRODUCT,
    frequencies,
)
from prunekit.delivery.packing.tensor_forms import Form, classes_of

# A lane costs some 3 bytes, and each step of the decoder as long as some hundred symbols.
_BYTES_OF_A_LANE = 600
_LANES_LIMIT = 1 << 14
# Mixed contexts make a text a quarter smaller than LZMA does. They are worth half a second where the text is more than
# the 24th part of a file.
_TEXT_SHARE = 24
# Classes are compared with those of rows, or columns, at most so far before them: inputs of a flattened image.
_FARTHEST = 4096


@dataclass(frozen=True)
class Piece:
    """A part of a file.

    Attributes:
        form: The form of its tensor.
        shape: Shape of the array.
        weights: Number of weights in it.
        kept: How many of them are not zero.
    """

    form: Form
    shape: tuple[int, ...] = ()
    weights: int = 0
    kept: int = 0


@dataclass(frozen=True)
class Packed:
    """A packed file, and what its bytes hold.

    Attributes:
        data: The file.
        ideal_bits: Bits of the coded symbols by their frequencies, with bytes that are not coded.
        text_bytes: Bytes of the coded text: tables, names, and the rest of the file.
    """

    data: bytes
    ideal_bits: float
    text_bytes: int


def encode(pieces: Sequence[Piece], whole: bytes, kind: bytes) -> Packed:
    """Returns a packed file.

    Args:
        pieces: The parts of the file, in order.
        whole: The bytes that they are, one after another, for the checksum.
        kind: `decoder.LITERT`; or `decoder.KERAS` for texts and arrays, of which the first text names the others.
    """
    forms, classes = _with_classes(_within_limits(pieces, whole))
    coded = [(form, found) for form, found in zip(forms, classes, strict=True) if found is not None]
    contexts, counts = _joined(coded)
    symbols = np.concatenate([np.zeros(0, np.uint8), *(form.symbols for form, _ in coded if form.symbols is not None)])
    parts = frequencies(levels_of(counts))
    bits = symbol_bits(counts)
    lanes = int(np.clip(bits // (8 * _BYTES_OF_A_LANE), 1, _LANES_LIMIT))
    words, lengths = encode_symbols(symbols, contexts, parts, lanes)
    parts_of_text = _text(forms, classes, lengths)
    text, lists = _separated(parts_of_text)
    extra = b"".join(form.extra for form in forms)
    joined = b"".join(one.numbers.tobytes() if isinstance(one, Small) else one for one in parts_of_text)
    packed_text = encode_text(joined)
    is_mixed = (
        len(text) <= MIXED_TEXT
        and sum(len(one.numbers) for one in lists) <= MIXED_SMALL
        and len(packed_text) * _TEXT_SHARE > 2 * len(words) + len(extra)
    )
    text, packed_text = (text, encode_mixed(text, PRIMES[kind], lists)) if is_mixed else (joined, packed_text)
    numbers = b"".join(number(n) for n in (is_mixed, len(text), len(packed_text), len(words)))
    data = kind + struct.pack("<I", zlib.crc32(whole)) + numbers + packed_text + words.tobytes() + extra
    if len(whole) > LARGEST:
        # The decoder ignores what follows.
        data += bytes(max(0, -(-len(whole) // MOST_EXPANSION) - len(data)))
    return Packed(data, bits + 8 * len(extra), len(packed_text))


def text_of(pieces: Sequence[Piece]) -> bytes:
    """Returns the text of a packed file, without the lengths of lanes and small numbers."""
    return _separated(_text(*_with_classes(pieces), np.zeros(0, np.int64)))[0]


def number(value: int) -> bytes:
    """Returns a number of at least 0 in 7 bits a byte, the lowest first; all bytes but the last have the upper bit."""
    coded = bytearray()
    while value > 127:
        coded.append(value & 127 | 128)
        value >>= 7
    return bytes([*coded, value])


def _within_limits(pieces: Sequence[Piece], whole: bytes) -> Sequence[Piece]:
    """Returns the parts, with no more coded tensors than a packed file may have tables: the smallest are not coded."""
    coded = [i for i, piece in enumerate(pieces) if piece.form.symbols is not None]
    smallest = sorted(coded, key=lambda i: pieces[i].form.bits)[: max(0, len(coded) - MOST_CONTEXTS)]
    raw, start, parts = set(smallest), 0, []
    for i, piece in enumerate(pieces):
        end = start + piece.form.size
        parts.append(replace(piece, form=piece.form.raw(whole[start:end])) if i in raw else piece)
        start = end
    return parts


def _with_classes(pieces: Sequence[Piece]) -> tuple[list[Form], list[Classes | None]]:
    forms, classes = [], []
    # Tables beside one for each tensor.
    left = MOST_CONTEXTS - sum(piece.form.symbols is not None for piece in pieces)
    for piece in pieces:
        form, found = piece.form, None
        if form.symbols is not None:
            form, found = classes_of(form, piece.shape or form.shape, most=left + 1)
            left -= found.counts.shape[0] * found.counts.shape[1] - 1
        forms.append(form)
        classes.append(found)
    return forms, classes


def _joined(coded: Sequence[tuple[Form, Classes]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the context of each symbol of all tensors, and the counts, shape (contexts, most symbols)."""
    width = max((form.width for form, _ in coded), default=1)
    contexts, counts, first = [np.zeros(0, np.uint16)], [np.zeros((0, width), np.int64)], 0
    for _, found in coded:
        of_rows, of_columns, symbols = found.counts.shape
        contexts.append((first + found.rows[:, None] * of_columns + found.columns).reshape(-1).astype(np.uint16))
        counts.append(np.pad(found.counts.reshape(-1, symbols), ((0, 0), (0, width - symbols))))
        first += of_rows * of_columns
    return np.concatenate(contexts), np.concatenate(counts)


def _text(forms: Sequence[Form], classes: Sequence[Classes | None], lengths: np.ndarray) -> list[bytes | Small]:
    """Returns the parts of the text, and lists of small numbers, in the decoder's order."""
    parts: list[bytes | Small] = [number(len(lengths)), *(number(int(n)) for n in lengths), number(len(forms))]
    for form, found in zip(forms, classes, strict=True):
        parts += _described(form, found)
    for form in forms:
        parts += [*form.small, form.text]
    return parts


def _separated(parts: Sequence[bytes | Small]) -> tuple[bytes, list[Small]]:
    return b"".join(one for one in parts if isinstance(one, bytes)), [one for one in parts if isinstance(one, Small)]


def _described(form: Form, found: Classes | None) -> list[bytes | Small]:
    fields: list[bytes | Small] = [number(n) for n in (form.form, DTYPES.index(form.dtype), *form.shape)]
    if form.form == PRODUCT:
        fields += [number(form.source), form.factor.tobytes()]
    if found is not None:
        zigzag = form.minimum << 1 if form.minimum >= 0 else (-form.minimum << 1) - 1
        numbers = found.counts.shape[:2]
        fields += [number(n) for n in (zigzag, form.width, *numbers)]
        for lines, of_lines in zip((found.rows, found.columns), numbers, strict=True):
            if of_lines > 1:
                stride = _stride(lines)
                fields += [number(stride), Small(lines.astype(np.uint8), (of_lines - 1).bit_length(), stride)]
        fields.append(Small(levels_of(found.counts).reshape(-1), 7, form.width))
    return fields


def _stride(classes: np.ndarray) -> int:
    """Returns how far before a line another one is most often of its class."""
    if len(classes) > MIXED_SMALL:
        return 1
    small = classes.astype(np.uint8)
    equal = [float((small[s:] == small[:-s]).mean()) for s in range(1, min(len(small) // 4, _FARTHEST))]
    return int(np.argmax(equal)) + 1 if equal else 1

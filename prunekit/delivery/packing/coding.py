"""Codes symbols by the lanes of a range coder, and texts by arithmetic coding: what `decoder` reads."""

from __future__ import annotations

import lzma
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from prunekit.delivery.packing.decoder import LZMA, TOTAL_BITS, TextModel

_WORD = 1 << 16


class Small(NamedTuple):
    """A list of small numbers beside the text, each coded in the context of others of the list.

    Attributes:
        numbers: The numbers, uint8.
        bits: Bits of the largest.
        stride: How far before a number another one is like it.
    """

    numbers: np.ndarray
    bits: int = 8
    stride: int = 1


def encode_text(text: bytes) -> bytes:
    """Returns a text coded by LZMA, which takes no time."""
    return lzma.compress(text, lzma.FORMAT_RAW, filters=LZMA)


def encode_mixed(text: bytes, prime: str, lists: Iterable[Small] = ()) -> bytes:
    """Returns a text coded by mixed contexts after a prime, and lists of small numbers: fewer bytes, and slow.

    Args:
        text: At most `MIXED_TEXT` bytes.
        prime: One of `decoder.PRIMES`.
        lists: At most `MIXED_SMALL` numbers together.
    """
    low, span, length = 0, 1 << 32, 4

    def coded_bit(probability: int, bit: int) -> int:
        nonlocal low, span, length
        part = (span >> 12) * probability
        low, span = (low, part) if bit else (low + part, span - part)
        while span < 1 << 24:
            low, span, length = low << 8, span << 8, length + 1
        return bit

    model = TextModel(prime, coded_bit)
    for byte in text:
        model.byte(byte)
    for numbers, bits, stride in lists:
        model.small(len(numbers), bits, stride, numbers.tolist())
    # The decoder reads zeros after the end: the number of the fewest bytes within the interval.
    zeros = next(zeros for zeros in (32, 24, 16, 8, 0) if -(-low >> zeros) << zeros < low + span)
    return (-(-low >> zeros) << zeros).to_bytes(length, "big").rstrip(b"\0")


def levels_of(counts: np.ndarray) -> np.ndarray:
    """Returns the levels that stand for counts in a table: 0 for none, then four for each doubling, uint8."""
    quarters = counts.astype(np.float64) * 4
    octave = np.floor(np.log2(np.maximum(quarters, 4) / 4))
    steps = np.rint(quarters / 2**octave - 4)
    return np.where(counts > 0, 1 + 4 * octave + steps, 0).astype(np.uint8)


def encode_symbols(
    symbols: np.ndarray, contexts: np.ndarray, parts: np.ndarray, lanes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the words of all lanes, and how many each has.

    Args:
        symbols: Each in range(parts.shape[1]).
        contexts: Row of `parts` of each symbol.
        parts: Frequencies of the symbols in each context, in 1 / 2**TOTAL_BITS.
        lanes: How many runs of equal length the symbols are coded in.

    Source: Martin 1979, "Range encoding"; carries are added to the words already written.
    """
    steps = -(-len(symbols) // lanes)
    padding = steps * lanes - len(symbols)
    likely = int(parts[0].argmax()) if len(parts) else 0
    rows = np.pad(contexts.astype(np.int64), (0, padding)).reshape(lanes, steps).T
    symbols = np.pad(symbols.astype(np.int64), (0, padding), constant_values=likely).reshape(lanes, steps).T
    starts = (np.cumsum(parts, 1) - parts).astype(np.uint64)
    sizes = parts.astype(np.uint64)
    low, span = np.zeros(lanes, np.uint64), np.full(lanes, 1 << 48, np.uint64)
    written = _Words(lanes)
    for step in range(steps):
        row, symbol = rows[step], symbols[step]
        unit = span >> TOTAL_BITS
        low += unit * starts[row, symbol]
        span = unit * sizes[row, symbol]
        low = written.carried(low)
        short = np.flatnonzero(span < 1 << 32)
        if len(short):
            written.append(short, low[short] >> 32)
            low[short] = low[short] << 16 & (1 << 48) - 1
            span[short] <<= 16
    _finish(written, low, span)
    return written.joined()


def _finish(written: _Words, low: np.ndarray, span: np.ndarray) -> None:
    """Writes the one or two words after which any others may follow."""
    ends = low + span
    upper = (low + (1 << 32) - 1) >> 32
    one = np.flatnonzero((upper + 1) << 32 <= ends)
    two = np.flatnonzero((upper + 1) << 32 > ends)
    # Carries into the words before: the last word may be 2**16.
    rounded = low.copy()
    rounded[one] = upper[one] << 32
    rounded[two] = (low[two] + _WORD - 1) >> 16 << 16
    rounded = written.carried(rounded)
    every = np.arange(len(low))
    written.append(every, rounded >> 32)
    written.append(two, rounded[two] >> 16 & _WORD - 1)


class _Words:
    """The words of each lane."""

    def __init__(self, lanes: int):
        self._words = np.zeros((lanes, 64), np.int64)
        self._counts = np.zeros(lanes, np.int64)

    def append(self, lanes: np.ndarray, words: np.ndarray) -> None:
        if len(lanes) and self._counts[lanes].max() >= self._words.shape[1]:
            self._words = np.pad(self._words, ((0, 0), (0, self._words.shape[1])))
        self._words[lanes, self._counts[lanes]] = words.astype(np.int64)
        self._counts[lanes] += 1

    def carried(self, low: np.ndarray) -> np.ndarray:
        """Adds the bits above 48 to the words before; returns the others."""
        lanes = np.flatnonzero(low >> 48)
        places = self._counts[lanes] - 1
        while len(lanes):
            self._words[lanes, places] += 1
            over = self._words[lanes, places] == _WORD
            lanes, places = lanes[over], places[over]
            self._words[lanes, places] = 0
            places = places - 1
        return low & (1 << 48) - 1

    def joined(self) -> tuple[np.ndarray, np.ndarray]:
        given = np.arange(self._words.shape[1]) < self._counts[:, None]
        return self._words[given].astype("<u2"), self._counts

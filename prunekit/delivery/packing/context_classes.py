"""Classes of rows and of columns of a matrix of symbols, each pair of which has a table of probabilities of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Bits of one entry of a table, and of the class of one row, in the text of a packed file: what was measured, rounded.
_ENTRY_BITS = 5.0
_CLASS_BITS = 0.5
_ROUNDS = 4
_NUMBERS = (2, 4, 8)
# Of fewer symbols, further tables would cost more than they save.
_SMALLEST = 256
# Counts of at most so many rows x symbols are formed.
_COUNTS_LIMIT = 1 << 24


@dataclass(frozen=True)
class Classes:
    """Classes of rows and columns.

    Attributes:
        rows: Class of each row, shape (rows,).
        columns: Class of each column, shape (columns,).
        counts: How often each symbol occurs, shape (classes of rows, classes of columns, symbols).
    """

    rows: np.ndarray
    columns: np.ndarray
    counts: np.ndarray

    @property
    def bits(self) -> float:
        """Bits of the symbols by their frequencies, of the tables and of the classes."""
        numbers = self.counts.shape[:2]
        of_classes = sum(
            _entropy(np.bincount(found)) + _CLASS_BITS * len(found)
            for found, number in zip((self.rows, self.columns), numbers, strict=True)
            if number > 1
        )
        return symbol_bits(self.counts) + _ENTRY_BITS * np.count_nonzero(self.counts) + of_classes


def symbol_bits(counts: np.ndarray) -> float:
    """Returns the bits of symbols by their frequencies in each context; `counts` has the symbols last."""
    return float(sum(_entropy(row) for row in counts.reshape(-1, counts.shape[-1])))


def _entropy(counts: np.ndarray) -> float:
    some = counts[counts > 0].astype(np.float64)
    return float(-(some * np.log2(some / some.sum())).sum())


def find_classes(symbols: np.ndarray, width: int, most: int) -> Classes:
    """Returns the classes of the fewest bits that were tried.

    Args:
        symbols: Each in range(width), shape (rows, columns).
        width: Number of symbols.
        most: Largest number of pairs of a class of rows and a class of columns.
    """
    best = _classes(symbols, width, np.zeros(len(symbols), np.int64), np.zeros(symbols.shape[1], np.int64))
    for first in (0, 1) if symbols.size >= _SMALLEST else ():
        found = best
        for axis in (first, 1 - first, first):
            tried = [one for one in _tried(symbols, width, found, axis) if one.counts[..., 0].size <= most]
            found = min(tried, key=lambda one: one.bits, default=found)
        best = min(best, found, key=lambda one: one.bits)
    return best


def _classes(symbols: np.ndarray, width: int, rows: np.ndarray, columns: np.ndarray) -> Classes:
    numbers = (int(rows.max(initial=0)) + 1, int(columns.max(initial=0)) + 1)
    places = (rows[:, None] * numbers[1] + columns) * width + symbols
    return Classes(
        rows,
        columns,
        np.bincount(places.reshape(-1), minlength=numbers[0] * numbers[1] * width).reshape(*numbers, width),
    )


def _tried(symbols: np.ndarray, width: int, found: Classes, axis: int) -> list[Classes]:
    """Returns `found`, and what numbers of classes of one axis give, with those of the other as they are."""
    other = (found.rows, found.columns)[1 - axis]
    lines = symbols if axis == 0 else symbols.T
    blocks = int(other.max(initial=0)) + 1
    if len(lines) < 4 or len(lines) * blocks * width > _COUNTS_LIMIT:
        return [found]
    places = (np.arange(len(lines))[:, None] * blocks + other) * width + lines
    counts = np.bincount(places.reshape(-1), minlength=len(lines) * blocks * width).reshape(len(lines), blocks, width)
    tried = [found]
    for number in _NUMBERS:
        if number * 2 > len(lines):
            break
        own = _nearest_tables(counts, number)
        tried.append(_classes(symbols, width, *((own, other) if axis == 0 else (other, own))))
        if tried[-1].bits > tried[-2].bits:
            break
    return tried


def _nearest_tables(counts: np.ndarray, number: int) -> np.ndarray:
    """Returns the class of each line: k-means with code lengths in the place of distances.

    Args:
        counts: How often each symbol occurs, shape (lines, blocks, symbols); each block has its own table.
        number: Number of classes.
    """
    most = counts.sum((0, 1)).argmax()
    # Lines are first split by how often the most frequent symbol occurs in them.
    order = np.argsort(counts[:, :, most].sum(1), kind="stable")
    found = np.empty(len(counts), np.int64)
    found[order] = np.arange(len(counts)) * number // len(counts)
    flat = counts.reshape(len(counts), -1).astype(np.float32)
    for _ in range(_ROUNDS):
        members = (found == np.arange(number)[:, None]).astype(np.float32)
        tables = (members @ flat).reshape(number, *counts.shape[1:]) + 0.05
        lengths = -np.log2(tables / tables.sum(-1, keepdims=True)).reshape(number, -1)
        before, found = found, (flat @ lengths.T).argmin(1)
        if np.array_equal(before, found):
            break
    # Without the numbers of classes that no line is in.
    return np.unique(found, return_inverse=True)[1]

"""Sparse encoding of an array of integers in LiteRT's schema: the stored blocks, and where they are.

All axes but one are dense. Along this one, each row has a list of the indices of its blocks with an entry that is not
zero, and a block has some consecutive entries.

Source: TensorFlow Lite's schema, `SparsityParameters`; Kjolstad et al. 2017, doi:10.1145/3133901 (the format).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

# Lengths of blocks that are tried.
_BLOCKS = (1, 2, 4, 8, 16)
# Types of indices in the schema.
_INDICES = ("uint8", "uint16", "int32")


@dataclass(frozen=True, eq=False)
class SparseEncoding:
    """An array as blocks.

    Attributes:
        codes: The array, integers of 8 bits.
        axis: The axis that is not dense.
        block: Entries of a block along this axis; divides its length.
    """

    codes: np.ndarray
    axis: int
    block: int

    @property
    def order(self) -> tuple[int, ...]:
        """The axes in the order in which the blocks are stored: the one that is not dense is the last."""
        return (*(axis for axis in range(self.codes.ndim) if axis != self.axis), self.axis)

    @cached_property
    def _blocks(self) -> np.ndarray:
        """All blocks, shape (rows, blocks of a row, entries of a block)."""
        length = self.codes.shape[self.axis]
        return self.codes.transpose(self.order).reshape(-1, length // self.block, self.block)

    @cached_property
    def _kept(self) -> np.ndarray:
        """True for blocks that are stored, shape (rows, blocks of a row)."""
        found = (self._blocks != 0).any(axis=-1)
        if not found.any():
            # A constant without bytes counts as a tensor that is computed.
            found[0, 0] = True
        return np.asarray(found)

    @property
    def values(self) -> np.ndarray:
        """The entries of the stored blocks, one after another."""
        return np.asarray(self._blocks[self._kept].reshape(-1))

    @property
    def segments(self) -> np.ndarray:
        """Numbers of blocks before each row, and of all blocks, shape (rows + 1,)."""
        return _smallest(np.concatenate([[0], np.cumsum(self._kept.sum(axis=1))]))

    @property
    def indices(self) -> np.ndarray:
        """Index of each stored block in its row."""
        return _smallest(np.nonzero(self._kept)[1])

    @property
    def bytes(self) -> int:
        """Bytes of values, segments and indices."""
        return int(self._kept.sum()) * self.block + self.segments.nbytes + self.indices.nbytes


def smallest_encoding(codes: np.ndarray) -> SparseEncoding:
    """Returns the encoding of an array with the fewest bytes.

    Args:
        codes: Integers of 8 bits, at least one axis and one entry.
    """
    choices = itertools.product(range(codes.ndim), _BLOCKS)
    tried = [SparseEncoding(codes, axis, block) for axis, block in choices if codes.shape[axis] % block == 0]
    return min(tried, key=lambda one: one.bytes)


def _smallest(indices: np.ndarray) -> np.ndarray:
    """Returns indices in the smallest type of the schema that holds them."""
    largest = indices.max(initial=0)
    return indices.astype(next(one for one in _INDICES if largest <= np.iinfo(one).max))

"""A tensor as symbols and bytes that are not coded, in the form of the fewest bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from prunekit.delivery.packing.coding import Small
from prunekit.delivery.packing.context_classes import Classes, find_classes, symbol_bits
from prunekit.delivery.packing.decoder import DTYPES, FLOAT, GRID, INTEGER, LENGTH, PRODUCT, RAW, TABLE, TEXT

_ALPHABET = 256
# Largest integer on a grid.
_STEPS = 128
# Shorter rows or columns have no scale, and no table of values, of their own.
_SHORTEST_LINE = 16
# Values of a line with which all scales are tried.
_FIRST = 32


@dataclass(frozen=True)
class Form:
    """A tensor as a packed file holds it.

    Attributes:
        form: Number of the form, in `decoder`.
        dtype: One of `decoder.DTYPES`.
        shape: (rows, columns).
        minimum: What is added to each symbol.
        symbols: Symbols, shape (rows x columns,), or None.
        width: Number of kinds of symbols.
        extra: Bytes that are not coded.
        small: Lists of small numbers beside the text.
        text: Bytes that are part of the text.
        source: Of a product: index of the other tensor.
        factor: Of a product: the float32 number.
    """

    form: int
    dtype: str
    shape: tuple[int, int]
    minimum: int = 0
    symbols: np.ndarray | None = None
    width: int = 1
    extra: bytes = b""
    small: tuple[Small, ...] = ()
    text: bytes = b""
    source: int = 0
    factor: np.ndarray = field(default_factory=lambda: np.ones(1, "<f4"))

    @property
    def bits(self) -> float:
        """Bits without classes: what forms are compared by."""
        coded = 0.0
        if self.symbols is not None:
            counts = np.bincount(self.symbols, minlength=self.width)
            coded = symbol_bits(counts) + 5 * np.count_nonzero(counts)
        return (
            coded + 8 * len(self.extra) + sum(symbol_bits(np.bincount(one.numbers, minlength=1)) for one in self.small)
        )

    @property
    def size(self) -> int:
        """Bytes of the tensor in the file that is packed."""
        count = self.shape[0] * self.shape[1]
        return (count + 1) // 2 if self.dtype == "int4" else count * np.dtype(self.dtype).itemsize

    def raw(self, content: bytes) -> Form:
        """Returns the form that codes nothing, of the tensor's bytes."""
        if self.dtype == "int4":
            return Form(RAW, "|u1", (1, len(content)), extra=content)
        return Form(RAW, self.dtype, self.shape, extra=content)


def text_form(text: bytes) -> Form:
    """Returns bytes as part of the text."""
    return Form(TEXT, "|u1", (1, len(text)), text=text)


def product_form(count: int, source: int, factor: np.ndarray) -> Form:
    """Returns a float32 vector that is another one times a number."""
    return Form(PRODUCT, "<f4", (1, count), source=source, factor=factor)


def best_form(array: np.ndarray, dtype: str | None = None) -> Form:
    """Returns an array in the form of the fewest bits.

    Args:
        array: Any of the types in `decoder.DTYPES`, of any shape.
        dtype: "int4" for int8 values of which a file holds 4 bits each; None = the array's own.
    """
    kind = dtype or array.dtype.newbyteorder("<").str
    if kind not in DTYPES:
        raise TypeError(f"a packed file holds arrays of {', '.join(DTYPES)}. Received: {array.dtype}.")
    # Channels are the first axis in LiteRT and the last one in Keras.
    ends = (array.shape[0], array.shape[-1]) if array.ndim and array.size else (1, 1)
    matrices = [array.reshape(ends[0], -1), array.reshape(-1, ends[1])] if array.size else [np.zeros((0, 0), kind)]
    return min((form for matrix in matrices for form in _forms(matrix, kind)), key=lambda form: form.bits)


def classes_of(form: Form, shape: tuple[int, ...], most: int) -> tuple[Form, Classes]:
    """Returns the form in the shape (rows, columns) of the fewest bits, and its classes.

    Args:
        form: A form with symbols.
        shape: Shape of the array: rows are its first axes, columns the others. Scales and tables of
            rows or columns keep the shape that they were found in.
        most: Largest number of pairs of classes.
    """
    assert form.symbols is not None  # noqa: S101
    splits = {form.shape}
    if form.form not in (GRID, TABLE) or form.extra[0] == 0:
        splits |= {(int(np.prod(shape[:i])), int(np.prod(shape[i:]))) for i in range(1, len(shape))}
    found = [(split, find_classes(form.symbols.reshape(split), form.width, most)) for split in sorted(splits)]
    split, classes = min(found, key=lambda one: one[1].bits)
    return Form(**{**vars(form), "shape": split}), classes


def _forms(matrix: np.ndarray, kind: str) -> Iterator[Form]:
    shape = matrix.shape
    if kind != "int4":
        yield Form(RAW, kind, shape, extra=matrix.astype(matrix.dtype.newbyteorder("<")).tobytes())
    if not matrix.size:
        return
    if matrix.dtype.kind in "iub":
        yield from _integer_forms(matrix, kind)
        return
    yield from _table_forms(matrix, kind)
    if kind == "<f4":
        yield from _grid_forms(matrix)
    yield from _float_forms(matrix, kind)


def _integer_forms(matrix: np.ndarray, kind: str) -> Iterator[Form]:
    values = matrix.astype(np.int64 if matrix.dtype != np.uint64 else np.uint64).reshape(-1)
    least, most = int(values.min()), int(values.max())
    if most - least < _ALPHABET:
        symbols = (values - least).astype(np.uint8)
        yield Form(INTEGER, kind, matrix.shape, least, symbols, most - least + 1)
    elif matrix.dtype.kind == "i":
        yield _length_form(values, matrix.shape, kind)


def _length_form(values: np.ndarray, shape: tuple[int, int], kind: str) -> Form:
    places = ((values << 1) ^ (values >> 63)).view(np.uint64)
    bits = np.unpackbits(places.astype(">u8").view(np.uint8).reshape(-1, 8), axis=1)
    lengths = np.where(places > 0, 64 - bits.argmax(1), 0)
    # All bits after the first one that is set.
    after = np.arange(64) > 64 - lengths[:, None]
    symbols = lengths.astype(np.uint8)
    return Form(LENGTH, kind, shape, 0, symbols, int(lengths.max()) + 1, np.packbits(bits[after]).tobytes())


def _table_forms(matrix: np.ndarray, kind: str) -> Iterator[Form]:
    """Yields a matrix as places in a table of its values, and in tables of each row and of each column."""
    if not np.isfinite(matrix).all() or (np.signbit(matrix) & (matrix == 0)).any():
        return
    for axis, lines in enumerate((matrix.reshape(1, -1), matrix, matrix.T)):
        if axis and (lines.shape[1] < _SHORTEST_LINE or len(lines) < 2):
            continue
        # The first entries tell most lines that have too many values.
        if len(np.unique(lines[0][: 4 * _ALPHABET])) >= _ALPHABET:
            continue
        tables = [np.union1d(line, np.zeros(1, line.dtype)) for line in lines]
        zeros = np.array([np.searchsorted(table, 0) for table in tables])
        above = np.array([len(table) for table in tables]) - zeros - 1
        if zeros.max() + above.max() >= _ALPHABET:
            continue
        # Places are counted from zero: zeros have one symbol in all lines.
        found = [np.searchsorted(table, line) - zero for table, line, zero in zip(tables, lines, zeros, strict=True)]
        places = np.stack(found).T if axis == 2 else np.stack(found)
        values = np.concatenate([table[table != 0] for table in tables]).astype(matrix.dtype.newbyteorder("<"))
        heads, rest = _heads(values)
        lists = tuple(Small(one.astype(np.uint8)) for one in (zeros, above, heads + 1))
        least, most = int(places.min()), int(places.max())
        symbols = (places - least).astype(np.uint8).reshape(-1)
        # The upper bits of the largest numbers of 8 bytes leave no room for the 1 that is added.
        if heads.max(initial=0) < _ALPHABET - 1:
            yield Form(TABLE, kind, matrix.shape, least, symbols, most - least + 1, bytes([axis]) + rest, lists)


def _float_forms(matrix: np.ndarray, kind: str) -> Iterator[Form]:
    some = matrix.reshape(-1).view(f"u{matrix.itemsize}") > 0
    heads, rest = _heads(matrix.reshape(-1)[some])
    least = int(heads.min(initial=255)) - 1
    width = int(heads.max(initial=least)) - least + 1
    if width <= _ALPHABET:
        symbols = np.zeros(len(some), np.uint8)
        symbols[some] = heads - least
        yield Form(FLOAT, kind, matrix.shape, least, symbols, width, rest)


def _heads(values: np.ndarray) -> tuple[np.ndarray, bytes]:
    """Returns the upper 8 bits of numbers rotated to the left by one, and their other bytes."""
    size = values.itemsize
    patterns = values.view(f"u{size}")
    rotated = patterns << 1 | patterns >> (8 * size - 1)
    parts = rotated.astype(f"<u{size}").view(np.uint8).reshape(-1, size)
    return parts[:, -1].astype(np.int64), parts[:, :-1].tobytes()


# ---- grids -----------------------------------------------------------------------------------------------------------


def _grid_forms(matrix: np.ndarray) -> Iterator[Form]:
    """Yields a matrix of float32 as integers times a scale of all, or of each row and of each column, if it is one."""
    if not np.isfinite(matrix).all() or (np.signbit(matrix) & (matrix == 0)).any():
        return
    for axis, lines in enumerate((matrix.reshape(1, -1), matrix, matrix.T)):
        if axis and lines.shape[1] < _SHORTEST_LINE:
            continue
        scales = _scales(lines)
        if scales is not None:
            across = scales.reshape((1, -1) if axis == 2 else (-1, 1))
            integers = np.rint(matrix / np.where(across > 0, across, 1)).astype(np.int64)
            least, most = int(integers.min()), int(integers.max())
            symbols = (integers - least).astype(np.uint8).reshape(-1)
            some = scales > 0
            heads, rest = _heads(scales[some])
            upper = np.zeros(len(scales), np.uint8)
            upper[some] = heads + 1
            extra = bytes([axis]) + rest
            # From -128 to 128 there are 257.
            if most - least < _ALPHABET:
                yield Form(GRID, "<f4", matrix.shape, least, symbols, most - least + 1, extra, (Small(upper),))
            if axis == 0:
                return


def _scales(lines: np.ndarray) -> np.ndarray | None:
    """Returns the scale of each line; None if a line has none."""
    # Most weights are on no grid. The line with the fewest zeros says so at once: a single value is on many grids.
    found = np.zeros(len(lines), np.float32)
    for place in np.argsort(-np.count_nonzero(lines, axis=1)):
        line = lines[place]
        scale = _scale(line[line != 0])
        if scale is None:
            return None
        found[place] = scale
    return found


@np.errstate(over="ignore")
def _scale(values: np.ndarray) -> np.float32 | None:
    """Returns the scale of which values other than zero are multiples by integers of at most 8 bits; 0 without values.

    float32(integer) * scale has the bits of each value. A scale is the largest value divided by an integer, or a
    neighbour of it, since that division was rounded. The first values tell most scales that are none.
    """
    if not len(values):
        return np.float32(0)
    divided = np.abs(values).max() / np.arange(1, _STEPS + 1, dtype=np.float32)
    scales = np.stack([divided, np.nextafter(divided, np.float32(0)), np.nextafter(divided, np.float32(np.inf))], 1)
    scales = scales[(scales > 0) & np.isfinite(scales)]
    for scale in scales[_are_multiples(values[:_FIRST], scales[:, None])]:
        if _are_multiples(values, scale):
            return scale
    return None


def _are_multiples(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    found = np.rint(values / scales)
    return ((found * scales == values) & (np.abs(found) <= _STEPS)).all(-1)

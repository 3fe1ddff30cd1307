"""Tensors of every type and form come back bit by bit, in few bytes."""

import numpy as np
import pytest

from prunekit.delivery.packing.context_classes import find_classes, symbol_bits
from prunekit.delivery.packing.decoder import (
    FLOAT,
    GRID,
    INTEGER,
    KERAS,
    LENGTH,
    LITERT,
    MOST_CONTEXTS,
    PRODUCT,
    RAW,
    TABLE,
    decode,
)
from prunekit.delivery.packing.encoder import Piece, encode
from prunekit.delivery.packing.tensor_forms import best_form, product_form, text_form

pytestmark = pytest.mark.usefixtures("without_primes")

RNG = np.random.default_rng(3)
FLOATS = RNG.normal(size=(40, 30)).astype("<f4")
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4e38, 1.0], "<f4").repeat(9)
KEPT = RNG.random((40, 30)) < 0.1


def grid(axis):
    """Integers of four bits times a scale of all, of each row, or of each column."""
    integers = RNG.integers(-7, 8, (40, 30)) * (RNG.random((40, 30)) < 0.5)
    scales = np.abs(RNG.normal(size=[(1, 1), (40, 1), (1, 30)][axis])).astype("<f4") + np.float32(0.01)
    return integers.astype("<f4") * scales


def codebook(axis):
    """Each row, or each column, takes eight values of its own, of which one is zero."""
    lines = (1, 60, 60)[axis]
    values = RNG.normal(size=(lines, 8)).astype("<f4")
    values[:, 3] = 0
    places = RNG.integers(0, 8, (lines, 3600 // lines))
    found = np.take_along_axis(values, places, axis=1).reshape(60, 60)
    return found.T.copy() if axis == 2 else found


ARRAYS = {
    "integers": (np.clip(RNG.normal(0, 30, (60, 50)), -127, 127).astype("|i1"), INTEGER),
    "integers, all as frequent": (RNG.integers(-128, 128, (20, 50)).astype("|i1"), RAW),
    "pruned integers": ((RNG.integers(-7, 8, (60, 50)) * (RNG.random((60, 50)) < 0.1)).astype("|i1"), INTEGER),
    "unsigned": (RNG.integers(0, 9, 500).astype("|u1"), INTEGER),
    "bool": (RNG.random((9, 50)) < 0.2, INTEGER),
    "few of int64": (RNG.integers(-3, 3, 200) + 2**40, INTEGER),
    "zero points": (np.zeros(300, "<i8"), INTEGER),
    "biases": (RNG.integers(-90_000, 90_000, 200).astype("<i4"), LENGTH),
    "extremes": (np.array([-(2**63), 2**63 - 1, 0, 1, -1, 5] * 3, "<i8"), LENGTH),
    "int16": (RNG.integers(-3000, 3000, 300).astype("<i2"), LENGTH),
    "large unsigned": (np.array([2**64 - 1, 0, 7] * 4, "<u8"), RAW),
    "one grid": (grid(0), GRID),
    "a grid of each row": (grid(1), GRID),
    "a grid of each column": (grid(2), GRID),
    "one codebook": (codebook(0), TABLE),
    "a codebook of each row": (codebook(1), TABLE),
    "a codebook of each column": (codebook(2), TABLE),
    "pruned floats": (np.where(KEPT, FLOATS, 0).astype("<f4"), FLOAT),
    "floats": (RNG.normal(size=3000).astype("<f4"), FLOAT),
    "special floats": (np.append(SPECIAL, RNG.normal(size=300).astype("<f4")), None),
    "negative zeros": (np.where(KEPT, FLOATS, np.float32(-0.0)), None),
    "negative zeros on a grid": (-np.abs(grid(0)), None),
    "float16": (FLOATS.astype("<f2"), None),
    "float64": (FLOATS.astype("<f8"), None),
    "random bits": (np.frombuffer(RNG.bytes(4000), "<f4"), RAW),
    "one number": (np.float32(0.3), None),
    "empty": (np.zeros((0, 3), "<f4"), None),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_comes_back_bit_by_bit_in_its_form(name):
    array, form = ARRAYS[name]
    array = np.asarray(array)
    best = best_form(array)
    assert form is None or best.form == form
    first = f'[["weights",{list(array.shape)}]]'.encode()
    packed = encode([Piece(text_form(first)), Piece(best, array.shape)], first + array.tobytes(), KERAS)
    found = decode(packed.data)["weights"]
    assert (found.dtype, found.shape) == (array.dtype, array.shape) and found.tobytes() == array.tobytes()


@pytest.mark.parametrize("count", [24, 25])
def test_nibbles_come_back(count):
    values = RNG.integers(-8, 8, count).astype(np.int8)
    low, high = values[::2], np.pad(values[1::2], (0, count % 2))
    content = ((low & 15) | (high << 4)).astype(np.int8).tobytes()
    assert decode(encode([Piece(best_form(values, "int4"), (count,))], content, LITERT).data) == content


def test_a_product_of_another_tensor_takes_its_factor_alone():
    scales = np.abs(RNG.normal(size=500)).astype("<f4")
    factor = np.array([0.0371], "<f4")
    pieces = [Piece(product_form(500, 1, factor)), Piece(best_form(scales), (500,))]
    both = (scales * factor).tobytes() + scales.tobytes()
    assert pieces[0].form.form == PRODUCT
    assert decode(encode(pieces, both, LITERT).data) == both
    alone = encode([Piece(best_form(scales), (500,))], scales.tobytes(), LITERT)
    assert len(encode(pieces, both, LITERT).data) <= len(alone.data) + 20


@pytest.mark.parametrize("lowest", [-127, -128])
def test_a_grid_of_more_kinds_than_a_byte_has_is_not_one(lowest):
    array = np.arange(lowest, 129).astype("<f4").reshape(1, -1) * np.float32(0.37)
    best = best_form(array)
    assert best.width <= 256
    first = f'[["weights",{list(array.shape)}]]'.encode()
    data = encode([Piece(text_form(first)), Piece(best, array.shape)], first + array.tobytes(), KERAS).data
    assert decode(data)["weights"].tobytes() == array.tobytes()


@pytest.mark.parametrize("axis", [1, 2])
def test_scales_of_lines_of_zeros_take_no_bytes(axis):
    array = grid(axis)
    (array if axis == 1 else array.T)[:20] = 0
    form = best_form(array)
    # The axis, and three bytes of each of the other scales.
    assert form.form == GRID and len(form.extra) == 1 + 3 * (array.shape[axis - 1] - 20)
    assert (form.small[0].numbers[:20] == 0).all() and (form.small[0].numbers[20:] > 0).all()


def test_values_of_codebooks_at_the_ends_of_their_types_come_back():
    for dtype in ("<f2", "<f4", "<f8"):
        ends = np.finfo(dtype)
        values = np.array([ends.max, -ends.max, ends.tiny, ends.smallest_subnormal, 0, 1], dtype)
        array = RNG.choice(values, (60, 60))
        first = b'[["weights",[60,60]]]'
        data = encode(
            [Piece(text_form(first)), Piece(best_form(array), array.shape)], first + array.tobytes(), KERAS
        ).data
        assert decode(data)["weights"].tobytes() == array.tobytes()


def test_zeros_cost_what_their_frequency_says():
    array = np.where(RNG.random((300, 200)) < 0.02, RNG.integers(1, 4, (300, 200)), 0).astype("|i1")
    packed = encode([Piece(best_form(array), array.shape)], array.tobytes(), LITERT)
    counts = np.bincount(array.reshape(-1))
    assert len(packed.data) < symbol_bits(counts) / 8 * 1.01 + 60


@pytest.mark.parametrize(("weights", "is_mixed"), [(300, True), (60_000, False)])
def test_the_slow_coder_of_texts_is_taken_where_the_text_counts(weights, is_mixed):
    array = RNG.integers(-128, 128, weights).astype("|i1")
    text = bytes(range(200))
    data = encode([Piece(text_form(text)), Piece(best_form(array), array.shape)], text + array.tobytes(), LITERT).data
    assert data[8] == is_mixed and decode(data) == text + array.tobytes()


def test_rows_of_different_density_have_tables_of_their_own():
    density = np.where(np.arange(200) < 100, 0.005, 0.3)[:, None]
    array = (RNG.random((200, 150)) < density).astype("|i1")
    found = find_classes(array.astype(np.int64), 2, 64)
    assert found.counts.shape[0] >= 2 and found.counts.shape[1] == 1
    assert len(set(found.rows[:100]) & set(found.rows[100:])) == 0
    ideal = symbol_bits(np.stack([np.bincount(half.reshape(-1)) for half in (array[:100], array[100:])]))
    assert ideal < found.bits < ideal + 400 < symbol_bits(np.bincount(array.reshape(-1)))
    columns = find_classes(array.T.astype(np.int64), 2, 64)
    assert columns.counts.shape[:2] == (1, found.counts.shape[0])


def test_equal_rows_share_one_table():
    array = (RNG.random((200, 150)) < 0.1).astype(np.int64)
    assert find_classes(array, 2, 64).counts.shape == (1, 1, 2)


def test_a_file_of_more_tensors_than_tables_comes_back():
    arrays = [RNG.integers(0, 2, 10 + i % 3).astype("|i1") for i in range(MOST_CONTEXTS + 50)]
    pieces = [Piece(best_form(array), array.shape) for array in arrays]
    nibbles = RNG.integers(-8, 8, 24).astype(np.int8)
    pieces.append(Piece(best_form(nibbles, "int4"), (24,)))
    whole = b"".join(array.tobytes() for array in arrays)
    whole += ((nibbles[::2] & 15) | (nibbles[1::2] << 4)).astype(np.int8).tobytes()
    assert sum(piece.form.symbols is not None for piece in pieces) > MOST_CONTEXTS
    assert decode(encode(pieces, whole, LITERT).data) == whole


def test_an_array_that_no_form_holds_is_refused():
    with pytest.raises(TypeError, match="a packed file holds arrays of .* Received: complex64"):
        best_form(np.zeros(3, np.complex64))

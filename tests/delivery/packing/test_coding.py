"""The range coder against a decoder in exact arithmetic, the text coder, tables of frequencies."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from prunekit.delivery.packing.coding import Small, encode_mixed, encode_symbols, encode_text, levels_of
from prunekit.delivery.packing.context_classes import symbol_bits
from prunekit.delivery.packing.decoder import (
    KERAS,
    MIXED_SMALL,
    MIXED_TEXT,
    PRIMES,
    Damaged,
    TextModel,
    decode_symbols,
    frequencies,
    open_text,
)


def exact_symbols(words, count, contexts, parts):
    """Decodes one lane in whole numbers of any size: the words are the digits of one number below 1."""
    digits = 16 * (len(words) + 3)
    value = int.from_bytes(b"".join(int(w).to_bytes(2, "big") for w in words) + bytes(6), "big")
    low, span, found = 0, 1 << 48, []
    scale = digits - 48
    for context in contexts[:count]:
        unit = span >> 14
        slot = ((value >> scale) - low) // unit
        ends = np.cumsum(parts[context])
        symbol = int(np.searchsorted(ends, slot, side="right"))
        found.append(symbol)
        low += unit * int(ends[symbol] - parts[context][symbol])
        span = unit * int(parts[context][symbol])
        if span < 1 << 32:
            low, span, scale = low << 16, span << 16, scale - 16
    return found


def drawn(seed, count, width, contexts=1, skew=1.0):
    rng = np.random.default_rng(seed)
    tables = rng.dirichlet(np.full(width, skew), size=contexts)
    places = rng.integers(0, contexts, count).astype(np.uint16)
    symbols = np.array([rng.choice(width, p=tables[place]) for place in places], np.uint8)
    counts = np.zeros((contexts, width), np.int64)
    np.add.at(counts, (places, symbols), 1)
    return symbols, places, counts


def test_a_lane_is_one_number_in_exact_arithmetic():
    for seed, width in enumerate([1, 2, 3, 7, 16, 255, 256, 1, 2, 3, 7, 16]):
        symbols, contexts, counts = drawn(seed, 600, width, 1 + seed % 3, skew=[1, 0.02][seed % 2])
        parts = frequencies(levels_of(counts))
        words, lengths = encode_symbols(symbols, contexts, parts, 1)
        assert lengths.tolist() == [len(words)]
        assert exact_symbols(words, len(symbols), contexts, parts) == symbols.tolist()


def test_any_number_of_lanes_gives_the_symbols_back():
    for lanes in (1, 2, 3, 64, 999, 1000, 1500):
        symbols, contexts, counts = drawn(lanes, 1000, 9, 4, skew=0.2)
        parts = frequencies(levels_of(counts))
        words, lengths = encode_symbols(symbols, contexts, parts, lanes)
        assert len(lengths) == lanes and lengths.sum() == len(words)
        np.testing.assert_array_equal(decode_symbols(words, lengths, contexts, parts), symbols)


def test_carries_reach_through_words_of_ones():
    parts = np.array([[1 << 7, (1 << 14) - (1 << 7)]])
    for last in range(40):
        # Many symbols at the upper end of the interval make words of ones; the last ones carry into them.
        symbols = np.array([1] * 400 + [0] * (last % 5) + [1] * last, np.uint8)
        contexts = np.zeros(len(symbols), np.uint16)
        words, lengths = encode_symbols(symbols, contexts, parts, 1)
        np.testing.assert_array_equal(decode_symbols(words, lengths, contexts, parts), symbols)
        assert exact_symbols(words, len(symbols), contexts, parts) == symbols.tolist()


def test_no_symbols_are_one_word():
    parts = np.array([[1 << 14]])
    words, lengths = encode_symbols(np.zeros(0, np.uint8), np.zeros(0, np.uint16), parts, 1)
    assert len(words) <= 2
    assert len(decode_symbols(words, lengths, np.zeros(0, np.uint16), parts)) == 0


def test_the_words_take_the_bits_of_the_frequencies():
    symbols, contexts, counts = drawn(5, 60_000, 7, 2, skew=0.3)
    parts = frequencies(levels_of(counts))
    words, _ = encode_symbols(symbols, contexts, parts, 1)
    # Levels of the counts cost some thousandths of a bit for each symbol; the coder itself two bytes.
    ideal = symbol_bits(counts)
    assert ideal <= 16 * len(words) <= ideal * 1.005 + 32


def test_levels_are_exact_for_small_counts_and_within_an_eighth_for_others():
    counts = np.arange(1, 5000)[None]
    levels = levels_of(counts).astype(np.int64)[0] - 1
    weights = (4 + levels % 4) << (levels // 4)
    ratio = weights / (4 * counts[0])
    assert (ratio[:8] == 1).all() and np.abs(ratio - 1).max() <= 1 / 8


@given(st.lists(st.integers(0, 1 << 22), min_size=1, max_size=256))
@settings(max_examples=80, deadline=None)
def test_frequencies_sum_up_and_leave_no_symbol_out(counts):
    counts = np.array([counts])
    parts = frequencies(levels_of(counts))
    assert parts.sum() == 1 << 14 and (parts >= 0).all()
    if counts.any():
        np.testing.assert_array_equal(parts[0] > 0, counts[0] > 0)


# ---- texts -----------------------------------------------------------------------------------------------------------

TEXTS = {
    "empty": b"",
    "a zero": b"\0",
    "zeros": bytes(300),
    "every byte": bytes(range(256)) * 2,
    "a configuration": b'{"class_name": "Dense", "config": {"units": 10, "activation": "relu"}}' * 5,
    "random": np.random.default_rng(0).bytes(700),
    "the limit": b"ab" * 300,
}


def decoded(coded, text, prime="", mixed=True):
    return open_text(coded, len(text), prime, mixed)[0].take(len(text))


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_comes_back(name):
    text = TEXTS[name]
    coded = encode_mixed(text, "")
    assert decoded(coded, text) == text
    assert len(coded) <= len(text) * 1.06 + 4


LISTS = [
    Small(np.zeros(0, np.uint8), 3, 5),
    Small(np.tile(np.arange(7), 40).astype(np.uint8), 3, 7),
    Small(np.arange(200).astype(np.uint8), 8, 1),
    Small(np.array([1, 0, 1, 1], np.uint8), 1, 9),
    Small(np.random.default_rng(2).integers(0, 128, 300).astype(np.uint8), 7, 2),
]


def test_small_numbers_come_back_behind_a_text():
    coded = encode_mixed(b"a text", "", LISTS)
    text, small = open_text(coded, 6, "", True)
    assert text.take(6) == b"a text"
    for numbers, bits, stride in LISTS:
        np.testing.assert_array_equal(small(len(numbers), bits, stride), numbers)


def test_small_numbers_that_come_again_after_a_stride_cost_little():
    numbers = np.tile(np.random.default_rng(3).integers(0, 8, 50), 20).astype(np.uint8)
    sizes = {stride: len(encode_mixed(b"", "", [Small(numbers, 3, stride)])) for stride in (1, 50)}
    assert sizes[50] < 0.25 * sizes[1]


@pytest.mark.parametrize(
    ("count", "bits", "stride"),
    [(MIXED_SMALL + 1, 1, 1), (1, 9, 1), (1, 1 << 40, 1), (1, 1, MIXED_SMALL + 1), (1, 1, 1 << 60), (1, 1, 0)],
)
def test_small_numbers_without_bound_are_refused(count, bits, stride):
    _, small = open_text(b"", 0, "", True)
    with pytest.raises(Damaged, match="declares more bytes than it may hold"):
        small(count, bits, stride)


def test_all_lists_together_are_bounded():
    _, small = open_text(b"", 0, "", True)
    assert len(small(100, 1, 1)) == 100
    with pytest.raises(Damaged, match="declares more bytes than it may hold"):
        small(MIXED_SMALL - 99, 1, 1)


def test_a_long_text_is_coded_by_lzma():
    text = np.random.default_rng(1).integers(0, 4, MIXED_TEXT + 1).astype(np.uint8).tobytes()
    coded = encode_text(text)
    assert decoded(coded, text, mixed=False) == text and len(coded) < len(text) / 3


def test_the_primes_make_usual_texts_small():
    text = b'{"module": "keras.layers", "class_name": "BatchNormalization", "config": {"name": "batch_normalization_7"'
    coded = encode_mixed(text, PRIMES[KERAS])
    assert len(coded) < 16 < 60 < len(encode_mixed(text, ""))
    assert decoded(coded, text, PRIMES[KERAS]) == text


def test_the_logistic_table_is_the_same_on_every_machine():
    # `math.exp` may differ in its last bits: no value is near the middle of two whole numbers.
    exact = [4096 / (1 + math.exp(-x / 256)) for x in range(-2047, 2048)]
    assert min(abs(value % 1 - 0.5) for value in exact) > 1e-6
    assert TextModel.SQUASH[2047] == 2048 and TextModel.STRETCH[2048] == 0
    assert all(isinstance(value, int) for value in TextModel.STRETCH)

"""Fingerprints: the same on every backend, and different for different examples."""

import keras
import numpy as np
import pytest

from prunekit.techniques.distill.fingerprints import can_be_told_apart, fingerprints, place_factors

pytestmark = pytest.mark.every_backend


def found(inputs):
    tensors = keras.tree.map_structure(keras.ops.convert_to_tensor, inputs)
    return keras.ops.convert_to_numpy(fingerprints(tensors))


def plain(words):
    """Sum of products modulo 2^32 of the folded numbers."""
    unsigned = words.reshape(len(words), -1).view("uint32")
    folded = (unsigned ^ (unsigned >> np.uint32(16))).astype("uint64")
    factors = place_factors(unsigned.shape[1]).view("uint32").astype("uint64")
    return ((folded @ factors.T) & np.uint64(2**32 - 1)).astype("uint32").view("int32")


def test_fingerprints_are_sums_of_products_of_folded_numbers():
    values = np.random.default_rng(0).normal(size=(5, 3, 4)).astype("float32")
    np.testing.assert_array_equal(found(values), plain(values))
    whole = np.random.default_rng(1).integers(-(2**31), 2**31, (5, 7)).astype("int32")
    np.testing.assert_array_equal(found(whole), plain(whole))


def test_they_do_not_depend_on_the_batch():
    values = np.random.default_rng(0).normal(size=(64, 9)).astype("float32")
    np.testing.assert_array_equal(found(values)[13:14], found(values[13:14]))


CHANGES = {
    "one number": lambda one: one.__setitem__((0, 3), 0.25),
    "a sign": lambda one: one.__setitem__((0, 3), -one[0, 3]),
    "two numbers change places": lambda one: one.__setitem__((0, slice(0, 2)), one[0, 1::-1].copy()),
    "the last bit": lambda one: one.__setitem__((0, 3), np.nextafter(one[0, 3], np.float32(9))),
    "a power of two": lambda one: one.__setitem__((0, 3), one[0, 3] * 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_example_has_another_fingerprint(change):
    values = np.random.default_rng(0).normal(size=(1, 6)).astype("float32")
    other = values.copy()
    CHANGES[change](other)
    assert (values != other).any()
    assert (found(values) != found(other)).all()


def test_numbers_and_their_complements_differ():
    # A shift that fills with the sign would make them equal.
    values = np.array([[0], [-1], [5], [~5]], "int32")
    assert len(np.unique(found(values), axis=0)) == 4


def test_tens_of_thousands_of_similar_examples_differ_in_each_word():
    values = (np.arange(40_000)[:, None] // np.array([1, 200]) % np.array([200, 200])).astype("float32")
    for word in found(values).T:
        assert np.unique(word).size > 39_990
    assert len(np.unique(found(values), axis=0)) == 40_000


@pytest.mark.parametrize("kind", ["float16", "uint8", "int8", "bool"])
def test_small_numbers_are_widened(kind):
    values = (np.random.default_rng(0).random((4, 5)) > 0.5).astype(kind)
    wide = values.astype("float32" if kind == "float16" else "int32")
    np.testing.assert_array_equal(found(values), plain(wide))


def test_several_inputs_are_read_in_order():
    one, two = np.ones((3, 2), "float32"), np.arange(3, dtype="int32")[:, None]
    assert len(np.unique(found({"a": one, "b": two}), axis=0)) == 3
    np.testing.assert_array_equal(found([one, two]), found((one, two)))


def test_what_has_no_fixed_size_or_too_many_bits_cannot_be_told_apart():
    assert can_be_told_apart(keras.KerasTensor((None, 3), "float32"))
    assert not can_be_told_apart(keras.KerasTensor((None, None), "float32"))
    assert not can_be_told_apart(keras.KerasTensor((None, 3), "float64"))
    assert not can_be_told_apart(keras.KerasTensor((None, 3), "int64"))
    assert not can_be_told_apart({"text": keras.KerasTensor((None, 1), "string")})
    assert not can_be_told_apart([])

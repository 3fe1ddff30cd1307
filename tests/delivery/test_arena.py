"""The memory that a LiteRT file needs for its activations."""

import numpy as np
import pytest
from keras import layers as L
from networks import sequential

import prunekit as pk
from prunekit.delivery.litert.arena import Lifetime, arena_bytes, planned


def drawn(seed):
    rng = np.random.default_rng(seed)
    rows = rng.integers((1, 0, 0), (9, 12, 5), (20, 3)).tolist()
    return [Lifetime(16 * size, first, first + longer) for size, first, longer in rows]


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("seed", range(3))
def test_tensors_take_the_lowest_free_place_the_largest_first(seed):
    lifetimes = drawn(seed)
    # Memory as a table of places and times.
    taken = np.zeros((sum(one.size for one in lifetimes) // 16, 20), bool)
    for one in sorted(lifetimes, key=lambda one: (-one.size, one.first)):
        rows, times = one.size // 16, slice(one.first, one.last + 1)
        start = next(at for at in range(len(taken)) if not taken[at : at + rows, times].any())
        taken[start : start + rows, times] = True
    assert planned(lifetimes) == 16 * (np.flatnonzero(taken.any(axis=1)).max() + 1)
    live = [sum(one.size for one in lifetimes if one.first <= now <= one.last) for now in range(20)]
    assert max(live) <= planned(lifetimes) < sum(one.size for one in lifetimes)


def test_the_arena_of_a_file_is_that_of_its_largest_neighbours(tmp_path):
    model = sequential(
        (12, 12, 2), L.Conv2D(16, 3, padding="same", activation="relu"), L.MaxPooling2D(), L.Flatten(), L.Dense(4)
    )
    images = np.random.default_rng(0).normal(size=(40, 12, 12, 2)).astype("float32")
    result = pk.quantize(model, images, full_integer=True)
    result.export(tmp_path / "integers.tflite", integer_io=("inputs", "outputs"))
    # The convolution writes 12 x 12 x 16 bytes, the pooling 6 x 6 x 16.
    assert arena_bytes((tmp_path / "integers.tflite").read_bytes()) == 12 * 12 * 16 + 6 * 6 * 16
    result.export(tmp_path / "floats.tflite")
    # The input in float32 has 4 bytes for each value, and is no more needed then.
    assert arena_bytes((tmp_path / "floats.tflite").read_bytes()) == 12 * 12 * 16 + 6 * 6 * 16
    assert planned([]) == 0

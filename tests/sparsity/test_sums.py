import numpy as np
import pytest
from keras import ops

from prunekit.sparsity.sums import sum_in_order

pytestmark = pytest.mark.every_backend


def by_halves(column):
    while len(column) > 1:
        half = len(column) // 2
        added = [np.float32(a + b) for a, b in zip(column[:half], column[half:], strict=False)]
        column = added + column[2 * half :]
    return column[0]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 36, 100])
@pytest.mark.parametrize("axis", [0, 1])
def test_halves_are_added_to_halves_to_the_last_bit(length, axis):
    values = np.random.default_rng(length).choice([-0.7, 0.1, 0.2, 0.9, 1e6], (length, 5)).astype("float32")
    expected = [by_halves(list(values[:, i])) for i in range(5)]
    found = sum_in_order(ops.convert_to_tensor(values if axis == 0 else values.T), axis)
    np.testing.assert_array_equal(ops.convert_to_numpy(found), np.array(expected))


def test_the_sum_of_nothing_is_zero():
    assert ops.convert_to_numpy(sum_in_order(ops.zeros((0, 3)), 0)).tolist() == [0, 0, 0]

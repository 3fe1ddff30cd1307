"""Codebooks of kernels: who shares one, and zeros, which are nobody's."""

import numpy as np
import pytest

from prunekit.techniques.cluster.codebooks import Channels, Codebooks, entropy

CASES = {
    "one for all": ((3, 3, 8, 6), (3,), None, 1),
    "each filter": ((3, 3, 8, 6), (3,), 1, 6),
    "four filters": ((3, 3, 8, 6), (3,), 4, 2),
    "depthwise": ((3, 3, 8, 2), (2, 3), 1, 16),
    "einsum outputs first": ((6, 4, 8), (0, 1), 1, 24),
    "no output axis": ((9, 5), (), 1, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_each_codebook_has_few_values_and_its_own(name):
    shape, axes, run, count = CASES[name]
    kernel = np.random.default_rng(0).normal(size=shape).astype("float32")
    channels = Channels(shape, axes, run)
    books = Codebooks.fitted(kernel, channels, 3)
    found = books.nearest(kernel)
    assert channels.count == count == len(books.table) and found.dtype == "float32"
    # Independent of the numbers of `Channels`: output axes to the front, one row per channel.
    rows = np.moveaxis(kernel, axes, range(len(axes))).reshape(int(np.prod([shape[axis] for axis in axes])), -1)
    new = np.moveaxis(found, axes, range(len(axes))).reshape(rows.shape)
    size = len(rows) if run is None else run
    for start in range(0, len(rows), size):
        part = new[start : start + size]
        assert len(np.unique(part)) == 3
        centroids = np.unique(part)
        np.testing.assert_array_equal(
            part, centroids[np.abs(rows[start : start + size, :, None] - centroids).argmin(axis=-1)]
        )
    assert books.holds(found) and not books.holds(kernel)


@pytest.mark.parametrize("run", [None, 1])
@pytest.mark.parametrize("clusters", [2, 3, 16])
def test_zeros_stay_and_no_entry_becomes_one(run, clusters):
    rng = np.random.default_rng(1)
    kernel = rng.normal(size=(20, 8)).astype("float32")
    kernel[rng.uniform(size=kernel.shape) < 0.6] = 0.0
    kernel[:, 0] = 0.0  # A channel of zeros.
    kernel[:, 1] = np.abs(kernel[:, 1])  # One sign.
    kernel[:, 2] = 0.0
    kernel[3, 2] = 1e-30  # One entry, which a mean of others would swallow.
    found = Codebooks.fitted(kernel, Channels(kernel.shape, (1,), run), clusters).nearest(kernel)
    np.testing.assert_array_equal(found == 0, kernel == 0)
    for part in [found] if run is None else found.T:
        assert len(np.unique(part)) <= clusters


def test_a_mean_of_zero_is_no_zero():
    kernel = np.array([[-1.0, 1.0], [0.0, 5.0], [5.0, 5.0]], "float32")
    found = Codebooks.fitted(kernel, Channels(kernel.shape, (1,)), 3).nearest(kernel)
    np.testing.assert_array_equal(found == 0, kernel == 0)
    assert len(np.unique(found)) == 3


def test_weights_of_entries_move_centroids():
    kernel = np.array([[0.9, 1.1], [4.0, 5.0]], "float32")
    weights = np.array([[1.0, 1.0], [3.0, 1.0]])
    found = Codebooks.fitted(kernel, Channels(kernel.shape, (1,)), 2, weights)
    np.testing.assert_allclose(found.table, [[1.0, 4.25]])


def test_entropy_is_that_of_the_values():
    assert entropy(np.array([1.0, 1.0, 2.0, 2.0])) == pytest.approx(1.0)
    assert entropy(np.array([0.0, 0.0, 0.0, 5.0])) == pytest.approx(0.8113, abs=1e-4)
    assert entropy(np.zeros((3, 3))) == 0.0

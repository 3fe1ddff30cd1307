"""The principal directions of one dimension, against the singular values of NumPy's unfolded tensor."""

import numpy as np
import pytest

from prunekit.techniques.factorize.dimension.modes import ModeMoments


def tensor(seed=0):
    rng = np.random.default_rng(seed)
    return (
        np.einsum("bwr,rf->bwf", rng.normal(size=(40, 7, 3)), rng.normal(size=(3, 9)))
        + rng.normal(size=(40, 7, 9)) * 0.3
        + rng.normal(size=9)
    )


def mode_of(x, axis, parts=3):
    moments = ModeMoments(axis)
    for part in np.array_split(x, parts):
        moments.add(part)
    assert (moments.length, moments.examples) == (x.shape[axis], len(x))
    return moments.mode()


@pytest.mark.parametrize("axis", [1, 2])
def test_energies_are_the_squared_singular_values_of_the_unfolded_tensor_about_its_means(axis):
    x = tensor()
    mode = mode_of(x, axis)
    unfolded = np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
    np.testing.assert_allclose(mode.means, unfolded.mean(axis=1), atol=1e-12)
    singular = np.linalg.svd(unfolded - mode.means[:, None], compute_uv=False)
    np.testing.assert_allclose(mode.energies, np.square(singular), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(mode.vectors.T @ mode.vectors, np.eye(x.shape[axis]), atol=1e-12)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("size", [1, 4, 7])
def test_the_error_of_the_restored_tensor_is_the_energy_of_the_dropped_directions(axis, size):
    x = tensor()
    mode = mode_of(x, axis)
    vectors, shape = mode.vectors[:, :size], [1, 1, 1]
    shape[axis] = -1
    deviations = x - mode.means.reshape(shape)
    restored = np.moveaxis(np.moveaxis(deviations, axis, -1) @ vectors @ vectors.T, -1, axis)
    error = np.square(deviations - restored).sum()
    assert error == pytest.approx(mode.energies[size:].sum(), rel=1e-9, abs=1e-9)
    assert mode.errors()[size - 1] == pytest.approx(error / np.square(deviations).sum(), abs=1e-12)


def test_the_size_for_an_energy_is_the_smallest_that_keeps_it():
    mode = mode_of(tensor(), 2)
    size = mode.size_for(0.9)
    assert mode.errors()[size - 1] <= 0.1 < mode.errors()[size - 2]


def test_a_direction_has_one_sign():
    one, other = mode_of(tensor(), 2, parts=1), mode_of(tensor(), 2, parts=5)
    np.testing.assert_allclose(one.vectors, other.vectors, atol=1e-8)
    largest = np.abs(one.vectors).argmax(axis=0)
    assert (one.vectors[largest, np.arange(9)] > 0).all()


def test_a_constant_tensor_loses_nothing():
    mode = mode_of(np.full((6, 3, 4), 2.0), 2)
    np.testing.assert_array_equal(mode.errors(), np.zeros(4))
    np.testing.assert_array_equal(mode.means, np.full(4, 2.0))


def test_batches_of_different_lengths_are_refused():
    moments = ModeMoments(1)
    moments.add(np.zeros((2, 5, 3)))
    with pytest.raises(ValueError, match="lengths 5 and 6"):
        moments.add(np.zeros((2, 6, 3)))

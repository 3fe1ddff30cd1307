"""Gradients clipped by their norm: as NumPy does it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import prunekit as pk


@pytest.mark.parametrize("per_example", [True, False])
def test_norms_are_clipped_as_numpy_does_it(per_example, precision):
    gradient = np.random.default_rng(6).normal(size=(6, 3, 2)).astype(precision) * np.array(
        [1e-3, 0.1, 1, 10, 100, 0], precision
    ).reshape(6, 1, 1)
    found = pk.gradients.clipped_by_norm(2.0, per_example=per_example)(tf.constant(gradient)).numpy()
    whole = np.linalg.norm(gradient.reshape(6, -1).astype("float64"), axis=1)
    norms = whole if per_example else np.full(6, np.linalg.norm(whole))
    factors = np.minimum(1, 2.0 / np.where(norms > 0, norms, 1)).reshape(6, 1, 1)
    np.testing.assert_allclose(found, gradient * factors, rtol=1e-12 if precision == "float64" else 1e-6)
    assert found.dtype == precision
    np.testing.assert_array_equal(found[norms <= 2], gradient[norms <= 2])


def test_clipping_neither_overflows_in_half_precision_nor_spreads_nan():
    gradient = np.array([[3e4, 4e4], [np.nan, 1], [0.3, 0.4], [0, 0]], "float16")
    found = pk.gradients.clipped_by_norm(1.0)(tf.constant(gradient)).numpy()
    np.testing.assert_allclose(found[0], [0.6, 0.8], rtol=1e-3)
    np.testing.assert_array_equal(found[1:], gradient[1:])


@pytest.mark.parametrize("kind", [tf.Variable, keras.Variable])
def test_a_limit_may_be_a_variable_and_is_above_zero(kind):
    limit = kind(1.0)
    clip = tf.function(pk.gradients.clipped_by_norm(limit))
    np.testing.assert_allclose(clip(tf.constant([[3.0, 4.0]])), [[0.6, 0.8]], rtol=1e-6)
    limit.assign(10.0)
    np.testing.assert_array_equal(clip(tf.constant([[3.0, 4.0]])), [[3, 4]])
    for wrong in (0, -1.0, float("nan"), np.float32(-1), "1", None):
        with pytest.raises(ValueError, match="limit above zero"):
            pk.gradients.clipped_by_norm(wrong)

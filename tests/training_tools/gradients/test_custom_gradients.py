"""straight_through and with_gradient: forwards the function, backwards what was asked for."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from networks import sequential

from prunekit.training_tools.gradients.custom_gradients import straight_through, with_gradient

MODES = {"eager": lambda f: f, "graph": lambda f: tf.function(f, autograph=False),
         "xla": lambda f: tf.function(f, autograph=False, jit_compile=True)}  # fmt: skip


def gradient(function, *inputs, mode="eager", weights=None):
    """(value, gradients of sum(weights * value)) in float64 or the inputs' own precision."""
    variables = [tf.Variable(one) for one in inputs]

    def run():
        with tf.GradientTape() as tape:
            value = function(*variables)
            total = tf.reduce_sum(value if weights is None else value * tf.constant(weights, value.dtype))
        return value, tape.gradient(total, variables)

    value, gradients = MODES[mode](run)()
    return value.numpy(), [one if one is None else one.numpy() for one in gradients]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("function", [ops.sign, ops.round, ops.floor, lambda x: ops.cast(x > 0, x.dtype)])
def test_straight_through_is_the_function_forwards_and_the_identity_backwards(function, dtype, mode):
    x = np.array([-2.5, -0.4, 0.0, 0.6, 3.0], dtype)
    weights = np.arange(1.0, 6)
    value, (found,) = gradient(straight_through(function), x, mode=mode, weights=weights)
    np.testing.assert_array_equal(value, ops.convert_to_numpy(function(ops.convert_to_tensor(x))))
    np.testing.assert_array_equal(found, weights.astype(dtype))
    assert found.dtype == dtype


def test_a_window_lets_gradients_pass_near_zero_only():
    _, (found,) = gradient(straight_through(ops.sign, window=1.0), np.array([-1.5, -1.0, 0.2, 1.0, 1.01]))
    np.testing.assert_array_equal(found, [0, 1, 1, 1, 0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_given_gradient_takes_the_place_of_the_real_one(dtype, mode):
    @with_gradient(lambda upstream, a, b: (upstream * b, 2 * upstream * a))
    def product(a, b):
        """Rounded product."""
        return ops.round(a * b)

    a, b = np.array([1.2, -3.0, 0.5], dtype), np.array([2.0, 0.7, -1.0], dtype)
    weights = np.array([1.0, 10.0, 100.0])
    value, found = gradient(product, a, b, mode=mode, weights=weights)
    np.testing.assert_array_equal(value, np.round(a * b))
    np.testing.assert_allclose(found[0], weights * b, rtol=1e-6)
    np.testing.assert_allclose(found[1], 2 * weights * a, rtol=1e-6)
    assert product.__doc__ == "Rounded product."


def test_variables_that_the_function_reads_get_no_gradient_through_it():
    inner = tf.Variable(3.0)
    x = tf.Variable([0.4, 1.6])
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(straight_through(lambda t: ops.round(t) * inner)(x))
    found = tape.gradient(value, [x, inner])
    np.testing.assert_array_equal(found[0], [1.0, 1.0])
    assert found[1] is None


@pytest.mark.thorough
def test_a_network_of_signs_learns_only_with_straight_through():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 6)).astype("float32")
    y = (x[:, :1] * x[:, 1:2] > 0).astype("float32")

    def train(activation):
        keras.utils.set_random_seed(3)
        model = sequential((6,), keras.layers.Dense(32, activation=activation), keras.layers.Dense(1, "sigmoid"))
        before = model.layers[0].kernel.numpy()
        model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy")
        model.fit(x, y, epochs=60, batch_size=64, verbose=0)
        return model.evaluate(x, y, verbose=0), (model.layers[0].kernel.numpy() != before).any()

    stuck, moved = train(ops.sign)
    assert not moved
    learned, moved = train(straight_through(ops.sign, window=1.0))
    assert moved and learned < 0.7 * stuck


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"so `window` is above zero. Received: window=0"):
        straight_through(ops.sign, window=0)
    with pytest.raises(
        ValueError, match=r"which turns shape \(2, 3\) into \(2,\). Define its gradient with with_gradient"
    ):
        straight_through(lambda x: ops.sum(x, axis=1))(np.ones((2, 3)))
    wrong = with_gradient(lambda upstream, x: ops.sum(upstream))(lambda x: 2 * x)
    with pytest.raises(ValueError, match=r"one part for each input, of its shape: \[\(3,\)\]. Received: \[\(\)\]"):
        gradient(wrong, np.ones(3))

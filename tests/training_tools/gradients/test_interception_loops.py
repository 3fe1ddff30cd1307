"""Interception where a layer is not called in the open: in loops and conditions of a graph, and in recomputation."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import prunekit as pk
from prunekit.training_tools.gradients import intercepting


def recurrent():
    return keras.Sequential([keras.Input((4, 3)), layers.SimpleRNN(3, name="rnn"), layers.Dense(1)])


def square_of(model, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(model(x)))
    return tape.gradient(loss, model.trainable_variables)


@pytest.mark.parametrize("xla", [None, True], ids=["plain", "xla"])
def test_a_cell_is_intercepted_at_every_step_of_its_loop(xla, precision):
    model, x = recurrent(), np.random.default_rng(3).normal(size=(2, 4, 3)).astype(precision)
    cell = model.layers[0].cell
    with tf.GradientTape() as tape:
        state = tf.zeros((2, 3), precision)
        for step in range(4):
            _, (state,) = cell(x[:, step], [state])
            state = 0.5 * state + tf.stop_gradient(0.5 * state)
        loss = tf.reduce_sum(tf.square(model.layers[1](state)))
    expected = tape.gradient(loss, model.trainable_variables)

    def only_once(gradient):
        return 0.5 * gradient

    # The cell's output is its state: the last one comes back as output, those before it as states.
    with intercepting(model, {"rnn/simple_rnn_cell": only_once}):
        found = tf.function(square_of, jit_compile=xla)(model, tf.constant(x))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10 if precision == "float64" else 2e-4, atol=1e-7)


def test_the_rnn_itself_is_not_its_cell():
    model, x = recurrent(), np.ones((2, 4, 3), "float32")
    shapes = []
    with intercepting(model, {"rnn": lambda gradient: shapes.append(tuple(gradient.shape)) or gradient}):
        tf.function(square_of)(model, x)
    assert shapes == [(2, 3)]


def test_variables_in_a_loop_of_a_graph_are_refused_in_words():
    model, x = recurrent(), np.ones((2, 4, 3), "float32")
    statistics = pk.gradients.GradientStatistics()
    with pytest.raises(ValueError, match="'rnn/simple_rnn_cell' uses variables .* Name the layer around it"):
        with intercepting(model, {"rnn/simple_rnn_cell": statistics}):
            tf.function(square_of)(model, x)
    with intercepting(model, {"rnn/simple_rnn_cell": statistics}):
        square_of(model, x)
    assert statistics.read().gradients == 4, "at once, a loop is a loop of Python's"


class OneRowAtATime(layers.Layer):
    """A layer called in a condition, in a loop."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(2, "tanh", name="inner")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return tf.map_fn(
            lambda row: tf.cond(row[0] > 0, lambda: self.inner(row[None])[0], lambda: row[:2]),
            x,
            fn_output_signature=tf.TensorSpec((2,), x.dtype),
        )


def test_inside_conditions_and_loops_functions_without_variables_work(precision):
    model = keras.Sequential([keras.Input((3,)), OneRowAtATime(), layers.Dense(1)])
    x = np.random.default_rng(8).normal(size=(6, 3)).astype(precision)
    plain = square_of(model, x)
    with intercepting(model, {"inner": lambda gradient: 3 * gradient}):
        found = tf.function(square_of)(model, tf.constant(x))
    for ours, theirs, factor in zip(found, plain, (3, 3, 1, 1), strict=True):
        np.testing.assert_allclose(ours, factor * theirs.numpy(), rtol=1e-10 if precision == "float64" else 1e-4)
    with pytest.raises(ValueError, match="'inner' uses variables"):
        with intercepting(model, {"inner": pk.gradients.GradientStatistics()}):
            tf.function(square_of)(model, tf.constant(x))


def test_vectorized_map_is_refused_and_a_fixed_number_of_steps_is_not():
    inner = layers.Dense(2, name="inner")
    model = keras.Sequential([keras.Input((None, 3)), layers.TimeDistributed(inner)])
    compute = tf.function(square_of, input_signature=None)
    with pytest.raises(ValueError, match="'inner' is called inside vectorized_map"):
        with intercepting(model, {"inner": tf.zeros_like}):
            tf.function(lambda x: square_of(model, x), input_signature=[tf.TensorSpec((None, None, 3))])(
                np.ones((2, 4, 3))
            )
    with intercepting(model, {"inner": tf.zeros_like}):
        assert all((gradient.numpy() == 0).all() for gradient in compute(model, tf.ones((2, 4, 3))))


class Recomputed(layers.Layer):
    """Two layers whose activations are computed again on the way back."""

    def __init__(self):
        super().__init__(name="recomputed")
        self.first, self.second = layers.Dense(3, "tanh", name="first"), layers.Dense(2, name="second")

    def build(self, shape):
        self.first.build(shape)
        self.second.build(shape)

    def call(self, x):
        return tf.recompute_grad(lambda x: self.second(self.first(x)))(x)


@pytest.mark.parametrize("graph", [False, True], ids=["at once", "in a graph"])
def test_layers_that_are_recomputed_are_intercepted(graph):
    model = keras.Sequential([keras.Input((3,)), Recomputed()])
    compute = tf.function(square_of) if graph else square_of
    x, statistics = np.ones((2, 3), "float32"), pk.gradients.GradientStatistics()
    plain = square_of(model, x)
    with intercepting(model, {"first": lambda gradient: 3 * statistics(gradient)}):
        found = compute(model, x)
    assert statistics.read().gradients == 1
    for ours, theirs, factor in zip(found, plain, (3, 3, 1, 1), strict=True):
        np.testing.assert_allclose(ours, factor * theirs.numpy(), rtol=1e-5)

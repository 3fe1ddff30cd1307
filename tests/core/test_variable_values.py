"""Other values for variables during a call: what a layer reads, where gradients flow, what is assigned meanwhile."""

import keras
import numpy as np
import pytest
from keras import ops

from prunekit.core.runtime.differentiation import gradient
from prunekit.core.runtime.variable_values import full_value, weights_digest, with_values

pytestmark = pytest.mark.every_backend


def dense(**options):
    """Returns a layer with a kernel of ones."""
    layer = keras.layers.Dense(2, kernel_initializer="ones", **options)
    layer.build((None, 3))
    return layer


def numbers(value) -> list:
    """Returns a tensor as a list."""
    return ops.convert_to_numpy(ops.cast(value, "float32")).tolist()


def test_a_layer_reads_the_other_value_and_then_its_own():
    layer, x = dense(), ops.ones((1, 3))
    with with_values([(layer.kernel, 2.0 * ops.ones((3, 2)))], layer):
        assert numbers(layer(x)) == [[6.0, 6.0]]
    assert numbers(layer(x)) == [[3.0, 3.0]]


def test_a_gradient_reaches_what_the_value_was_calculated_from():
    layer, x = dense(), ops.ones((1, 3))

    def loss(at):
        with with_values([(layer.kernel, at[0] * at[0])], layer):
            return ops.sum(layer(x))

    assert numbers(gradient(loss, [3.0 * ops.ones((3, 2))])[0]) == [[6.0] * 2] * 3


def test_values_of_an_outer_scope_are_read_inside():
    layer, x = dense(bias_initializer="zeros"), ops.ones((1, 3))
    with keras.StatelessScope([(layer.bias, ops.ones((2,)))]):
        with with_values([(layer.kernel, ops.zeros((3, 2)))], layer):
            assert numbers(layer(x)) == [[1.0, 1.0]]
        assert numbers(layer(x)) == [[4.0, 4.0]]


def test_moving_statistics_and_seeds_are_assigned():
    norm = keras.layers.BatchNormalization(momentum=0.5)
    norm.build((None, 2))
    dropout = keras.layers.Dropout(0.5, seed=0)
    state = numbers(dropout.seed_generator.state)
    with with_values([(norm.gamma, 2.0 * ops.ones((2,)))], norm):
        norm(ops.convert_to_tensor(np.float32([[1.0, 2.0], [3.0, 4.0]])), training=True)
        dropout.seed_generator.next()
    assert numbers(norm.moving_mean) == [1.0, 1.5]
    assert numbers(dropout.seed_generator.state) != state


def test_assignments_in_an_outer_scope_stay_in_it():
    norm = keras.layers.BatchNormalization(momentum=0.5)
    norm.build((None, 1))
    with keras.StatelessScope() as outer:
        with with_values([(norm.gamma, ops.ones((1,)))], norm):
            norm(ops.convert_to_tensor(np.float32([[1.0], [3.0]])), training=True)
        assert numbers(outer.get_current_value(norm.moving_mean)) == [1.0]
    assert numbers(norm.moving_mean) == [0.0]


def test_losses_belong_to_the_layer():
    layer = dense(activity_regularizer="l2")
    with with_values([(layer.kernel, ops.ones((3, 2)))], layer):
        layer(ops.ones((1, 3)))
    assert len(layer.losses) == 1


def test_a_full_value_is_not_cast_to_half_precision():
    layer = keras.layers.Dense(1, dtype="mixed_bfloat16", kernel_initializer=keras.initializers.Constant(1.001))
    layer.build((None, 1))
    seen = []
    own = layer.call

    def call(inputs):
        seen.extend([ops.multiply(full_value(layer.kernel), 1), layer.kernel.value])
        return own(inputs)

    layer.__dict__["call"] = call
    layer(ops.ones((1, 1)))
    assert [keras.backend.standardize_dtype(one.dtype) for one in seen] == ["float32", "bfloat16"]
    assert numbers(seen[0]) == [[np.float32(1.001)]]


def test_the_digest_changes_with_any_weight_and_comes_back():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.BatchNormalization()])
    first, seen = weights_digest(model), set()
    for variable in model.weights:
        before = ops.convert_to_numpy(variable)
        variable.assign(before + 1.0)
        seen.add(weights_digest(model))
        variable.assign(before)
    assert len(seen) == len(model.weights) and first not in seen
    assert weights_digest(model) == first

"""Batch normalizations on inputs that are no data."""

import keras
import numpy as np
import pytest
from networks import sequential

import prunekit as pk
from prunekit.core.data import moving_statistics
from prunekit.core.data.moving_statistics import Renormalization
from prunekit.sparsity.array_ops import array_of

L = keras.layers


def normalized_network(inputs, channels=24):
    """Two batch normalizations whose moving statistics are those of the inputs, and weights that keep signals apart."""
    model = sequential(
        inputs.shape[1:],
        L.Dense(channels, name="first"),
        L.BatchNormalization(momentum=0.0, epsilon=1e-6, name="one"),
        L.ReLU(),
        L.Dense(channels, use_bias=False, name="second"),
        L.BatchNormalization(momentum=0.0, epsilon=1e-6, name="two"),
        L.ReLU(),
        L.Dense(5, name="last"),
    )
    model(inputs, training=True)
    return model


@pytest.fixture
def far():
    """Data far from anything that synthetic inputs look like."""
    generator = np.random.default_rng(3)
    return (generator.normal(size=(512, 4)) @ generator.normal(size=(4, 16)) * 3 + 10).astype("float32")


def moving(model):
    return [np.array(array_of(one)) for one in model.non_trainable_variables if "moving" in one.name]


@pytest.mark.every_backend
def test_each_normalization_normalizes_the_inputs_inside_the_scope_and_has_its_own_statistics_after_it(far):
    model = normalized_network(far)
    before = moving(model)
    inputs = np.random.default_rng(0).normal(size=(400, 16)).astype("float32")
    with Renormalization(model, inputs):
        between = keras.Model(model.inputs[0], [model.get_layer(name).output for name in ("one", "two")])
        for outputs in map(array_of, between(inputs)):
            np.testing.assert_allclose(outputs.mean(0), 0, atol=1e-4)
            np.testing.assert_allclose(outputs.std(0), 1, rtol=1e-3)
    for one, other in zip(before, moving(model), strict=True):
        np.testing.assert_array_equal(one, other)


def test_statistics_that_move_inside_the_scope_move_alike_outside(far):
    model = normalized_network(far)
    mean, variance = moving(model)[:2]
    layer = model.get_layer("one")
    with Renormalization(model, np.random.default_rng(0).normal(size=(400, 16)).astype("float32")) as statistics:
        inside = array_of(layer.moving_mean), array_of(layer.moving_variance)
        found = statistics.on_data(id(layer.moving_mean), inside[0] + 1)
        layer.moving_mean.assign(inside[0] + 0.5)
        layer.moving_variance.assign(inside[1] * 2)
        kernel = model.get_layer("first").kernel
        assert statistics.on_data(id(kernel), kernel) is kernel
    np.testing.assert_allclose(found, mean + 1, rtol=1e-6)
    np.testing.assert_allclose(array_of(layer.moving_mean), mean + 0.5, rtol=1e-5)
    np.testing.assert_allclose(array_of(layer.moving_variance), variance * 2, rtol=1e-6)


def test_a_failure_leaves_the_statistics_as_they_were(far):
    model = normalized_network(far)
    before = moving(model)
    with pytest.raises(RuntimeError, match="inside"), Renormalization(model, far[:100]):
        raise RuntimeError("inside")
    model.get_layer("last").call = lambda inputs, training=None: 1 / 0
    with pytest.raises(Exception, match="division"), Renormalization(model, far[:100]):
        pass
    for one, other in zip(before, moving(model), strict=True):
        np.testing.assert_array_equal(one, other)


def test_channels_that_are_constant_on_the_inputs_keep_some_variance_and_few_rows_change_nothing(far):
    model = normalized_network(far)
    layer = model.get_layer("one")
    before = array_of(layer.moving_variance)
    with Renormalization(model, np.ones((100, 16), "float32")):
        np.testing.assert_allclose(array_of(layer.moving_variance), before / 1000, rtol=1e-5)
    with Renormalization(model, np.ones((10, 16), "float32")):
        np.testing.assert_array_equal(array_of(layer.moving_variance), before)
    with Renormalization(model, None):
        np.testing.assert_array_equal(array_of(layer.moving_variance), before)


def one_pruned(model):
    pk.prune(model, 0.5)
    return model


def one_smaller(model):
    return pk.shrink(model, channels=0.5)[0]


def one_rounded(model):
    pk.quantize(model, bits=2, activation_bits="float")
    return model


@pytest.mark.parametrize("changed", [one_pruned, one_smaller, one_rounded])
def test_calls_without_data_keep_more_where_normalizations_normalize_the_synthetic_inputs(changed, far, monkeypatch):
    """On synthetic inputs, the ReLUs behind normalizations of these data are all open or all shut."""
    model = normalized_network(far)
    weights, expected = model.get_weights(), array_of(model(far))

    def error():
        model.set_weights(weights)
        return np.square(array_of(changed(model)(far)) - expected).mean() / expected.var()

    renormalized = error()
    with monkeypatch.context() as patched:
        patched.setattr(moving_statistics.Renormalization, "__enter__", lambda self: self)
        assert renormalized < 0.75 * error()

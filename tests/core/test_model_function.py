"""Functions that run a model, compiled: they read its present weights, loss and frozen layers."""

import keras
import numpy as np
import pytest
from backends import tensorflow_only
from keras import ops
from networks import sequential

from prunekit.anatomy.layers.targets import find_targets
from prunekit.core.runtime import backend
from prunekit.core.runtime.model_function import ModelFunction
from prunekit.core.statistics.statistics import Collectors

INPUTS, LABELS = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")


@pytest.fixture
def model():
    keras.utils.set_random_seed(0)
    made = sequential((3,), keras.layers.Dense(2), keras.layers.BatchNormalization(name="norm", momentum=0.5))
    made.compile("sgd", "mse")
    return made


def gradient_of(collectors):
    return ops.convert_to_numpy(collectors.values()[0]["gradient"])


@pytest.mark.every_backend
def test_the_present_weights_are_read_at_each_call(model):
    function = ModelFunction(model, lambda x: ops.sum(model(x, training=False)))
    first = float(ops.convert_to_numpy(function(ops.convert_to_tensor(INPUTS))))
    kernel = model.layers[0].kernel
    kernel.assign(2 * backend.value_now(kernel))
    assert float(ops.convert_to_numpy(function(ops.convert_to_tensor(INPUTS)))) == pytest.approx(2 * first, rel=1e-5)


@pytest.mark.every_backend
def test_the_gradient_follows_the_weights_beside_the_targets_and_another_loss(model):
    collectors = Collectors(["gradient"], model, find_targets(model)[0], (INPUTS + np.eye(4, 3), LABELS))
    gamma = model.get_layer("norm").gamma
    first = gradient_of(collectors)
    gamma.assign(0 * backend.value_now(gamma))
    assert np.abs(first).max() > 0
    assert np.abs(gradient_of(collectors)).max() == 0
    gamma.assign(1 + backend.value_now(gamma))
    model.compile("sgd", "mse", loss_weights=[2.0])
    np.testing.assert_allclose(gradient_of(collectors), 2 * first, rtol=1e-4, atol=1e-6)


@pytest.mark.every_backend
def test_a_layer_that_is_frozen_later_runs_with_its_stored_statistics(model):
    collectors = Collectors(["gradient"], model, find_targets(model)[0], (INPUTS, LABELS))
    # All examples are equal, so with batch statistics the outputs do not depend on the weights.
    assert np.abs(gradient_of(collectors)).max() < 1e-5
    model.get_layer("norm").trainable = False
    assert np.abs(gradient_of(collectors)).max() > 1e-2


@tensorflow_only
@pytest.mark.parametrize(("eagerly", "runs"), [(False, 1), (True, 3)])
def test_one_trace_serves_all_sizes_of_batches_unless_the_model_runs_eagerly(model, eagerly, runs):
    model.compile("sgd", "mse", run_eagerly=eagerly)
    calls = []
    function = ModelFunction(model, lambda x: calls.append(1) or model(x, training=False))
    for size in (1, 2, 4):
        assert function(ops.convert_to_tensor(INPUTS[:size])).shape == (size, 2)
    assert len(calls) == runs


@tensorflow_only
@pytest.mark.parametrize("statistic", ["gauss_newton", "square_gradient"])
def test_statistics_of_examples_are_traced_once_for_all_updates(statistic):
    calls = []

    class Counted(keras.layers.Dense):
        def call(self, inputs):
            calls.append(1)
            return super().call(inputs)

    model = keras.Sequential([keras.Input((3,)), Counted(2)])
    model.compile("sgd", "mse")
    calls.clear()
    collectors = Collectors([statistic], model, find_targets(model)[0], (INPUTS, LABELS))
    collectors.values()
    count = len(calls)
    assert count > 0
    collectors.values()
    assert len(calls) == count

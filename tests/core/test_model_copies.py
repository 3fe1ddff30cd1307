"""Copies of models compute what the models do, also where layers keep more than weights."""

import keras
import numpy as np
import pytest
from keras import layers as L

from prunekit.core.runtime.model_copies import copied_model
from prunekit.techniques.distill.teacher import copy_of

X = np.random.default_rng(0).normal(5, 3, (64, 4)).astype("float32")
NUMBERS = np.random.default_rng(0).integers(10, 20, (50, 3))


def adapted(layer, data):
    layer.adapt(data)
    return layer


def normalized():
    return keras.Sequential([keras.Input((4,)), adapted(L.Normalization(), X), L.Dense(3)]), X


def nested():
    inner = keras.Sequential([keras.Input((4,)), adapted(L.Normalization(), X)])
    return keras.Sequential([keras.Input((4,)), inner, L.Dense(3)]), X


def looked_up():
    inputs = keras.Input((3,), dtype="int32")
    return keras.Model(inputs, L.Embedding(20, 2)(adapted(L.IntegerLookup(), NUMBERS)(inputs))), NUMBERS


def discretized():
    inputs = keras.Input((4,))
    return keras.Model(inputs, L.Embedding(6, 2)(adapted(L.Discretization(num_bins=5), X)(inputs))), X


@pytest.mark.every_backend(cases=1)
@pytest.mark.short(cases=1)
@pytest.mark.parametrize("make", [normalized, nested, looked_up, discretized])
def test_a_copy_computes_the_same(make):
    model, data = make()
    expected = keras.ops.convert_to_numpy(model(data))
    for copy in (copied_model(model), copy_of(model)):
        np.testing.assert_allclose(keras.ops.convert_to_numpy(copy(data)), expected, rtol=1e-6)
        assert not {id(one) for one in copy.weights} & {id(one) for one in model.weights}

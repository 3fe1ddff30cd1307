"""Factors of channels between layers: the model computes the same with them."""

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES, inputs_of, randomize, stack
from keras import layers as L, ops
from networks import outputs
from scaled_models import LAST, assert_same, assert_unchanged_by_factors, dense_pair, image, multiply_all

from prunekit.core.runtime.variable_values import assigned
from prunekit.techniques.quantize.placement.placement import place
from prunekit.techniques.quantize.rescaling.channel_scaling import rescale, rescaled, wide_value
from prunekit.techniques.quantize.rescaling.rescaling import rescalable

pytestmark = pytest.mark.every_backend


# ---- factors ---------------------------------------------------------------------------------------------------------


@pytest.mark.short(cases=12)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_outputs_of_architectures_stay_as_they_are(name):
    model = randomize(ARCHITECTURES[name]())
    inputs = inputs_of(model)
    before = outputs(model, inputs)
    multiply_all(model)
    assert_same(outputs(model, inputs), before, 1e-5)


@pytest.mark.parametrize("name", ["einsum", "densenet", "resnet20", "conv3d", "bottleneck"])
def test_outputs_stay_with_factors_that_are_rounded(name):
    assert_unchanged_by_factors(ARCHITECTURES[name]())


@pytest.mark.parametrize("name", ["conv1d", "densenet", "permute"])
def test_outputs_in_training_stay_as_they_are(name):
    model = randomize(ARCHITECTURES[name]())
    inputs = inputs_of(model)
    before = outputs(model, inputs, training=True)
    multiply_all(model)
    assert_same(outputs(model, inputs, training=True), before, 1e-5)


@pytest.mark.parametrize("name", ["einsum", "separable", "grouped", "transposed", "mobilenetv2", "rms_norm", "prelu"])
def test_the_tensors_themselves_are_multiplied(name):
    model = randomize(ARCHITECTURES[name]())
    inputs, scalings = inputs_of(model), rescalable(place(model))
    watched = keras.Model(model.input, [one.producer.outputs[0] for one in scalings])
    before = outputs(watched, inputs)
    factors = [2.0 ** np.random.default_rng(1).integers(-2, 3, one.channels) for one in scalings]
    for scaling, factor in zip(scalings, factors, strict=True):
        with assigned(rescale(scaling, factor)):
            pass
    expected = [one * factor.astype("float32") for one, factor in zip(before, factors, strict=True)]
    assert_same(outputs(watched, inputs), expected, 1e-6)


def test_zeros_stay_zeros_and_only_the_named_weights_change():
    model = image(
        L.Conv2D(4, 3, name="first"), L.BatchNormalization(name="norm"), L.ReLU(), L.Conv2D(5, 3, **LAST), L.Softmax()
    )
    randomize(model)
    last = model.get_layer("last").kernel
    last.assign(np.where(np.random.default_rng(0).random(last.shape) < 0.6, 0.0, ops.convert_to_numpy(last)))
    (scaling,) = rescalable(place(model))
    pairs = rescale(scaling, np.linspace(0.3, 3.0, 4))
    assert [one.path for one, _ in pairs] == ["norm/gamma", "norm/beta", "last/kernel"]
    former, new = ops.convert_to_numpy(last), pairs[-1][1]
    assert pairs[-1][0] is last
    assert new.dtype == "float32"
    assert ((new == 0) == (former == 0)).all()
    assert np.count_nonzero(new == 0) > 50


def test_values_can_be_those_of_earlier_factors():
    model = image(L.Conv2D(4, 3, name="first"), L.DepthwiseConv2D(3, name="middle"), L.Conv2D(5, 1, **LAST))
    first, second = rescalable(place(model))[:2]
    held = {id(one): values for one, values in rescaled(first, np.full(4, 2.0), wide_value)}
    found = rescaled(second, np.full(4, 8.0), lambda one: held.get(id(one), wide_value(one)))
    assert np.allclose(found[0][1], wide_value(found[0][0]) * 4)


def test_a_flattened_tensor_repeats_the_factors():
    model = stack((4, 4, 3), L.Conv2D(2, 3, name="first"), L.Flatten(), L.Dense(3, name="head"))
    (scaling,) = rescalable(place(model))
    ratio = rescale(scaling, np.array([2.0, 8.0]))[-1][1] / wide_value(model.get_layer("head").kernel)
    assert np.allclose(ratio, np.tile([[0.5], [0.125]], (4, 1)))


@pytest.mark.parametrize("factors", [np.ones(5), np.ones((6, 1)), np.zeros(6), -np.ones(6), np.full(6, np.nan), [1.0]])
def test_other_factors_are_refused(factors):
    (scaling,) = rescalable(place(dense_pair()))
    with pytest.raises(ValueError, match="first needs 6 finite factors above zero"):
        rescale(scaling, factors)


def test_an_interrupted_assignment_leaves_the_model_as_it_was():
    model = dense_pair()
    (scaling,) = rescalable(place(model))
    before = [np.array(one) for one in model.get_weights()]
    pairs = rescale(scaling, np.full(6, 2.0))
    pairs[-1] = (pairs[-1][0], np.ones((2, 2), "float32"))
    with pytest.raises(ValueError):
        with assigned(pairs):
            pass
    assert all((one == other).all() for one, other in zip(before, model.get_weights(), strict=True))

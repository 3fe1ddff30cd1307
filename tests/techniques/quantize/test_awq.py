"""Scales of channels from the magnitudes of activations, against plain loops and against rounding to nearest."""

import keras
import numpy as np
import pytest
from architectures import inputs_of, randomize, stack
from hypothesis import given, settings, strategies as st
from keras import layers as L, ops
from plain_quantization import plain_awq_scales, plain_scaled_error

from prunekit.anatomy.layers.targets import find_targets
from prunekit.core.runtime.variable_values import assigned
from prunekit.core.statistics.layer_products import product_of
from prunekit.techniques.quantize.grids.grids import Granularity, IntegerFormat
from prunekit.techniques.quantize.grids.ranges import MeanSquaredError
from prunekit.techniques.quantize.placement.placement import place
from prunekit.techniques.quantize.rescaling.awq import Reading, awq_factors, input_channels, output_error
from prunekit.techniques.quantize.rescaling.channel_scaling import rescale
from prunekit.techniques.quantize.rescaling.rescaling import rescalable


def activations(rows=256, inputs=32, outliers=3, seed=0) -> np.ndarray:
    """Returns normal activations, with some channels of 30 times the magnitude."""
    rng = np.random.default_rng(seed)
    found = rng.normal(size=(rows, inputs))
    found[:, rng.choice(inputs, outliers, replace=False)] *= 30.0
    return found


def weights(inputs=32, outputs=24, seed=1) -> np.ndarray:
    """Returns a matrix of normal weights."""
    return np.random.default_rng(seed).normal(size=(inputs, outputs)).astype("float32")


def reading_of(rows, matrix, **options) -> Reading:
    """Returns the product of rows and one matrix."""
    return Reading(matrix[None], (rows.T @ rows)[None], np.arange(len(matrix))[None], **options)


def errors(readings, rows, form, **options) -> tuple[float, float]:
    """Returns the errors with scales and without."""
    factors = awq_factors(readings, np.abs(rows).mean(axis=0), form, **options)
    rule = options.get("rule")
    ones = np.ones(len(factors))
    return tuple(sum(output_error(one, values, form, rule) for one in readings) for values in (factors, ones))


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_outlier_channels_are_rounded_with_less_error(bits, seed):
    rows = activations(seed=seed)
    scaled, plain = errors([reading_of(rows, weights(seed=seed + 9))], rows, IntegerFormat(bits))
    assert scaled < 0.5 * plain


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_factors_and_error_are_those_of_plain_loops(bits):
    rows, matrix = activations(12, 8, 1), weights(8, 5)
    scales, error = plain_awq_scales(rows, matrix, bits, 20)
    reading, form = reading_of(rows, matrix), IntegerFormat(bits)
    found = awq_factors([reading], np.abs(rows).mean(axis=0), form)
    assert np.allclose(1 / found, scales, rtol=1e-6)
    assert np.isclose(output_error(reading, found, form), error, rtol=1e-3)
    assert np.isclose(output_error(reading, np.ones(8), form), plain_scaled_error(rows, matrix, np.ones(8), bits))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 8), st.integers(1, 12), st.integers(1, 4))
def test_the_error_is_never_larger_than_without_factors(seed, bits, inputs, readers):
    rng = np.random.default_rng(seed)
    rows = rng.standard_t(2, size=(20, inputs)) * 10.0 ** rng.uniform(-3, 3, inputs)
    readings = [reading_of(rows, weights(inputs, 4, seed + n)) for n in range(readers)]
    scaled, plain = errors(readings, rows, IntegerFormat(bits))
    assert scaled <= plain


def test_equal_magnitudes_need_no_factors():
    rows = np.random.default_rng(0).choice([-1.0, 1.0], (64, 8))
    assert (awq_factors([reading_of(rows, weights(8, 4))], np.abs(rows).mean(axis=0), IntegerFormat(4)) == 1.0).all()


def test_factors_lie_around_one_and_channels_of_zeros_keep_one():
    rows = activations()
    rows[:, 5] = 0.0
    found = awq_factors([reading_of(rows, weights())], np.abs(rows).mean(axis=0), IntegerFormat(3))
    assert found[5] == 1.0
    used = np.delete(found, 5)
    assert np.isclose(used.max() * used.min(), 1.0)
    assert used.max() > 1.5


def test_factors_are_bounded():
    rows = activations()
    mean_abs = np.abs(rows).mean(axis=0)
    mean_abs[:2] = 1e-300, 1e300
    found = awq_factors([reading_of(rows, weights())], mean_abs, IntegerFormat(3))
    assert (found >= 2.0**-10).all()
    assert (found <= 2.0**10).all()


@pytest.mark.parametrize("mean_abs", [np.zeros(8), np.arange(1.0, 9.0)])
def test_without_an_error_nothing_is_multiplied(mean_abs):
    reading = reading_of(np.zeros((4, 8)), weights(8, 4))
    assert (awq_factors([reading], mean_abs, IntegerFormat(4)) == 1.0).all()


def test_other_grids_take_part_in_the_search():
    rows = activations()
    options = {"granularity": Granularity((0, 2), 8)}
    grouped, plain = errors([reading_of(rows, weights(), **options)], rows, IntegerFormat(3), rule=MeanSquaredError())
    assert grouped < 0.6 * plain


def test_zeros_of_a_pruned_matrix_stay_zeros():
    matrix = weights() * (np.random.default_rng(2).random((32, 24)) < 0.3)
    rows = activations()
    factors = awq_factors([reading_of(rows, matrix)], np.abs(rows).mean(axis=0), IntegerFormat(4))
    assert (((matrix / factors[:, None]) == 0) == (matrix == 0)).all()


@pytest.mark.parametrize(
    "reader",
    [
        L.Conv2D(5, 3, name="reader"),
        L.Conv2D(6, 3, groups=2, name="reader"),
        L.DepthwiseConv2D(3, depth_multiplier=2, name="reader"),
        L.Dense(5, name="reader"),
        L.EinsumDense("bhwc,cgo->bhwgo", (6, 6, 2, 3), name="reader"),
    ],
    ids=["convolution", "groups", "depthwise", "dense", "equation"],
)
def test_the_error_of_a_layer_is_that_of_its_outputs_after_the_factors_are_applied(reader):
    model = randomize(stack((8, 8, 3), L.Conv2D(4, 3, activation="relu", name="first"), reader))
    images, (scaling,) = inputs_of(model), rescalable(place(model))
    inner = keras.Model(model.input, model.get_layer("first").output)
    (target,) = find_targets(model, "reader/kernel")[0]
    product, form = product_of(target), IntegerFormat(3)
    rows = ops.convert_to_numpy(product.rows((ops.convert_to_tensor(inner(images)),))).astype("float64")
    matrices = product.matrix(ops.convert_to_numpy(reader.kernel))
    channels = input_channels(product, scaling.kernels[0])
    reading = Reading(matrices, rows.transpose(0, 2, 1) @ rows, channels)
    factors = np.array([0.25, 1.0, 3.0, 0.7])
    before = ops.convert_to_numpy(model(images))
    with assigned(rescale(scaling, factors)):
        pass
    scaled = product.matrix(ops.convert_to_numpy(reader.kernel))
    assert np.allclose(scaled, matrices / factors[channels][:, :, None], rtol=1e-6)
    steps = np.abs(scaled).max(axis=1, keepdims=True) / form.highest
    reader.kernel.assign(product.kernel((np.round(scaled / steps) * steps).astype("float32")))
    error = np.sum(np.square(ops.convert_to_numpy(model(images)) - before))
    assert np.isclose(output_error(reading, factors, form), error, rtol=1e-3)


def test_shapes_that_do_not_agree_are_refused():
    with pytest.raises(ValueError, match=r"Received: shapes \(1, 8, 4\), \(1, 7, 7\) and \(1, 8\)"):
        Reading(np.ones((1, 8, 4)), np.ones((1, 7, 7)), np.zeros((1, 8), int))
    with pytest.raises(ValueError, match="Expected matrices of shape"):
        Reading(np.ones((8, 4)), np.ones((8, 8)), np.zeros(8, int))


@pytest.mark.parametrize("mean_abs", [[-1.0, 1.0], [np.nan, 1.0], [np.inf, 1.0], [[1.0, 1.0]]])
def test_magnitudes_that_are_none_are_refused(mean_abs):
    with pytest.raises(ValueError, match="mean_abs needs finite magnitudes"):
        awq_factors([reading_of(np.ones((3, 2)), weights(2, 2))], mean_abs, IntegerFormat(4))


def test_the_number_of_powers_is_at_least_one():
    with pytest.raises(ValueError, match="steps must be at least 1"):
        awq_factors([], np.ones(2), IntegerFormat(4), steps=0)

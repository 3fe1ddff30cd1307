"""Scales that are trained: gradients of LSQ, zeros that stay zero, and grids that are those of the simulation."""

import keras
import numpy as np
import pytest
from backends import update
from keras import ops

from prunekit.techniques.quantize.grids.grids import PER_TENSOR, Granularity, Grid, IntegerFormat
from prunekit.techniques.quantize.placement.units import RoundedWeight, SharedGrid
from prunekit.techniques.quantize.rounding.calibration import Formats
from prunekit.techniques.quantize.training.learned_ranges import LearnedRanges

pytestmark = pytest.mark.every_backend
INT4, UINT8 = IntegerFormat(4), IntegerFormat(8, symmetric=False)
RANGE = SharedGrid("tensor")
# Where gradients are asked for without a training step.
GRADIENTS = pytest.mark.skipif(keras.backend.backend() == "jax", reason="`update` is written with tapes")


def tensor_grid(scale=0.1, zero_point=-28):
    return Grid(UINT8, PER_TENSOR, np.asarray(scale, "float32"), np.asarray(zero_point, "int32"))


def weight_and_grid(shape=(5, 3), seed=0):
    variable = keras.Variable(np.random.default_rng(seed).normal(size=shape).astype("float32"), name="kernel")
    scales = np.array([[0.1, 0.2, 0.3]], "float32")
    grid = Grid(INT4, Granularity((1,)), scales, np.zeros((1, 3), "int32"))
    return RoundedWeight(variable, "dense/kernel", Granularity((1,))), grid


def learned(weight=None, grid=None, ranges=None):
    weights = {} if weight is None else {id(weight.variable): grid}
    return LearnedRanges(Formats(INT4, UINT8), ranges or {}, weights)


def array(value):
    return ops.convert_to_numpy(ops.stop_gradient(ops.convert_to_tensor(value)))


def lsq_gradient(values, scale, zero_point, form):
    """d(rounded)/d(scale) of each value, as equation 3 of Esser et al. 2020 says."""
    steps = values.astype("float64") / scale
    first, last = form.lowest - zero_point, form.highest - zero_point
    inside = (steps > first) & (steps < last)
    return np.where(inside, np.round(steps) - steps, np.clip(steps, first, last))


def test_at_the_start_the_grids_are_those_of_calibration_bit_for_bit():
    weight, grid = weight_and_grid()
    found = learned(weight, grid, {RANGE: tensor_grid()})
    ranges, weights = found.grids()
    assert ranges[RANGE].scale == tensor_grid().scale and ranges[RANGE].zero_point == -28
    np.testing.assert_array_equal(weights[id(weight.variable)].scale, grid.scale)
    value = np.random.default_rng(1).normal(size=(7,)).astype("float32")
    np.testing.assert_array_equal(
        array(found.for_pass().tensor(ops.convert_to_tensor(value), RANGE)), tensor_grid().nearest(value)
    )
    np.testing.assert_array_equal(
        array(found.for_pass().weight(weight.variable.value, weight)), grid.nearest(array(weight.variable))
    )


@pytest.mark.parametrize("change", [-3.0, -0.1, 0.05, 2.0])
def test_the_grids_are_those_that_the_simulation_rounds_on(change):
    weight, grid = weight_and_grid()
    found = learned(weight, grid, {RANGE: tensor_grid()})
    for variable in found.variables:
        variable.assign(np.full(variable.shape, change, "float32"))
    ranges, weights = found.grids()
    np.testing.assert_allclose(weights[id(weight.variable)].scale, grid.scale * np.exp(change), rtol=1e-6)
    value = np.random.default_rng(1).normal(size=(50,), scale=5).astype("float32")
    got, expected = array(found.for_pass().tensor(ops.convert_to_tensor(value), RANGE)), ranges[RANGE].nearest(value)
    # Two roundings of exp may differ in the last bit, and a value in the middle of two steps with them.
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=float(ranges[RANGE].scale) * 1e-3)
    assert weights[id(weight.variable)].holds(array(found.for_pass().weight(weight.variable.value, weight)))


@GRADIENTS
@pytest.mark.parametrize("change", [0.0, -0.7, 0.4])
def test_the_gradient_of_a_range_is_that_of_lsq_in_the_logarithm(change):
    found = learned(ranges={RANGE: tensor_grid()})
    (variable,) = found.variables
    variable.assign(np.float32([change]))
    generator = np.random.default_rng(2)
    value, slope = (generator.normal(size=(64,), scale=scale).astype("float32") for scale in (12, 1))
    trainer = keras.optimizers.SGD(1.0)
    update(
        trainer,
        [variable],
        lambda: ops.sum(found.for_pass().tensor(ops.convert_to_tensor(value), RANGE) * ops.convert_to_tensor(slope)),
    )
    scale = 0.1 * np.exp(change)
    # Equation 3 is about the scale; d scale / d v = scale.
    expected = change - scale * (slope * lsq_gradient(value, scale, -28, UINT8)).sum()
    np.testing.assert_allclose(array(variable), expected, rtol=1e-4, atol=1e-4)


@GRADIENTS
def test_the_gradient_of_a_weights_scales_is_that_of_each_output():
    weight, grid = weight_and_grid((40, 3))
    found = learned(weight, grid)
    (variable,) = found.variables
    slope = np.random.default_rng(3).normal(size=(40, 3)).astype("float32")
    kernel = np.array(array(weight.variable))
    trainer = keras.optimizers.SGD(1.0)
    update(
        trainer,
        [variable, weight.variable],
        lambda: ops.sum(found.for_pass().weight(weight.variable.value, weight) * ops.convert_to_tensor(slope)),
    )
    gradient = lsq_gradient(kernel, grid.scale, 0, INT4)
    np.testing.assert_allclose(array(variable), -grid.scale[0] * (slope * gradient).sum(axis=0), rtol=1e-4, atol=1e-5)
    inside = np.abs(kernel / grid.scale) <= INT4.highest
    # Straight through inside of the range, nothing outside.
    np.testing.assert_allclose(array(weight.variable), kernel - slope * inside, rtol=1e-5, atol=1e-6)
    assert inside.any() and not inside.all()


@GRADIENTS
def test_the_gradient_of_the_scale_of_a_group_is_that_of_its_weights():
    # Of 5 * 4 inputs of a convolution, the first eight, the next eight, and the last four share a scale.
    shape, granularity = (5, 4, 3), Granularity((2,), 8)
    variable = keras.Variable(np.random.default_rng(0).normal(size=shape).astype("float32"), name="kernel")
    scales = np.random.default_rng(1).uniform(0.1, 0.3, (1, 3, 3)).astype("float32")
    weight = RoundedWeight(variable, "conv/kernel", granularity)
    found = learned(weight, Grid(INT4, granularity, scales, np.zeros((1, 3, 3), "int32")))
    (trained,) = found.variables
    slope = np.random.default_rng(3).normal(size=shape).astype("float32")
    kernel = np.array(array(variable))
    update(
        keras.optimizers.SGD(1.0),
        [trained, variable],
        lambda: ops.sum(found.for_pass().weight(variable.value, weight) * ops.convert_to_tensor(slope)),
    )
    spread = np.repeat(scales[0], 8, axis=0)[:20].reshape(shape)
    products = (slope * lsq_gradient(kernel, spread, 0, INT4)).reshape(20, 3)
    expected = -scales[0] * np.stack([products[start : start + 8].sum(axis=0) for start in (0, 8, 16)])
    np.testing.assert_allclose(array(trained).reshape(3, 3), expected, rtol=1e-4, atol=1e-5)
    inside = np.abs(kernel / spread) <= INT4.highest
    np.testing.assert_allclose(array(variable), kernel - slope * inside, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change", [-10.0, -1.0, 0.0, 0.3, 10.0, 200.0, -200.0])
def test_zeros_stay_exactly_zero_on_every_grid(change):
    weight, grid = weight_and_grid()
    kernel = array(weight.variable) * (np.arange(15).reshape(5, 3) % 2)
    weight.variable.assign(kernel)
    found = learned(weight, grid, {RANGE: tensor_grid()})
    for variable in found.variables:
        variable.assign(np.full(variable.shape, change, "float32"))
    rounded = array(found.for_pass().weight(weight.variable.value, weight))
    assert (rounded[kernel == 0] == 0).all() and np.isfinite(rounded).all()
    assert array(found.for_pass().tensor(ops.zeros((3,)), RANGE)).tolist() == [0.0, 0.0, 0.0]
    ranges, weights = found.grids()
    assert (weights[id(weight.variable)].scale > 0).all() and ranges[RANGE].scale > 0


def test_ranges_that_a_kernel_prescribes_are_not_trained():
    prescribed = SharedGrid("softmax", signed=False)
    found = learned(ranges={prescribed: tensor_grid(1 / 256, -128), RANGE: tensor_grid()})
    assert [tuple(one.shape) for one in found.variables] == [(1,)]
    value = ops.convert_to_tensor(np.array([0.1, 0.5], "float32"))
    np.testing.assert_array_equal(
        array(found.for_pass().tensor(value, prescribed)), tensor_grid(1 / 256, -128).nearest(array(value))
    )


def test_half_precision_values_stay_in_half_precision():
    found = learned(ranges={RANGE: tensor_grid()})
    assert keras.backend.standardize_dtype(found.for_pass().tensor(ops.ones((3,), "float16"), RANGE).dtype) == "float16"

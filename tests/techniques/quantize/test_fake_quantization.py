"""Values and gradients of fake quantization against the formulas, on every backend and in every dtype."""

import keras
import numpy as np
import pytest
from backends import tensorflow_only
from keras import ops

from prunekit.core.runtime.differentiation import gradient
from prunekit.techniques.quantize.grids.fake_quantization import fake_quantized
from prunekit.techniques.quantize.grids.grids import Granularity, Grid, IntegerFormat
from prunekit.techniques.quantize.grids.ranges import grid_of

pytestmark = pytest.mark.every_backend
FORMATS = [IntegerFormat(bits, symmetric) for bits in (2, 4, 8) for symmetric in (True, False)] + [IntegerFormat(16)]


def example(form: IntegerFormat) -> tuple[np.ndarray, Grid]:
    """Returns values inside and outside of a grid with a scale for each column, zeros among them."""
    values = np.random.default_rng(0).normal(size=(9, 4)).astype("float32")
    values[::3, 1:] = 0.0
    grid = grid_of(values, form, Granularity((1,)))
    return (2.0 * values).astype("float32"), grid


def expected_gradients(values, grid, upstream) -> tuple[np.ndarray, np.ndarray]:
    """The gradients of values and scales by the formula of LSQ, one entry after the other, in float64."""
    form = grid.format
    of_values, of_scale = np.zeros(values.shape), np.zeros(grid.scale.shape)
    for (row, column), value in np.ndenumerate(values):
        zero_point = int(grid.zero_point[0, column])
        steps = float(value / grid.scale[0, column])
        if steps < form.lowest - zero_point:
            slope, inside = form.lowest - zero_point, 0.0
        elif steps > form.highest - zero_point:
            slope, inside = form.highest - zero_point, 0.0
        else:
            slope, inside = round(steps) - steps, 1.0
        of_values[row, column] = inside * upstream[row, column]
        of_scale[0, column] += slope * upstream[row, column]
    return of_values, of_scale


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_values_are_those_of_the_grid_to_the_bit(form):
    values, grid = example(form)
    found = fake_quantized(ops.convert_to_tensor(values), grid.scale, grid.zero_point, form)
    assert np.array_equal(ops.convert_to_numpy(found), grid.nearest(values))
    assert (ops.convert_to_numpy(found)[values == 0.0] == 0.0).all()


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_gradients_are_those_of_the_straight_through_estimator_and_of_learned_step_sizes(form):
    values, grid = example(form)
    upstream = np.random.default_rng(1).normal(size=values.shape).astype("float32")

    def loss(at):
        return ops.sum(ops.multiply(fake_quantized(at[0], at[1], grid.zero_point, form), upstream))

    found = gradient(loss, [ops.convert_to_tensor(values), ops.convert_to_tensor(grid.scale)])
    of_values, of_scale = expected_gradients(values, grid, upstream)
    # Multiplied by the scale and divided by it again.
    assert np.allclose(ops.convert_to_numpy(found[0]), of_values, rtol=3e-7, atol=0.0)
    # float32 rounds each quotient, of up to 2 ** 15 steps, and each term of the sums.
    assert np.allclose(ops.convert_to_numpy(found[1]), of_scale, rtol=1e-5, atol=2e-7 * 2**form.bits * len(values))


def test_zeros_stay_zero_and_pass_their_gradient_on():
    form = IntegerFormat(4, symmetric=False)
    grid = Grid(form, Granularity(), np.float32(0.3), np.int32(-5))
    zeros = ops.zeros((5,))
    found = fake_quantized(zeros, grid.scale, grid.zero_point, form)
    assert ops.convert_to_numpy(found).tolist() == [0.0] * 5
    of_values = gradient(lambda at: ops.sum(fake_quantized(at[0], grid.scale, grid.zero_point, form)), [zeros])
    assert ops.convert_to_numpy(of_values[0]).tolist() == [1.0] * 5


@pytest.mark.parametrize("symmetric", [True, False])
def test_values_at_the_ends_of_their_range_pass_their_whole_gradient_on(symmetric):
    form = IntegerFormat(3, symmetric)
    grid = Grid(form, Granularity(), np.float32(0.5), np.int32(0))
    values = ops.convert_to_tensor(np.float32([form.lowest * 0.5, form.highest * 0.5]))
    of_values = gradient(lambda at: ops.sum(fake_quantized(at[0], grid.scale, grid.zero_point, form)), [values])
    assert ops.convert_to_numpy(of_values[0]).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_the_weight_that_sets_the_scale_passes_its_gradient_on(bits):
    """Divided by its scale, it is often more than the last number of steps, by a rounding error of float32."""
    form = IntegerFormat(bits)
    values = np.random.default_rng(0).normal(size=(1, 2000)).astype("float32")
    grid = grid_of(values, form, Granularity((1,)))
    of_values = gradient(
        lambda at: ops.sum(fake_quantized(at[0], grid.scale, grid.zero_point, form)), [ops.convert_to_tensor(values)]
    )
    assert np.allclose(ops.convert_to_numpy(of_values[0]), 1.0, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_values_keep_their_dtype_and_are_rounded_in_float32(dtype):
    values, grid = example(IntegerFormat(8))
    halves = ops.cast(ops.convert_to_tensor(values), dtype)
    found = fake_quantized(halves, grid.scale, grid.zero_point, grid.format)
    assert keras.backend.standardize_dtype(found.dtype) == dtype
    exact = ops.convert_to_tensor(grid.nearest(ops.convert_to_numpy(ops.cast(halves, "float32"))))
    back = ops.cast(ops.cast(exact, dtype), "float32")
    assert np.array_equal(ops.convert_to_numpy(ops.cast(found, "float32")), ops.convert_to_numpy(back))


@tensorflow_only
@pytest.mark.parametrize("compiled", [False, True], ids=["graph", "XLA"])
def test_compiled_values_are_the_eager_ones(compiled):
    import tensorflow as tf

    values, grid = example(IntegerFormat(4))
    function = tf.function(
        lambda x: fake_quantized(x, grid.scale, grid.zero_point, grid.format), jit_compile=compiled, autograph=False
    )
    assert np.array_equal(function(tf.constant(values)).numpy(), grid.nearest(values))

"""Grids against plain loops, on the edges: zeros, one sign, dead channels, ragged groups, every number of bits."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from keras import ops
from plain_quantization import plain_code, plain_limits, plain_parameters, plain_parts

from prunekit.techniques.quantize.grids.grids import Granularity, Grid, IntegerFormat, grid_between, grid_for_bias
from prunekit.techniques.quantize.grids.ranges import grid_of

# Names and NumPy: two of the tests stand for all on other backends in the short suite.
pytestmark = pytest.mark.every_backend(cases=0)
BITS = (2, 3, 4, 5, 6, 7, 8, 16)
FORMATS = [(bits, symmetric) for bits in BITS for symmetric in (True, False) if symmetric or bits < 16]
RANGES = [(-1.0, 1.0), (-0.3, 0.7), (0.5, 1.0), (-3.0, -2.0), (0.0, 0.0), (0.0, 1e-30), (-1e30, 2e30), (-1e-3, 40.0)]
# (shape, axes with a scale for each index, size of groups)
GRANULARITIES = {
    "one scale": ((6, 5), (), None),
    "a number": ((), (), None),
    "dense by output": ((6, 5), (1,), None),
    "dense by input": ((6, 5), (0,), None),
    "convolution": ((3, 3, 4, 5), (3,), None),
    "depthwise": ((3, 3, 4, 2), (2, 3), None),
    "attention": ((6, 2, 3), (1, 2), None),
    "groups": ((8, 5), (1,), 4),
    "ragged groups": ((9, 5), (1,), 4),
    "one long group": ((9, 5), (1,), 100),
    "groups of one": ((4, 3), (1,), 1),
    "groups of a convolution": ((3, 3, 5, 4), (3,), 8),
    "groups of a transposed convolution": ((3, 2, 4, 5), (2,), 8),
    "groups of attention": ((3, 4, 6), (2,), 5),
    "groups around parallel axes": ((4, 2, 5, 3), (1, 3), 6),
    "groups inside": ((3, 7, 4), (0, 2), 3),
    "groups without axes": ((5, 6), (), 4),
    "groups after": ((4, 9), (0,), 4),
}


def numbers(shape, seed: int = 0) -> np.ndarray:
    """Values of different sizes along the last axis, with zeros and with channels of zeros alone."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape).astype("float32")
    if values.ndim:
        values *= 10.0 ** rng.integers(-3, 3, shape[-1]).astype("float32")
        values[..., 0] = 0.0
        values[rng.random(shape) < 0.3] = 0.0
    return values


# Formats and granularities -------------------------------------------------------------------------------------------


@pytest.mark.every_backend
@pytest.mark.parametrize("bits, symmetric", FORMATS)
def test_codes_of_a_format(bits, symmetric):
    form = IntegerFormat(bits, symmetric)
    assert (form.lowest, form.highest) == plain_limits(bits, symmetric)
    assert form.highest - form.lowest + 1 == 2**bits - symmetric


@pytest.mark.every_backend
@pytest.mark.parametrize(
    "arguments, error, match",
    [
        ({"bits": 1}, ValueError, "bits must be 2 to 8, or 16. Received: bits=1"),
        ({"bits": 12}, ValueError, "bits must be 2 to 8, or 16"),
        ({"bits": 16, "symmetric": False}, ValueError, "have the zero point 0"),
        ({"bits": 4.5}, (TypeError, ValueError), "bits"),
    ],
)
def test_other_formats_are_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        IntegerFormat(**arguments)


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"axes": (0, 0)}, "Each axis can be named once"),
        ({"axes": (-1,)}, "axes"),
        ({"group_size": 0}, "group_size"),
    ],
)
def test_contradictory_granularities_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        Granularity(**arguments)


@pytest.mark.parametrize("granularity", [Granularity((2,)), Granularity((0, 2), 4)])
def test_a_missing_axis_is_refused(granularity):
    with pytest.raises(ValueError, match=r"needs an axis 2. Received: shape=\(6, 5\)"):
        granularity.parameter_shape((6, 5))


@pytest.mark.parametrize("name", GRANULARITIES)
def test_each_scale_belongs_to_the_entries_that_share_it(name):
    shape, axes, size = GRANULARITIES[name]
    granularity = Granularity(axes, size)
    slices = dict(plain_parts(shape, axes, size))
    scales = np.arange(len(slices), dtype="float32").reshape(granularity.parameter_shape(shape))
    spread = np.broadcast_to(granularity.spread(scales, shape), shape)
    for index, entries in slices.items():
        assert set(np.ravel(spread[entries]).tolist()) == {float(scales[index])}


# From ranges to grids ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits, symmetric", FORMATS)
@pytest.mark.parametrize("low, high", RANGES)
def test_parameters_of_a_range(low, high, bits, symmetric):
    grid = grid_between(low, high, IntegerFormat(bits, symmetric))
    assert (grid.scale, grid.zero_point) == plain_parameters(low, high, bits, symmetric)
    assert (grid.scale.dtype, grid.zero_point.dtype) == ("float32", "int32")


@pytest.mark.parametrize("bits, symmetric", FORMATS)
@settings(deadline=None, max_examples=60)
@given(low=st.floats(-1e30, 1e30), high=st.floats(-1e30, 1e30))
def test_zero_is_the_value_of_the_zero_point_and_of_no_other_code(bits, symmetric, low, high):
    form = IntegerFormat(bits, symmetric)
    grid = grid_between(min(low, high), max(low, high), form)
    assert form.lowest <= int(grid.zero_point) <= form.highest
    assert int(grid.codes(np.float32(0.0))) == int(grid.codes(np.float32(-0.0))) == int(grid.zero_point)
    zeros = [c for c in range(form.lowest, form.highest + 1) if grid.values(np.int32(c)) == 0.0] if bits <= 8 else [0]
    assert zeros == [int(grid.zero_point)]


@pytest.mark.parametrize("bits, symmetric", FORMATS)
def test_the_ends_of_a_range_are_at_most_half_a_step_outside(bits, symmetric):
    form = IntegerFormat(bits, symmetric)
    for low, high in RANGES:
        grid = grid_between(low, high, form)
        first, last = grid.values(np.int32(form.lowest)), grid.values(np.int32(form.highest))
        half = 0.5 * grid.scale * 1.0001
        assert first <= min(low, 0.0) + half and last >= max(high, 0.0) - half


@pytest.mark.parametrize("low, high", [(-np.inf, 1.0), (0.0, np.nan), (-1e39, 0.0)])
def test_ranges_without_ends_are_refused(low, high):
    with pytest.raises(ValueError, match="A range needs finite ends. Received: .*Look for NaN or infinity"):
        grid_between([-1.0, low], [1.0, high], IntegerFormat())


# From values to codes and back ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits, symmetric", FORMATS)
@pytest.mark.parametrize("name", GRANULARITIES)
def test_codes_and_values_are_those_of_plain_loops(name, bits, symmetric):
    shape, axes, size = GRANULARITIES[name]
    values = numbers(shape)
    grid = grid_of(values, IntegerFormat(bits, symmetric), Granularity(axes, size))
    codes, nearest = grid.codes(values), grid.nearest(values)
    for index, entries in plain_parts(shape, axes, size):
        part = values[entries]
        scale, zero_point = plain_parameters(float(part.min()), float(part.max()), bits, symmetric)
        assert (grid.scale[index], grid.zero_point[index]) == (scale, zero_point)
        expected = [plain_code(value, scale, zero_point, bits, symmetric) for value in np.ravel(part)]
        assert np.ravel(codes[entries]).tolist() == expected
        assert np.ravel(nearest[entries]).tolist() == [
            float(np.float32(code - zero_point) * scale) for code in expected
        ]
        # Quotients and products in float32 are off by half a digit.
        assert (np.abs(nearest[entries] - part) <= scale / 2 + np.spacing(np.abs(part))).all()
    assert (nearest[values == 0.0] == 0.0).all()


@pytest.mark.parametrize("bits, symmetric", FORMATS)
def test_tensors_of_the_backend_get_the_codes_and_values_of_arrays(bits, symmetric):
    values = numbers((9, 5))
    grid = grid_of(values, IntegerFormat(bits, symmetric), Granularity((1,), 4))
    codes = grid.codes(ops.convert_to_tensor(values))
    assert keras.backend.standardize_dtype(codes.dtype) == "int32"
    assert np.array_equal(ops.convert_to_numpy(codes), grid.codes(values))
    assert np.array_equal(ops.convert_to_numpy(grid.values(codes)), grid.nearest(values))


def test_of_two_codes_that_are_equally_near_the_even_number_of_steps_is_taken():
    grid = Grid(IntegerFormat(8, False), Granularity(), np.float32(2.0), np.int32(3))
    assert grid.codes(np.float32([1.0, 3.0, 5.0, -1.0, -3.0])).tolist() == [3, 5, 5, 3, 1]


def test_values_outside_get_the_code_of_the_nearest_end():
    grid = grid_between(-1.0, 1.0, IntegerFormat(4))
    assert grid.codes(np.float32([-1e30, -np.inf, 1e30, np.inf])).tolist() == [-7, -7, 7, 7]


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_dtypes_are_divided_without_loss(dtype):
    values = np.array([0.1, -0.7, 0.0, 2.0], dtype)
    grid = grid_between(-1.0, 1.0, IntegerFormat(8))
    assert grid.codes(values).tolist() == [round(float(np.clip(v / grid.scale, -127, 127))) for v in values.tolist()]


def test_values_of_a_grid_are_on_it():
    values = numbers((40, 7))
    grid = grid_of(values, IntegerFormat(4), Granularity((1,)))
    once = grid.nearest(values)
    assert np.array_equal(grid.nearest(once), once)
    # Also of the grid that a reader would find from the values alone, where a channel has its extreme value.
    assert np.array_equal(grid_of(once, IntegerFormat(4), Granularity((1,))).codes(once), grid.codes(once))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_empty_arrays_have_a_grid(shape):
    grid = grid_of(np.zeros(shape, "float32"), IntegerFormat(), Granularity((len(shape) - 1,)))
    assert grid.scale.shape == (1,) * (len(shape) - 1) + (shape[-1],)
    assert grid.nearest(np.zeros(shape, "float32")).shape == shape


def test_infinite_weights_are_refused():
    with pytest.raises(ValueError, match="Received: 2 of 4 values are NaN or infinite"):
        grid_of(np.array([1.0, np.nan, np.inf, 0.0]), IntegerFormat())


def test_consecutive_indices_of_a_run_share_a_scale():
    runs, values = Granularity((1,), run=2), np.random.default_rng(0).normal(size=(3, 6)).astype("float32")
    assert runs.parameter_shape((3, 6)) == (1, 3)
    parts = [values[:, start : start + 2] for start in (0, 2, 4)]
    assert [sorted(row) for row in runs.rows(values).tolist()] == [sorted(part.ravel().tolist()) for part in parts]
    assert runs.spread(np.array([[1.0, 2.0, 3.0]]), (3, 6)).tolist() == [[1.0, 1.0, 2.0, 2.0, 3.0, 3.0]]
    grid = grid_of(values, IntegerFormat(), runs)
    assert np.array_equal(grid.scale[0], [np.float32(np.abs(part).max() / 127) for part in parts])
    assert grid.holds(grid.nearest(values)) and np.abs(grid.nearest(values) - values).max() <= grid.scale.max() / 2


@pytest.mark.parametrize("arguments", [((0, 1), None, 2), ((1,), 4, 2), ((), None, 2)])
def test_runs_of_several_axes_or_with_groups_are_refused(arguments):
    with pytest.raises(ValueError, match="Runs are those of one axis, without groups"):
        Granularity(*arguments)


# Biases --------------------------------------------------------------------------------------------------------------


def test_a_channel_without_weights_gets_a_scale_that_stores_its_bias():
    kernel = np.array([[1.0, 0.0, 1e-12], [0.5, 0.0, 0.0]], "float32")
    bias = np.array([0.25, 0.7, 0.3], "float32")
    grid = grid_of(kernel, IntegerFormat(), Granularity((1,)))
    suited = grid_for_bias(grid, used=(kernel != 0).any(0)[None], bias=bias[None], input_scale=0.1, bits=30)
    stored = np.round(bias / (0.1 * suited.scale[0].astype("float64")))
    assert suited.scale[0, 0] == grid.scale[0, 0]
    # The scale is rounded to float32.
    assert (np.abs(stored) <= 2**30 * (1 + 2.0**-23)).all()
    assert np.allclose((stored * 0.1 * suited.scale[0])[1:], bias[1:], rtol=2.0**-23, atol=0.0)
    assert suited.scale.dtype == "float32" and suited.scale.shape == (1, 3)


def test_a_channel_without_weights_and_bias_has_the_scale_one():
    grid = grid_of(np.zeros((4, 2), "float32"), IntegerFormat(), Granularity((1,)))
    suited = grid_for_bias(grid, used=np.zeros((1, 2), bool), bias=np.zeros((1, 2)), input_scale=0.1, bits=30)
    assert suited.scale.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("bias", [np.inf, np.nan, 1e38])
def test_biases_that_no_scale_stores_are_refused(bias):
    grid = grid_between([[0.0]], [[1.0]], IntegerFormat(), Granularity((1,)))
    with pytest.raises(ValueError, match="A bias must be finite and fit in 30 bits"):
        grid_for_bias(grid, used=np.ones((1, 1), bool), bias=np.array([[bias]]), input_scale=1e-20, bits=30)

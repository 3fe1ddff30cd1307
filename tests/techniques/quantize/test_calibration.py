"""Grids from data against the extremes that Keras itself computes, and the rounding on them."""

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES, inputs_of, randomize
from keras import layers as L, ops
from plain_quantization import plain_parameters

from prunekit.core.runtime.compilation import compiled_reader
from prunekit.techniques.quantize.grids.grids import Granularity, IntegerFormat
from prunekit.techniques.quantize.grids.histogram import Histogram, extract_of
from prunekit.techniques.quantize.grids.ranges import MeanSquaredError, MinMax, Percentile, grid_of
from prunekit.techniques.quantize.placement.placement import place
from prunekit.techniques.quantize.rounding import calibration
from prunekit.techniques.quantize.rounding.calibration import Formats, GridRounding, calibrated, scale_of
from prunekit.techniques.quantize.rounding.simulation import simulating

pytestmark = pytest.mark.every_backend
ASYMMETRIC = IntegerFormat(8, symmetric=False)


def network():
    """Returns a convolutional network without batch normalization, so that its tensors are those of the simulation."""
    x = keras.Input((6, 6, 2), name="x")
    y = L.Conv2D(4, 3, activation="relu", name="conv")(x)
    z = L.Concatenate(name="joined")([L.MaxPooling2D(name="pooled")(y), L.Conv2D(3, 3, name="down")(y)])
    return randomize(keras.Model(x, L.Dense(3, activation="softmax", name="head")(L.Flatten(name="flat")(z))))


def batches(count=3, scale=1.0):
    """Returns batches of growing values."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=(4, 6, 6, 2)).astype("float32") * scale * (one + 1) for one in range(count)]


def grids_of(model, data, rule=None, form=ASYMMETRIC):
    """Returns {name of a range: grid}."""
    return {one.name: grid for one, grid in calibrated(model, place(model), data, form, rule or MinMax()).items()}


def values_of(model, names, data) -> np.ndarray:
    """Returns the outputs of layers as Keras computes them, in one row."""
    inner = keras.Model(model.input, [model.get_layer(name).output for name in names])
    found = [keras.tree.flatten(inner(batch, training=False)) for batch in data]
    return np.concatenate([ops.convert_to_numpy(one).ravel() for outputs in found for one in outputs])


def assert_grid_over(grid, values):
    """Compares a grid with that over the extremes of values."""
    scale, zero_point = plain_parameters(float(values.min()), float(values.max()), 8, False)
    assert np.isclose(grid.scale, scale, rtol=1e-5)
    assert grid.zero_point == zero_point


def test_extremes_are_those_of_all_batches_and_of_all_tensors_of_a_range():
    model, data = network(), batches()
    grids = grids_of(model, data)
    assert sorted(grids) == ["conv", "head", "head (before its activation)", "x"]
    assert_grid_over(grids["x"], np.concatenate([one.ravel() for one in data]))
    assert_grid_over(grids["conv"], values_of(model, ["conv", "down"], data))


def test_large_batches_run_in_parts_with_the_same_extremes(monkeypatch):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), L.Dense(8, activation="relu"), L.Dense(3)])
    batch, placement, sizes = np.random.default_rng(0).normal(size=(7, 6)).astype("float32"), place(model), []
    plain = calibration.in_parts
    monkeypatch.setattr(calibration, "in_parts", lambda *args: [sizes.append(len(one)) or one for one in plain(*args)])
    whole = calibrated(model, placement, [batch], IntegerFormat(8, symmetric=False), MinMax())
    # The outputs of the first layer for three examples.
    monkeypatch.setattr(calibration, "_AT_ONCE", 4 * 8 * 3)
    parts = calibrated(model, placement, [batch], IntegerFormat(8, symmetric=False), MinMax())
    assert sizes == [7, 3, 3, 1]
    for place_, grid in whole.items():
        np.testing.assert_allclose(parts[place_].scale, grid.scale, rtol=1e-6)


def test_a_prescribed_grid_does_not_depend_on_the_data():
    grid = grids_of(network(), batches(scale=0.01))["head"]
    assert (grid.scale, grid.zero_point) == (np.float32(1 / 256), -128)
    grid = grids_of(network(), batches(), form=IntegerFormat(16))["head"]
    assert (grid.scale, grid.zero_point) == (np.float32(1 / 32768), 0)


@pytest.mark.parametrize("rule", [Percentile(0.9), MeanSquaredError()], ids=repr)
def test_other_rules_clip(rule):
    model, form = network(), IntegerFormat(4, symmetric=False)
    values = np.random.default_rng(0).normal(size=(100, 6, 6, 2)).astype("float32")
    values[0, 0, 0, 0] = 20.0
    assert grids_of(model, [values], rule, form)["x"].scale < 0.7 * grids_of(model, [values], form=form)["x"].scale


def test_values_that_are_not_finite_are_refused_with_the_name_of_the_layer():
    model = network()
    model.get_layer("down").bias.assign([0.0, np.nan, 0.0])
    with pytest.raises(
        ValueError, match="The outputs of 'conv', and of layers that share its grid, must be finite.*Check these data"
    ):
        grids_of(model, batches(1))


def test_data_without_batches_are_refused():
    with pytest.raises(ValueError, match="Calibration needs at least one batch"):
        grids_of(network(), [])


def test_dictionaries_of_inputs():
    inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((2,), name="b")}
    y = L.Concatenate()([L.Dense(4, name="left")(inputs["a"]), L.Dense(4, name="right")(inputs["b"])])
    model = keras.Model(inputs, L.Dense(1, name="head")(y))
    data = {"a": np.array([[1.0, -2.0, 3.0]], "float32"), "b": np.array([[10.0, 20.0]], "float32")}
    grids = grids_of(model, [data])
    assert_grid_over(grids["a"], data["a"])
    assert_grid_over(grids["b"], data["b"])


def test_the_model_stays_as_it_is():
    model = ARCHITECTURES["separable"]()
    before = [ops.convert_to_numpy(one).copy() for one in model.variables]
    grids_of(model, [inputs_of(model)])
    for one, other in zip(model.variables, before, strict=True):
        assert np.array_equal(ops.convert_to_numpy(one), other)


class Checked(GridRounding):
    """Checks that what it returns is on a grid."""

    def __init__(self, formats, grids):
        super().__init__(formats, grids)
        self.checked = 0

    def tensor(self, value, place):
        result = super().tensor(value, place)
        grid = self._grids.get(place)
        if grid is not None:
            codes = ops.convert_to_numpy(ops.cast(result, "float32")) / grid.scale + grid.zero_point
            assert np.allclose(codes, np.round(codes), atol=1e-3)
            assert codes.min() >= grid.format.lowest - 1e-3 and codes.max() <= grid.format.highest + 1e-3
            self.checked += 1
        return result

    def weight(self, value, weight):
        result = ops.convert_to_numpy(super().weight(value, weight))
        grid = grid_of(ops.convert_to_numpy(value), self._formats.weights, weight.granularity)
        assert np.allclose(result, grid.nearest(ops.convert_to_numpy(value)), atol=1e-6 * np.abs(result).max())
        return super().weight(value, weight)


@pytest.mark.parametrize("name", ["mlp", "separable"])
def test_every_tensor_lies_on_its_grid(name):
    model = randomize(ARCHITECTURES[name]())
    placement, inputs, formats = place(model), inputs_of(model), Formats()
    rounding = Checked(formats, calibrated(model, placement, [inputs], formats.activations, MinMax()))
    with simulating(placement, rounding):
        model(keras.tree.map_structure(ops.convert_to_tensor, inputs), training=False)
    assert rounding.checked >= len(placement.ranges)


@pytest.mark.short(cases=5)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_more_bits_are_nearer_to_the_model(name):
    model = randomize(ARCHITECTURES[name]())
    inputs, placement = inputs_of(model, examples=8), place(model)

    def outputs():
        found = model(keras.tree.map_structure(ops.convert_to_tensor, inputs), training=False)
        return np.concatenate([ops.convert_to_numpy(one).ravel() for one in keras.tree.flatten(found)])

    exact, errors = outputs(), []
    for weights, activations in ((4, ASYMMETRIC), (8, ASYMMETRIC), (8, IntegerFormat(16))):
        formats = Formats(IntegerFormat(weights), activations)
        grids = calibrated(model, placement, [inputs], activations, MinMax())
        with simulating(placement, GridRounding(formats, grids)):
            errors.append(np.linalg.norm(outputs() - exact) / np.linalg.norm(exact))
    assert errors[0] > errors[1] > errors[2]
    assert errors[1] < 0.05


def test_weights_that_decayed_to_subnormal_numbers_stay_finite():
    values = np.array([[1e-44, 0.0, 1.0], [0.0, 0.0, 0.5]], "float32")
    scale = ops.convert_to_numpy(scale_of(ops.convert_to_tensor(values), IntegerFormat(8), Granularity((1,))))
    # TensorFlow takes subnormal numbers for zero.
    assert scale[0, 0] in (np.finfo("float32").tiny, 1.0)
    assert scale[0, 1:].tolist() == [1.0, np.float32(1 / 127)]


def test_constants_are_rounded_in_compiled_functions():
    x = keras.Input((3,), name="x")
    model = keras.Model(x, ops.multiply(x, np.array([0.5, 1.0, 0.123], "float32")))
    inputs = np.array([[1.0, -1.0, 0.5]], "float32")
    placement, formats = place(model), Formats()
    grids = calibrated(model, placement, [inputs], formats.activations, MinMax())
    with simulating(placement, GridRounding(formats, grids)):
        found = model.predict(inputs, verbose=0)
        assert np.allclose(found, ops.convert_to_numpy(model(inputs)), atol=1e-6)
    factor = np.float32(round(0.123 * 255) / 255)
    assert np.isclose(found[0, 2], 0.5 * factor, atol=0.006) and not np.isclose(factor, 0.123)


@pytest.mark.parametrize(
    "shape, axes, size",
    [((6, 5), (1,), None), ((3, 3, 4, 2), (2, 3), None), ((4,), (), None), ((3, 3, 4, 2), (3,), 8), ((4, 9), (0,), 4)],
)
def test_scales_of_tensors_are_those_of_arrays(shape, axes, size):
    values = np.random.default_rng(0).normal(size=shape).astype("float32")
    values[..., 0] = 0.0
    grid = grid_of(values, IntegerFormat(4), Granularity(axes, size))
    found = ops.convert_to_numpy(scale_of(ops.convert_to_tensor(values), IntegerFormat(4), Granularity(axes, size)))
    assert np.allclose(found, grid.scale, rtol=2.0**-22, atol=0.0)
    assert found.shape == (grid.scale.shape if axes else (1,) * len(shape))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place_", [0, 1, 17, 100_003, -1])
def test_one_value_that_is_not_finite_is_found_in_a_large_tensor(wrong, place_):
    values = np.random.default_rng(0).normal(size=(33, 70, 67)).astype("float32")
    values.reshape(-1)[place_] = wrong
    with pytest.raises(ValueError, match="A range needs finite values"):
        Histogram().observe(*compiled_reader(extract_of, [])(ops.convert_to_tensor(values)))


def test_what_is_read_of_a_large_tensor_are_its_extremes_and_every_nth_value():
    values = np.random.default_rng(0).normal(size=(5, 1000, 64)).astype("float32")
    low, high, counted, step = compiled_reader(extract_of, [])(ops.convert_to_tensor(values))
    # At least 4, for 524,288 of the values of 32 examples, and without a common divisor with 64,000.
    assert (float(low), float(high), int(step)) == (values.min(), values.max(), 7)
    assert np.array_equal(ops.convert_to_numpy(counted), values.reshape(-1)[::7])

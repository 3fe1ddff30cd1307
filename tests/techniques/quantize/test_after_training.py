"""Quantization after training: weights on grids, zeros that stay, errors that change nothing, and the report."""

import json

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES, inputs_of, randomize, stack
from backends import tensorflow_only
from keras import layers as L
from keras import ops

from prunekit.techniques.quantize.after_training import quantized
from prunekit.techniques.quantize.options import QuantizationOptions
from prunekit.techniques.quantize.placement import place
from prunekit.techniques.quantize.quantized_model import unique_weights

pytestmark = pytest.mark.every_backend
METHODS = ("nearest", "gptq")
# Every kind of kernel: shared, grouped, depthwise, recurrent, transposed, of attention, inside nested models.
FAMILY = (
    "mlp separable grouped transposed conv3d mobilenetv2 einsum transformer_encoder tied bidirectional conv_lstm "
    "time_distributed nested multi_output subclassed_model two_towers prelu"
).split()
EVERYTHING = dict(equalize=True, correct_biases=True)


def arrays_of(model) -> list[np.ndarray]:
    """Returns copies of all variables."""
    return [np.array(ops.convert_to_numpy(one)) for one in model.variables]


def assert_bit_identical(model, before):
    """Compares all variables with former values, bit by bit."""
    for one, former in zip(model.variables, before, strict=True):
        assert ops.convert_to_numpy(one).tobytes() == former.tobytes(), one.path


def made(name, examples=12):
    """Returns an architecture with random weights, and calibration data."""
    keras.utils.set_random_seed(0)
    model = ARCHITECTURES[name]()
    randomize(model)
    data = inputs_of(model, examples=examples)
    return model, (data, None) if isinstance(data, list | tuple) else data


def pair():
    """Returns a model of two Dense layers with a ReLU between, with random weights."""
    x = keras.Input((6,), name="x")
    model = keras.Model(x, L.Dense(3, name="head")(L.Dense(8, activation="relu", name="hidden")(x)))
    randomize(model)
    return model


def convolutions():
    """Returns a model with convolutions with and without batch normalization, and a Dense layer."""
    model = stack(
        (8, 7, 3),
        L.Conv2D(8, 3, use_bias=False, name="conv"),
        L.BatchNormalization(name="norm"),
        L.ReLU(name="relu"),
        L.DepthwiseConv2D(3, padding="same", activation="relu", name="depthwise"),
        L.Conv2D(6, 1, activation="relu", name="point"),
        L.Flatten(name="flat"),
        L.Dense(4, name="head"),
    )
    randomize(model)
    return model


def correlated(shape, examples=256, rank=4, seed=3):
    """Returns inputs whose features are combinations of a few numbers, with a little noise and a mean."""
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape))
    values = rng.normal(size=(examples, rank)) @ rng.normal(size=(rank, size)) + 0.1 * rng.normal(size=(examples, size))
    return (values + rng.normal(size=size)).reshape(examples, *shape).astype("float32")


def outputs_of(model, data) -> np.ndarray:
    """Returns the model's output in inference."""
    return ops.convert_to_numpy(model(ops.convert_to_tensor(data), training=False))


def simulated(found, data) -> np.ndarray:
    """Returns the output of the simulation."""
    with found.simulating():
        return outputs_of(found.model, data)


# ---- grids -----------------------------------------------------------------------------------------------------------


@pytest.mark.short(cases=8)
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FAMILY)
def test_every_quantized_weight_lies_on_its_grid(name, method, bits):
    model, data = made(name)
    found = quantized(model, QuantizationOptions(weights=bits, method=method), data)
    weights = unique_weights(found.placement)
    assert weights and len(found.weights) == len(weights)
    for weight in weights:
        grid, value = found.weights[id(weight.variable)], ops.convert_to_numpy(weight.variable)
        codes = value.astype("float64") / grid.scale
        assert np.abs(codes - np.round(codes)).max() < 1e-4, weight.name
        assert np.abs(codes).max() <= 2 ** (bits - 1) - 1 + 1e-4, weight.name
        assert np.array_equal(grid.nearest(value), value)
        assert (grid.zero_point == 0).all()
    found.check_unchanged()


def test_a_second_quantization_with_the_nearest_values_of_the_extremes_changes_nothing():
    model, data = made("separable")
    options = QuantizationOptions(weights=8, method="nearest")
    quantized(model, options, data)
    before = arrays_of(model)
    quantized(model, options, data)
    for one, former in zip(arrays_of(model), before, strict=True):
        assert np.allclose(one, former, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "equalized and corrected"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bits", [8, 3])
def test_no_zero_of_a_pruned_model_is_lost(bits, method, options):
    model, rng = convolutions(), np.random.default_rng(0)
    variables = [one for layer in model.layers for one in layer.weights if "kernel" in one.name]
    for variable in variables:
        value = ops.convert_to_numpy(variable).copy()
        value[rng.random(value.shape) < 0.7] = 0.0
        variable.assign(value)
    # A channel, and an input, without weights.
    point = ops.convert_to_numpy(model.get_layer("point").kernel).copy()
    point[..., 2], point[..., 5, :] = 0.0, 0.0
    model.get_layer("point").kernel.assign(point)
    zeros = [ops.convert_to_numpy(variable) == 0.0 for variable in variables]
    assert len(zeros) == 4 and np.mean(np.concatenate([one.ravel() for one in zeros])) > 0.65
    found = quantized(model, QuantizationOptions(weights=bits, method=method, **options), inputs_of(model, examples=32))
    for variable, where in zip(variables, zeros, strict=True):
        value = ops.convert_to_numpy(variable)
        assert (value[where] == 0.0).all()
        assert np.isfinite(value).all() and value.any()
    counted = [int((ops.convert_to_numpy(variable) == 0.0).sum()) for variable in variables]
    assert [one.zeros for one in found.report.weights] == counted


@pytest.mark.parametrize("method", METHODS)
def test_a_kernel_of_zeros_stays_and_its_outputs_are_the_bias(method):
    model = pair()
    model.get_layer("head").kernel.assign(np.zeros((8, 3)))
    data = inputs_of(model, examples=16)
    found = quantized(model, QuantizationOptions(weights=4, method=method), data)
    assert not ops.convert_to_numpy(model.get_layer("head").kernel).any()
    bias = ops.convert_to_numpy(model.get_layer("head").bias)
    assert np.abs(simulated(found, data) - bias).max() <= 0.01 * np.abs(bias).max()
    assert found.report.weights[1].error == 0.0


# ---- errors and interruptions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "equalized and corrected"])
@pytest.mark.parametrize("method", METHODS)
def test_nan_in_the_second_batch_leaves_all_variables_as_they_were(method, options):
    model = convolutions()
    data, before = [inputs_of(model, examples=8), inputs_of(model, 1, examples=8)], arrays_of(model)
    data[1][3, 2, 1, 0] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        quantized(model, QuantizationOptions(weights=4, method=method, **options), data)
    assert_bit_identical(model, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("stop")], ids=["interrupt", "error"])
@pytest.mark.parametrize("step", [1, 3])
def test_an_interruption_from_progress_leaves_all_variables_as_they_were(step, error):
    model = convolutions()
    before = arrays_of(model)

    def progress(done, total, name):
        if done == step:
            raise error

    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        options = QuantizationOptions(weights=4, **EVERYTHING)
        quantized(model, options, inputs_of(model, examples=8), progress)
    assert_bit_identical(model, before)
    assert "call" not in vars(model)


def test_a_weight_that_is_not_finite_is_refused_by_name_and_nothing_changes():
    model = pair()
    kernel = ops.convert_to_numpy(model.get_layer("head").kernel).copy()
    kernel[0, 0] = np.inf
    model.get_layer("head").kernel.assign(kernel)
    before = arrays_of(model)
    with pytest.raises(ValueError, match="The weight head/kernel cannot be quantized. .*finite values"):
        quantized(model, QuantizationOptions(activations=None))
    assert_bit_identical(model, before)


def test_progress_is_told_of_each_weight_once():
    model, told = convolutions(), []
    quantized(model, QuantizationOptions(weights=4), inputs_of(model, examples=8), lambda *step: told.append(step))
    names = ["conv/kernel", "depthwise/kernel", "point/kernel", "head/kernel"]
    assert told == [(done + 1, 4, name) for done, name in enumerate(names)]


# ---- simulation ------------------------------------------------------------------------------------------------------


def test_a_simulation_rounds_the_outputs_and_leaves_the_model_as_it_was():
    model = pair()
    data = inputs_of(model, examples=16)
    found = quantized(model, QuantizationOptions(), data)
    outside, variables = outputs_of(model, data), arrays_of(model)
    with found.simulating() as inside:
        assert inside is model and "call" in vars(model)
        rounded = outputs_of(model, data)
    assert "call" not in vars(model)
    assert np.array_equal(outputs_of(model, data), outside) and not np.array_equal(rounded, outside)
    (grid,) = [grid for place, grid in found.ranges.items() if place.name == "head"]
    assert np.allclose(rounded, grid.nearest(rounded), rtol=1e-6, atol=1e-7)
    assert np.abs(rounded - outside).max() <= 4 * grid.scale
    assert_bit_identical(model, variables)


def test_an_error_in_a_simulation_restores_the_call():
    model = pair()
    found = quantized(model, QuantizationOptions(), inputs_of(model, examples=16))
    with pytest.raises(RuntimeError, match="stop"), found.simulating():
        raise RuntimeError("stop")
    assert "call" not in vars(model)


def test_with_activations_in_floating_point_the_simulation_computes_what_the_model_does():
    model = convolutions()
    found = quantized(model, QuantizationOptions(weights=4, activations=None))
    data = inputs_of(model, examples=8)
    assert found.ranges == {} and found.report.ranges == ()
    assert np.allclose(simulated(found, data), outputs_of(model, data), rtol=1e-5, atol=1e-6)


# ---- weights that changed since --------------------------------------------------------------------------------------


def test_weights_that_changed_since_are_refused_by_name():
    model = pair()
    found = quantized(model, QuantizationOptions(weights=4, activations=None))
    head, scale = model.get_layer("head"), found.report.weights[1]
    kernel = ops.convert_to_numpy(head.kernel).copy()
    kernel[0, 0] += 0.01 * float(found.weights[id(head.kernel)].scale.max())
    assert scale.name == "head/kernel"
    head.kernel.assign(kernel)
    with pytest.raises(ValueError, match="Received: head/kernel with other values"):
        found.check_unchanged()


def test_biases_may_change_since():
    model = pair()
    found = quantized(model, QuantizationOptions(weights=4, activations=None))
    before = [np.array(one) for one in model.get_weights()]
    model.get_layer("head").bias.assign([1.0, 2.0, 3.0])
    found.check_unchanged()
    kernels = [one for one in model.weights if one.name == "kernel"]
    assert all(found.weights[id(one)].codes(ops.convert_to_numpy(one)).any() for one in kernels)
    assert not all((one == other).all() for one, other in zip(before, model.get_weights(), strict=True))


def test_a_training_is_refused_with_all_names():
    model = pair()
    found = quantized(model, QuantizationOptions(weights=4, activations=None))
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 6)), np.ones((8, 3)), verbose=0)
    with pytest.raises(ValueError, match="hidden/kernel, head/kernel with other values.*Call pk.quantize"):
        found.check_unchanged()


# ---- quality ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "convolutions"])
def test_gptq_is_nearer_to_the_float_model_than_the_nearest_values_on_correlated_data(kind):
    errors = {}
    for method in METHODS:
        keras.utils.set_random_seed(0)
        model = pair() if kind == "dense" else convolutions()
        data = correlated(model.input_shape[1:])
        exact = outputs_of(model, data)
        found = quantized(model, QuantizationOptions(weights=3, method=method, activations=None), data)
        errors[method] = np.linalg.norm(simulated(found, data) - exact) / np.linalg.norm(exact)
    assert errors["gptq"] < 0.7 * errors["nearest"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["dense", "convolutions"])
def test_corrected_biases_leave_no_mean_error_of_the_outputs(kind, method):
    means = {}
    for corrects in (False, True):
        model = pair() if kind == "dense" else convolutions()
        data = correlated(model.input_shape[1:])
        exact = outputs_of(model, data)
        options = QuantizationOptions(weights=3, method=method, correct_biases=corrects, activations=None)
        quantized(model, options, data)
        means[corrects] = np.abs((outputs_of(model, data) - exact).mean(axis=0)).max() / exact.std()
    assert means[True] < 1e-5
    assert means[False] > 1e-3


def test_the_moving_statistics_follow_the_rounded_convolution():
    model = convolutions()
    data, norm = correlated(model.input_shape[1:]), model.get_layer("norm")
    convolved = outputs_of(keras.Model(model.input, norm.input), data)
    norm.moving_mean.assign(convolved.mean(axis=(0, 1, 2)))
    norm.moving_variance.assign(convolved.var(axis=(0, 1, 2)))
    normalized, exact = keras.Model(model.input, norm.output), {}
    for options in (None, dict(correct_biases=True)):
        if options is not None:
            quantized(model, QuantizationOptions(weights=2, method="nearest", **options), data)
        values = outputs_of(normalized, data)
        exact[options is None] = values.mean(axis=(0, 1, 2)), values.std(axis=(0, 1, 2))
    (mean, std), (former_mean, former_std) = exact[False], exact[True]
    assert np.allclose(mean, former_mean, atol=1e-4) and np.allclose(std, former_std, rtol=1e-3)
    assert not np.allclose(outputs_of(keras.Model(model.input, norm.input), data).std(), convolved.std(), rtol=1e-2)


def test_equalization_leaves_the_float_outputs_and_is_noted():
    model = convolutions()
    # One channel of a thousandth of the range of the others.
    point = ops.convert_to_numpy(model.get_layer("point").kernel) * np.array([1e-3, 1, 1, 1, 1, 1], "float32")
    model.get_layer("point").kernel.assign(point)
    data, seen = inputs_of(model, examples=16), []
    exact, former = outputs_of(model, data), arrays_of(model)

    def progress(done, total, name):
        # The rounded values are assigned at the end: until then the model has the equalized ones.
        seen.append((outputs_of(model, data), arrays_of(model)))

    options = QuantizationOptions(equalize=True, correct_biases=True)
    report = quantized(model, options, data, progress).report
    outputs, variables = seen[0]
    assert any(not np.allclose(one, other, rtol=1e-3) for one, other in zip(variables, former, strict=True))
    assert np.abs(outputs - exact).max() <= 1e-5 * np.abs(exact).max()
    assert len(report.notes) == 1 and "Equalization changed the channels of" in report.notes[0]
    assert "point" in report.notes[0]


# ---- data ------------------------------------------------------------------------------------------------------------


def scales_of(model, data, **options):
    """Returns the scales and zero points of all ranges, and the kernels, after a quantization."""
    found = quantized(model, QuantizationOptions(weights=4, **options), data)
    grids = [(place.name, float(grid.scale), int(grid.zero_point)) for place, grid in found.ranges.items()]
    return grids, [ops.convert_to_numpy(one) for one in model.weights]


def assert_same_result(one, other):
    """Compares results of `scales_of`."""
    assert [row[0] for row in one[0]] == [row[0] for row in other[0]]
    # Batches of other sizes add up in another order, and the ranges of weights are those of fitted ones.
    assert np.allclose([row[1:] for row in one[0]], [row[1:] for row in other[0]], rtol=1e-3)
    for value, former in zip(one[1], other[1], strict=True):
        assert np.allclose(value, former, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["pair with labels", "list of batches", "list of pairs"])
def test_the_kind_of_the_data_does_not_change_the_result(kind):
    inputs = correlated((6,), examples=48)
    labels = np.zeros(48, "int32")
    data = {
        "pair with labels": (inputs, labels),
        "list of batches": [inputs[:20], inputs[20:]],
        "list of pairs": [(inputs[:20], labels[:20]), (inputs[20:], labels[20:])],
    }[kind]
    assert_same_result(scales_of(pair(), data), scales_of(pair(), inputs))


@tensorflow_only
def test_a_dataset_gives_the_result_of_its_arrays():
    import tensorflow as tf

    inputs = correlated((6,), examples=48)
    data = tf.data.Dataset.from_tensor_slices((inputs, np.zeros(48))).batch(20)
    assert_same_result(scales_of(pair(), data), scales_of(pair(), inputs))


def two_inputs(as_dictionary):
    """Returns a model of two inputs, in a dictionary or a list."""
    keras.utils.set_random_seed(0)
    a, b = keras.Input((3,), name="a"), keras.Input((2,), name="b")
    y = L.Concatenate(name="joined")([L.Dense(4, name="left")(a), L.Dense(4, name="right")(b)])
    model = keras.Model({"a": a, "b": b} if as_dictionary else [a, b], L.Dense(2, name="head")(y))
    randomize(model)
    return model


@pytest.mark.parametrize("method", METHODS)
def test_dictionaries_and_lists_of_inputs_give_the_same_result(method):
    a, b = correlated((3,), examples=32), 10 * correlated((2,), examples=32, seed=8)
    results = [
        scales_of(two_inputs(True), {"a": a, "b": b}, method=method),
        scales_of(two_inputs(True), [{"b": b[:15], "a": a[:15]}, {"b": b[15:], "a": a[15:]}], method=method),
        scales_of(two_inputs(False), ([a, b], None), method=method),
        scales_of(two_inputs(False), [([a[:15], b[:15]], None), ([a[15:], b[15:]], None)], method=method),
    ]
    for other in results[1:]:
        assert_same_result(other, results[0])
    scales = {name: scale for name, scale, _ in results[0][0]}
    assert {"a", "b"} <= set(scales) and scales["b"] > 2 * scales["a"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "data, error, message",
    [
        (np.ones((4, 5), "float32"), ValueError, "6"),
        (np.ones((0, 6), "float32"), ValueError, "lengths"),
        ([], ValueError, "no batches"),
        (iter([np.ones((4, 6), "float32")]), TypeError, "An iterator can be read only once"),
        (3, TypeError, "Calibration data are an array of inputs"),
    ],
    ids=["other features", "no examples", "no batches", "an iterator", "a number"],
)
def test_data_that_do_not_fit_are_refused_and_nothing_changes(data, error, message, method):
    model = pair()
    before = arrays_of(model)
    with pytest.raises(error, match=message):
        quantized(model, QuantizationOptions(method=method), data)
    assert_bit_identical(model, before)


def test_other_models_are_refused():
    with pytest.raises(TypeError, match="Keras"):
        quantized(3, QuantizationOptions(activations=None))
    with pytest.raises(ValueError, match="built"):
        quantized(keras.Sequential([L.Dense(3)]), QuantizationOptions(activations=None))


# ---- report ----------------------------------------------------------------------------------------------------------


def test_the_report_has_the_sizes_grids_and_errors():
    model = pair()
    kernel = ops.convert_to_numpy(model.get_layer("hidden").kernel).copy()
    kernel[:2] = 0.0
    model.get_layer("hidden").kernel.assign(kernel)
    report = quantized(model, QuantizationOptions(weights=3), inputs_of(model, examples=16)).report
    assert (report.model_name, report.method, report.parameters) == (model.name, "gptq", 48 + 8 + 24 + 3)
    hidden, head = report.weights
    assert (hidden.name, hidden.shape, hidden.bits, hidden.scales) == ("hidden/kernel", (6, 8), 3, 8)
    assert (head.name, head.shape, head.bits, head.scales) == ("head/kernel", (8, 3), 3, 3)
    assert hidden.granularity == head.granularity == "per index of axis 1"
    # 48 and 24 codes of 3 bits; 8 and 3 scales; 11 biases.
    assert (hidden.bytes, head.bytes) == (24 + 32, 12 + 12)
    assert report.bytes == (4 * 83, 24 + 32 + 12 + 12 + 4 * 11)
    assert hidden.zeros >= 16 and 0.0 < hidden.error < 0.2
    assert [one.name for one in report.ranges] == ["x", "hidden", "head"]
    assert all(one.bits == 8 and one.chosen == "data" and one.low <= 0.0 <= one.high for one in report.ranges)
    for one in report.ranges:
        assert np.isclose(one.high - one.low, 255 * one.scale) and np.isclose(
            one.low, one.scale * (-128 - one.zero_point)
        )
    assert report.ranges[1].low == 0.0
    assert (report.left_float, report.skipped, report.notes) == ((), (), ())


def test_the_report_of_a_prescribed_grid_says_so():
    model = stack((6,), L.Dense(3, activation="softmax", name="head"))
    report = quantized(model, QuantizationOptions(), inputs_of(model, examples=16)).report
    (last,) = [one for one in report.ranges if one.name == "head"]
    assert (last.chosen, last.scale, last.zero_point, last.low) == ("kernel", 1 / 256, -128, 0.0)
    assert [one.name for one in report.ranges if one.chosen == "data"] == [
        model.input.name,
        "head (before its activation)",
    ]


def test_the_error_of_a_weight_without_data_is_its_relative_change():
    model = pair()
    before = ops.convert_to_numpy(model.get_layer("hidden").kernel).astype("float64")
    report = quantized(model, QuantizationOptions(weights=2, activations=None)).report
    after = ops.convert_to_numpy(model.get_layer("hidden").kernel)
    assert report.weights[0].error == pytest.approx(np.square(after - before).sum() / np.square(before).sum())


def test_the_report_is_text_and_json():
    model = stack((6,), L.Dense(8, name="hidden"), L.LayerNormalization(name="norm"), L.Dense(3, name="head"))
    report = quantized(model, QuantizationOptions(weights=4), inputs_of(model, examples=16)).report
    found = json.loads(json.dumps(report.to_dict()))
    assert found["bytes"] == list(report.bytes) and found["weights"][0]["shape"] == [6, 8]
    assert [one["name"] for one in found["left_float"]] == ["norm"]
    assert [one.title for one in report.sections()] == ["Quantized weights", "Ranges of tensors", "In floating point"]
    assert report.verdict().startswith("2 weights on grids of 4 bits (gptq): ")
    assert report.verdict().endswith("1 operation stays in floating point.")
    text = str(report)
    assert text.startswith(f"{model.name}: 2 weights") and "  in floating point: norm: " in text


def test_the_ranges_are_those_of_the_rounded_weights():
    model = pair()
    data = inputs_of(model, examples=32)
    options = QuantizationOptions(weights=2, activation_ranges="minmax")
    found = quantized(model, options, data)
    (grid,) = [grid for place, grid in found.ranges.items() if place.name == "head"]
    outputs = outputs_of(model, data)
    assert np.isclose(255 * grid.scale, max(outputs.max(), 0) - min(outputs.min(), 0), rtol=1e-4)


def test_a_weight_that_two_layers_read_has_one_grid():
    model, data = made("tied")
    found = quantized(model, QuantizationOptions(weights=4), data)
    names = [one.name for one in found.report.weights]
    assert len(names) == len(set(names)) == len(unique_weights(place(model)))


@pytest.mark.parametrize("options", [{"weights": 4}, {"weights": 6}, {"weights": 8, "method": "gptq"}], ids=str)
def test_a_second_quantization_leaves_weights_on_their_grids_as_they_are(options):
    keras.utils.set_random_seed(0)
    model = stack((32,), L.Dense(32, activation="relu"), L.Dense(32, activation="relu"), L.Dense(8))
    data = np.random.default_rng(0).normal(size=(100, 32)).astype("float32")
    quantized(model, QuantizationOptions(**options), data)
    before = [np.array(one) for one in model.get_weights()]
    quantized(model, QuantizationOptions(**options), data)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(other, one)


def test_weights_of_4_bits_stay_where_8_bits_are_asked_for():
    model = pair()
    quantized(model, QuantizationOptions(weights=4, activations=None))
    before = [np.array(one) for one in model.get_weights()]
    quantized(model, QuantizationOptions(weights=8, activations=None))
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_kernel_with_nan_is_named(bits):
    model = pair()
    kernel = np.array(model.get_layer("head").kernel)
    kernel[0, 0] = np.nan
    model.get_layer("head").kernel.assign(kernel)
    with pytest.raises(ValueError, match="head/kernel"):
        quantized(model, QuantizationOptions(weights=bits), np.ones((8, 6), "float32"))


def test_stateful_layers_are_refused_with_the_remedy():
    x = keras.Input(batch_shape=(8, 5, 4))
    model = keras.Model(x, L.Dense(2)(L.LSTM(6, stateful=True, name="lstm")(x)))
    with pytest.raises(ValueError, match="stateful layers lstm. Build the model with stateful=False"):
        quantized(model, QuantizationOptions(), np.ones((16, 5, 4), "float32"))


def test_a_normalization_of_vectors_and_a_rescaling_of_integers_are_named_as_floating_point():
    model = stack((8,), L.Dense(8, activation="relu"), L.BatchNormalization(name="norm"), L.Dense(3))
    report = quantized(model, QuantizationOptions(), np.ones((8, 8), "float32")).report
    assert [one.name for one in report.left_float] == ["norm"]
    x = keras.Input((6, 6, 3), dtype="uint8")
    model = keras.Model(x, L.Conv2D(2, 3)(L.Rescaling(1 / 255.0, name="scaled")(x)))
    report = quantized(model, QuantizationOptions(), np.ones((8, 6, 6, 3), "uint8")).report
    assert [(one.name, "integers" in one.reason) for one in report.left_float] == [("scaled", True)]

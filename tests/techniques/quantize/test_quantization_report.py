"""Quantization after training: the kinds of calibration data, and the report."""

import json

import keras
import numpy as np
import pytest
from architectures import inputs_of, randomize, stack
from backends import tensorflow_only
from keras import layers as L, ops
from rounded_models import METHODS, arrays_of, assert_bit_identical, correlated, made, outputs_of, pair

from prunekit.techniques.quantize.after_training import quantize_model
from prunekit.techniques.quantize.options import QuantizationOptions
from prunekit.techniques.quantize.placement.placement import place
from prunekit.techniques.quantize.preparation import few_bits_notes
from prunekit.techniques.quantize.quantization_state import unique_weights

# Names and NumPy: two of the tests stand for all on other backends in the short suite.
pytestmark = pytest.mark.every_backend(cases=0)


# ---- data ------------------------------------------------------------------------------------------------------------


def scales_of(model, data, **options):
    """Returns the scales and zero points of all ranges, and the kernels, after a quantization."""
    found = quantize_model(model, QuantizationOptions(bits=4, **options), data)
    grids = [(place.name, float(grid.scale), int(grid.zero_point)) for place, grid in found.ranges.items()]
    return grids, [ops.convert_to_numpy(one) for one in model.weights]


def assert_same_result(one, other):
    """Compares results of `scales_of`."""
    assert [row[0] for row in one[0]] == [row[0] for row in other[0]]
    # Batches of other sizes add up in another order, and the ranges of weights are those of fitted ones.
    assert np.allclose([row[1:] for row in one[0]], [row[1:] for row in other[0]], rtol=1e-3)
    for value, former in zip(one[1], other[1], strict=True):
        assert np.allclose(value, former, rtol=1e-3, atol=1e-4)


@pytest.mark.every_backend
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
    return randomize(keras.Model({"a": a, "b": b} if as_dictionary else [a, b], L.Dense(2, name="head")(y)))


@pytest.mark.every_backend
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
        quantize_model(model, QuantizationOptions(method=method), data)
    assert_bit_identical(model, before)


def test_other_models_are_refused():
    with pytest.raises(TypeError, match="Keras"):
        quantize_model(3, QuantizationOptions(activation_bits="float"))
    with pytest.raises(ValueError, match="built"):
        quantize_model(keras.Sequential([L.Dense(3)]), QuantizationOptions(activation_bits="float"))


# ---- report ----------------------------------------------------------------------------------------------------------


def test_the_report_has_the_sizes_grids_and_errors():
    model = pair()
    kernel = ops.convert_to_numpy(model.get_layer("hidden").kernel).copy()
    kernel[:2] = 0.0
    model.get_layer("hidden").kernel.assign(kernel)
    report = quantize_model(model, QuantizationOptions(bits=3), inputs_of(model, examples=16)).report
    assert (report.model_name, report.method, report.parameters) == (model.name, "gptq", 48 + 8 + 24 + 3)
    hidden, head = report.weights
    assert (hidden.name, hidden.shape, hidden.bits, hidden.scales) == ("hidden/kernel", (6, 8), 3, 8)
    assert (head.name, head.shape, head.bits, head.scales) == ("head/kernel", (8, 3), 3, 3)
    assert hidden.granularity == head.granularity == "per index of axis 1"
    # 48 and 24 codes of 3 bits; 8 and 3 scales, with as many zero points; 11 biases.
    assert (hidden.bytes, head.bytes) == (24 + 32, 12 + 12)
    assert report.bytes == (4 * 83, 24 + 32 + 12 + 12 + 8 * 11 + 4 * 11)
    assert hidden.zeros >= 16 and 0.0 < hidden.error < 0.2
    assert [one.name for one in report.ranges] == ["x", "hidden", "head"]
    assert all(one.bits == 8 and one.chosen == "data" and one.low <= 0.0 <= one.high for one in report.ranges)
    for one in report.ranges:
        assert np.isclose(one.high - one.low, 255 * one.scale) and np.isclose(
            one.low, one.scale * (-128 - one.zero_point)
        )
    assert report.ranges[1].low == 0.0
    assert (report.skipped, report.notes) == ((), few_bits_notes([3, 8]))
    assert few_bits_notes([3, 2, 8])[0].startswith("Weights of 2 or 3 bits: a LiteRT file stores each code with 4 bits")
    assert few_bits_notes([4, 8]) == ()


def test_the_report_of_a_prescribed_grid_says_so():
    model = stack((6,), L.Dense(3, activation="softmax", name="head"))
    report = quantize_model(model, QuantizationOptions(), inputs_of(model, examples=16)).report
    (last,) = [one for one in report.ranges if one.name == "head"]
    assert (last.chosen, last.scale, last.zero_point, last.low) == ("kernel", 1 / 256, -128, 0.0)
    assert [one.name for one in report.ranges if one.chosen == "data"] == [
        model.input.name,
        "head (before its activation)",
    ]


def test_the_error_of_a_weight_without_data_is_its_relative_change():
    model = pair()
    before = ops.convert_to_numpy(model.get_layer("hidden").kernel).astype("float64")
    report = quantize_model(model, QuantizationOptions(bits=2, activation_bits="float", method="nearest")).report
    after = ops.convert_to_numpy(model.get_layer("hidden").kernel)
    assert report.weights[0].error == pytest.approx(np.square(after - before).sum() / np.square(before).sum())


def test_the_report_is_text_and_json():
    model = stack((6,), L.Dense(8, name="hidden"), L.LayerNormalization(name="norm"), L.Dense(3, name="head"))
    report = quantize_model(model, QuantizationOptions(bits=4), inputs_of(model, examples=16)).report
    found = json.loads(json.dumps(report.to_dict()))
    assert found["bytes"] == list(report.bytes) and found["weights"][0]["shape"] == [6, 8]
    assert [one["name"] for one in found["skipped"]] == ["norm"]
    assert [one.title for one in report.sections()] == ["Quantized weights", "Ranges of tensors", "In floating point"]
    assert report.verdict().startswith("2 weights on grids of 4 bits (gptq): ")
    assert report.verdict().endswith("1 layer or weight stays in floating point.")
    text = str(report)
    assert text.startswith(f"{model.name}: 2 weights") and "  in floating point: norm: " in text


def test_the_ranges_are_those_of_the_rounded_weights():
    model = pair()
    data = inputs_of(model, examples=32)
    options = QuantizationOptions(bits=2, activation_ranges="minmax")
    found = quantize_model(model, options, data)
    (grid,) = [grid for place, grid in found.ranges.items() if place.name == "head"]
    outputs = outputs_of(model, data)
    assert np.isclose(255 * grid.scale, max(outputs.max(), 0) - min(outputs.min(), 0), rtol=1e-4)


def test_a_weight_that_two_layers_read_has_one_grid():
    model, data = made("tied")
    found = quantize_model(model, QuantizationOptions(bits=4), data)
    names = [one.name for one in found.report.weights]
    assert len(names) == len(set(names)) == len(unique_weights(place(model)))


SECOND = [
    {"bits": 4},
    {"bits": 6},
    {"bits": 8, "method": "gptq"},
    {"bits": 4, "equalize": True},
    {"bits": 8, "equalize": True},
    {"bits": {"middle": 3}, "method": "gptq", "equalize": True},
    # The layer that is not rounded lies on no grid, and its neighbour must not follow it.
    {"bits": 4, "equalize": True, "exclude": "head"},
    {"bits": 4, "method": "awq"},
    {"bits": 3, "method": "awq", "equalize": True},
]


@pytest.mark.parametrize("options", SECOND, ids=str)
def test_a_second_quantization_leaves_weights_on_their_grids_as_they_are(options):
    keras.utils.set_random_seed(0)
    layers = [L.Dense(32, activation="relu", name=name) for name in ("first", "middle")]
    model = stack((32,), *layers, L.Dense(8, name="head"))
    data = np.random.default_rng(0).normal(size=(100, 32)).astype("float32")
    quantize_model(model, QuantizationOptions(**options), data)
    before = [np.array(one) for one in model.get_weights()]
    quantize_model(model, QuantizationOptions(**options), data)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(other, one)


@pytest.mark.parametrize("method", ["nearest", "awq"])
def test_a_kernel_on_its_grid_stays_when_the_layer_before_it_is_quantized_later(method):
    model = pair()
    data = inputs_of(model, examples=16)
    quantize_model(model, QuantizationOptions(activation_bits="float", exclude="hidden"))
    before = np.array(ops.convert_to_numpy(model.get_layer("head").kernel))
    quantize_model(model, QuantizationOptions(method=method, equalize=True), data)
    np.testing.assert_array_equal(ops.convert_to_numpy(model.get_layer("head").kernel), before)


def test_weights_of_4_bits_stay_where_8_bits_are_asked_for():
    model = pair()
    quantize_model(model, QuantizationOptions(bits=4, activation_bits="float"))
    before = [np.array(one) for one in model.get_weights()]
    quantize_model(model, QuantizationOptions(bits=8, activation_bits="float"))
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_kernel_with_nan_is_named(bits):
    model = pair()
    kernel = np.array(model.get_layer("head").kernel)
    kernel[0, 0] = np.nan
    model.get_layer("head").kernel.assign(kernel)
    with pytest.raises(ValueError, match="head/kernel"):
        quantize_model(model, QuantizationOptions(bits=bits), np.ones((8, 6), "float32"))


def test_stateful_layers_are_refused_with_the_remedy():
    x = keras.Input(batch_shape=(8, 5, 4))
    model = keras.Model(x, L.Dense(2)(L.LSTM(6, stateful=True, name="lstm")(x)))
    with pytest.raises(ValueError, match="stateful layers lstm. Build the model with stateful=False"):
        quantize_model(model, QuantizationOptions(), np.ones((16, 5, 4), "float32"))


def test_a_normalization_of_rows_and_a_rescaling_of_integers_are_named_as_floating_point():
    model = stack((4, 8), L.Dense(8, activation="relu"), L.BatchNormalization(axis=1, name="norm"), L.Dense(3))
    report = quantize_model(model, QuantizationOptions(), np.ones((8, 4, 8), "float32")).report
    assert [one.name for one in report.skipped] == ["norm"]
    x = keras.Input((6, 6, 3), dtype="uint8")
    model = keras.Model(x, L.Conv2D(2, 3)(L.Rescaling(1 / 255.0, name="scaled")(x)))
    report = quantize_model(model, QuantizationOptions(), np.ones((8, 6, 6, 3), "uint8")).report
    assert [(one.name, "integers" in one.reason) for one in report.skipped] == [("scaled", True)]

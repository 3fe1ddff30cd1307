"""Quantization after training: weights on grids, zeros that stay, errors that change nothing, and the quality."""

import keras
import numpy as np
import pytest
from architectures import inputs_of, randomize, stack
from keras import layers as L, ops
from rounded_models import METHODS, arrays_of, assert_bit_identical, correlated, made, outputs_of, pair

from prunekit.techniques.quantize.after_training import quantize_model
from prunekit.techniques.quantize.options import QuantizationOptions
from prunekit.techniques.quantize.quantization_state import unique_weights

pytestmark = pytest.mark.every_backend


# Every kind of kernel: shared, grouped, depthwise, recurrent, transposed, of attention, inside nested models.
FAMILY = (
    "mlp separable grouped transposed conv3d mobilenetv2 einsum transformer_encoder tied bidirectional conv_lstm "
    "time_distributed nested multi_output subclassed_model two_towers prelu"
).split()
EVERYTHING = dict(equalize=True, correct_biases=True)


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
    found = quantize_model(model, QuantizationOptions(bits=bits, method=method), data)
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
    options = QuantizationOptions(bits=8, method="nearest")
    quantize_model(model, options, data)
    before = arrays_of(model)
    quantize_model(model, options, data)
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
    found = quantize_model(
        model, QuantizationOptions(bits=bits, method=method, **options), inputs_of(model, examples=32)
    )
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
    found = quantize_model(model, QuantizationOptions(bits=4, method=method), data)
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
        quantize_model(model, QuantizationOptions(bits=4, method=method, **options), data)
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
        options = QuantizationOptions(bits=4, **EVERYTHING)
        quantize_model(model, options, inputs_of(model, examples=8), progress)
    assert_bit_identical(model, before)
    assert "call" not in vars(model)


def test_a_weight_that_is_not_finite_is_refused_by_name_and_nothing_changes():
    model = pair()
    kernel = ops.convert_to_numpy(model.get_layer("head").kernel).copy()
    kernel[0, 0] = np.inf
    model.get_layer("head").kernel.assign(kernel)
    before = arrays_of(model)
    with pytest.raises(ValueError, match="The weight head/kernel cannot be quantized. .*finite values"):
        quantize_model(model, QuantizationOptions(activation_bits="float"))
    assert_bit_identical(model, before)


def test_progress_is_told_of_each_weight_once():
    model, told = convolutions(), []
    quantize_model(model, QuantizationOptions(bits=4), inputs_of(model, examples=8), lambda *step: told.append(step))
    names = ["conv/kernel", "depthwise/kernel", "point/kernel", "head/kernel"]
    assert told == [(done + 1, 4, name) for done, name in enumerate(names)]


# ---- simulation ------------------------------------------------------------------------------------------------------


def test_a_simulation_rounds_the_outputs_and_leaves_the_model_as_it_was():
    model = pair()
    data = inputs_of(model, examples=16)
    found = quantize_model(model, QuantizationOptions(), data)
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
    found = quantize_model(model, QuantizationOptions(), inputs_of(model, examples=16))
    with pytest.raises(RuntimeError, match="stop"), found.simulating():
        raise RuntimeError("stop")
    assert "call" not in vars(model)


def test_with_activations_in_floating_point_the_simulation_computes_what_the_model_does():
    model = convolutions()
    found = quantize_model(model, QuantizationOptions(bits=4, activation_bits="float"))
    data = inputs_of(model, examples=8)
    assert found.ranges == {} and found.report.ranges == ()
    assert np.allclose(simulated(found, data), outputs_of(model, data), rtol=1e-5, atol=1e-6)


# ---- weights that changed since --------------------------------------------------------------------------------------


def test_weights_that_changed_since_are_refused_by_name():
    model = pair()
    found = quantize_model(model, QuantizationOptions(bits=4, activation_bits="float"))
    head, scale = model.get_layer("head"), found.report.weights[1]
    kernel = ops.convert_to_numpy(head.kernel).copy()
    kernel[0, 0] += 0.01 * float(found.weights[id(head.kernel)].scale.max())
    assert scale.name == "head/kernel"
    head.kernel.assign(kernel)
    with pytest.raises(ValueError, match="Received: head/kernel with other values"):
        found.check_unchanged()


def test_biases_may_change_since():
    model = pair()
    found = quantize_model(model, QuantizationOptions(bits=4, activation_bits="float"))
    before = [np.array(one) for one in model.get_weights()]
    model.get_layer("head").bias.assign([1.0, 2.0, 3.0])
    found.check_unchanged()
    kernels = [one for one in model.weights if one.name == "kernel"]
    assert all(found.weights[id(one)].codes(ops.convert_to_numpy(one)).any() for one in kernels)
    assert not all((one == other).all() for one, other in zip(before, model.get_weights(), strict=True))


def test_a_training_is_refused_with_all_names():
    model = pair()
    found = quantize_model(model, QuantizationOptions(bits=4, activation_bits="float"))
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
        found = quantize_model(model, QuantizationOptions(bits=3, method=method, activation_bits="float"), data)
        errors[method] = np.linalg.norm(simulated(found, data) - exact) / np.linalg.norm(exact)
    assert errors["gptq"] < 0.7 * errors["nearest"]


PARTS = [(L.MultiHeadAttention, f"{name}/kernel") for name in ("query", "key", "value", "attention_output")]
PARTS += [(layer, name) for layer in (L.LSTM, L.GRU, L.SimpleRNN) for name in ("kernel", "recurrent_kernel")]


@pytest.mark.short(cases=5)
@pytest.mark.parametrize(("layer", "kernel"), PARTS, ids=[f"{layer.__name__}, {name}" for layer, name in PARTS])
def test_gptq_of_each_kernel_of_attention_and_recurrent_layers_is_nearer_than_the_nearest_values(layer, kernel):
    """One kernel is rounded, and no bias is corrected, which would hide how it was rounded."""
    ratios = []
    for seed in range(2):
        errors = []
        for method in METHODS:
            x = keras.Input((8, 32))
            if layer is L.MultiHeadAttention:
                model = keras.Model(x, layer(2, 8, name="layer")(x, x))
            else:
                model = keras.Model(x, layer(24, return_sequences=True, name="layer")(x))
            randomize(model, seed)
            data = correlated((8, 32), seed=seed + 3)
            exact = outputs_of(model, data)
            options = dict(bits=3, method=method, activation_bits="float", correct_biases=False, include=f"*/{kernel}")
            found = quantize_model(model, QuantizationOptions(**options), data)
            assert [row.name for row in found.report.weights] == [f"layer/{kernel}"]
            errors.append(np.linalg.norm(outputs_of(model, data) - exact))
        ratios.append(errors[1] / errors[0])
    # 0.76 to 0.90.
    assert np.mean(ratios) < 0.93


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["dense", "convolutions"])
def test_corrected_biases_leave_no_mean_error_of_the_outputs(kind, method):
    means = {}
    for corrects in (False, True):
        model = pair() if kind == "dense" else convolutions()
        data = correlated(model.input_shape[1:])
        exact = outputs_of(model, data)
        options = QuantizationOptions(bits=3, method=method, correct_biases=corrects, activation_bits="float")
        quantize_model(model, options, data)
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
            quantize_model(model, QuantizationOptions(bits=2, method="nearest", **options), data)
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
    report = quantize_model(model, options, data, progress).report
    outputs, variables = seen[0]
    assert any(not np.allclose(one, other, rtol=1e-3) for one, other in zip(variables, former, strict=True))
    assert np.abs(outputs - exact).max() <= 1e-5 * np.abs(exact).max()
    assert len(report.notes) == 1 and "Equalization changed the channels of" in report.notes[0]
    assert "point" in report.notes[0]

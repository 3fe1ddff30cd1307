"""Activation-aware scaling on models: outputs that stay, smaller errors after rounding, and what is left alone."""

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES, inputs_of, randomize, stack
from keras import layers as L, ops

from prunekit.core.runtime.variable_values import assigned
from prunekit.techniques.quantize.after_training import quantize_model
from prunekit.techniques.quantize.grids.ranges import MeanSquaredError
from prunekit.techniques.quantize.options import QuantizationOptions
from prunekit.techniques.quantize.placement.placement import place
from prunekit.techniques.quantize.rescaling import activation_scaling
from prunekit.techniques.quantize.rescaling.activation_scaling import activation_scaled
from prunekit.techniques.quantize.targeting import selected

pytestmark = pytest.mark.every_backend


def scaled(model, data, exclude=(), bits=3):
    selection = selected(model, (), exclude)
    batches = [data[:100], data[100:]]
    placement = place(model, selection.kept_float)
    widths = dict.fromkeys(selection.targets, bits)
    return activation_scaled(
        placement, selection.targets, lambda: iter(batches), widths, lambda bits: MeanSquaredError()
    )


def with_outliers(seed=0):
    """Returns a model whose first layer computes some channels a hundred times as large as others, and data."""
    keras.utils.set_random_seed(seed)
    model = stack(
        (12,), L.Dense(24, activation="relu", name="first"), L.Dense(16, activation="relu", name="mid"), L.Dense(4)
    )
    randomize(model)
    kernel = np.array(ops.convert_to_numpy(model.get_layer("first").kernel))
    kernel[:, ::8] *= 100
    model.get_layer("first").kernel.assign(kernel)
    reader = np.array(ops.convert_to_numpy(model.get_layer("mid").kernel))
    reader[::8] /= 20
    model.get_layer("mid").kernel.assign(reader)
    return model, np.random.default_rng(seed).normal(size=(256, 12)).astype("float32")


def before_attention(seed=0):
    """Returns a normalization with some channels thirty times as large, and attention that reads them, and data."""
    keras.utils.set_random_seed(seed)
    x = keras.Input((6, 16))
    y = L.LayerNormalization(name="norm")(x)
    model = randomize(keras.Model(x, L.MultiHeadAttention(2, 8, name="attention")(y, y)), seed)
    large = np.where(np.arange(16) % 8 == 0, 30.0, 1.0)
    model.get_layer("norm").gamma.assign(ops.convert_to_numpy(model.get_layer("norm").gamma) * large)
    for one in model.weights:
        if one.path in ("attention/query/kernel", "attention/key/kernel", "attention/value/kernel"):
            one.assign(ops.convert_to_numpy(one) / np.where(large > 1, 20, 1)[:, None, None])
    return model, np.random.default_rng(seed).normal(size=(128, 6, 16)).astype("float32")


def test_the_outputs_of_the_float_model_stay():
    model, data = with_outliers()
    before = ops.convert_to_numpy(model(data))
    found = scaled(model, data)
    with assigned(found.values):
        np.testing.assert_allclose(
            ops.convert_to_numpy(model(data)), before, rtol=1e-4, atol=1e-4 * np.abs(before).max()
        )
    assert found.layers == ("first", "mid") and found.examined == 2


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("made", [with_outliers, before_attention])
def test_the_nearest_values_after_it_are_nearer_to_the_float_model(made, bits):
    ratios = []
    for seed in range(3):
        model, data = made(seed)
        former, before, errors = model.get_weights(), ops.convert_to_numpy(model(data)), []
        for method in ("nearest", "awq"):
            model.set_weights(former)
            quantize_model(model, QuantizationOptions(bits=bits, activation_bits="float", method=method), data)
            errors.append(np.square(ops.convert_to_numpy(model(data)) - before).mean())
        ratios.append(errors[1] / errors[0])
    assert np.mean(ratios) < 0.6


@pytest.mark.parametrize("name", ["einsum", "mobilenetv2", "separable", "grouped", "nested", "transformer_encoder"])
def test_the_outputs_of_architectures_stay(name):
    keras.utils.set_random_seed(0)
    model = randomize(ARCHITECTURES[name]())
    data = inputs_of(model, examples=6)
    selection = selected(model)
    widths = dict.fromkeys(selection.targets, 4)
    before = ops.convert_to_numpy(model(data))
    found = activation_scaled(
        place(model, selection.kept_float), selection.targets, lambda: [data], widths, lambda bits: MeanSquaredError()
    )
    with assigned(found.values):
        after = ops.convert_to_numpy(model(data))
    np.testing.assert_allclose(after, before, rtol=1e-3, atol=1e-3 * np.abs(before).max())
    assert found.layers


def test_excluded_kernels_are_not_searched_for():
    model, data = with_outliers()
    assert scaled(model, data, exclude=["mid", "dense*"]).examined == 0


def test_passes_with_few_hessians_at_once_find_the_same(monkeypatch):
    model, data = with_outliers()
    whole = scaled(model, data)
    monkeypatch.setattr(activation_scaling, "_AT_ONCE", 1)
    parts = scaled(model, data)
    for (_, one), (_, other) in zip(whole.values, parts.values, strict=True):
        np.testing.assert_array_equal(one, other)


def test_zeros_stay_zeros_and_the_report_names_the_layers():
    model, data = with_outliers()
    kernel = np.array(ops.convert_to_numpy(model.get_layer("mid").kernel))
    kernel[:, ::2] = 0
    model.get_layer("mid").kernel.assign(kernel)
    found = quantize_model(model, QuantizationOptions(bits=4, method="awq", activation_bits="float"), data)
    assert not ops.convert_to_numpy(model.get_layer("mid").kernel)[:, ::2].any()
    assert found.report.method == "awq"
    assert "Activation-aware scaling changed the channels of 2 of 2 layers: first, mid." in found.report.notes


def test_factors_of_half_precision_are_small():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model, data = with_outliers()
    finally:
        keras.config.set_dtype_policy(before)
    kernel = ops.convert_to_numpy(model.get_layer("first").kernel)
    (values,) = [value for one, value in scaled(model, data).values if one is model.get_layer("first").kernel]
    ratio = np.abs(values[kernel != 0] / kernel[kernel != 0])
    assert 1 / 16.1 <= ratio.min() and ratio.max() <= 16.1


def test_data_are_needed():
    with pytest.raises(ValueError, match="method='awq' reads calibration data"):
        QuantizationOptions(method="awq", activation_bits="float").with_data(None)

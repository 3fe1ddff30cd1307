"""Cross-layer equalization: equal ranges on both sides of each channel, less error per tensor, the same outputs."""

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES, inputs_of, randomize, stack
from keras import layers as L, ops
from networks import outputs
from plain_quantization import plain_equalization

from prunekit.core.runtime.variable_values import assigned
from prunekit.techniques.quantize.after_training import quantize_model
from prunekit.techniques.quantize.grids.grids import IntegerFormat
from prunekit.techniques.quantize.grids.ranges import grid_of
from prunekit.techniques.quantize.options import QuantizationOptions
from prunekit.techniques.quantize.placement.placement import place
from prunekit.techniques.quantize.rescaling.channel_scaling import rescale
from prunekit.techniques.quantize.rescaling.equalization import channel_ranges, equalized
from prunekit.techniques.quantize.rescaling.rescaling import rescalable


def unbalanced(model, spread=1000.0, seed=5):
    """Returns the model with random weights, whose channels' ranges then differ by the spread."""
    randomize(model)
    rng = np.random.default_rng(seed)
    for scaling in rescalable(place(model)):
        factors = spread ** rng.permutation(np.linspace(-0.5, 0.5, scaling.channels))
        with assigned(rescale(scaling, factors)):
            pass
    return model


def dense_pair(**options):
    """Returns a model of two Dense layers with a ReLU between."""
    return stack((24,), L.Dense(32, activation="relu", name="first", **options), L.Dense(9, name="head", **options))


def mobile():
    """Returns depthwise and pointwise convolutions with batch normalization and ReLU."""
    layers = [L.Conv2D(8, 3, name="stem"), L.BatchNormalization(name="stem_bn"), L.ReLU()]
    for block, filters in enumerate((12, 10)):
        layers += [L.DepthwiseConv2D(3, padding="same", name=f"depthwise{block}"), L.BatchNormalization(), L.ReLU()]
        layers += [L.Conv2D(filters, 1, use_bias=False, name=f"point{block}"), L.BatchNormalization(), L.ReLU()]
    return stack((10, 9, 3), *layers, L.GlobalAveragePooling2D(), L.Dense(5, name="head"))


def error_with_one_scale(model, inputs) -> float:
    """Returns the error of the outputs if each kernel is rounded to 8 bits with one scale, relative to the outputs."""
    exact = outputs(model, inputs)[0]
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    for layer in copy.layers:
        if hasattr(layer, "kernel"):
            values = ops.convert_to_numpy(layer.kernel)
            layer.kernel.assign(grid_of(values, IntegerFormat(8)).nearest(values))
    return float(np.linalg.norm(outputs(copy, inputs)[0] - exact) / np.linalg.norm(exact))


def test_channels_whose_ranges_differ_a_thousandfold_are_rounded_with_a_tenth_of_the_error():
    model = unbalanced(dense_pair())
    inputs = inputs_of(model, examples=64)
    first, (before,) = error_with_one_scale(model, inputs), outputs(model, inputs)
    with assigned(equalized(place(model)).values):
        pass
    assert error_with_one_scale(model, inputs) < first / 10
    assert np.allclose(outputs(model, inputs)[0], before, rtol=1e-5, atol=1e-5 * np.abs(before).max())


def test_one_sweep_over_two_layers_applies_the_formula():
    model = unbalanced(dense_pair())
    first, head = (ops.convert_to_numpy(model.get_layer(name).kernel) for name in ("first", "head"))
    factors = plain_equalization(np.abs(first).max(axis=0), np.abs(head).max(axis=1))
    found = {id(variable): values for variable, values in equalized(place(model), sweeps=1).values}
    layer = model.get_layer("first")
    assert np.allclose(found[id(layer.kernel)], first * factors, rtol=1e-6)
    assert np.allclose(found[id(layer.bias)], ops.convert_to_numpy(layer.bias) * factors, rtol=1e-6)
    assert np.allclose(found[id(model.get_layer("head").kernel)], head / np.array(factors)[:, None], rtol=1e-6)


def test_ranges_are_those_of_kernels_with_folded_normalization():
    model = unbalanced(mobile())
    stem, norm = model.get_layer("stem"), model.get_layer("stem_bn")
    kernel, gamma, variance = (
        ops.convert_to_numpy(one).astype("float64") for one in (stem.kernel, norm.gamma, norm.moving_variance)
    )
    computed, read = channel_ranges(rescalable(place(model))[0])
    assert np.allclose(computed, np.abs(kernel).max(axis=(0, 1, 2)) * np.abs(gamma) / np.sqrt(variance + norm.epsilon))
    after, following = model.get_layer("depthwise0"), model.layers[5]
    gamma, variance = (
        ops.convert_to_numpy(one).astype("float64") for one in (following.gamma, following.moving_variance)
    )
    kernel = np.abs(ops.convert_to_numpy(after.kernel)).max(axis=(0, 1, 3))
    assert np.allclose(read, kernel * np.abs(gamma) / np.sqrt(variance + following.epsilon))


def test_normalization_after_a_separable_convolution_belongs_to_its_second_kernel():
    model = stack(
        (8, 7, 3), L.Conv2D(4, 3), L.SeparableConv2D(4, 3, name="separable"), L.BatchNormalization(), L.Conv2D(2, 1)
    )
    randomize(model)
    layer, norm = model.layers[2], model.layers[3]
    first, second = rescalable(place(model))
    read = np.abs(ops.convert_to_numpy(layer.depthwise_kernel)).max(axis=(0, 1, 3))
    assert np.allclose(channel_ranges(first)[1], read)
    scale = ops.convert_to_numpy(norm.gamma) / np.sqrt(ops.convert_to_numpy(norm.moving_variance) + norm.epsilon)
    computed = np.abs(ops.convert_to_numpy(layer.pointwise_kernel)).max(axis=(0, 1, 2)) * scale
    assert np.allclose(channel_ranges(second)[0], computed)


@pytest.mark.parametrize("make", [dense_pair, mobile, ARCHITECTURES["fashion_cnn"], ARCHITECTURES["inception"]])
def test_ranges_on_both_sides_of_each_channel_become_equal(make):
    model = unbalanced(make(), 100.0)
    found = equalized(place(model))
    assert found.converged
    with assigned(found.values):
        pass
    for scaling in rescalable(place(model)):
        computed, read = channel_ranges(scaling)
        assert np.allclose(computed, read, rtol=3e-3)


@pytest.mark.short(cases=12)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_outputs_of_architectures_stay_and_a_second_time_changes_nothing(name):
    model = randomize(ARCHITECTURES[name]())
    inputs = inputs_of(model)
    before = outputs(model, inputs)
    found = equalized(place(model))
    assert found.converged
    assert bool(found.values) == bool(found.pairs)
    with assigned(found.values):
        pass
    for one, other in zip(outputs(model, inputs), before, strict=True):
        assert np.abs(one - other).max() <= 1e-5 * np.abs(other).max()
    again = equalized(place(model))
    assert (again.values, again.layers) == ([], ())


def test_several_readers_count_by_their_largest_range():
    x = keras.Input((5,))
    y = L.Dense(6, name="first")(x)
    model = randomize(keras.Model(x, [L.Dense(3, name="one")(y), L.Dense(4, name="two")(y)]))
    for name, rows in (("one", [9, 1, 9, 1, 9, 1]), ("two", [1, 9, 1, 9, 1, 9])):
        kernel = model.get_layer(name).kernel
        kernel.assign(ops.convert_to_numpy(kernel) * np.array(rows)[:, None])
    kernels = [np.abs(ops.convert_to_numpy(model.get_layer(name).kernel)).max(axis=1) for name in ("one", "two")]
    (scaling,) = rescalable(place(model))
    assert np.allclose(channel_ranges(scaling)[1], np.maximum(*kernels))
    (row,) = equalized(place(model)).layers
    assert (row.producer, sorted(row.readers), row.channels, row.changed) == ("first", ["one", "two"], 6, 6)


def test_zeros_stay_zeros_and_channels_without_a_range_stay_as_they_are():
    model = unbalanced(dense_pair())
    first, head = model.get_layer("first"), model.get_layer("head")
    mask = np.random.default_rng(1).random(first.kernel.shape) < 0.5
    mask[:, 3] = False
    first.kernel.assign(ops.convert_to_numpy(first.kernel) * mask)
    rows = np.ones(head.kernel.shape)
    rows[7] = 0.0
    head.kernel.assign(ops.convert_to_numpy(head.kernel) * rows)
    before = {id(one): np.array(ops.convert_to_numpy(one)) for one in model.weights}
    found = equalized(place(model))
    assert found.layers[0].changed == 30
    for variable, values in found.values:
        assert ((values == 0) == (before[id(variable)] == 0)).all()
        assert np.isfinite(values).all()
    kept = {id(variable): values for variable, values in found.values}
    assert (kept[id(first.bias)][[3, 7]] == before[id(first.bias)][[3, 7]]).all()
    assert (kept[id(first.kernel)][:, 7] == before[id(first.kernel)][:, 7]).all()
    assert (kept[id(head.kernel)][3] == before[id(head.kernel)][3]).all()


def test_a_channel_with_nearly_no_weights_gets_a_bounded_factor():
    model = randomize(dense_pair())
    kernel = np.array(ops.convert_to_numpy(model.get_layer("first").kernel))
    kernel[:, 0] *= 1e-20
    model.get_layer("first").kernel.assign(kernel)
    found = equalized(place(model))
    assert found.layers[0].largest_factor == 2.0**10
    assert found.converged


def test_half_precision_does_not_overflow():
    model = randomize(dense_pair(dtype="mixed_float16"))
    first = model.get_layer("first")
    kernel, bias = np.array(ops.convert_to_numpy(first.kernel)), np.array(ops.convert_to_numpy(first.bias))
    kernel[:, :8] *= 1e-6
    bias[:4] = 50_000.0
    first.kernel.assign(kernel)
    first.bias.assign(bias)
    found = equalized(place(model))
    new = dict((variable.path, values) for variable, values in found.values)["first/bias"]
    assert found.layers[0].largest_factor <= 16.0
    assert np.isfinite(new.astype("float16")).all()
    assert new[:4].max() > 60_000
    assert np.allclose(new[4:8], 16 * bias[4:8])


def test_a_model_without_such_layers_stays_as_it_is():
    model = stack((4,), L.Dense(3, activation="tanh"), L.LayerNormalization(), L.Dense(2))
    found = equalized(place(model))
    assert (found.values, found.layers, found.pairs, found.sweeps, found.converged) == ([], (), 0, 0, True)


def test_the_last_permitted_sweep_is_reported():
    found = equalized(place(unbalanced(mobile())), sweeps=1)
    assert (found.sweeps, found.converged, found.pairs) == (1, False, 5)


def test_a_kernel_of_a_single_input_lies_on_every_grid_and_is_equalized_all_the_same():
    model = stack((1,), L.Dense(12, activation="relu", name="first"), L.Dense(3, name="head"))
    unbalanced(model)
    found = quantize_model(model, QuantizationOptions(activation_bits="float", equalize=True))
    assert found.report.notes == ("Equalization changed the channels of 1 of 1 layers: first.",)
    again = quantize_model(model, QuantizationOptions(activation_bits="float", equalize=True))
    assert again.report.notes == ("Equalization changed nothing: the weights lie on their grids already.",)


@pytest.mark.parametrize("method", ["nearest", "awq"])
def test_the_note_says_that_a_model_has_no_channels_to_multiply(method):
    model = stack((4,), L.Dense(3, activation="tanh"), L.Dense(2))
    data = None if method == "nearest" else np.ones((8, 4), "float32")
    found = quantize_model(model, QuantizationOptions(method=method, activation_bits="float", equalize=True), data)
    reason = "changed nothing: no channels between the model's layers can be multiplied."
    names = ["Equalization", "Activation-aware scaling"][: 1 + (method == "awq")]
    assert found.report.notes == tuple(f"{name} {reason}" for name in names)

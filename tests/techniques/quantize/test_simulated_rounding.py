"""What a simulation rounds: weights, folded normalizations, tensors inside of units, constants; and the gradients."""

import keras
import numpy as np
import pytest
from architectures import randomize
from backends import BACKEND
from keras import layers as L, ops
from simulated_models import Passing, Rounding, arrays, assert_close, eighths, made, outputs_of, quarters

from prunekit.techniques.quantize.grids.ranges import MinMax
from prunekit.techniques.quantize.placement.placement import place
from prunekit.techniques.quantize.rounding.calibration import Formats, GridRounding, calibrated
from prunekit.techniques.quantize.rounding.simulation import simulating

pytestmark = pytest.mark.every_backend


def normalized(units=3, **options):
    """Returns (model, Dense, BatchNormalization, inputs): the normalization is folded into the layer."""
    x = keras.Input((5,), name="x")
    dense, norm = L.Dense(units, **options), L.BatchNormalization(momentum=0.5, name="norm")
    model = randomize(keras.Model(x, norm(dense(x))))
    return model, dense, norm, np.random.default_rng(1).normal(size=(6, 5)).astype("float32")


def folded(norm):
    """Returns factor and shift of a batch normalization in inference."""
    gamma, beta, mean, variance = (ops.convert_to_numpy(one) for one in norm.weights)
    factor = gamma / np.sqrt(variance + norm.epsilon)
    return factor, beta - mean * factor


@pytest.mark.parametrize("bias", [True, False])
def test_in_inference_the_rounded_kernel_is_multiplied_by_the_factor(bias):
    model, dense, norm, x = normalized(use_bias=bias)
    factor, shift = folded(norm)
    kernel = ops.convert_to_numpy(dense.kernel)
    shift = shift + (ops.convert_to_numpy(dense.bias) * factor if bias else 0)
    rounding = Rounding()
    with simulating(place(model), rounding):
        outputs_of(model, x)
        found = arrays(model(ops.convert_to_tensor(x), training=False))[0]
    expected = np.round((np.round(x * 4) / 4 @ (eighths(kernel) * factor) + shift) * 4) / 4
    assert (np.abs(found - expected) > 1e-5).mean() < 0.1


@pytest.mark.parametrize("bias", [True, False])
def test_in_training_the_kernel_is_rounded_and_the_batch_is_normalized(bias):
    model, dense, norm, x = normalized(use_bias=bias)
    norm.gamma.assign([0.7, 0.0, -1.3])
    kernel, bias_value = ops.convert_to_numpy(dense.kernel), ops.convert_to_numpy(dense.bias) if bias else 0
    gamma, beta, mean, variance = (ops.convert_to_numpy(one).copy() for one in norm.weights)
    passing = Passing()
    passing.weight = Rounding().weight
    with simulating(place(model), passing):
        found = arrays(model(ops.convert_to_tensor(x), training=True))[0]
    outputs = x @ eighths(kernel) + bias_value
    expected = (outputs - outputs.mean(0)) / np.sqrt(outputs.var(0) + norm.epsilon) * gamma + beta
    assert np.allclose(found, expected, atol=1e-5)
    assert np.allclose(ops.convert_to_numpy(norm.moving_mean), 0.5 * mean + 0.5 * outputs.mean(0), atol=1e-5)
    assert np.allclose(ops.convert_to_numpy(norm.moving_variance), 0.5 * variance + 0.5 * outputs.var(0), atol=1e-5)


def test_a_frozen_normalization_is_folded_in_training_too():
    model, _, norm, x = normalized()
    norm.trainable = False
    before = arrays(norm.weights)
    with simulating(place(model), Passing()):
        found = arrays(model(ops.convert_to_tensor(x), training=True))
    assert_close(found, arrays(model(ops.convert_to_tensor(x), training=False)), 1e-6)
    assert_close(arrays(norm.weights), before, 0.0)


def seen_by(model, inputs):
    """Returns {name of a range: values} of one call in inference that rounds."""
    rounding = Rounding()
    with simulating(place(model), rounding):
        outputs = arrays(model(ops.convert_to_tensor(inputs), training=False))
    return {name: arrays(values)[0] for name, values in rounding.seen.items()}, outputs[0]


def test_an_activation_sees_rounded_values_and_its_results_are_rounded():
    x = keras.Input((5,), name="x")
    dense = L.Dense(3, activation="sigmoid", name="dense")
    model = keras.Model(x, dense(x))
    inputs = np.random.default_rng(0).normal(size=(4, 5)).astype("float32")
    seen, output = seen_by(model, inputs)
    before = quarters(inputs) @ eighths(ops.convert_to_numpy(dense.kernel))
    assert np.allclose(seen["dense (before its activation)"], before, atol=1e-5)
    assert np.allclose(seen["dense"], 1 / (1 + np.exp(-quarters(before))), atol=1e-5)
    assert np.array_equal(output, quarters(seen["dense"]))


def test_silu_multiplies_with_a_rounded_sigmoid():
    x = keras.Input((50,), name="x")
    model = keras.Model(x, L.Activation("silu", name="act")(x))
    inputs = np.linspace(-4, 4, 50, dtype="float32")[None]
    seen, _ = seen_by(model, inputs)
    sigmoid = 1 / (1 + np.exp(-quarters(inputs)))
    assert np.allclose(seen["act"], quarters(inputs) * quarters(sigmoid), atol=1e-5)


def test_the_middle_of_a_separable_convolution_is_rounded():
    x = keras.Input((6, 6, 3), name="x")
    layer = L.SeparableConv2D(4, 3, strides=2, padding="same", depth_multiplier=2, name="conv")
    model = keras.Model(x, layer(x))
    inputs = np.random.default_rng(0).normal(size=(2, 6, 6, 3)).astype("float32")
    seen, _ = seen_by(model, inputs)
    depthwise, pointwise = (eighths(ops.convert_to_numpy(one)) for one in layer.weights[:2])
    middle = ops.depthwise_conv(quarters(inputs), depthwise, 2, "same")
    assert np.allclose(seen["conv (inside)"], ops.convert_to_numpy(middle), atol=1e-5)
    expected = ops.conv(quarters(ops.convert_to_numpy(middle)), pointwise, 1)
    assert np.allclose(seen["conv"], ops.convert_to_numpy(expected), atol=1e-4)


def test_a_rescaling_is_rounded_between_its_product_and_its_sum():
    x = keras.Input((3,), name="x")
    model = keras.Model(x, L.Rescaling(0.3, offset=-0.6, name="scale")(x))
    seen, _ = seen_by(model, np.array([[1.0, 2.0, 5.0]], "float32"))
    assert np.allclose(seen["scale (inside)"], [[0.3, 0.6, 1.5]])
    assert np.allclose(seen["scale"], quarters(np.array([[0.3, 0.6, 1.5]])) - 0.6)


def test_constants_of_the_graph_are_rounded():
    x = keras.Input((3,), name="x")
    model = keras.Model(x, x + np.array([0.1, 0.2, 0.6], "float32"))
    _, output = seen_by(model, np.zeros((1, 3), "float32"))
    assert output.tolist() == [[0.0, 0.25, 0.5]]


def test_weights_of_layers_in_floating_point_are_rounded():
    x = keras.Input((4, 3), name="x")
    layer = L.GRU(2, name="gru")
    model = keras.Model(x, layer(x))
    inputs = np.random.default_rng(0).normal(size=(2, 4, 3)).astype("float32")
    _, output = seen_by(model, inputs)
    for one in layer.weights[:2]:
        one.assign(eighths(ops.convert_to_numpy(one)))
    assert np.allclose(output, arrays(model(inputs))[0], atol=1e-6)


def test_gradients_reach_every_weight_through_the_rounding_of_a_training_step():
    model, inputs = made("separable")
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=BACKEND == "jax")
    placement, formats = place(model), Formats()
    grids = calibrated(model, placement, [inputs], formats.activations, MinMax())
    before = [one.copy() for one in arrays(model.trainable_variables)]
    with simulating(placement, GridRounding(formats, grids)):
        model.train_on_batch(inputs, np.zeros(model(inputs).shape, "float32"))
    after = arrays(model.trainable_variables)
    still = {
        v.path for v, one, other in zip(model.trainable_variables, before, after, strict=True) if (one == other).all()
    }
    # Batch normalization takes the mean, and with it the bias before it, out of its inputs.
    assert still <= {"depthwise_2d/bias"}

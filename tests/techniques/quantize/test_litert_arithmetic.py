"""Codes, scales and zero points against those of LiteRT's converter, and values against its integer kernels."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from prunekit.techniques.quantize.grids.grids import Granularity, IntegerFormat, grid_between
from prunekit.techniques.quantize.grids.ranges import grid_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Statistics for quantized inputs were expected:UserWarning"),
]
ACTIVATIONS = IntegerFormat(8, symmetric=False)
RANGES = [
    (-1.0, 1.0),
    (-0.3, 0.7),
    (0.0, 6.0),
    (-3.0, 0.0),
    (-1e-4, 2e-4),
    (-7.0, 900.0),
    (-0.011, 0.73),
    (-127.5, 127.5),
]
RNG = np.random.default_rng(0)


def converted(function, samples, shape) -> Interpreter:
    """Returns LiteRT's interpreter of a function that the converter quantized to int8 from samples."""
    traced = tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec(shape, tf.float32))
    converter = tf.lite.TFLiteConverter.from_concrete_functions([traced])
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([sample] for sample in samples)
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    interpreter = Interpreter(
        model_content=converter.convert(),
        # The reference kernels keep every tensor.
        experimental_op_resolver_type=OpResolverType.BUILTIN_REF,
        experimental_preserve_all_tensors=True,
    )
    interpreter.allocate_tensors()
    return interpreter


def parameters(tensor) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scales and zero points of a tensor of an interpreter."""
    found = tensor["quantization_parameters"]
    return found["scales"], found["zero_points"]


@pytest.mark.parametrize("low, high", RANGES)
def test_scales_zero_points_and_codes_of_activations(low, high):
    sample = np.linspace(low, high, 64, dtype="float32")
    interpreter = converted(lambda x: tf.add(x, x), [sample], (64,))
    quantize = next(op for op in interpreter._get_ops_details() if op["op_name"] == "QUANTIZE")
    tensor = interpreter._get_tensor_details(quantize["outputs"][0], 0)
    grid = grid_between(low, high, ACTIVATIONS)
    (scale,), (zero_point,) = parameters(tensor)
    assert zero_point == grid.zero_point
    # The converter rounds its quotient once more: float32 of the range, then of the quotient.
    assert np.isclose(scale, grid.scale, rtol=2.0**-22)
    values = RNG.uniform(low * 1.2, high * 1.2, 64).astype("float32")
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], values)
    interpreter.invoke()
    found = interpreter.get_tensor(tensor["index"])
    expected = grid.codes(values)
    # The kernel takes of two equally near codes the one away from zero.
    ties = np.abs(np.abs(values / grid.scale) % 1.0 - 0.5) < 1e-4
    assert np.array_equal(found[~ties], expected[~ties])
    assert ties.sum() <= 2


@pytest.mark.parametrize("kind", ["convolution", "depthwise"])
def test_codes_and_scales_of_convolution_kernels(kind):
    kernel = RNG.normal(size=(3, 3, 4, 5) if kind == "convolution" else (3, 3, 4, 1)).astype("float32")
    kernel[RNG.random(kernel.shape) < 0.5] = 0.0
    operation = tf.nn.conv2d if kind == "convolution" else tf.nn.depthwise_conv2d
    samples = [RNG.normal(size=(1, 8, 8, 4)).astype("float32") for _ in range(4)]
    interpreter = converted(
        lambda x: operation(x, tf.constant(kernel), strides=[1, 1, 1, 1], padding="SAME"), samples, (1, 8, 8, 4)
    )
    axes = (3,) if kind == "convolution" else (2, 3)
    grid = grid_of(kernel, IntegerFormat(8), Granularity(axes))
    name = "CONV_2D" if kind == "convolution" else "DEPTHWISE_CONV_2D"
    call = next(op for op in interpreter._get_ops_details() if op["op_name"] == name)
    tensor = interpreter._get_tensor_details(call["inputs"][1], 0)
    scales, zero_points = parameters(tensor)
    assert not zero_points.any()
    assert np.allclose(scales, grid.scale.reshape(-1), rtol=2.0**-22)
    order = (3, 0, 1, 2)
    codes = interpreter.get_tensor(tensor["index"])
    assert np.array_equal(codes, grid.codes(kernel).transpose(order))
    assert (codes[kernel.transpose(order) == 0.0] == 0).all()


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
def test_values_of_integer_convolutions_are_within_one_step(padding):
    """The sum of products of codes, rounded once to the output's grid; SAME pads with the code of zero."""
    kernel = RNG.normal(size=(3, 3, 4, 5)).astype("float32")
    samples = [RNG.normal(size=(1, 8, 8, 4)).astype("float32") for _ in range(4)]
    interpreter = converted(
        lambda x: tf.nn.conv2d(x, tf.constant(kernel), [1, 1, 1, 1], padding), samples, (1, 8, 8, 4)
    )
    call = next(op for op in interpreter._get_ops_details() if op["op_name"] == "CONV_2D")
    tensors = {tensor["index"]: tensor for tensor in interpreter.get_tensor_details()}
    read, written = tensors[call["inputs"][0]], tensors[call["outputs"][0]]
    inputs, outputs = (_grid(tensor) for tensor in (read, written))
    weights = grid_of(kernel, IntegerFormat(8), Granularity((3,)))
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], samples[0])
    interpreter.invoke()
    codes = inputs.codes(samples[0])
    assert np.array_equal(interpreter.get_tensor(read["index"]), codes)
    exact = keras.ops.conv(inputs.values(codes), weights.nearest(kernel), 1, padding.lower())
    expected = outputs.codes(keras.ops.convert_to_numpy(exact))
    found = interpreter.get_tensor(written["index"]).astype("int32")
    assert np.abs(found - expected).max() <= 1
    assert (found == expected).mean() > 0.99


def _grid(tensor):
    """Returns the grid of an activation from its scale and zero point in a file."""
    (scale,), (zero_point,) = parameters(tensor)
    low, high = (scale * (code - zero_point) for code in (-128, 127))
    grid = grid_between(low, high, ACTIVATIONS)
    assert np.isclose(grid.scale, scale, rtol=1e-6) and grid.zero_point == zero_point
    return grid

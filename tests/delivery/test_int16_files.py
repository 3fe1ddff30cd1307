"""Integer files with activations of 16 bits, run by LiteRT, against NumPy, simulation, float model and 8 bits."""

import keras
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from architectures import ARCHITECTURES, inputs_of, randomize
from integer_files import run
from keras import layers as L, ops

import prunekit as pk
from prunekit.delivery.integers import integer_writing
from prunekit.delivery.integers.integer_comparison import TensorDifference
from prunekit.delivery.integers.integer_export import integer_file
from prunekit.delivery.integers.integer_report import IntegerExportError
from prunekit.delivery.litert.litert import input_specs
from prunekit.delivery.litert.litert_graph import LiteRTGraph

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def network(*layers, shape=(8, 8, 3)):
    """A model with random weights, whose batch normalizations have statistics."""
    keras.utils.set_random_seed(0)
    x = y = keras.Input(shape)
    for layer in layers:
        y = layer(y)
    return randomize(keras.Model(x, y))


def residual():
    """A model with a sum, a concatenation and pooling, on which tensors share grids."""
    keras.utils.set_random_seed(0)
    x = keras.Input((8, 8, 3))
    y = L.Conv2D(3, 3, padding="same", activation="relu6")(x)
    y = L.ReLU()(L.Add()([L.Conv2D(3, 1)(y), y]))
    y = L.Concatenate()([L.AveragePooling2D(2)(y), L.MaxPooling2D(2)(y)])
    return randomize(keras.Model(x, L.Dense(4)(L.GlobalAveragePooling2D()(y))))


def attention():
    """A model with a product of two tensors."""
    keras.utils.set_random_seed(0)
    x = keras.Input((4, 5))
    return randomize(keras.Model(x, L.Dense(3)(ops.matmul(x, ops.swapaxes(x, 1, 2)))))


def mixed():
    """A model whose tanh is rounded again on the grid of what it is joined with."""
    keras.utils.set_random_seed(0)
    x = keras.Input((12,))
    y = L.Dense(6)(x)
    return randomize(keras.Model(x, L.Dense(3)(L.Concatenate()([L.Activation("tanh")(y), y]))))


# Names -> (model, largest difference that the kernels explain, in steps).
NETWORKS = {
    "dense": (lambda: network(L.Dense(16, activation="relu"), L.Dense(5), shape=(12,)), 2),
    "dense on positions": (lambda: network(L.Dense(6, activation="relu"), L.Dense(5), shape=(4, 12)), 2),
    "convolution": (lambda: network(L.Conv2D(6, 3), L.BatchNormalization(), L.ReLU(), L.Flatten(), L.Dense(4)), 2),
    "depthwise": (lambda: network(L.DepthwiseConv2D(3), L.BatchNormalization(), L.ReLU(6.0), L.Conv2D(4, 1)), 2),
    "grouped": (lambda: network(L.Conv2D(4, 3), L.Conv2D(6, 3, groups=2)), 2),
    "dilated": (lambda: network(L.Conv1D(4, 3, dilation_rate=2), L.Dense(3), shape=(9, 3)), 2),
    "transposed": (lambda: network(L.Conv2DTranspose(4, 3, strides=2, activation="relu")), 2),
    "batch normalization alone": (lambda: network(L.BatchNormalization(), L.ReLU(), L.Conv2D(4, 3)), 2),
    "residual": (residual, 2),
    "softmax": (lambda: network(L.Dense(10, activation="softmax"), shape=(12,)), 22),
    "sigmoid": (lambda: network(L.Dense(10, activation="sigmoid"), shape=(12,)), 2),
    "silu": (lambda: network(L.Dense(10, activation="silu"), L.Dense(3), shape=(12,)), 2),
    "tanh": (lambda: network(L.Dense(10, activation="tanh"), L.Dense(3), shape=(12,)), 4),
    "leaky relu": (lambda: network(L.Dense(10), L.LeakyReLU(), L.Dense(3), shape=(12,)), 2),
    "resizing": (lambda: network(L.Conv2D(3, 3), L.UpSampling2D(interpolation="bilinear"), L.UpSampling2D()), 2),
    "attention": (attention, 2),
    "tanh on two grids": (mixed, 4),
}


def quantized(model, activation_bits=16, **options):
    inputs = inputs_of(model, examples=16)
    return pk.quantize(model, inputs, activation_bits=activation_bits, **options), inputs


def file_of(done, inputs, folder):
    """Returns the `IntegerFile` of a quantization, without the comparisons of an export."""
    found, specs = done.state, input_specs(done.model, inputs)
    return integer_file(found.placement, found.ranges, found.formats, structure=inputs, specs=specs, folder=folder)


def calls_of(made, done, inputs):
    """Returns the interpreter after a run, and {kind: an operation of the file}."""
    interpreter, _ = run(made, done.model, inputs)
    return interpreter, {one["op_name"]: one for one in interpreter._get_ops_details()}


def scale_of(interpreter, index):
    """Returns the scales of a tensor, whose zero points are 0."""
    found = interpreter._get_tensor_details(index, 0)["quantization_parameters"]
    assert not found["zero_points"].any()
    return found["scales"].astype("float64")


@pytest.mark.short(cases=4)
@pytest.mark.parametrize("name", NETWORKS)
def test_tensors_are_as_near_to_the_simulation_as_kernels_of_16_bits_are(name, tmp_path):
    build, steps = NETWORKS[name]
    done, _ = quantized(build())
    made = done.export(tmp_path / "m.tflite")
    assert made.skipped == done.skipped == () and made.largest_difference <= steps
    assert max(one.allowed for one in made.tensors) == steps
    assert {one.allowed for one in made.tensors} <= {1, 2, steps}
    # A thousandth of the range is a quarter of a step of 8 bits.
    assert made.simulation.max_error < 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", "resnet20 mobilenetv2 efficientnet_v2 densenet unet shuffle conv1d transformer_encoder lstm_stack".split()
)
def test_architectures_are_written_with_16_bits(name, tmp_path):
    keras.utils.set_random_seed(0)
    model = randomize(ARCHITECTURES[name]())
    made = quantized(model, activation_ranges="minmax")[0].export(tmp_path / "m.tflite")
    assert made.tensors and not any(one.is_too_large for one in made.tensors)
    assert max(one.allowed for one in made.tensors) <= (22 if name == "transformer_encoder" else 2)
    assert made.simulation.max_error < 1e-3 and np.mean([one.share for one in made.tensors]) < 0.12


def test_a_dense_layer_is_the_product_of_its_integers_in_64_bits(tmp_path):
    done, inputs = quantized(network(L.Dense(7, activation="relu"), shape=(300,)))
    interpreter, calls = calls_of(file_of(done, inputs, tmp_path), done, inputs)
    call = calls["FULLY_CONNECTED"]
    x, w, b, y = (interpreter.get_tensor(index) for index in (*call["inputs"], *call["outputs"]))
    assert [one.dtype.name for one in (x, w, b, y)] == ["int16", "int8", "int64", "int16"]
    read, weight, bias, written = (scale_of(interpreter, index) for index in (*call["inputs"], *call["outputs"]))
    assert np.allclose(bias, read * weight, rtol=1e-6) and weight.shape == (7,)
    exact = (x.astype("int64") @ w.T.astype("int64") + b) * (read * weight / written)
    assert np.abs(y - np.clip(np.round(exact), 0, 32767)).max() <= 2
    # These integers stand for what the Keras layer computes.
    assert np.abs(y * written - done.model.predict(inputs, verbose=0)).max() <= 3 * written


def test_a_bias_that_32_bits_do_not_hold_leaves_its_weights_alone(tmp_path):
    model = network(L.Dense(2), shape=(6,))
    kernel = np.random.default_rng(0).normal(size=(6, 2)).astype("float32") * np.float32([1.0, 1e-4])
    model.layers[1].set_weights([kernel, np.float32([0.1, 0.7])])
    done, inputs = quantized(model)
    interpreter, calls = calls_of(file_of(done, inputs, tmp_path), done, inputs)
    call = calls["FULLY_CONNECTED"]
    weights, biases = (interpreter.get_tensor(index) for index in call["inputs"][1:])
    assert biases[1] > 2**31 and np.abs(weights[1]).max() == 127
    _, (found,) = run(file_of(done, inputs, tmp_path), done.model, inputs)
    assert np.abs(found - model.predict(inputs, verbose=0)).max() <= 2 * scale_of(interpreter, call["outputs"][0])


@pytest.mark.short(cases=3)
@pytest.mark.parametrize("name", ["convolution", "depthwise", "residual", "tanh", "softmax"])
def test_files_are_nearer_to_the_float_model_than_with_8_bits(name, tmp_path):
    errors = []
    for bits in (8, 16):
        done, _ = quantized(NETWORKS[name][0](), activation_bits=bits)
        errors.append(done.export(tmp_path / f"{bits}.tflite").float_model.mean_error)
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.parametrize("activation, kind", [("softmax", "SOFTMAX"), ("sigmoid", "LOGISTIC"), ("tanh", "TANH")])
def test_prescribed_grids_are_those_of_the_kernels(activation, kind, tmp_path):
    done, inputs = quantized(network(L.Dense(6, activation=activation), shape=(12,)))
    interpreter, calls = calls_of(file_of(done, inputs, tmp_path), done, inputs)
    assert scale_of(interpreter, calls[kind]["outputs"][0]) == [2.0**-15]


LEFT_FLOAT = {
    "ELU": L.ELU(),
    "PRELU": L.PReLU(),
    "GELU": L.Activation("gelu"),
    "HARD_SWISH": L.Activation("hard_silu"),
    # The reference kernel adds codes without regard to their scales.
    "SUM": lambda x: ops.sum(x, axis=1),
    # The kernel is off by two steps for each entry.
    "SOFTMAX": L.Softmax(),
    "ABS": ops.abs,
    "EXP": ops.exp,
    "RSQRT": lambda x: ops.rsqrt(ops.square(x) + 0.1),
    "RELU_N1_TO_1": lambda x: ops.clip(x, -1, 1),
}


@pytest.mark.parametrize("kind", LEFT_FLOAT)
def test_operations_without_a_precise_kernel_compute_in_floating_point_between_integers(kind, tmp_path):
    done, _ = quantized(network(L.Dense(33), LEFT_FLOAT[kind], L.Dense(3), shape=(4, 5)))
    made = done.export(tmp_path / "m.tflite")
    ((name, kinds),) = [(one.name, one.reason) for one in made.skipped]
    # The report knows it before there is a file.
    assert kinds == kind and [one.name for one in done.skipped if "/" not in one.name] == [name]
    graph = LiteRTGraph((tmp_path / "m.tflite").read_bytes())
    kinds = [graph.kind(one) for one in graph.operators if graph.kind(one) != "RESHAPE"]
    place = kinds.index(kind)
    assert kinds[place - 1 : place + 2] == ["DEQUANTIZE", kind, "QUANTIZE"]
    assert kinds.count("FULLY_CONNECTED") == 2 and made.largest_difference <= 2


def test_a_softmax_of_32_entries_is_no_more_than_half_a_step_of_8_bits_off(tmp_path):
    # Entries far below the largest one, which the kernel's table of exponentials ends before.
    model = network(L.Dense(32, activation="softmax"), shape=(32,))
    model.layers[1].set_weights([30 * np.eye(32, dtype="float32"), np.zeros(32, "float32")])
    done = pk.quantize(model, np.eye(32, dtype="float32"), activation_bits=16)
    made = done.export(tmp_path / "m.tflite")
    (softmax,) = [one for one in made.tensors if one.allowed > 2]
    assert made.skipped == () and softmax.allowed == 66 and 30 < softmax.largest <= 66
    assert done.skipped == ()


def test_a_softmax_of_open_length_computes_in_floating_point(tmp_path):
    keras.utils.set_random_seed(0)
    x = keras.Input((None, 5))
    y = L.Softmax()(ops.swapaxes(L.Dense(4)(x), 1, 2))
    model = keras.Model(x, L.Dense(3)(ops.swapaxes(y, 1, 2)))
    inputs = np.random.default_rng(0).normal(size=(16, 6, 5)).astype("float32")
    done = pk.quantize(model, inputs, activation_bits=16)
    made = done.export(tmp_path / "m.tflite")
    assert "SOFTMAX" in [one.reason for one in made.skipped]
    assert "up to 32 entries" in done.skipped[0].reason


def test_operations_have_the_versions_of_kernels_of_16_bits(tmp_path):
    versions = {}
    for name in ("efficientnet_v2", "transposed", "shuffle"):
        keras.utils.set_random_seed(0)
        model = ARCHITECTURES[name]()
        done, inputs = quantized(model)
        graph = LiteRTGraph(file_of(done, inputs, tmp_path).content)
        versions |= {graph.kind(one): graph.version(one) for one in graph.operators}
    # From op_version.cc of LiteRT; 6 for groups, 4 for transposed convolutions with an activation.
    expected = dict(CONV_2D=6, DEPTHWISE_CONV_2D=5, FULLY_CONNECTED=7, TRANSPOSE_CONV=4, ADD=3, MUL=4, MEAN=3)
    expected |= dict(LOGISTIC=3, LEAKY_RELU=2, TRANSPOSE=5, QUANTIZE=2, DEQUANTIZE=3)
    assert {kind: versions[kind] for kind in expected} == expected


def test_sums_have_scales_that_are_no_powers_of_two(tmp_path):
    done, inputs = quantized(residual())
    graph = LiteRTGraph(file_of(done, inputs, tmp_path).content)
    (add,) = [one for one in graph.operators if graph.kind(one) == "ADD"]
    assert add.builtinOptions.potScaleInt16 is False


def test_weights_of_4_bits_are_stored_as_such_in_dense_layers_alone(tmp_path):
    # DEPTHWISE_CONV_2D computes nonsense from codes of 4 bits, and CONV_2D has no version that says it reads them.
    layers = L.Conv2D(4, 3), L.DepthwiseConv2D(3), L.ReLU(), L.Flatten(), L.Dense(4)
    done, _ = quantized(network(*layers), bits=4)
    made = done.export(tmp_path / "m.tflite")
    graph = LiteRTGraph((tmp_path / "m.tflite").read_bytes())
    types = {graph.kind(one): graph.tensor(one.inputs[1]).type for one in graph.operators if len(one.inputs) == 3}
    assert types == {"CONV_2D": 9, "DEPTHWISE_CONV_2D": 9, "FULLY_CONNECTED": 17}
    assert made.largest_difference <= 2 and made.skipped == ()


def test_zeros_of_a_pruned_kernel_are_zeros_in_a_file_of_16_bits(tmp_path):
    model = network(L.Dense(9), shape=(12,))
    kernel = np.array(model.layers[1].kernel)
    kernel[np.random.default_rng(0).random(kernel.shape) < 0.7] = 0.0
    model.layers[1].kernel.assign(kernel)
    done, inputs = quantized(model)
    interpreter, calls = calls_of(file_of(done, inputs, tmp_path), done, inputs)
    assert (interpreter.get_tensor(calls["FULLY_CONNECTED"]["inputs"][1])[kernel.T == 0.0] == 0).all()


def test_inputs_and_outputs_of_16_bits_compute_what_those_of_floats_do(tmp_path):
    done, inputs = quantized(residual())
    done.export(tmp_path / "float.tflite")
    done.export(tmp_path / "int16.tflite", integer_io=("inputs", "outputs"))
    floats, integers = (Interpreter(model_path=str(tmp_path / f"{name}.tflite")) for name in ("float", "int16"))
    (given,), (computed,) = integers.get_input_details(), integers.get_output_details()
    assert (given["dtype"], computed["dtype"]) == (np.int16, np.int16)
    (read, zero), (written, other) = given["quantization"], computed["quantization"]
    assert (zero, other) == (0, 0)
    signature = floats.get_signature_list()["serving_default"]
    (key,), (result,) = signature["inputs"], signature["outputs"]
    expected = floats.get_signature_runner()(**{key: inputs})[result]
    codes = np.clip(np.round(inputs / read), -32767, 32767).astype("int16")
    found = integers.get_signature_runner()(**{key: codes})[result]
    assert np.abs(found * np.float32(written) - expected).max() <= 1.01 * written


@pytest.mark.parametrize("allowed, hint", [(1, "simulation. Received"), (4, r"simulation \(4 steps for the kernel")])
def test_a_file_with_a_larger_difference_than_its_kernels_explain_is_refused(allowed, hint, tmp_path, monkeypatch):
    done, _ = quantized(network(L.Dense(3), shape=(4,)))
    tensors = [TensorDifference("fits", allowed, 0.5, allowed), TensorDifference("other", allowed + 1, 0.5, allowed)]
    monkeypatch.setattr(integer_writing, "tensor_differences", lambda *_: tensors)
    with pytest.raises(IntegerExportError, match=f"{hint}.* 'other' with {allowed + 1} steps, and 0 more"):
        done.export(tmp_path / "m.tflite")
    assert not list(tmp_path.iterdir())


def test_outputs_of_16_bits_are_compared_more_strictly(tmp_path, monkeypatch):
    done, _ = quantized(network(L.Dense(3), shape=(4,)))
    answers = integer_writing._Export._answers
    monkeypatch.setattr(integer_writing._Export, "_answers", lambda *given: [one + 0.2 for one in answers(*given)])
    with pytest.raises(IntegerExportError, match="Received: a largest difference of .*allowed: 0.0[0-9]* and 0.00"):
        done.export(tmp_path / "m.tflite")

"""LiteRT files with scales for groups of inputs: what kernels read, on LiteRT's two sets of kernels, and bytes."""

import keras
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from architectures import randomize
from keras import layers as L

import prunekit as pk
from prunekit.delivery.litert.litert_graph import LiteRTGraph

pytestmark = pytest.mark.one_backend
SIZE = 16

# Layers with the shape of their inputs, and the operation that reads their weight in a file.
# 40, 45 and 25 inputs end with a shorter group, 32 and 144 do not.
LAYERS = {
    "dense": ((40,), lambda: L.Dense(6, name="w"), "FULLY_CONNECTED"),
    "dense with whole groups": ((32,), lambda: L.Dense(6, use_bias=False, name="w"), "FULLY_CONNECTED"),
    "equation": ((3, 40), lambda: L.EinsumDense("abc,cde->abde", (3, 2, 5), name="w"), "FULLY_CONNECTED"),
    "convolution": ((6, 6, 5), lambda: L.Conv2D(4, 3, name="w"), "CONV_2D"),
    "convolution with whole groups": ((6, 6, 16), lambda: L.Conv2D(4, 3, name="w"), "CONV_2D"),
    "depthwise": ((8, 8, 16), lambda: L.DepthwiseConv2D(5, name="w"), "DEPTHWISE_CONV_2D"),
    "transposed": ((5, 5, 3), lambda: L.Conv2DTranspose(8, 3, name="w"), "TRANSPOSE_CONV"),
    "table": ((3,), lambda: L.Embedding(7, 40, name="w"), "GATHER"),
}


def network(name):
    shape, layer, kind = LAYERS[name]
    keras.utils.set_random_seed(0)
    model = randomize(keras.Sequential([keras.Input(shape, dtype="int32" if kind == "GATHER" else "float32"), layer()]))
    rng = np.random.default_rng(0)
    data = rng.integers(0, 7, (8, *shape)) if kind == "GATHER" else rng.normal(size=(8, *shape)).astype("float32")
    return model, data, kind


def run(content, data, resolver):
    """Returns the interpreter after one run; with all tensors, except for the default kernels."""
    keeps = resolver is not OpResolverType.BUILTIN
    found = Interpreter(
        model_content=content, experimental_op_resolver_type=resolver, experimental_preserve_all_tensors=keeps
    )
    (details,) = found.get_input_details()
    found.resize_tensor_input(details["index"], data.shape)
    found.allocate_tensors()
    found.set_tensor(details["index"], data.astype(details["dtype"]))
    found.invoke()
    return found


def stored_kernel(model, kind):
    """Returns the kernel of a layer as a file has it."""
    (weight,) = [one for one in model.weights if "kernel" in one.path or "embeddings" in one.path]
    value = np.array(weight)
    if kind == "FULLY_CONNECTED":
        return value.reshape(value.shape[0], -1).T
    if kind == "DEPTHWISE_CONV_2D":
        return value.reshape(1, *value.shape[:2], -1)
    return {"CONV_2D": lambda: value.transpose(3, 0, 1, 2), "TRANSPOSE_CONV": lambda: value.transpose(2, 0, 1, 3)}.get(
        kind, lambda: value
    )()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", LAYERS)
def test_kernels_read_the_weights_of_the_quantized_model(tmp_path, name, bits):
    model, data, kind = network(name)
    found = pk.quantize(model, bits=bits, activation_bits="float", group_size=SIZE)
    exported = found.export(tmp_path / "w.tflite", data=data)
    assert exported.skipped == () and exported.simulation.max_error < 1e-5
    content, expected = (tmp_path / "w.tflite").read_bytes(), stored_kernel(model, kind)
    (operator,) = [one for one in LiteRTGraph(content).operators if LiteRTGraph(content).kind(one) == kind]
    place = 0 if kind == "GATHER" else 1
    for resolver in (OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES, OpResolverType.BUILTIN_REF):
        interpreter = run(content, data, resolver)
        read = interpreter.get_tensor(int(operator.inputs[place]))
        assert ((read == 0.0) == (expected == 0.0)).all()
        # A scale is found again from the largest value, with one rounding; its products have another one.
        assert (np.abs(read - expected) <= 2 * np.spacing(np.abs(expected))).all()
    outputs = run(content, data, OpResolverType.BUILTIN)
    computed = outputs.get_tensor(outputs.get_output_details()[0]["index"])
    np.testing.assert_allclose(computed, model.predict(data, verbose=0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", LAYERS)
def test_the_bytes_of_the_report_are_those_of_codes_and_scales_in_the_file(tmp_path, name, bits):
    model, data, kind = network(name)
    found = pk.quantize(model, bits=bits, activation_bits="float", group_size=SIZE)
    found.export(tmp_path / "w.tflite", data=data)
    graph = LiteRTGraph((tmp_path / "w.tflite").read_bytes())
    (codes,) = [one.inputs[0] for one in graph.operators if graph.kind(one) == "DEQUANTIZE"]
    (scales,) = [one.inputs[1] for one in graph.operators if graph.kind(one) == "MUL"]
    stored = [len(graph._model.buffers[graph.tensor(index).buffer].data) for index in (codes, scales)]
    (row,) = found.weights
    assert sum(stored) == row.bytes and stored[1] == 4 * row.scales
    # One scale for the codes, whose zero point has 64 bits.
    assert len(graph.tensor(codes).quantization.scale) == 1
    assert graph.is_int4(codes) == (bits == 4)


def test_a_normalization_is_folded_and_weights_with_few_inputs_keep_one_scale(tmp_path):
    keras.utils.set_random_seed(0)
    layers = [
        L.Conv2D(16, 3, use_bias=False, name="first"),
        L.BatchNormalization(name="norm"),
        L.ReLU(),
        L.SeparableConv2D(24, 3, name="second"),
        L.GlobalAveragePooling2D(),
        L.Dense(8, name="head"),
    ]
    model = randomize(keras.Sequential([keras.Input((10, 10, 3)), *layers]))
    data = np.random.default_rng(0).normal(size=(32, 10, 10, 3)).astype("float32")
    found = pk.quantize(model, data, bits=4, activation_bits="float", group_size=SIZE)
    exported = found.export(tmp_path / "w.tflite")
    assert exported.simulation.max_error < 1e-5
    graph = LiteRTGraph((tmp_path / "w.tflite").read_bytes())
    kinds = [graph.kind(one) for one in graph.operators]
    # The depthwise kernel has 9 inputs, the pointwise one 16.
    assert kinds.count("DEQUANTIZE") == 4 and kinds[:5].count("DEQUANTIZE") >= 1
    sizes = {
        len(graph.tensor(one.inputs[0]).quantization.scale)
        for one in graph.operators
        if graph.kind(one) == "DEQUANTIZE"
    }
    assert sizes == {1, 16, 24}


def test_a_trained_model_is_exported_with_its_groups(tmp_path):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((40,)), L.Dense(16, activation="relu"), L.Dense(3)])
    model.compile("adam", "mse")
    data = np.random.default_rng(0).normal(size=(64, 40)).astype("float32")
    training = pk.QuantizationCallback(bits=4, activation_bits="float", group_size=SIZE)
    model.fit(data, data[:, :3], epochs=1, verbose=0, callbacks=[training])
    exported = training.report.export(tmp_path / "w.tflite", data=data)
    assert exported.simulation.max_error < 1e-5 and exported.skipped == ()

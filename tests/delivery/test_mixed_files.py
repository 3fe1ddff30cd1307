"""Integer files whose weights have different bits, and files of weights that were pruned while they were rounded."""

import keras
import numpy as np
import pytest
from keras import layers as L
from networks import sequential

import prunekit as pk
from prunekit.delivery.litert.litert_graph import LiteRTGraph

pytestmark = pytest.mark.one_backend


def network():
    keras.utils.set_random_seed(0)
    model = sequential(
        (12, 12, 3),
        L.Conv2D(16, 3, activation="relu", name="first"),
        L.Conv2D(16, 3, activation="relu", name="second"),
        L.GlobalAveragePooling2D(name="pool"),
        L.Dense(32, activation="relu", name="hidden"),
        L.Dense(10, name="head"),
    )
    return model, np.random.default_rng(0).normal(size=(64, 12, 12, 3)).astype("float32")


def types_of(path):
    """Returns the types of the constants with more than 100 entries, by size."""
    graph = LiteRTGraph(path.read_bytes())
    found = {}
    for operator in graph.operators:
        for index in map(int, operator.inputs):
            size = int(np.prod(graph.shape(index)))
            if index >= 0 and graph.tensor(index).buffer and size > 100 and graph.kind(operator) != "RESHAPE":
                kind = "int4" if graph.is_int4(index) else "float32" if graph.is_float(index) else "int8"
                if graph._model.buffers[graph.tensor(index).buffer].data is not None:
                    found[size] = kind
    return found


@pytest.mark.parametrize("activations", [8, "float"])
def test_each_weight_is_stored_with_its_bits(tmp_path, activations):
    model, data = network()
    found = pk.quantize(model, data, bits={"second": 4, "hidden": 3, "head": 8}, activation_bits=activations)
    made = found.export(tmp_path / "mixed.tflite")
    assert types_of(tmp_path / "mixed.tflite") == {432: "int8", 2304: "int4", 512: "int4", 320: "int8"}
    assert not made.skipped and made.largest_difference in (None, 0, 1)


def test_a_layer_without_bits_stays_in_floating_point(tmp_path):
    model, data = network()
    made = pk.quantize(model, data, bits={"second": "float", "first": 4}).export(tmp_path / "mixed.tflite")
    assert types_of(tmp_path / "mixed.tflite") == {432: "int4", 2304: "float32", 512: "int8", 320: "int8"}
    assert [(one.name, one.reason) for one in made.skipped] == [("second", "CONV_2D")]


def test_a_choice_under_a_budget_is_a_file_of_about_these_bytes(tmp_path):
    model, data = network()
    choice = pk.choose_bits(model, data, budget=3600)
    assert set(choice.bits.values()) == {4, 8}
    # Corrected biases would be stored, where biases of zeros are not.
    mixed = pk.quantize(model, data, bits=choice.bits, correct_biases=False)
    assert mixed.bytes[1] == choice.bytes <= 3600
    size = mixed.export(tmp_path / "mixed.tflite").bytes
    keras.utils.set_random_seed(0)
    model, _ = network()
    whole = pk.quantize(model, data)
    # What a file holds besides the weights is the same.
    others = whole.export(tmp_path / "whole.tflite").bytes - whole.bytes[1]
    assert abs(size - choice.bytes - others) < 400


def codes_and_floats(path):
    """Returns the bytes of the constants of weights: those of codes, and floats that are no biases."""
    graph = LiteRTGraph(path.read_bytes())
    total = 0
    for index in {int(index) for one in graph.operators for index in one.inputs}:
        if index >= 0 and len(graph.shape(index)) > 1 and graph.dtype(index) != "int32":
            data = graph._model.buffers[graph.tensor(index).buffer].data
            total += 0 if data is None else len(data)
    return total


LAYERS = {
    "dense": lambda: [L.Flatten(), L.Dense(48, name="w")],
    "few for a scale": lambda: [L.GlobalAveragePooling2D(), L.Dense(64, name="w")],
    "convolution": lambda: [L.Conv2D(16, 3, name="w")],
    "depthwise": lambda: [L.DepthwiseConv2D(5, depth_multiplier=4, name="w")],
    "transposed": lambda: [L.Conv2DTranspose(16, 3, name="w")],
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("activations", [8, 16, "float"])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_bytes_that_a_budget_counts_are_those_of_the_file(tmp_path, name, activations, bits):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8, 8, 4)), *LAYERS[name]()])
    data = np.random.default_rng(0).normal(size=(8, 8, 8, 4)).astype("float32")
    options = dict(activation_bits=activations, method="nearest", correct_biases=False)
    choice = pk.choose_bits(model, data, budget=10**9, bits=(bits,), **options)
    pk.quantize(model, data, bits=choice.bits, **options).export(tmp_path / "w.tflite")
    ((levels,), scales) = choice.weights, {"depthwise": 16, "dense": 48, "few for a scale": 64}.get(name, 16)
    codes = levels.bytes[0] - (0 if (activations, name) == ("float", "few for a scale") else 4 * scales)
    assert codes_and_floats(tmp_path / "w.tflite") == codes


def test_zeros_before_the_rounding_are_zeros_of_the_file(tmp_path):
    model, data = network()
    found = pk.quantize(model, data, bits=4, sparsity=0.75)
    made = found.export(tmp_path / "sparse.tflite")
    assert made.gzip_bytes < 0.8 * made.bytes
    graph = LiteRTGraph((tmp_path / "sparse.tflite").read_bytes())
    zeros = {}
    for operator in graph.operators:
        for index in map(int, operator.inputs):
            if index >= 0 and graph.is_int4(index):
                data = np.asarray(graph._model.buffers[graph.tensor(index).buffer].data, "uint8")
                codes = np.stack([data & 15, data >> 4])
                zeros[data.size * 2] = int(np.sum(codes == 0))
    assert set(zeros) == {432, 2304, 512, 320} and sum(zeros.values()) >= 0.75 * sum(zeros)


def test_trained_bits_of_patterns_stay(tmp_path):
    model, data = network()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    callback = pk.QuantizationCallback(data, bits={"second": 4})
    model.fit(data, np.arange(64) % 10, epochs=1, verbose=0, callbacks=[callback])
    assert {row.name: row.bits for row in callback.report.weights}["second/kernel"] == 4
    callback.report.export(tmp_path / "trained.tflite")
    assert types_of(tmp_path / "trained.tflite")[2304] == "int4"

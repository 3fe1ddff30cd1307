"""What sparsity is said to buy in each runtime."""

import keras
import numpy as np
import pytest
from backends import converts, tensorflow_only
from exported_networks import identity, mobile_network, prune
from keras import layers

import prunekit as pk
from prunekit.anatomy.cost.inspection import inspect
from prunekit.operations.export import runtime_advice

# Keras's own conversion of a variable to NumPy, whenever a model is saved.
pytestmark = [converts, pytest.mark.every_backend]


def advice_for(model):
    return {line.runtime: line for line in runtime_advice(inspect(model), model)}


def test_a_dense_model_gets_no_advice(perceptron):
    lines = advice_for(perceptron)
    assert {line.what_it_buys for line in lines.values()} == {"nothing"}
    assert len(lines) == 9


def test_a_model_that_became_smaller_is_faster_on_every_runtime(perceptron):
    smaller, _ = pk.shrink(perceptron, channels=0.5)
    *_, line = runtime_advice(inspect(smaller), smaller, inspect(perceptron))
    assert line.runtime == "any, by removing channels" and line.what_it_buys == "speed and size"
    assert line.why.startswith("0.509 of the parameters are left")


def shrunk_advice(perceptron, sparsity):
    smaller, _ = pk.shrink(perceptron, channels=0.5)
    before = inspect(perceptron)
    if sparsity:
        prune(smaller, sparsity)
    return {line.runtime: line for line in runtime_advice(inspect(smaller), smaller, before)}


@pytest.mark.parametrize("sparsity", [0.0, 0.9])
def test_no_runtime_has_nothing_of_a_model_that_became_smaller(perceptron, sparsity):
    lines = shrunk_advice(perceptron, sparsity)
    assert len(lines) == 9 and not [line for line in lines.values() if line.what_it_buys == "nothing"]
    for runtime in ("LiteRT on x86", "LiteRT on ARM64", "LiteRT.js (WebAssembly)", "OpenVINO", "GPU"):
        assert lines[runtime].what_it_buys == "less arithmetic: 0.500 of the multiply-accumulates"
        assert lines[runtime].why.startswith("smaller tensors need no support by the runtime; zeros give no more speed")


def test_files_are_compared_with_those_of_the_model_before_the_removal(perceptron):
    lines = shrunk_advice(perceptron, 0.0)
    assert lines["download (gzip)"].what_it_buys == "about 0.51 of the download before in the same format"
    assert lines["disk, uncompressed"].what_it_buys == "about 0.51 of the file before"
    lines = shrunk_advice(perceptron, 0.9)
    assert lines["disk, uncompressed"].what_it_buys.endswith(" in the '-sparse' formats, 0.51 in the others")
    assert float(lines["download (gzip)"].what_it_buys.split()[1]) < 0.2
    assert lines["ONNX Runtime"].what_it_buys.endswith("; of the zeros: a smaller file, no speed")


def test_unstructured_zeros_of_dense_layers_buy_size_and_no_speed(perceptron):
    lines = advice_for(prune(perceptron, 0.9))
    assert lines["download (gzip)"].what_it_buys.startswith("about 0.")
    for runtime in ("LiteRT on x86", "LiteRT on ARM64", "LiteRT.js (WebAssembly)", "OpenVINO", "GPU"):
        assert lines[runtime].what_it_buys == "nothing"


def test_large_dense_blocks_buy_speed_on_x86():
    model = keras.Sequential([keras.Input((256,)), layers.Dense(256), layers.Dense(4)])
    line = advice_for(prune(model, 0.9, block=4))["LiteRT on x86"]
    assert line.what_it_buys.startswith("4.3x on 1 Dense kernel at")


@tensorflow_only
@pytest.mark.parametrize(
    "middle, sparsity, buys",
    [(identity, 0.9, "about 4.1x"), (identity, 0.6, "nothing"), (lambda x: layers.MaxPooling2D()(x), 0.9, "wrong")],
    ids=["qualifies", "too few zeros", "lies"],
)
def test_sparse_convolutions_are_advised_only_where_the_graph_qualifies(middle, sparsity, buys):
    assert buys in advice_for(mobile_network(middle, sparsity))["LiteRT.js (WebAssembly)"].what_it_buys


def test_what_cannot_be_checked_is_said():
    model = Pointwise()
    model(np.zeros((1, 4, 4, 3), "float32"))
    line = advice_for(prune(model, 0.9))["LiteRT on ARM64"]
    assert line.what_it_buys == "not known" and "subclassed" in line.why


class Pointwise(keras.Model):
    def __init__(self):
        super().__init__()
        self.convolution = layers.Conv2D(8, 1)

    def call(self, inputs):
        return self.convolution(inputs)

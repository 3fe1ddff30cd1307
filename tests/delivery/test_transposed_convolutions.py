"""Transposed convolutions of integer files: blocks of pixels as channels where that is small, for any batch size."""

import keras
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from keras import layers as L

import prunekit as pk
from prunekit.delivery.litert_graph import LiteRTGraph

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
BLOCKS, PADDED = "CONV_2D DEPTH_TO_SPACE", "PAD CONV_2D DEPTH_TO_SPACE"
WHOLE = "SHAPE STRIDED_SLICE PACK TRANSPOSE_CONV"


def written(filters, options, path, **quantization):
    """Returns a quantization of one transposed convolution with a ReLU, inputs, and the kinds of its operations."""
    keras.utils.set_random_seed(0)
    x = keras.Input((6, 7, 3), name="x")
    y = L.ReLU()(L.Conv2DTranspose(filters, bias_initializer="normal", **options)(x))
    inputs = np.random.default_rng(0).normal(size=(6, 6, 7, 3)).astype("float32")
    done = pk.quantize(keras.Model(x, y), inputs, misfits="error", **quantization)
    assert done.export(path).largest_difference <= 1
    graph = LiteRTGraph(path.read_bytes())
    return done, inputs, [graph.kind(one) for one in graph.operators][1:-1], graph


@pytest.mark.parametrize(
    ("options", "kinds", "entries"),
    [
        ({"kernel_size": 2, "strides": 2}, BLOCKS, 60),
        ({"kernel_size": 3, "strides": 2, "padding": "same"}, PADDED, 240),
        ({"kernel_size": (2, 3), "strides": 2, "padding": "same"}, PADDED, 120),
        # The converter pads alike on both sides by itself.
        ({"kernel_size": 4, "strides": 2, "padding": "same"}, BLOCKS, 540),
        ({"kernel_size": 1, "strides": 3}, BLOCKS, 135),
        # The outputs end inside a block, or blocks are no squares.
        ({"kernel_size": 3, "strides": 2}, WHOLE, 135),
        ({"kernel_size": 3, "strides": (1, 2), "padding": "same"}, WHOLE, 135),
    ],
    ids=str,
)
def test_each_block_of_pixels_is_computed_as_the_channels_of_one(options, kinds, entries, tmp_path):
    done, inputs, found, graph = written(5, options, tmp_path / "m.tflite")
    assert found == kinds.split()
    (linear,) = [one for one in graph.operators if graph.kind(one) in ("CONV_2D", "TRANSPOSE_CONV")]
    assert linear.builtinOptions.fusedActivationFunction == 1
    assert graph.codes(int(linear.inputs[1])).size == entries == done.report.weights[0].stored.entries
    with done.simulating() as simulated:
        expected = simulated.predict(inputs, verbose=0)
    for batch in (1, 4):
        (answers,) = Interpreter(str(tmp_path / "m.tflite")).get_signature_runner()(x=inputs[:batch]).values()
        assert np.abs(answers - expected[:batch]).max() < 0.01 * np.ptp(expected)


@pytest.mark.parametrize(
    ("filters", "quantization"), [(3000, {}), (5, {"activations": 16})], ids=["large", "tensors of 16 bits"]
)
def test_kernels_that_would_grow_much_and_tensors_of_16_bits_stay_transposed(filters, quantization, tmp_path):
    options = {"kernel_size": 3, "strides": 2, "padding": "same"}
    assert written(filters, options, tmp_path / "m.tflite", **quantization)[2] == WHOLE.split()

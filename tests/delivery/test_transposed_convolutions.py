"""Transposed convolutions of integer files: blocks of pixels as channels where that is small, for any batch size."""

import keras
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from keras import layers as L

import prunekit as pk
from prunekit.delivery.litert.litert_graph import LiteRTGraph
from prunekit.techniques.quantize.placement import subpixels

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
        # There are more blocks than inputs, of which the last may be cut.
        ({"kernel_size": 3, "strides": 2}, f"{PADDED} STRIDED_SLICE", 240),
        ({"kernel_size": (2, 5), "strides": 2}, f"{PADDED} STRIDED_SLICE", 180),
        ({"kernel_size": 4, "strides": 2}, PADDED, 240),
        # One convolution.
        ({"kernel_size": 3}, "PAD CONV_2D", 135),
        ({"kernel_size": (3, 4), "padding": "same"}, "PAD CONV_2D", 180),
        ({"kernel_size": 3, "padding": "same"}, "CONV_2D", 135),
        # Blocks that are no squares.
        ({"kernel_size": 3, "strides": (1, 2), "padding": "same"}, WHOLE, 135),
    ],
    ids=str,
)
def test_each_block_of_pixels_is_computed_as_the_channels_of_one(options, kinds, entries, tmp_path):
    done, inputs, found, graph = written(5, options, tmp_path / "m.tflite")
    assert found == kinds.split()
    (linear,) = [one for one in graph.operators if graph.kind(one) in ("CONV_2D", "TRANSPOSE_CONV")]
    assert linear.builtinOptions.fusedActivationFunction == 1
    assert graph.codes(int(linear.inputs[1])).size == entries == done.weights[0].stored.entries
    with done.simulating() as simulated:
        expected = simulated.predict(inputs, verbose=0)
    for batch in (1, 4):
        (answers,) = Interpreter(str(tmp_path / "m.tflite")).get_signature_runner()(x=inputs[:batch]).values()
        assert np.abs(answers - expected[:batch]).max() < 0.01 * np.ptp(expected)


@pytest.mark.parametrize(
    ("filters", "size", "quantization"),
    [(200, 1, {}), (5, 3, {"activation_bits": 16})],
    ids=["large", "tensors of 16 bits"],
)
def test_kernels_that_would_grow_much_and_tensors_of_16_bits_stay_transposed(filters, size, quantization, tmp_path):
    options = {"kernel_size": size, "strides": 3, "padding": "same"}
    assert written(filters, options, tmp_path / "m.tflite", **quantization)[2] == WHOLE.split()


def kernels_of(graph):
    """Returns the convolutions of a file, and the codes of their kernels."""
    found = [one for one in graph.operators if graph.kind(one) == "CONV_2D"]
    return found, [graph.codes(int(one.inputs[1])) for one in found]


@pytest.mark.parametrize(
    ("options", "parts", "paddings", "bits"),
    [
        ({"kernel_size": 3, "strides": 2}, 4, 3, 8),
        ({"kernel_size": 3, "strides": 2}, 4, 3, 4),
        ({"kernel_size": (2, 3), "strides": 2}, 4, 1, 8),
        ({"kernel_size": 4, "strides": 2}, 4, 3, 8),
        ({"kernel_size": 5, "strides": 2}, 4, 3, 8),
        ({"kernel_size": 3, "strides": 2, "padding": "valid"}, 4, 4, 8),
        # Two of three pixels read one input alone.
        ({"kernel_size": 4, "strides": 3}, 6, 3, 8),
    ],
    ids=str,
)
def test_pixels_that_read_the_same_inputs_have_a_convolution_without_zeros(options, parts, paddings, bits, tmp_path):
    options = {"padding": "same", **options}
    done, inputs, kinds, graph = written(96, options, tmp_path / "m.tflite", bits=bits)
    moves = ["CONCATENATION", "DEPTH_TO_SPACE"] + ["STRIDED_SLICE"] * (options["padding"] == "valid")
    assert kinds[-len(moves) :] == moves
    assert (kinds.count("CONV_2D"), kinds.count("PAD"), len(kinds)) == (parts, paddings, parts + paddings + len(moves))
    convolutions, kernels = kernels_of(graph)
    (layer,) = (one for one in done.model.layers if isinstance(one, L.Conv2DTranspose))
    assert sum(map(np.count_nonzero, kernels)) == np.count_nonzero(layer.kernel)
    assert sum(-(-one.size // (8 // bits)) for one in kernels) == done.weights[0].stored.entries
    # One kernel's scales and bias, and the activation in each.
    pixels = {len(codes) // 96 for codes in kernels}
    assert done.weights[0].stored.scales == 96 * sum(pixels)
    assert len({int(one.inputs[2]) for one in convolutions}) == len(pixels)
    assert len({graph.scales(int(one.inputs[1]))[:96].tobytes() for one in convolutions}) == 1
    assert {one.builtinOptions.fusedActivationFunction for one in convolutions} == {1}
    with done.simulating() as simulated:
        expected = simulated.predict(inputs, verbose=0)
    for batch in (1, 4):
        (answers,) = Interpreter(str(tmp_path / "m.tflite")).get_signature_runner()(x=inputs[:batch]).values()
        assert np.abs(answers - expected[:batch]).max() < 0.01 * np.ptp(expected)


@pytest.mark.parametrize("filters", [4, 64])
def test_the_form_is_that_of_the_smaller_file(filters, tmp_path, monkeypatch):
    options = {"kernel_size": 3, "strides": 2, "padding": "same"}
    sizes = {}
    for name, rule in [("taken", None), ("one", len), ("several", lambda form: -len(form))]:
        if rule is not None:
            monkeypatch.setattr(subpixels, "_bytes", lambda form, *_, rule=rule: rule(form))
        path = tmp_path / f"{name}.tflite"
        written(filters, options, path)
        sizes[name] = path.stat().st_size
    assert sizes["taken"] == min(sizes["one"], sizes["several"]) < max(sizes.values())


@pytest.mark.parametrize("filters", [8, 64], ids=["one convolution", "several"])
def test_pruned_entries_stay_zero_in_both_forms(filters, tmp_path):
    keras.utils.set_random_seed(0)
    x = keras.Input((6, 7, 3))
    layer = L.Conv2DTranspose(filters, 3, strides=2, padding="same", bias_initializer="normal")
    model = keras.Model(x, layer(x))
    pk.prune(model, 0.8)
    pruned = layer.kernel.numpy() == 0
    assert pruned.sum() == round(0.8 * pruned.size)
    inputs = np.random.default_rng(0).normal(size=(6, 6, 7, 3)).astype("float32")
    done = pk.quantize(model, inputs)
    assert not layer.kernel.numpy()[pruned].any()
    done.export(tmp_path / "m.tflite")
    _, kernels = kernels_of(LiteRTGraph((tmp_path / "m.tflite").read_bytes()))
    assert len(kernels) == (4 if filters == 64 else 1)
    assert sum(map(np.count_nonzero, kernels)) == np.count_nonzero(layer.kernel)
    # Encoded sparsely, the file computes the same; the export compares the two.
    assert done.export(tmp_path / "s.tflite", sparse=True).bytes <= (tmp_path / "m.tflite").stat().st_size

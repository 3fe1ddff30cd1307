"""Reshapes of integer files that follow one another or undo one another are gone, for any batch size."""

import keras
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from architectures import randomize
from keras import layers as L

import prunekit as pk
from prunekit.delivery.litert.litert_graph import LiteRTGraph

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def exported(model, inputs, path, **options):
    """Returns the export of a model, and the kinds of its operations."""
    done = pk.quantize(model, inputs, **options)
    made = done.export(path)
    assert made.skipped == done.skipped == () and made.largest_difference <= 1
    graph = LiteRTGraph(path.read_bytes())
    return done, [graph.kind(one) for one in graph.operators]


def network(length):
    keras.utils.set_random_seed(0)
    x = keras.Input((length, 4), name="x")
    y = L.DepthwiseConv1D(3, padding="same", activation="relu")(L.Conv1D(6, 3, padding="same")(x))
    y = L.Conv1D(6, 3, padding="causal", dilation_rate=2)(L.MaxPooling1D(2)(y))
    y = L.SeparableConv1D(4, 3)(L.ZeroPadding1D((1, 0))(y))
    model = randomize(keras.Model(x, L.Dense(3)(L.GlobalAveragePooling1D()(y))))
    return model, np.random.default_rng(1).normal(size=(8, length or 12, 4)).astype("float32")


@pytest.mark.parametrize("bits", [8, 16])
def test_convolutions_with_one_spatial_axis_compute_on_images_of_one_row_from_first_to_last(bits, tmp_path):
    model, inputs = network(12)
    done, kinds = exported(model, inputs, tmp_path / "m.tflite", activation_bits=bits)
    expected = "EXPAND_DIMS CONV_2D DEPTHWISE_CONV_2D MAX_POOL_2D PAD CONV_2D PAD DEPTHWISE_CONV_2D CONV_2D MEAN "
    assert kinds == ["QUANTIZE", *expected.split(), "FULLY_CONNECTED", "DEQUANTIZE"]
    runner = Interpreter(str(tmp_path / "m.tflite")).get_signature_runner()
    with done.simulating() as simulated:
        answers = simulated.predict(inputs, verbose=0)
    for batch in (1, 3):
        (found,) = runner(x=inputs[:batch]).values()
        assert np.abs(found - answers[:batch]).max() < 0.02 * np.ptp(answers)


def test_sequences_of_open_length_stay_images_too(tmp_path):
    model, inputs = network(None)
    _, kinds = exported(model, inputs, tmp_path / "m.tflite")
    assert kinds.count("CONV_2D") == 3 and kinds.count("EXPAND_DIMS") == 1 and "RESHAPE" not in kinds


def test_a_tensor_that_is_an_output_too_keeps_its_shape(tmp_path):
    x = keras.Input((12, 4), name="x")
    y = L.Conv1D(6, 3, name="a")(x)
    model = randomize(keras.Model(x, [y, L.Conv1D(2, 3, name="b")(y)]))
    inputs = np.random.default_rng(1).normal(size=(8, 12, 4)).astype("float32")
    done, kinds = exported(model, inputs, tmp_path / "m.tflite")
    assert kinds.count("EXPAND_DIMS") == 1
    found = Interpreter(str(tmp_path / "m.tflite")).get_signature_runner()(x=inputs[:2])
    assert sorted(one.shape for one in found.values()) == [(2, 8, 2), (2, 10, 6)]


@pytest.mark.parametrize("bits", [8, 16, "float"])
def test_no_file_computes_the_shape_of_a_reshape(bits, tmp_path):
    x = keras.Input((6, 6, 3), name="x")
    y = L.Dense(5, activation="relu")(L.Reshape((4, 12))(L.Conv2D(3, 3)(x)))
    z = L.Flatten()(y)
    model = randomize(keras.Model(x, [L.Dense(3)(z), L.Reshape((2, 10))(z)]))
    inputs = np.random.default_rng(1).normal(size=(8, 6, 6, 3)).astype("float32")
    done = pk.quantize(model, inputs, activation_bits=bits)
    done.export(tmp_path / "m.tflite", data=inputs)
    graph = LiteRTGraph((tmp_path / "m.tflite").read_bytes())
    kinds = [graph.kind(one) for one in graph.operators]
    assert not {"SHAPE", "STRIDED_SLICE", "PACK"} & set(kinds) if bits != "float" else kinds.count("SHAPE") <= 1
    runner = Interpreter(str(tmp_path / "m.tflite")).get_signature_runner()
    with done.simulating() as simulated:
        answers = simulated.predict(inputs, verbose=0)
    for batch in (1, 3):
        found = {one.shape: one for one in runner(x=inputs[:batch]).values()}
        for one in answers:
            off = np.abs(found[(batch, *one.shape[1:])] - one[:batch]).max()
            assert off < 0.02 * np.ptp(one)

"""Integer files whose inputs and outputs are int8, run by LiteRT."""

import keras
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from architectures import ARCHITECTURES, inputs_of, randomize
from keras import layers as L

import prunekit as pk

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def quantized():
    keras.utils.set_random_seed(0)
    model = ARCHITECTURES["multi_output"]()
    randomize(model)
    return pk.quantize(model, inputs_of(model, examples=16))


def details(path):
    interpreter = Interpreter(model_path=str(path))
    return interpreter.get_input_details(), interpreter.get_output_details(), interpreter.get_signature_runner()


@pytest.mark.parametrize("kinds", ["inputs", "outputs", ("inputs", "outputs")], ids=str)
def test_inputs_and_outputs_are_int8_where_asked(quantized, kinds, tmp_path):
    quantized.export(tmp_path / "m.tflite", integer_io=kinds)
    given, computed, _ = details(tmp_path / "m.tflite")
    for name, found in (("inputs", given), ("outputs", computed)):
        assert {one["dtype"] for one in found} == {np.int8 if name in kinds else np.float32}


def test_a_file_with_int8_inputs_and_outputs_computes_what_the_other_does(quantized, tmp_path):
    quantized.export(tmp_path / "float.tflite")
    quantized.export(tmp_path / "int8.tflite", integer_io=("inputs", "outputs"))
    *_, floats = details(tmp_path / "float.tflite")
    *_, integers = details(tmp_path / "int8.tflite")
    x = {name: one[:4] for name, one in inputs_of(quantized.model, examples=16).items()}

    def codes(name, values):
        scale, zero = integers.get_input_details()[name]["quantization"]
        return np.clip(np.round(values / scale) + zero, -128, 127).astype("int8")

    expected = floats(**x)
    found = integers(**{name: codes(name, values) for name, values in x.items()})
    assert sorted(found) == sorted(expected)
    for name, values in found.items():
        scale, zero = integers.get_output_details()[name]["quantization"]
        assert np.abs((values.astype("int32") - zero) * np.float32(scale) - expected[name]).max() <= 1.01 * scale


def test_an_input_that_is_read_in_floating_point_is_refused(tmp_path):
    x = keras.Input((5, 3), name="series")
    model = keras.Model(x, L.Dense(2)(L.LSTM(4)(x)))
    done = pk.quantize(model, np.random.default_rng(0).normal(size=(8, 5, 3)).astype("float32"))
    with pytest.raises(ValueError, match="Received: 'series', which is read in floating point"):
        done.export(tmp_path / "m.tflite", integer_io="inputs")
    assert not list(tmp_path.iterdir())


def test_other_words_and_float_activations_are_refused(quantized, tmp_path):
    with pytest.raises(ValueError, match="`integer_io` lists"):
        quantized.export(tmp_path / "m.tflite", integer_io="input")
    x = keras.Input((8,), name="x")
    model = keras.Model(x, L.Dense(16)(x))
    done = pk.quantize(model, np.ones((4, 8), "float32"), activations=None)
    with pytest.raises(
        ValueError, match="activations in floating point, as each Keras file is, has inputs and outputs"
    ):
        done.export(tmp_path / "m.tflite", integer_io="outputs")


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("shape", [(None, None, 3), (None, 20, 3), (20, None, 3), (None, 3)], ids=str)
def test_files_with_inputs_of_open_size_are_checked_at_the_size_of_the_samples(shape, bits, tmp_path):
    keras.utils.set_random_seed(0)
    x = keras.Input(shape, name="x")
    if len(shape) == 2:
        y = L.Conv1D(4, 3)(L.Cropping1D(1)(L.Conv1D(4, 5, strides=2, activation="relu")(x)))
    else:
        y = L.Conv2DTranspose(4, 3, strides=2)(L.Conv2D(4, 3)(L.Cropping2D(1)(L.Conv2D(4, 5, strides=2)(x))))
    model = keras.Model(x, y)
    randomize(model)
    images = np.random.default_rng(1).normal(size=(4, *(20 if one is None else one for one in shape)))
    done = pk.quantize(model, images.astype("float32"), activations=bits, misfits="error")
    assert done.export(tmp_path / "m.tflite").largest_difference <= 1
    # At another size of the open axes.
    other = np.random.default_rng(2).normal(size=(2, *(26 if one is None else one for one in shape))).astype("float32")
    (found,) = details(tmp_path / "m.tflite")[2](x=other).values()
    with done.simulating() as simulated:
        expected = simulated.predict(other, verbose=0)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 0.05 * np.ptp(expected)

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

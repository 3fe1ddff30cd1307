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
    model = randomize(ARCHITECTURES["multi_output"]())
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


@pytest.mark.parametrize("kinds", [("inputs", "uint8"), ("outputs", "uint8"), "uint8"], ids=str)
def test_uint8_codes_are_the_int8_codes_and_128(quantized, kinds, tmp_path):
    quantized.export(tmp_path / "int8.tflite", integer_io=("inputs", "outputs"))
    quantized.export(tmp_path / "uint8.tflite", integer_io=kinds)
    *_, signed = details(tmp_path / "int8.tflite")
    *_, found = details(tmp_path / "uint8.tflite")
    unsigned = {name for name in ("inputs", "outputs") if name in kinds or kinds == "uint8"}
    places = {"inputs": found.get_input_details(), "outputs": found.get_output_details()}
    for name, tensors in places.items():
        assert {one["dtype"] for one in tensors.values()} == {np.uint8 if name in unsigned else np.float32}
    draw = np.random.default_rng(0)
    codes = {name: draw.integers(-128, 128, (4, *one["shape"][1:])) for name, one in signed.get_input_details().items()}

    def as_read(name, values):
        scale, zero = signed.get_input_details()[name]["quantization"]
        return (values + 128).astype("uint8") if "inputs" in unsigned else np.float32(scale) * np.float32(values - zero)

    expected = signed(**{name: values.astype("int8") for name, values in codes.items()})
    for name, values in found(**{name: as_read(name, values) for name, values in codes.items()}).items():
        scale, zero = signed.get_output_details()[name]["quantization"]
        if "outputs" in unsigned:
            np.testing.assert_array_equal(values, expected[name].astype("int32") + 128)
        else:
            np.testing.assert_array_equal(values, np.float32(scale) * np.float32(expected[name].astype("int32") - zero))


def test_pixels_are_the_codes_of_an_input_that_is_calibrated_from_0_to_255(tmp_path):
    x = keras.Input((8, 8, 3), name="image")
    model = keras.Model(x, L.Dense(2)(L.Flatten()(L.Conv2D(4, 3)(L.Rescaling(1 / 255)(x)))))
    pixels = np.random.default_rng(0).integers(0, 256, (16, 8, 8, 3))
    done = pk.quantize(model, pixels.astype("float32"), activation_ranges="minmax")
    exported = done.export(tmp_path / "m.tflite", integer_io=("inputs", "uint8"))
    (given,), _, run = details(tmp_path / "m.tflite")
    assert given["quantization"] == (1.0, 0) and not exported.skipped
    with done.simulating() as simulation:
        expected = simulation.predict(pixels.astype("float32"), verbose=0)
    (found,) = run(image=pixels.astype("uint8")).values()
    step = np.unique(np.diff(np.unique(expected)))[0]
    assert np.abs(found - expected).max() <= 1.01 * step


def test_uint8_is_refused_for_activations_of_16_bits(tmp_path):
    x = keras.Input((8,), name="x")
    done = pk.quantize(keras.Model(x, L.Dense(16)(x)), np.random.default_rng(0).normal(size=(4, 8)), activation_bits=16)
    with pytest.raises(ValueError, match="of uint8 are those of files with activation_bits=8"):
        done.export(tmp_path / "m.tflite", integer_io="uint8")
    assert not list(tmp_path.iterdir())


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
    done = pk.quantize(model, np.ones((4, 8), "float32"), activation_bits="float")
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
    model = randomize(keras.Model(x, y))
    images = np.random.default_rng(1).normal(size=(4, *(20 if one is None else one for one in shape)))
    done = pk.quantize(model, images.astype("float32"), activation_bits=bits, misfits="error")
    assert done.export(tmp_path / "m.tflite").largest_difference <= 1
    # At another size of the open axes.
    other = np.random.default_rng(2).normal(size=(2, *(26 if one is None else one for one in shape))).astype("float32")
    (found,) = details(tmp_path / "m.tflite")[2](x=other).values()
    with done.simulating() as simulated:
        expected = simulated.predict(other, verbose=0)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 0.05 * np.ptp(expected)

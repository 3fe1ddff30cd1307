"""Calibration data are checked alike by every function that takes them."""

import keras
import numpy as np
import pytest
from keras import layers as L, ops

import prunekit as pk
from prunekit.core.data.calibration import CheckedData, check_inputs

READERS = {
    "choose_bits": lambda model, data: pk.choose_bits(model, data, budget=10_000),
    "prune_in_rounds": lambda model, data: pk.prune_in_rounds(model, fitted, 0.5, data, rounds=1, criterion="wanda"),
    "quantize": lambda model, data: pk.quantize(model, data),
    "sensitivity": lambda model, data: pk.sensitivity(model, data),
    "prune": lambda model, data: pk.prune(model, 0.5, data=data, criterion="magnitude", allocation="uniform"),
    "remove_blocks": lambda model, data: pk.remove_blocks(model, 1, data),
    "shrink nonzero": lambda model, data: pk.shrink(model, channels="nonzero", data=data),
    "shrink": lambda model, data: pk.shrink(model, channels=0.5, data=data),
}
GOOD = np.ones((4, 5), "float32")
BAD = {
    "texts": (np.array([["a"] * 5] * 4), TypeError, "arrays of numbers. Received: str32 for the input 'features'"),
    "objects": (GOOD.astype(object), TypeError, "arrays of numbers. Received: object for the input 'features'"),
    "complex numbers": (GOOD.astype("complex64"), TypeError, "Received: complex64 for the input 'features'"),
    "a text": ("data", TypeError, "Received: the path 'data'. Load the file first"),
    "NaN": (np.where(np.eye(4, 5) > 0, np.nan, GOOD), ValueError, "Received: 4 NaN or infinite values for the input"),
    "infinity": (np.float16(GOOD) * np.float16(np.inf), ValueError, "Received: 20 NaN or infinite values"),
    "another name": ({"other": GOOD}, ValueError, "are features. Received: calibration data with the names other"),
    "another width": (np.ones((4, 6)), ValueError, r"'features' is \(None, 5\).*Received: .* shape \(4, 6\)"),
    "two inputs": (([GOOD, GOOD], np.zeros(4)), ValueError, "Received: 2 in the calibration data"),
    "no batch": ([], ValueError, "no batches"),
}


def with_named_input():
    inputs = keras.Input((5,), name="features")
    x = L.Dense(6, "relu")(inputs)
    model = keras.Model(inputs, L.Dense(3)(L.Add()([x, L.Dense(6)(x)])))
    model.compile("sgd", "mse")
    return model


def fitted(model):
    """A training that changes nothing."""


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize(("data", "error", "message"), BAD.values(), ids=BAD)
def test_calibration_data_that_do_not_fit_are_refused_in_one_line(reader, data, error, message):
    model = with_named_input()
    before = model.get_weights()
    with pytest.raises(error, match=message) as found:
        reader(model, data)
    assert "\n" not in str(found.value)
    assert all((one == other).all() for one, other in zip(before, model.get_weights(), strict=True))


@pytest.mark.parametrize("name", ["prune", "remove_blocks", "shrink"])
def test_a_later_batch_that_does_not_fit_is_refused_too(name):
    with pytest.raises(ValueError, match=r"Received: calibration data of shape \(3, 6\)"):
        READERS[name](with_named_input(), [GOOD, np.ones((3, 6))])


@pytest.mark.filterwarnings("ignore:The structure of `inputs`")
def test_inputs_by_name_are_accepted():
    report = pk.remove_blocks(with_named_input(), 1, {"features": GOOD})[1]
    assert len(report.removed) == 1


def datasets():
    yield "batches of the backend's tensors", [ops.convert_to_tensor(GOOD), ops.convert_to_tensor(GOOD[:2])]
    yield "half precision", GOOD.astype("float16")
    yield "integers", GOOD.astype("int64")
    yield "a bfloat16 tensor", [ops.cast(GOOD, "bfloat16")]
    yield "float64 beyond float32", [np.full((2, 5), 1e39)]
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        yield "a dataset", tf.data.Dataset.from_tensor_slices(GOOD).batch(2)
        yield "a dataset with labels", tf.data.Dataset.from_tensor_slices((GOOD, np.zeros(4))).batch(2)


@pytest.mark.every_backend
def test_every_kind_of_batch_is_accepted():
    for name, data in datasets():
        check_inputs(with_named_input(), next(iter(CheckedData(with_named_input(), data)))[0])
        if not name.startswith("float64"):
            assert len(pk.remove_blocks(with_named_input(), 1, data)[1].removed) == 1, name


def test_texts_are_for_inputs_of_texts():
    inputs = keras.Input((1,), dtype="string", name="text")
    declared = keras.Sequential([inputs, L.TextVectorization(vocabulary=["a", "b"], output_sequence_length=3)])
    check_inputs(declared, np.array([["a b"], ["b"]]))
    with pytest.raises(TypeError, match="arrays of texts. Received: float32 for the input 'text'"):
        check_inputs(declared, np.ones((2, 1), "float32"))
    with pytest.raises(TypeError, match="arrays of texts. Received: str"):
        check_inputs(declared, "a b")


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_images_of_another_size_are_refused_without_a_name_that_keras_made_up(reader):
    layers = [L.Conv2D(4, 3, activation="relu"), L.GlobalAveragePooling2D(), L.Dense(2)]
    model = keras.Sequential([keras.Input((8, 8, 1)), *layers])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"^The shape of the input is \(None, 8, 8, 1\).* of shape \(4, 16, 16, 1\)"):
        reader(model, np.ones((4, 16, 16, 1), "float32"))


def test_one_of_several_inputs_without_names_has_the_name_of_its_layer():
    first, second = keras.Input((2,)), keras.Input((3,))
    model = keras.Model([first, second], L.Dense(2)(L.Concatenate()([first, second])))
    name = second._keras_history.operation.name
    with pytest.raises(ValueError, match=rf"The shape of the input '{name}' is \(None, 3\)"):
        check_inputs(model, [np.ones((4, 2)), np.ones((4, 4))])


def test_a_generator_function_is_read_as_often_as_needed():
    model, calls = with_named_input(), []

    def examples():
        calls.append(None)
        for row in np.linspace(0, 1, 40, dtype="float32").reshape(8, 1, 5):
            yield [row]

    batches = [inputs for inputs, _, _ in CheckedData(model, examples)]
    assert len(batches) == 8 and batches[0].shape == (1, 5) and len(calls) == 1
    report = pk.prune(model, 0.5, examples)
    other = with_named_input()
    assert report.layer_errors and pk.quantize(other, examples).weights
    assert len(calls) > 2


def test_a_generator_function_without_an_end_is_read_up_to_a_bound():
    def endless():
        while True:
            yield np.ones((500, 5), "float32")

    assert len(list(CheckedData(with_named_input(), endless))) == 5


@pytest.mark.parametrize("made", [lambda: None, lambda: GOOD], ids=["nothing", "an array"])
def test_a_function_that_makes_no_iterator_is_refused(made):
    with pytest.raises(TypeError, match="Received: a function that returns (NoneType|ndarray)"):
        list(CheckedData(with_named_input(), made))

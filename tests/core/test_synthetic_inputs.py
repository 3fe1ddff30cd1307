"""Random inputs that stand in for data."""

import keras
import numpy as np
import pytest

from prunekit.core.data import synthetic_inputs as module
from prunekit.core.data.synthetic_inputs import NoInputsError, signals, stand_in, synthetic_inputs

L = keras.layers


def model_of(*layers):
    return keras.Sequential(layers)


def test_inputs_have_shape_type_and_number_and_are_the_same_each_time():
    model = model_of(keras.Input((6, 6, 3)), L.Conv2D(2, 3))
    inputs = synthetic_inputs(model)
    assert inputs.shape == (1024, 6, 6, 3) and inputs.dtype == np.float32
    np.testing.assert_array_equal(inputs, synthetic_inputs(model))
    assert synthetic_inputs(model, 5).shape[0] == 5


def test_large_inputs_are_fewer():
    assert synthetic_inputs(model_of(keras.Input((400, 400, 1)), L.GlobalAveragePooling2D())).shape[0] == 64


def test_a_fixed_batch_size_gets_whole_batches():
    model = model_of(keras.Input(batch_shape=(48, 4)), L.Dense(1))
    assert synthetic_inputs(model).shape == (1056, 4)


def test_inputs_keep_the_structure_of_the_model():
    first, second = keras.Input((3,), name="first"), keras.Input((None, 2), name="second")
    pooled = L.GlobalAveragePooling1D()(second)
    model = keras.Model({"first": first, "second": second}, L.Concatenate()([first, pooled]))
    inputs = synthetic_inputs(model)
    assert {name: one.shape for name, one in inputs.items()} == {"first": (1024, 3), "second": (1024, 32, 2)}


@pytest.mark.parametrize("mask_zero", [False, True])
def test_tokens_are_drawn_from_the_vocabulary_of_the_embedding_that_reads_them(mask_zero):
    inner = model_of(
        keras.Input((5,), dtype="int32"), L.Embedding(9, 2, mask_zero=mask_zero), L.GlobalAveragePooling1D()
    )
    outer = keras.Input((5,), dtype="int32")
    inputs = synthetic_inputs(keras.Model(outer, L.Dense(1)(inner(outer))))
    assert sorted(np.unique(inputs)) == list(range(int(mask_zero), 9))


def test_integers_that_no_embedding_reads_are_ones():
    tokens, mask = keras.Input((5,), dtype="int32"), keras.Input((5,), dtype="bool")
    outputs = L.Embedding(9, 2)(tokens) * keras.ops.expand_dims(keras.ops.cast(mask, "float32"), -1)
    inputs = synthetic_inputs(keras.Model([tokens, mask], outputs))
    assert inputs[1].dtype == bool and inputs[1].all()


def test_inputs_have_the_scale_that_preprocessing_expects():
    rescaled = synthetic_inputs(model_of(keras.Input((8, 8, 3)), L.Rescaling(1 / 127.5, offset=-1.0), L.Flatten()))
    assert 20 < rescaled.std() < 400 and rescaled.mean() > 60
    normalization = L.Normalization(mean=[100.0, -5.0], variance=[400.0, 0.01])
    normalized = synthetic_inputs(model_of(keras.Input((2,)), normalization, L.Dense(1)))
    assert abs(normalized[:, 0].mean() - 100) < 20 and abs(normalized[:, 1].mean() + 5) < 0.1
    assert normalized[:, 0].std() > 5 and normalized[:, 1].std() < 0.2


def test_signals_differ_in_spectrum_offset_and_contrast():
    images = signals((64, 16, 16, 1), np.random.default_rng(0))
    means, spreads = images.mean(axis=(1, 2, 3)), images.std(axis=(1, 2, 3))
    assert np.ptp(means) > 1 and spreads.max() > 4 * spreads.min()
    # Of white noise, squared differences of neighbours are twice the variance.
    roughness = np.square(np.diff(images[::2], axis=1)).mean(axis=(1, 2, 3)) / np.square(spreads[::2])
    assert roughness.min() < 0.5 and roughness.max() > 1.5
    # Those with a background have their least value in many places; a quarter has it at 0.
    lowest = images.min(axis=(1, 2, 3))
    flat = (images == lowest.reshape(-1, 1, 1, 1)).mean(axis=(1, 2, 3))
    assert flat[1::2].mean() > 0.3 and (flat[::2] < 0.01).all()
    assert (lowest[1::4] == 0).all()


@pytest.mark.parametrize("length", [1, 2])
def test_signals_of_single_entries_are_finite(length):
    assert np.isfinite(signals((8, length, 1), np.random.default_rng(0))).all()


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([keras.Input((1,), dtype="string"), L.Identity()], "reads texts"),
        ([keras.Input((2,)), L.Lambda(lambda x: keras.ops.log(-keras.ops.abs(x) - 1))], "not finite"),
    ],
    ids=["texts", "not finite"],
)
def test_models_for_which_no_inputs_can_be_made_are_named(layers, reason):
    with pytest.raises(NoInputsError, match=reason):
        synthetic_inputs(model_of(*layers))


def test_a_model_without_declared_inputs_has_none():
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = L.Dense(2)

        def call(self, inputs):
            return self.dense(inputs)

    model = Subclassed()
    model(np.ones((1, 3), "float32"))
    with pytest.raises(NoInputsError, match="declares no inputs"):
        synthetic_inputs(model)


def test_large_models_are_not_fitted_unasked(monkeypatch):
    monkeypatch.setattr(module, "LARGEST", 5)
    found = stand_in(model_of(keras.Input((3,)), L.Dense(2)))
    assert found.inputs is None and "8 weights, more than 5" in found.note

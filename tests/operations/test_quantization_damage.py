"""What a quantization changes on the calibration data is in its report, after training and in training."""

import keras
import numpy as np
import pytest
from keras import layers as L

import prunekit as pk

X = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
Y = (X[:, :4].argmax(-1)).astype("int32")


@pytest.fixture(scope="module")
def trained():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), L.Dense(32, activation="relu"), L.Dense(4, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(X, Y, epochs=40, verbose=0)
    return model


def copied(model):
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    copy.compile(keras.optimizers.Adam(0.0), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return copy


@pytest.mark.every_backend
def test_the_report_has_the_metrics_that_evaluate_gives_of_the_model_and_of_its_simulation(trained):
    model = copied(trained)
    before = model.evaluate(X, Y, verbose=0, return_dict=True)
    done = pk.quantize(model, (X, Y))
    with done.simulating():
        after = model.evaluate(X, Y, verbose=0, return_dict=True)
    found = done.damage
    for one in found.metrics:
        assert (one.before, one.after) == pytest.approx((before[one.name], after[one.name]), rel=1e-4)
    assert found.examples == 96 and 0 < found.error < 0.05 and found.agreement > 0.95
    assert f"on 96 examples of the data: {found}" in str(done)
    assert done.sections()[0] == found.section()
    assert done.to_dict()["damage"]["outputs"][0]["agreement"] == found.agreement
    assert not any("Much was lost" in note for note in done.notes)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"method": "nearest"}, 'Pass method="gptq" with calibration data, or more bits.'),
        ({}, "or train on integers with pk.QuantizationCallback."),
    ],
    ids=["nearest", "gptq"],
)
def test_a_large_loss_ends_with_what_to_try_next(trained, options, remedy):
    report = pk.quantize(copied(trained), X, bits=2, **options)
    (note,) = [one for one in report.notes if "Much was lost" in one]
    assert note.startswith("Much was lost on 96 examples of the data: same class 0.") and note.endswith(remedy)


def test_fewer_bits_than_files_store_are_told_where_they_are_chosen(trained):
    for bits in (2, 3, 4):
        notes = pk.quantize(copied(trained), X, bits=bits).notes
        told = [
            one for one in notes if one.startswith(f"Weights of {bits} bits: a LiteRT file stores each code with 4")
        ]
        assert len(told) == (bits < 4)


def test_files_of_4_and_8_bits_are_compared_with_one_float_file(trained, tmp_path):
    exports = [pk.quantize(copied(trained), X, bits=bits).export(tmp_path / f"{bits}.tflite") for bits in (8, 4)]
    assert exports[0].float_bytes == exports[1].float_bytes > 4 * trained.count_params()


@pytest.mark.every_backend
def test_a_training_on_integers_is_compared_with_the_trained_weights(trained):
    model = copied(trained)
    callback = pk.QuantizationCallback((X, Y))
    model.fit(X, Y, epochs=1, verbose=0, callbacks=[callback])
    found = callback.report.damage
    assert callback.report.method == "training"
    assert [one.name for one in found.metrics] == ["accuracy", "loss"] and found.agreement > 0.95


def test_without_data_there_is_nothing_to_compare(trained):
    report = pk.quantize(copied(trained), activation_bits="float")
    assert report.damage is None and report.to_dict()["damage"] is None


def test_doubtful_data_are_told_by_a_warning_the_report_and_the_export(trained, tmp_path):
    model = copied(trained)
    with pytest.warns(UserWarning, match="all values are the same at") as told:
        done = pk.quantize(model, X * 0)
    (problem,) = [str(one.message) for one in told]
    assert done.notes[0] == done.export(tmp_path / "zeros.tflite").notes[0] == problem


def test_few_examples_for_gptq_are_named(trained):
    few, enough, nearest = (
        pk.quantize(copied(trained), data, bits=bits).notes
        for data, bits in ((X, 4), (np.concatenate([X, X]), 4), (X, 8))
    )
    assert any(note.startswith("96 examples were read. Outputs rounded by GPTQ") for note in few)
    assert not any("examples were read" in note for note in (*enough, *nearest))

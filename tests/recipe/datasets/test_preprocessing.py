import keras
import numpy as np
import pytest
import tensorflow as tf
from data_folders import write_csv, write_images

from prunekit.recipe.datasets import csv_files
from prunekit.recipe.datasets.data import load_data
from prunekit.recipe.settings.schema import DataSource
from prunekit.recipe.text.loader import RecipeError

pytestmark = pytest.mark.every_backend


@pytest.fixture
def arrays(tmp_path):
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 3)) * [1, 5, 0.1] + [0, 100, -3]
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(60) % 2)
    return {"npz": str(tmp_path / "data.npz"), "validation": 0.25}


def loaded(source, **options):
    return load_data(DataSource.model_validate({**source, **options}), seed=1)


def test_normalization_is_adapted_on_the_training_examples_alone(arrays):
    plain, found = loaded(arrays), loaded(arrays, preprocessing=["Normalization"])
    assert "data: Normalization is adapted to the 45 training examples." in found.notes
    assert "no part of the model: the model and its exports take preprocessed inputs" in found.notes[-1]
    train = plain.train.inputs.astype("float64")
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    for raw, prepared in ((plain.train, found.train), (plain.validation, found.validation)):
        np.testing.assert_allclose(prepared.inputs, (raw.inputs - mean) / deviation, rtol=1e-3, atol=1e-3)
    assert abs(found.validation.inputs.mean()) > 1e-3
    assert found.digest != plain.digest


@pytest.mark.one_backend
def test_layers_are_applied_in_order_and_later_ones_learn_from_earlier_ones(arrays):
    layers = [{"Rescaling": {"scale": 0.5, "offset": 1}}, "Normalization", {"Rescaling": {"scale": 2.0}}]
    found = loaded(arrays, preprocessing=layers)
    np.testing.assert_allclose(found.train.inputs.std(axis=0), 2, rtol=1e-3)
    given = [{"Normalization": {"mean": [0.0, 1.0, 2.0], "variance": [4.0, 1.0, 1.0]}}]
    fixed = loaded(arrays, preprocessing=given)
    np.testing.assert_allclose(fixed.train.inputs, (loaded(arrays).train.inputs - [0, 1, 2]) / [2, 1, 1], rtol=1e-4)
    assert not any("adapted" in note for note in fixed.notes)


def test_streamed_images_are_prepared_batch_by_batch(tmp_path):
    source = {"images": str(write_images(tmp_path / "images", each=3)), "size": [8, 6]}
    plain = loaded(source).train.first(99)[0]
    found = loaded(source, preprocessing=[{"CenterCrop": {"height": 4, "width": 4}}, {"Rescaling": {"scale": 1 / 255}}])
    prepared = found.train.first(99)[0]
    assert prepared.shape[1:] == (4, 4, 3)
    np.testing.assert_allclose(prepared, plain[:, 2:6, 1:5] / 255, rtol=1e-5)
    assert "image_dataset_from_directory" not in " ".join(found.notes)


@pytest.mark.one_backend
@pytest.mark.parametrize("in_memory", [True, False], ids=["in memory", "on disk"])
def test_text_is_made_numbers_by_a_layer(tmp_path, monkeypatch, in_memory):
    monkeypatch.setattr(csv_files, "IN_MEMORY", (1 << 28) * in_memory)
    rows = [["a good, good film", 1], ["bad", 0], ["not bad", 1], ["boring", 0], ["a film", 1]] * 4
    path = write_csv(tmp_path / "films.csv", ["review", "liked"], rows)
    layers = [{"TextVectorization": {"output_sequence_length": 4, "max_tokens": 50}}]
    found = loaded({"csv": str(path), "label": "liked"}, preprocessing=layers)
    inputs = found.train.first(99)[0]
    assert inputs.shape == (16, 4) and inputs.dtype == "int64" and inputs.max() <= 8
    assert "data: TextVectorization is adapted to the 16 training examples." in found.notes


@pytest.mark.one_backend
def test_text_of_a_saved_data_set_is_made_numbers_by_a_layer(tmp_path):
    words = np.array(["good", "bad", "good", "dull"] * 5)[:, None]
    tf.data.Dataset.from_tensor_slices((words, np.arange(20) % 2)).save(str(tmp_path / "saved"))
    found = loaded({"tfds_saved": str(tmp_path / "saved")}, preprocessing=["StringLookup"])
    assert set(found.train.first(20)[0].ravel()) == {1, 2, 3}


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("layers", "match"),
    [
        ([{"Normalization": {"mean": [1.0]}}], "Normalization refuses its options: "),
        ([{"CenterCrop": {"height": "a", "width": 1}}], "CenterCrop .*: "),
        ([{"Resizing": {"height": 4, "width": 4}}], "Resizing does not fit the inputs: "),
        ([{"Normalization": {"axis": 5}}], "Normalization does not fit the inputs: "),
    ],
)
def test_layers_that_do_not_fit_are_refused_before_anything_trains(arrays, layers, match):
    with pytest.raises(RecipeError, match=rf"data\.preprocessing: {match}") as refused:
        loaded(arrays, preprocessing=layers)
    assert "\n" not in str(refused.value)


@pytest.mark.one_backend
def test_every_layer_of_the_table_is_one_of_keras_with_these_options():
    import inspect

    from prunekit.recipe.settings.data_source import LAYERS

    for name, (required, others) in LAYERS.items():
        parameters = inspect.signature(getattr(keras.layers, name)).parameters
        assert set(required + others) <= set(parameters), name
        assert {option for option in required if parameters[option].default is not inspect.Parameter.empty} <= {
            "num_tokens"
        }, name

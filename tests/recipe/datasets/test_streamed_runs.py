"""Runs on streamed data: the weights of a run on arrays, and of an interrupted run, to the last bit."""

import numpy as np
import pytest
import tensorflow as tf
from data_folders import classifier, houses, pairs_of, recipe, write_images
from PIL import Image

from prunekit.recipe.datasets import csv_files
from prunekit.recipe.datasets.data import load_data
from prunekit.recipe.run.runner import compress, verify
from prunekit.recipe.settings.schema import DataSource
from prunekit.recipe.text.loader import RecipeError

pytestmark = pytest.mark.every_backend


def images(folder, monkeypatch):
    source = {"images": str(write_images(folder / "images")), "size": [4, 3], "scale": 255}
    return source, (4, 3, 3)


def csv_on_disk(folder, monkeypatch):
    monkeypatch.setattr(csv_files, "IN_MEMORY", 0)
    source = {"csv": str(houses(folder / "houses.csv")), "label": "town", "preprocessing": ["Normalization"]}
    return source, (3,)


def saved(folder, monkeypatch):
    tf.data.Dataset.from_tensor_slices(pairs_of(shape=(2, 2), kind="uint8")).save(str(folder / "saved"))
    return {"tfds_saved": str(folder / "saved"), "shuffle_buffer": 16, "validation": 0.25}, (2, 2)


# The others read by index, as arrays in memory are read.
KINDS = pytest.mark.parametrize(
    "kind",
    [saved, *(pytest.param(kind, marks=pytest.mark.thorough) for kind in (images, csv_on_disk))],
    ids=["saved", "images", "csv_on_disk"],
)


class InsideEpoch:
    """Interrupts a run in the middle of an epoch, after a checkpoint was written."""

    def __init__(self, epoch):
        self.epoch, self.ended = epoch, 0

    def __call__(self, item):
        if item.epoch is not None:
            self.ended = item.epoch
        elif self.ended == self.epoch and 0 < item.fraction < 1:
            raise KeyboardInterrupt


@pytest.mark.thorough
@KINDS
@pytest.mark.every_backend(cases=0)
def test_a_run_killed_inside_an_epoch_ends_with_the_bytes_of_a_whole_one(tmp_path, monkeypatch, kind):
    source, shape = kind(tmp_path, monkeypatch)
    monkeypatch.setattr("prunekit.recipe.state.progress._PAUSE", 0.0)
    prune = recipe(source)["steps"][0]["prune"]
    text = recipe(source, {"prune": prune | {"epochs": 3}})
    whole = compress(text, classifier(shape))
    with pytest.raises(KeyboardInterrupt):
        compress(text, classifier(shape), output=tmp_path / "run", progress=InsideEpoch(1))
    resumed = compress(text, classifier(shape), output=tmp_path / "run", resume=True)
    assert resumed.report.hashes == whole.report.hashes
    assert resumed.report.metrics == whole.report.metrics and resumed.report.pruned_sparsity > 0.7


@pytest.mark.every_backend(cases=0)
def test_streamed_images_train_the_weights_that_the_same_arrays_train(tmp_path, monkeypatch):
    source, shape = images(tmp_path, monkeypatch)
    streamed = load_data(DataSource.model_validate(source), seed=4)
    arrays = {}
    for name, part in {"train": streamed.train, "val": streamed.validation}.items():
        arrays[f"x_{name}"], arrays[f"y_{name}"] = part.first(part.examples)
    np.savez(tmp_path / "same.npz", **arrays)
    first = compress(recipe(source), classifier(shape))
    second = compress(recipe({"npz": str(tmp_path / "same.npz")}), classifier(shape))
    assert first.report.hashes["weights"] == second.report.hashes["weights"]
    assert first.report.metrics == second.report.metrics


@pytest.mark.thorough
def test_a_csv_file_on_disk_trains_the_weights_that_it_trains_in_memory(tmp_path, monkeypatch):
    source, shape = csv_on_disk(tmp_path, monkeypatch)
    on_disk = compress(recipe(source), classifier(shape))
    monkeypatch.setattr(csv_files, "IN_MEMORY", 1 << 30)
    in_memory = compress(recipe(source), classifier(shape))
    assert on_disk.report.hashes["weights"] == in_memory.report.hashes["weights"]


@pytest.mark.one_backend
@pytest.mark.thorough
def test_a_run_on_images_is_verified_and_refused_where_a_file_has_changed(tmp_path, monkeypatch):
    source, shape = images(tmp_path, monkeypatch)
    compress(recipe(source), classifier(shape), output=tmp_path / "run")
    assert verify(tmp_path / "run", model=classifier(shape)).identical
    Image.fromarray(np.zeros((9, 12, 3), "uint8")).save(tmp_path / "images" / "cat" / "00.jpg")
    changed = verify(tmp_path / "run", model=classifier(shape))
    assert not changed.identical and "data are not what the run started from" in changed.differences


@pytest.mark.one_backend
def test_an_image_that_is_cut_off_is_named_when_it_is_read(tmp_path, monkeypatch):
    source, shape = images(tmp_path, monkeypatch)
    path = tmp_path / "images" / "dog" / "03.png"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(RecipeError, match=r"dog/03\.png cannot be read as an image. Restore the file"):
        compress(recipe(source), classifier(shape))


@pytest.mark.one_backend
def test_the_split_is_told_in_progress_and_report(tmp_path, monkeypatch):
    source, shape = images(tmp_path, monkeypatch)
    lines = []
    result = compress(recipe(source), classifier(shape), progress=lambda item: lines.append(item.text))
    note = "data: the data have one part: of 36 examples, 7 are held out for validation, by seed 4."
    assert note in lines and note in result.report.notes
    assert "data: classes 0 cat, 1 dog, 2 fox." in result.report.notes

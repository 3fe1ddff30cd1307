"""Batches where TensorFlow is not installed: those of tf.data, read by NumPy."""

import keras
import numpy as np
import pytest
from data_folders import write_csv, write_images

from prunekit.core.data.calibration import batches_of
from prunekit.recipe.datasets import csv_files, parts, preprocessing
from prunekit.recipe.datasets.batches import IndexedBatches, Order
from prunekit.recipe.datasets.data import load_data
from prunekit.recipe.settings.schema import DataSource
from prunekit.recipe.text.loader import RecipeError

pytestmark = pytest.mark.every_backend


@pytest.fixture
def no_tensorflow(monkeypatch):
    def use():
        for module in (parts, preprocessing):
            monkeypatch.setattr(module, "is_installed", lambda _: False)

    return use


@pytest.fixture
def rows(tmp_path):
    numbers = np.random.default_rng(0).normal(size=(50, 3)).round(3)
    path = write_csv(tmp_path / "rows.csv", ("a", "b", "y"), [(a, b, int(y > 0)) for a, b, y in numbers.tolist()])
    return {"csv": str(path), "label": "y", "validation": 0.2}


def loaded(source, **options):
    return load_data(DataSource.model_validate({**source, **options}), seed=1)


def read(part):
    """All that a run reads of a part: epochs 0 and 3, all examples in order, the first ones, calibration data."""
    order = Order(part.examples, seed=7)
    training = part.training_batches(order, 16)
    found = list(batches_of(training))
    order.epoch = 3
    found += batches_of(training)
    return [*found, *batches_of(part.in_order(16)), part.first(5), *batches_of(part.calibration_data())]


@pytest.mark.parametrize("layers", [None, [{"Rescaling": {"scale": 0.5}}, "Normalization"]], ids=["raw", "layers"])
@pytest.mark.parametrize("in_memory", [True, False], ids=["in memory", "on disk"])
def test_batches_are_those_of_tensorflow(rows, no_tensorflow, monkeypatch, in_memory, layers):
    monkeypatch.setattr(csv_files, "IN_MEMORY", (1 << 28) * in_memory)
    expected = read(loaded(rows, preprocessing=layers).train)
    no_tensorflow()
    part = loaded(rows, preprocessing=layers).train
    assert isinstance(part.in_order(16), IndexedBatches)
    for ours, theirs in zip(read(part), expected, strict=True):
        for array, other in zip(ours, theirs, strict=True):
            array, other = np.asarray(array), np.asarray(other)
            assert isinstance(array, np.ndarray) and array.dtype == other.dtype
            np.testing.assert_allclose(array, other, rtol=1e-5 if layers else 0, atol=1e-5 if layers else 0)


@pytest.mark.parametrize("layer", ["Discretization", "IntegerLookup", "StringLookup", "TextVectorization"])
def test_layers_that_need_tensorflow_are_refused_by_name(rows, no_tensorflow, layer):
    no_tensorflow()
    with pytest.raises(RecipeError, match=f"data.preprocessing: {layer} needs TensorFlow on every backend of Keras"):
        loaded(rows, inputs={"first": ["a"], "second": ["b"]}, preprocessing={"first": [layer]})


@pytest.mark.parametrize("kind", ["images", "tfds_saved"])
def test_data_that_need_tensorflow_are_refused_by_name(tmp_path, no_tensorflow, kind):
    folder = write_images(tmp_path / "images", each=3)
    no_tensorflow()
    with pytest.raises(RecipeError, match=f"data.{kind} needs TensorFlow on every backend of Keras"):
        loaded({kind: str(folder), **({"size": [8, 6]} if kind == "images" else {})})


def test_fit_and_evaluate_take_the_batches():
    inputs, labels = np.arange(10.0, dtype="float32")[:, None], np.zeros(10, "float32")
    seen = []

    def chosen(indices):
        seen.append(indices.tolist())
        return inputs[indices], labels[indices]

    order = Order(10, seed=0)
    batches = IndexedBatches(chosen, 10, 4, order.indices)
    assert len(batches) == 3
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(batches, epochs=1, shuffle=False, verbose=0)
    assert sum(seen[-3:], []) == order.indices().tolist()
    model.evaluate(batches, verbose=0)
    assert sum(seen[-3:], []) == order.indices().tolist()

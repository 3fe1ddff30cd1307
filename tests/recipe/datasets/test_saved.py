import numpy as np
import pytest
import tensorflow as tf
from data_folders import pairs_of

from prunekit.core.data.calibration import batches_of
from prunekit.recipe.datasets.batches import Order
from prunekit.recipe.datasets.data import load_data
from prunekit.recipe.settings.schema import DataSource
from prunekit.recipe.text.loader import RecipeError


def written(folder, count=40, first=0, change=lambda dataset: dataset, **options):
    """A data set whose example i has the input i in each entry and the label i % 5."""
    numbers = np.arange(first, first + count)
    inputs = np.repeat(numbers[:, None], 3, 1).astype("float32")
    change(tf.data.Dataset.from_tensor_slices((inputs, numbers % 5))).save(str(folder), **options)
    return folder


def loaded(folder, seed=3, **options):
    return load_data(DataSource.model_validate({"tfds_saved": str(folder), **options}), seed)


def numbers(batches):
    return [int(row[0]) for inputs, _ in batches for row in inputs.numpy()]


@pytest.mark.parametrize("form", ["plain", "gzip", "several shards", "batches"])
def test_every_form_gives_the_same_examples_split_by_the_seed(tmp_path, form):
    options = {
        "plain": {},
        "gzip": {"compression": "GZIP"},
        "several shards": {"shard_func": lambda _, label: tf.cast(label % 3, tf.int64)},
        "batches": {"change": lambda dataset: dataset.batch(7)},
    }[form]
    found = loaded(written(tmp_path / "saved", **options))
    assert [part.examples for part in found.parts.values()] == [32, 8, 8]
    both = [numbers(part.in_order(5)) for part in (found.train, found.validation)]
    assert sorted(both[0] + both[1]) == list(range(40))
    assert all(
        int(label) == int(row[0]) % 5 for x, y in found.train.in_order(8) for row, label in zip(x, y, strict=True)
    )
    assert ("taken apart" in " ".join(found.notes)) == (form == "batches")
    if form != "several shards":
        assert both[0] == numbers(loaded(written(tmp_path / "again")).train.in_order(5))


def test_the_order_of_an_epoch_is_of_seed_and_epoch_alone(tmp_path):
    part = loaded(written(tmp_path / "saved"), shuffle_buffer=10).train

    def epochs(seed, wanted):
        order = Order(part.examples, seed)
        batches, found = part.training_batches(order, 5), []
        for order.epoch in wanted:
            found.append(numbers(batches))
        return found

    tf.random.set_seed(1)
    first = epochs(5, (0, 1, 2))
    assert all(sorted(epoch) == sorted(first[0]) for epoch in first) and first[0] != first[1] != first[2]
    assert epochs(5, (2, 0, 1, 1)) == [first[2], first[0], first[1], first[1]] and epochs(6, (0,))[0] != first[0]
    assert part.training_batches(Order(part.examples, 0), 5).cardinality() == 7


def test_criteria_that_read_data_get_batches_more_than_once(tmp_path):
    data = loaded(written(tmp_path / "saved", 80)).train.calibration_data()
    first, second = (list(batches_of(data)) for _ in range(2))
    assert [len(labels) for _, labels in first] == [64] and isinstance(first[0][0], np.ndarray)
    np.testing.assert_array_equal(first[0][0], second[0][0])


def test_parts_in_folders_need_no_split(tmp_path):
    written(tmp_path / "train", 20)
    written(tmp_path / "val", 6, 100)
    found = loaded(tmp_path)
    assert [part.examples for part in found.parts.values()] == [20, 6, 6]
    written(tmp_path / "test", 4, 200)
    assert [part.examples for part in loaded(tmp_path).parts.values()] == [20, 6, 4]
    with pytest.raises(RecipeError, match="has a validation part already: leave out data.validation"):
        loaded(tmp_path, validation=0.1)
    with pytest.raises(RecipeError, match="has a test part already: leave out data.test"):
        loaded(tmp_path, test=0.1)
    written(tmp_path / "test", 4, change=lambda dataset: dataset.map(lambda x, y: (x[:2], y)))
    with pytest.raises(RecipeError, match="the test part must have elements of the same shapes"):
        loaded(tmp_path)


def test_limits_are_kept_and_bytes_are_scaled(tmp_path):
    tf.data.Dataset.from_tensor_slices(pairs_of(30, (2, 2), kind="uint8")).save(str(tmp_path / "saved"))
    found = loaded(tmp_path / "saved", limit=10, test=0.2)
    assert [part.examples for part in found.parts.values()] == [8, 2, 2]
    images = found.train.first(8)[0]
    assert images.dtype == "float32" and 0.5 < images.max() <= 1.0


def test_elements_that_are_mappings_name_their_label(tmp_path):
    x, y = pairs_of(12)
    content = {"image": x, "label": y, "id": np.array([b"a"] * 12)}
    tf.data.Dataset.from_tensor_slices(content).save(str(tmp_path / "saved"))
    with pytest.raises(RecipeError, match="data.label must name the label. .*Valid here: "):
        loaded(tmp_path / "saved")
    with pytest.raises(RecipeError, match="inputs must be numbers. Received: text. Choose other keys"):
        loaded(tmp_path / "saved", label="label")
    with pytest.raises(RecipeError, match="have no key 'imago'. Did you mean 'image'"):
        loaded(tmp_path / "saved", label="label", inputs=["imago"])
    found = loaded(tmp_path / "saved", label="label", inputs=["image"])
    assert found.train.example[0].shape == (1, 4) and found.train.labels().high == 2


@pytest.mark.parametrize(
    ("elements", "match"),
    [
        (lambda x, y: x, "pairs .inputs, label., or mappings"),
        (lambda x, y: (x, y, y), "pairs .inputs, label., or mappings .* Received: tuple of 3"),
        (lambda x, y: (x, tf.strings.as_string(y)), "labels must be numbers. Received: text"),
        (lambda x, y: (tf.sparse.from_dense(x), y), "dense tensors of numbers or text. Received"),
        (lambda x, y: (x / 0.0, y), "NaN or infinity among examples 0 to 12"),
        (lambda x, y: ((x, x), y), "inputs must be one tensor, or a mapping"),
    ],
    ids=["inputs alone", "weights", "text", "sparse", "NaN", "nested"],
)
def test_elements_that_recipes_cannot_train_on_are_refused(tmp_path, elements, match):
    tf.data.Dataset.from_tensor_slices(pairs_of(12)).map(elements).save(str(tmp_path / "saved"))
    with pytest.raises(RecipeError, match=match):
        loaded(tmp_path / "saved")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("dataset_spec.pb", b"\x80\x04cos\nsystem\n(S'touch code-was-run'\ntR."),
        ("dataset_spec.pb", b"\xff" * 50),
        ("00000000.snapshot", b"\xff" * 50),
        ("00000000.snapshot", b""),
    ],
    ids=["a pickle", "noise", "noise instead of records", "no records"],
)
def test_damaged_folders_are_refused_in_one_line(tmp_path, monkeypatch, marker, name, content):
    monkeypatch.chdir(tmp_path)
    next(written(tmp_path / "saved").rglob(name)).write_bytes(content)
    with pytest.raises(RecipeError, match="saved (is not a whole data set|must hold)") as refused:
        loaded(tmp_path / "saved")
    assert "\n" not in str(refused.value) and not marker.exists()


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(RecipeError, match="must be a folder that tf.data.Dataset.save wrote, or hold such folders"):
        loaded(tmp_path)
    (tmp_path / "dataset_spec.pb").write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(RecipeError, match="has more than 1,048,576 bytes"):
        loaded(tmp_path)

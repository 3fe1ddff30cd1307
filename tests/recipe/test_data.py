import gzip
import itertools
import struct
import sys

import numpy as np
import pytest

from prunekit.anatomy.files.digests import array_digest
from prunekit.recipe.datasets import builtin_files
from prunekit.recipe.datasets.batches import Order
from prunekit.recipe.datasets.builtin_files import fashion_files
from prunekit.recipe.datasets.data import Data, check_files, given_data, load_data
from prunekit.recipe.datasets.idx import read_idx
from prunekit.recipe.datasets.parts import ArrayPart
from prunekit.recipe.settings.schema import DataSource
from prunekit.recipe.text.loader import RecipeError

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx_bytes(array, code=None):
    kind = array.dtype.str[1:]
    header = bytes([0, 0, code or CODES[kind], array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(f">{kind}").tobytes()


@pytest.fixture
def images():
    rng = np.random.default_rng(0)
    return {
        "train_inputs": rng.integers(0, 256, (20, 6, 5), dtype="uint8"),
        "train_labels": np.arange(20, dtype="uint8") % 4,
        "test_inputs": rng.integers(0, 256, (8, 6, 5), dtype="uint8"),
        "test_labels": np.arange(8, dtype="uint8") % 4,
    }


def written(folder, arrays, write):
    paths = {}
    for part, array in arrays.items():
        paths[part] = str(folder / part)
        write(folder / part, array)
    return paths


# ---- idx -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("packed", [False, True], ids=["raw", "gzip"])
def test_idx_files_give_back_what_was_written_in_the_machines_own_byte_order(tmp_path, kind, packed):
    array = (np.arange(24).reshape(2, 3, 4) - (0 if kind == "u1" else 5)).astype(kind)
    content = idx_bytes(array)
    (tmp_path / "file").write_bytes(gzip.compress(content) if packed else content)
    found = read_idx(tmp_path / "file")
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype and found.dtype.isnative and found.flags.writeable


WHOLE = idx_bytes(np.arange(24, dtype="uint8").reshape(2, 3, 4))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an idx file"),
        (b"PK\3\4 some zip file", "not an idx file"),
        (b"\0\0\x07\1" + bytes(20), "not an idx file"),
        (b"\0\0\x08\0", "not an idx file"),
        (b"\0\0\x08\xff" + bytes(4 * 255), "not an idx file"),
        (WHOLE[:3], "not an idx file"),
        (WHOLE[:9], "ends inside its header of 16 bytes"),
        (WHOLE[:-1], r"cut off: its header declares 24 bytes for shape \(2, 3, 4\). Received: 23"),
        (WHOLE + b"\0", "has more data after the 24 bytes"),
        (b"\0\0\x0e\4" + b"\xff" * 16 + b"abc", "cut off: its header declares .* Received: 3"),
        (gzip.compress(WHOLE, mtime=0)[:-12], "damaged gzip file"),
        (gzip.compress(WHOLE[:-1], mtime=0), "cut off"),
        (b"\x1f\x8b\x08 not gzip at all", "damaged gzip file"),
    ],
)
def test_damaged_idx_files_are_refused_with_what_is_wrong(tmp_path, content, message):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        read_idx(tmp_path / "file")


def test_idx_files_of_no_examples_are_empty_arrays(tmp_path):
    (tmp_path / "file").write_bytes(idx_bytes(np.zeros((0, 3), "uint8")))
    assert read_idx(tmp_path / "file").shape == (0, 3)


# ---- sources ---------------------------------------------------------------------------------------------------------


def test_images_of_idx_files_get_a_channel_axis_and_lie_in_the_unit_interval(tmp_path, images):
    paths = written(tmp_path, images, lambda path, array: path.write_bytes(idx_bytes(array)))
    found = load_data(DataSource.model_validate({"idx": paths}), seed=0)
    assert found.train[0].shape == (20, 6, 5, 1) and found.train[0].dtype == "float32"
    np.testing.assert_array_equal(found.train[0][..., 0], images["train_inputs"].astype("float32") / np.float32(255))
    np.testing.assert_array_equal(found.test[1], images["test_labels"])
    assert found.validation is found.test


@pytest.mark.parametrize("scale", [None, 1.0, 2.0])
def test_npz_arrays_are_found_by_the_names_given_and_divided_by_scale(tmp_path, images, scale):
    names = {"train_inputs": "a", "train_labels": "b", "test_inputs": "c", "test_labels": "d"}
    np.savez(tmp_path / "arrays.npz", **{names[part]: array for part, array in images.items()})
    source = {"npz": str(tmp_path / "arrays.npz"), "arrays": names} | ({"scale": scale} if scale else {})
    found = load_data(DataSource.model_validate(source), seed=0)
    expected = images["train_inputs"].astype("float32") / np.float32(scale or 255)
    np.testing.assert_array_equal(found.train[0], expected)


def test_integers_other_than_bytes_stay_as_they_are_for_embeddings(tmp_path, images):
    images["train_inputs"] = images["train_inputs"].astype("int32")
    images["test_inputs"] = images["test_inputs"].astype("int32")
    paths = written(tmp_path, images, lambda path, array: np.save(path.with_suffix(".npy"), array))
    source = DataSource.model_validate({"npy": {part: f"{path}.npy" for part, path in paths.items()}})
    assert load_data(source, seed=0).train[0].dtype == "int32"


def test_an_npz_without_the_array_is_refused_with_the_names_it_has(tmp_path):
    np.savez(tmp_path / "arrays.npz", images=np.ones(3))
    with pytest.raises(
        RecipeError,
        match="under usual names such as x and y; it has 'images'.*Name them.* several inputs are a mapping",
    ):
        load_data(DataSource(npz=str(tmp_path / "arrays.npz")), seed=0)


class Boom:
    def __reduce__(self):
        return (sys.exit, ("unpickled",))


def test_pickled_objects_are_refused_and_never_loaded(tmp_path, images):
    np.savez(tmp_path / "arrays.npz", x_train=np.array([Boom()], object), y_train=1, x_test=1, y_test=1)
    with pytest.raises(RecipeError, match="not a whole npz file of plain numbers: it holds Python objects"):
        load_data(DataSource(npz=str(tmp_path / "arrays.npz")), seed=0)
    paths = written(tmp_path, images, lambda path, _: path.write_bytes(b""))
    with open(paths["train_inputs"], "wb") as file:
        np.save(file, np.array([Boom()], object))
    with pytest.raises(RecipeError, match="not a whole npy file of plain numbers"):
        load_data(DataSource.model_validate({"npy": paths}), seed=0)


@pytest.mark.parametrize("content", [b"", b"PK\3\4 cut off", b"\x93NUMPY\1\0"], ids=["empty", "cut off", "header only"])
def test_damaged_npz_files_are_refused(tmp_path, content):
    (tmp_path / "arrays.npz").write_bytes(content)
    with pytest.raises(RecipeError, match="not a whole npz file"):
        load_data(DataSource(npz=str(tmp_path / "arrays.npz")), seed=0)


def test_a_whole_npz_or_a_cut_npz_is_distinguished(tmp_path, images):
    np.savez_compressed(
        tmp_path / "arrays.npz",
        x_train=images["train_inputs"],
        y_train=images["train_labels"],
        x_test=images["test_inputs"],
        y_test=images["test_labels"],
    )
    source = DataSource(npz=str(tmp_path / "arrays.npz"))
    assert len(load_data(source, seed=0).train[1]) == 20
    content = (tmp_path / "arrays.npz").read_bytes()
    (tmp_path / "arrays.npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(RecipeError, match="not a whole npz file"):
        load_data(source, seed=0)


def test_missing_files_are_refused_before_any_is_read(tmp_path, images):
    paths = written(tmp_path, images, lambda path, array: path.write_bytes(b"nonsense"))
    (tmp_path / "test_labels").unlink()
    with pytest.raises(RecipeError, match="test_labels does not exist"):
        check_files(DataSource.model_validate({"idx": paths}))
    with pytest.raises(RecipeError, match="none.npz does not exist"):
        check_files(DataSource(npz=str(tmp_path / "none.npz")))


def test_digits_are_the_same_1437_and_360_for_everybody():
    first, second = (load_data(DataSource(builtin="digits"), seed) for seed in (0, 1))
    assert first.train[0].shape == (1437, 8, 8, 1) and first.test[0].shape == (360, 8, 8, 1)
    assert first.train[0].min() == 0.0 and first.train[0].max() == 1.0
    assert set(first.train[1]) == set(first.test[1]) == set(range(10))
    assert first.digest == second.digest


def test_digits_without_scikit_learn_name_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(RecipeError, match=r"pip install 'prunekit\[examples\]'"):
        load_data(DataSource(builtin="digits"), 0)


@pytest.mark.parametrize("packed", [False, True], ids=["raw", "gzip"])
def test_fashion_mnist_is_found_in_a_folder_and_in_the_keras_cache(tmp_path, images, monkeypatch, packed):
    folder = tmp_path / "datasets" / "fashion-mnist"
    folder.mkdir(parents=True)
    for part, stem in builtin_files.FASHION_FILES.items():
        content = idx_bytes(images[part])
        (folder / (f"{stem}.gz" if packed else stem)).write_bytes(gzip.compress(content) if packed else content)
    found = load_data(DataSource(builtin="fashion-mnist", path=str(folder)), seed=0)
    assert found.name == "fashion-mnist" and found.train[0].shape == (20, 6, 5, 1)
    monkeypatch.setattr(builtin_files, "DEBIAN_FASHION", tmp_path / "nowhere")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    assert fashion_files()["train_labels"].parent == folder


def test_fashion_mnist_is_never_downloaded_but_the_ways_to_get_it_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(builtin_files, "DEBIAN_FASHION", tmp_path / "nowhere")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    with pytest.raises(RecipeError, match="dataset-fashion-mnist, or have Keras download them"):
        check_files(DataSource(builtin="fashion-mnist"))


NUMBERS = itertools.count()

# ---- factories and data given in Python ------------------------------------------------------------------------------


@pytest.fixture
def factory(tmp_path, monkeypatch):
    """Writes a module with a function `make` and returns a data source that names it."""

    def write(body, **arguments):
        name = f"data_factory_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(f"import numpy as np\n{body}\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
        return DataSource(factory=f"{name}:make", arguments=arguments)

    return write


def test_a_data_factory_of_the_working_directory_is_called_with_its_arguments(factory):
    body = "def make(n):\n    pair = np.zeros((n, 3), 'uint8') + 255, np.arange(n)\n    return pair, pair"
    path = list(sys.path)
    found = load_data(factory(body, n=6), seed=0)
    assert found.train[0].shape == (6, 3)
    assert found.train[0].max() == 255, "a factory's data come scaled"
    assert [entry for entry in path if entry] == sys.path


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def make(n): return 1", "does not take these arguments"),
        ("make = 3", "has no function 'make'"),
        ("def make(): return 1, 2, 3", r"must be \(\(train inputs, train labels\).* Received: tuple of 3"),
        ("def make(): return ([np.ones(3)], 1), (2, 3)", "train_inputs of .* must be one array"),
        ("def make(): return ('ab', 1), (2, 3)", "train_inputs must be numbers"),
    ],
)
def test_factories_that_do_not_fit_are_refused(factory, body, message):
    with pytest.raises(RecipeError, match=message):
        load_data(factory(body), seed=0)


def test_an_error_inside_a_factory_comes_through_as_it_is(factory):
    with pytest.raises(TypeError, match="inside"):
        load_data(factory("def make(): helper()\ndef helper(): raise TypeError('inside')"), seed=0)
    with pytest.raises(ModuleNotFoundError, match="no_such_package_at_all"):
        load_data(factory("import no_such_package_at_all\ndef make(): pass"), seed=0)


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(RecipeError, match="module 'no_such.module' was not found"):
        load_data(DataSource(factory="no_such.module:make"), seed=0)


GOOD = (np.ones((4, 2)), np.zeros(4, int))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (
            (GOOD, (np.ones((3, 2)), np.zeros(4))),
            "test_inputs and test_labels must have the same number of examples. Received: 3 and 4",
        ),
        ((GOOD, (np.ones((4, 3)), np.zeros(4))), r"one shape. Received: \(2,\) and \(3,\)"),
        ((GOOD, (np.ones((0, 2)), np.zeros(0))), "at least one example"),
        (((np.ones((4, 2)) * np.nan, np.zeros(4)), GOOD), "train_inputs must be finite"),
        (
            ((np.ones((4, 2)), np.array(["a"] * 4)), GOOD),
            "train_labels must be numbers. Received: an array of type <U1",
        ),
        (5, "Received: int"),
    ],
)
def test_given_arrays_that_do_not_belong_together_are_refused(pairs, message):
    with pytest.raises(RecipeError, match=message):
        given_data(pairs)


def test_given_data_are_used_as_they_are():
    found = given_data(((np.full((4, 2), 200, "uint8"), np.zeros(4)), (np.ones((2, 2)), np.zeros(2))))
    assert found.train[0].max() == 200 and found.test[0].dtype == "float32"


# ---- limit, split, order ---------------------------------------------------------------------------------------------


def numbered(tmp_path, **settings):
    count = 50
    inputs = np.arange(count, dtype="float32")[:, None]
    np.savez(tmp_path / "a.npz", x_train=inputs, y_train=np.arange(count), x_test=inputs + 100, y_test=np.arange(count))
    return load_data(DataSource(npz=str(tmp_path / "a.npz"), **settings), seed=settings.get("seed", 3))


def test_limit_keeps_so_many_of_each_part_chosen_by_the_seed(tmp_path):
    first, again = numbered(tmp_path, limit=7), numbered(tmp_path, limit=7)
    assert len(first.train[1]) == len(first.test[1]) == 7
    assert first.digest == again.digest
    np.testing.assert_array_equal(first.train[0][:, 0], first.train[1])
    assert first.train[1].tolist() != list(range(7)), "files may be sorted by class"
    assert len(numbered(tmp_path, limit=1000).train[1]) == 50


def test_the_validation_split_holds_out_other_examples_than_it_trains_on(tmp_path):
    found = numbered(tmp_path, validation=0.2)
    train, validation = set(found.train[1].tolist()), set(found.validation[1].tolist())
    assert len(validation) == 10 and train | validation == set(range(50)) and not train & validation
    assert found.test[0].min() == 100


def test_a_split_that_leaves_nothing_on_one_side_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="must leave examples in both parts. Received: 0.001 of 50"):
        numbered(tmp_path, validation=0.001)


def test_batches_show_each_example_once_an_epoch_in_another_order_each_time_and_the_same_for_the_same_seed():
    pair = np.arange(10, dtype="float32"), np.arange(10)

    def epochs(seed, numbers=(0, 1, 2)):
        order = Order(10, seed)
        drawn = ArrayPart(*pair).training_batches(order, 4)
        found = []
        for order.epoch in numbers:
            found.append([int(label) for _, labels in drawn for label in labels])
        return found

    first = epochs(seed=5)
    assert all(sorted(epoch) == list(range(10)) for epoch in first)
    assert first[0] != first[1] != first[2]
    assert epochs(seed=5) == first and epochs(seed=6) != first
    assert epochs(5, (2, 2, 1)) == [first[2], first[2], first[1]], "whatever was iterated before"
    drawn = ArrayPart(*pair).training_batches(Order(10, 0), 4)
    assert [len(labels) for _, labels in drawn] == [4, 4, 2] and drawn.cardinality() == 3


def test_the_digest_tells_types_shapes_and_bytes_apart():
    arrays = [np.zeros(4, "float32"), np.zeros((2, 2), "float32"), np.zeros(4, "int32"), -np.zeros(4, "float32")]
    assert len({array_digest(array) for array in arrays}) == 4
    pair = (np.ones((2, 1)), np.zeros(2))
    assert Data("a", pair, pair, pair).digest == Data("b", pair, pair, pair).digest

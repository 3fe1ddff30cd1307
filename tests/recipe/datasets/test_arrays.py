import keras
import numpy as np
import pytest
from data_folders import pairs_of, recipe

from prunekit.recipe.datasets.data import given_data, load_data, summary
from prunekit.recipe.run.plan import plan
from prunekit.recipe.run.runner import compress
from prunekit.recipe.settings.schema import DataSource
from prunekit.recipe.text.loader import RecipeError

USUAL = ["x_train", "y_train", "x_test", "y_test"]


def npz(path, *names, count=20):
    """Arrays named so: each input has the position of its name in the list as its value."""
    arrays = {
        name: np.full((count, 2), i, "float32") if "x" in name.lower() or "inputs" in name else np.full(count, i)
        for i, name in enumerate(names)
    }
    np.savez(path, **arrays)
    return path


def loaded(path, seed=3, **options):
    return load_data(DataSource.model_validate({"npz": str(path), **options}), seed)


@pytest.mark.parametrize(
    ("names", "read", "parts"),
    [
        (["x", "y"], ["x", "y"], (16, 4, 4)),
        (["x_train", "y_train"], ["x_train", "y_train"], (16, 4, 4)),
        (["X", "y"], ["X", "y"], (16, 4, 4)),
        (["x_train", "y_train", "x", "y"], ["x", "y"], (16, 4, 4)),
        (USUAL, USUAL, (20, 20, 20)),
        ([*USUAL, "x_val", "y_val"], [*USUAL, "x_val", "y_val"], (20, 20, 20)),
        ([*USUAL, "x", "y"], USUAL, (20, 20, 20)),
        (["x", "y", "x_test", "y_test"], ["x", "y", "x_test", "y_test"], (20, 20, 20)),
        (["train_inputs", "train_targets"], ["train_inputs", "train_targets"], (16, 4, 4)),
        # All examples, and beside them the parts: "X" would train on the test part.
        (
            ["X", "y", "X_train", "y_train", "X_test", "y_test"],
            ["X_train", "y_train", "X_test", "y_test"],
            (20, 20, 20),
        ),
        (["x", "y", "x_train", "y_train", "x_val", "y_val"], ["x_train", "y_train", "x_val", "y_val"], (20, 20, 20)),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_usual_names_are_tried_in_order_and_told(tmp_path, names, read, parts):
    found = loaded(npz(tmp_path / "data.npz", *names))
    assert tuple(part.examples for part in found.parts.values()) == parts
    assert found.train.first(1)[0][0, 0] == names.index(read[0]) and found.train.first(1)[1][0] == names.index(read[1])
    if names == USUAL:
        assert found.notes == ("data: all training labels are 1: no training learns from them.",)
        return
    listed = found.notes[0]
    assert all(f"'{name}'" in listed.partition("not used")[0] for name in read)
    assert all(f"'{name}'" in listed.partition("not used")[2] for name in names if name not in read)
    if parts[1] == 4:
        assert "the data have one part: of 20 examples, 4 are held out for validation, by seed 3." in found.notes[1]


def test_names_that_are_given_are_the_ones_read(tmp_path):
    path = npz(tmp_path / "data.npz", "x_a", "b", "x", "y", "x_test", "y_test")
    found = loaded(path, arrays={"train_inputs": "x_a", "train_labels": "b"})
    assert found.train.first(1)[0][0, 0] == 0 and found.test.first(1)[0][0, 0] == 4
    both = npz(tmp_path / "both.npz", "x", "y", "x_train", "y_train")
    assert loaded(both, arrays={"train_inputs": "x_train"}).train.first(1)[0][0, 0] == 2
    with pytest.raises(RecipeError, match="no array 'nowhere' for train_inputs"):
        loaded(path, arrays={"train_inputs": "nowhere", "train_labels": "b"})


def test_targets_may_be_any_numbers_of_any_shape(tmp_path):
    targets = np.random.default_rng(0).normal(size=(20, 2, 3))
    np.savez(tmp_path / "data.npz", x=np.ones((20, 4)), y=targets)
    labels = loaded(tmp_path / "data.npz", validation=0.25).train.labels()
    assert labels.shape == (2, 3) and not labels.whole
    assert summary(loaded(tmp_path / "data.npz")).labels[""].startswith("2 x 3 float64, -")


# ---- several inputs and outputs --------------------------------------------------------------------------------------


def two_by_two(as_list=False):
    keras.utils.set_random_seed(20)
    size, image = keras.Input((2,), name="size"), keras.Input((4, 4, 1), name="image")
    joined = keras.layers.Concatenate(name="join")([keras.layers.Flatten(name="flat")(image), size])
    hidden = keras.layers.Dense(8, "relu", name="hidden")(joined)
    price, kind = keras.layers.Dense(1, name="price")(hidden), keras.layers.Dense(3, "softmax", name="kind")(hidden)
    return keras.Model([size, image], [price, kind] if as_list else {"price": price, "kind": kind}, name="two")


def several(count=24):
    random = np.random.default_rng(0)
    inputs = {"image": random.integers(0, 256, (count, 4, 4, 1), dtype="uint8"), "size": random.normal(size=(count, 2))}
    return inputs, {"price": random.normal(size=count), "kind": np.eye(3)[np.arange(count) % 3]}


@pytest.fixture
def by_name(tmp_path):
    inputs, labels = several()
    names = {key: f"{key}_{key}" for key in (*inputs, *labels)}
    np.savez(tmp_path / "data.npz", **{names[key]: array for key, array in {**inputs, **labels}.items()})
    arrays = {
        "train_inputs": {key: names[key] for key in inputs},
        "train_labels": {key: names[key] for key in labels},
    }
    return {"npz": str(tmp_path / "data.npz"), "arrays": arrays, "preprocessing": {"size": ["Normalization"]}}


def test_several_inputs_and_outputs_are_named(by_name):
    found = load_data(DataSource.model_validate(by_name), seed=4)
    inputs, labels = found.train.first(99)
    assert inputs["image"].max() <= 1.0 and inputs["image"].dtype == "float32"
    np.testing.assert_allclose(inputs["size"].mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(inputs["size"].std(axis=0), 1, atol=1e-3)
    told = summary(found)
    assert told.inputs == {"image": "4 x 4 x 1 float32", "size": "2 float32"} and sorted(told.labels) == [
        "kind",
        "price",
    ]
    assert labels["kind"].shape == (19, 3)


@pytest.mark.parametrize("as_list", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["mapping", "list"])
def test_a_model_of_several_inputs_and_outputs_is_trained_and_exported(tmp_path, by_name, as_list):
    prune = {
        "prune": {
            "epochs": 1,
            "schedule": {"type": "constant", "target_sparsity": 0.5},
            "include": ["hidden"],
            "allocation": "uniform",
        }
    }
    steps = [prune, {"export": {"formats": ["keras"]}}]
    text = recipe(by_name, *steps, loss="mean_squared_error", metrics=[])
    result = compress(text, two_by_two(as_list), output=tmp_path / "run")
    assert result.report.pruned_sparsity == 0.5
    assert [row.status for row in result.report.exports] == ["ok"]


def test_labels_must_have_the_names_of_the_outputs(by_name):
    by_name["arrays"]["train_labels"] = {"price": "price_price", "sort": "kind_kind"}
    with pytest.raises(RecipeError, match="labels must have the names of the outputs of 'two': price, kind"):
        plan(recipe(by_name, loss="mean_squared_error", metrics=[]), two_by_two())


def test_data_given_in_python_may_be_named(by_name):
    pair = several()
    found = given_data((pair, pair))
    assert found.train.labels()["kind"].shape == (3,) and found.digest != given_data((pair, several(12))).digest
    other = ({"image": pair[0]["image"]}, pair[1])
    with pytest.raises(RecipeError, match="inputs of the same names"):
        given_data((pair, other))
    with pytest.raises(RecipeError, match="'image' and .* must have the same number of examples"):
        given_data((({**pair[0], "size": pair[0]["size"][:5]}, pair[1]), pair))


# ---- plan ------------------------------------------------------------------------------------------------------------


def test_a_plan_shows_parts_shapes_labels_and_the_split(tmp_path, perceptron):
    from io import StringIO

    from rich.console import Console

    from prunekit.recipe.run.plan import show_plan

    x, y = pairs_of(50, (8,), classes=4)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    found = plan(recipe({"npz": str(tmp_path / "data.npz")}), perceptron)
    assert found.to_dict()["data"]["examples"] == {"training": 40, "validation": 10}
    written = StringIO()
    show_plan(found, Console(file=written, width=200))
    text = written.getvalue()
    for line in (
        "data: data.npz: 40 training, 10 validation examples",
        "   input: 8 float32",
        "   label: int64, 0 to 3",
        "   the data have one part: of 50 examples, 10 are held out for validation, by seed 4.",
    ):
        assert f"{line}\n" in text

import keras
import numpy as np
import pytest
from data_folders import houses, recipe, write_csv

from prunekit.recipe.datasets import csv_files
from prunekit.recipe.datasets.data import load_data, summary
from prunekit.recipe.run.plan import plan
from prunekit.recipe.settings.schema import DataSource
from prunekit.recipe.text.loader import RecipeError

STRING_LOOKUP = {"town": [{"StringLookup": {"output_mode": "one_hot", "num_oov_indices": 0}}]}


@pytest.fixture
def path(tmp_path):
    return houses(tmp_path / "houses.csv")


def loaded(path, seed=0, **options):
    return load_data(DataSource.model_validate({"csv": str(path), **options}), seed)


def small(tmp_path, rows, header=("a", "b", "y"), name="data.csv"):
    return write_csv(tmp_path / name, header, rows)


def all_rows(data):
    """Inputs and labels of training and validation, in the order of the file's labels."""
    parts = [data.train.first(99), data.validation.first(99)]
    return [np.concatenate([part[i] for part in parts]) for i in (0, 1)]


@pytest.mark.parametrize("in_memory", [True, False], ids=["in memory", "on disk"])
def test_columns_become_one_matrix_and_the_label_its_numbers(path, monkeypatch, in_memory):
    monkeypatch.setattr(csv_files, "IN_MEMORY", (1 << 28) * in_memory)
    monkeypatch.setattr(csv_files, "_VALUES", 20)
    found = loaded(path, label="price", inputs=["area", "rooms"], validation=0.2, test=0.1)
    assert [part.examples for part in found.parts.values()] == [28, 8, 4]
    table = np.genfromtxt(path, delimiter=",", skip_header=1, usecols=(1, 0, 3)).astype("float32")
    rows = {tuple(row) for row in table.tolist()}
    note = "data: of 40 examples, 8 are held out for validation and 4 for the test, by seed 0."
    assert note in found.notes
    seen = set()
    for part in found.parts.values():
        inputs, labels = part.first(40)
        assert inputs.dtype == labels.dtype == "float32" and inputs.shape[1:] == (2,) and labels.shape[1:] == ()
        seen |= {(*row, label) for row, label in zip(inputs.tolist(), labels.tolist(), strict=True)}
    assert seen == rows
    assert summary(found).streamed != in_memory


def test_labels_that_are_text_are_classes_in_sorted_order(path):
    found = loaded(path, label="town")
    assert found.class_names == ("Bern", "Oslo", "Rome")
    assert found.train.labels().dtype == "int64"
    assert "data: classes 0 Bern, 1 Oslo, 2 Rome." in found.notes
    inputs, labels = all_rows(found)
    # The price of the row i is 100 + i / 4, and its town Rome, Oslo, Bern in turn.
    expected = [(2, 1, 0)[int(i) % 3] for i in (inputs[:, 2] - 100) * 4]
    assert labels.tolist() == expected


@pytest.mark.parametrize(
    ("label", "rows", "dtype", "shape"),
    [
        ("y", [[1, 2, 0], [3, 4, 7], [5, 6, 1], [7, 8, 2]], "int64", ()),
        ("y", [[1, 2, 0.5], [3, 4, 7], [5, 6, 1], [7, 8, 2]], "float32", ()),
        (["b", "y"], [[1, 2, 0.5], [3, 4, 7], [5, 6, 1], [7, 8, 2]], "float32", (2,)),
        (["b", "y"], [[1, 2, 0], [3, 4, 7], [5, 6, 1], [7, 8, 2]], "int64", (2,)),
    ],
    ids=["whole", "fractions", "two fractions", "two whole"],
)
def test_labels_keep_their_kind(tmp_path, label, rows, dtype, shape):
    labels = loaded(small(tmp_path, rows), label=label).train.labels()
    assert (labels.dtype, labels.shape) == (dtype, shape)


@pytest.mark.parametrize("in_memory", [True, False], ids=["in memory", "on disk"])
def test_several_inputs_by_name_may_hold_text(path, monkeypatch, in_memory):
    monkeypatch.setattr(csv_files, "IN_MEMORY", (1 << 28) * in_memory)
    inputs = {"numbers": ["rooms", "area"], "town": "town"}
    layers = STRING_LOOKUP | {"numbers": ["Normalization"]}
    found = loaded(path, label="price", inputs=inputs, preprocessing=layers)
    drawn, labels = found.train.first(40)
    assert drawn["town"].shape == (32, 3) and drawn["town"].sum(axis=1).tolist() == [1] * 32
    towns = drawn["town"].argmax(axis=1)
    # The same town has the same column.
    assert len({(int((label - 100) * 4) % 3, int(town)) for label, town in zip(labels, towns, strict=True)}) == 3
    np.testing.assert_allclose(drawn["numbers"].mean(axis=0), 0, atol=1e-5)


def test_a_test_file_has_the_classes_of_the_training_file(tmp_path, path):
    other = write_csv(tmp_path / "test.csv", ["rooms", "area", "town", "price"], [[1, 2, "Rome", 5], [1, 2, "Bern", 6]])
    found = loaded(path, label="town", test=str(other))
    assert found.test.first(2)[1].tolist() == [2, 0] and found.train.examples == 40
    write_csv(other, ["rooms", "area", "town", "price"], [[1, 2, "Paris", 5]])
    with pytest.raises(RecipeError, match="the label 'Paris', which the training file does not have"):
        loaded(path, label="town", test=str(other))
    write_csv(other, ["rooms", "area", "town", "price"], [[1, 2, "Rome", "low"], [1, 2, "Rome", "high"]])
    with pytest.raises(RecipeError, match="must have labels that are numbers, as .*Received: text, such as 'high'"):
        loaded(path, label="price", inputs=["rooms"], test=str(other))
    write_csv(other, ["area", "rooms", "town", "price"], [[1, 2, "Rome", 5]])
    with pytest.raises(RecipeError, match="must have the columns of"):
        loaded(path, label="town", test=str(other))


FILLER = [[i, i, i] for i in range(9)]
BOMB = "1" * 200


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a,b,y\n1,Oslo,3\n", r"line 2: column 'b' must hold numbers. Received: text, 'Oslo'. Leave the column out"),
        ("a,b,y\n1,2,3\n4,,6\n", r"line 3: column 'b' has no value. Received: ''. Fill it in"),
        ("a,b,y\n1,2,3\n4,NaN,6\n", "line 3: column 'b' has no value. Received: 'NaN'"),
        ("a,b,y\n1,2,3\n4,5,\n", "line 3: column 'y' has no value"),
        ("a,b,y\n1,2,3\n4,inf,6\n", "line 3: column 'b' must hold finite numbers"),
        ("a,b,y\n1,2,3\n4,1e39,6\n", "line 3: column 'b' must hold finite numbers that float32 can hold"),
        (f"a,b,y\n1,{BOMB},3\n", "line 2: column 'b' must hold numbers. Received: text"),
        ('a,b,y\n"1\n",2,3\n4,x,6\n', "line 4: column 'b' must hold numbers"),
        ("a,b,y\n1,2,3\n4,5\n", "line 3: expected 3 values, as in the header. Received: 2"),
        ("a,b,y\n", "no rows below its header"),
        ("", "must begin with a header line"),
        ("1,2,3\n4,5,6\n", "header line of column names. Received: numbers"),
        ("a,a,y\n1,2,3\n", "two columns 'a'"),
        ("a,b,z\n1,2,3\n", r"data\.label: .* has no column 'y'"),
        ("y\n1\n", r"must have columns for the inputs"),
        ("a;b;y\n1;2;3\n", r"no column 'y'. The file seems to have another delimiter: delimiter: ';'"),
        (",a,y\n0,1,2\n1,3,4\n", r"column 1 has no name, as the index that pandas writes"),
        ("a,b,y\nTrue,2,3\n4,x,6\n", "line 3: column 'b' must hold numbers. Received: text, 'x'"),
        ('a,b,y\n1,"2,3\n', "not a CSV file, near line"),
        ("a,b,y\n1,2,\xff\n", "not text in UTF-8"),
    ],
)
def test_files_that_cannot_be_used_are_refused_with_line_and_column(tmp_path, text, match):
    path = tmp_path / "data.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(RecipeError, match=match) as refused:
        loaded(path, label="y")
    assert "\n" not in str(refused.value)


def test_one_label_that_is_no_number_makes_no_regression_on_numbers_of_classes(tmp_path):
    path = small(tmp_path, [*FILLER, [1, 2, "5x"]])
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(RecipeError, match="with loss mse, labels must be quantities. Received: 10 classes .* '5x'"):
        plan(recipe({"csv": str(path), "label": "y"}, loss="mse", metrics=[]), model)


def test_true_and_false_among_numbers_are_1_and_0_and_columns_without_a_name_may_be_left_out(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text(',"a, b",flag,y\n' + "".join(f"{i},{i},{bool(i % 2)},{i}\n" for i in range(9)))
    inputs, labels = all_rows(loaded(path, label="y", inputs=["a, b", "flag"]))
    assert inputs.tolist() == [[label, label % 2] for label in labels.tolist()]


def test_a_byte_order_mark_and_another_delimiter_are_read(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("a;b;y\n" + "".join(f"{i};{i};{i}\n" for i in range(9)), encoding="utf-8-sig")
    assert loaded(path, label="y", delimiter=";").train.first(1)[0].shape == (1, 2)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"inputs": ["a", "c"]}, r"data\.inputs: .* has no column 'c'. .*Valid here: a, b, y"),
        ({"inputs": ["a", "y"]}, "besides those of the label"),
        ({"preprocessing": ["StringLookup"]}, "StringLookup takes one column of text"),
        ({"preprocessing": {"a": ["Normalization"]}}, "the data have one input, so layers are a list"),
        ({"inputs": {"one": ["a"], "two": ["b"]}, "preprocessing": ["Normalization"]}, "given for each by name"),
    ],
)
def test_columns_that_do_not_fit_are_refused(tmp_path, options, match):
    with pytest.raises(RecipeError, match=match):
        loaded(small(tmp_path, FILLER), label="y", **options)


def test_several_labels_must_be_numbers(tmp_path):
    with pytest.raises(RecipeError, match="several columns of the label must hold numbers"):
        loaded(small(tmp_path, [[1, "x", 2], [3, "z", 4]]), label=["b", "y"])

"""The command `export`: formats, folders and files, what they are compared on, and refusals."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest
from backends import tensorflow_only
from command_lines import assert_mistake

pytestmark = pytest.mark.every_backend


@pytest.fixture
def stored(run):
    """A classifier that was compiled, and data with labels, in the working directory."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    model.save("net.keras")
    x = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
    np.savez("d.npz", x=x, y=model.predict(x, verbose=0).argmax(-1))
    return model, x


def test_a_folder_gets_a_file_for_each_format(run, stored):
    model, x = stored
    code, out, err = run("export", "net.keras", "-o", "new", "--format", "keras", "--data", "d.npz")
    assert (code, err) == (0, "note: the folder new does not exist; it is made.\n")
    assert "Exported files" in out and out.endswith("\nWritten to new/net.keras\n")
    assert [path.name for path in Path("new").iterdir()] == ["net.keras"]
    written = keras.models.load_model("new/net.keras")
    assert not written.compiled
    np.testing.assert_array_equal(written.predict(x, verbose=0), model.predict(x, verbose=0))


@tensorflow_only
def test_a_file_has_the_format_of_its_name_and_json_the_comparison_with_the_data(run, stored):
    code, out, err = run("export", "net.keras", "-o", "small.tflite", "--data", "d.npz", "--json", "--batch-size", "2")
    assert (code, err) == (0, "")
    (row,) = json.loads(out)["files"]
    assert (row["format"], row["file"], row["status"], row["accuracy"]) == ("litert", "small.tflite", "ok", 1.0)
    assert "takes batches of 2" in row["note"]
    assert row["bytes"] == Path("small.tflite").stat().st_size and Path("small.tflite").read_bytes()[4:8] == b"TFL3"
    assert sorted(path.name for path in Path().iterdir()) == ["d.npz", "net.keras", "small.tflite"]


def test_without_data_the_comparison_is_on_random_numbers_and_that_is_told(run, stored):
    code, _, err = run("export", "net.keras", "-o", "other.keras")
    assert (code, err) == (0, "note: files and model were compared on random numbers: no --data.\n")


def test_a_file_that_is_refused_is_an_error_with_its_reason_and_is_not_written(run, stored):
    words = ("export", "net.keras", "-o", "new", "--format", "litert-dynamic-int8-sparse", "--data", "d.npz")
    code, out, err = run(*words)
    assert code == 1 and "error: litert-dynamic-int8-sparse refused: " in err and "Written" not in out
    assert json.loads(run(*words, "--json")[1])["files"][0]["file"] is None


def test_force_replaces_an_existing_file(run, stored):
    Path("other.keras").write_text("precious")
    words = ("export", "net.keras", "-o", "other.keras", "--data", "d.npz")
    assert_mistake(run(*words), "other.keras exists already. Pass --force to replace it.")
    assert_mistake(run(*words[:3], ".", "--format", "keras", "--name", "other"), "other.keras exists already.")
    assert Path("other.keras").read_text() == "precious"
    assert run(*words, "--force")[0] == 0 and Path("other.keras").read_bytes()[:2] == b"PK"


def test_several_inputs_stand_under_their_names(run):
    inputs = [keras.Input((size,), name=name) for name, size in (("one", 4), ("two", 6))]
    keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Concatenate()(inputs))).save("two.keras")
    np.savez(
        "two.npz", **{name: np.random.default_rng(0).normal(size=(9, size)) for name, size in (("two", 6), ("one", 4))}
    )
    code, out, err = run("export", "two.keras", "-o", "new.keras", "--data", "two.npz", "--json")
    assert (code, err, json.loads(out)["files"][0]["status"]) == (0, "", "ok")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "new"], "a folder needs --format, such as --format litert; a file ends with .tflite or .keras."),
        (["-o", "new.onnx"], "a file ends with .tflite or .keras. Received: -o new.onnx."),
        (["-o", "new.tflite", "--format", "keras"], "new.tflite is no file of the format keras."),
        (["-o", "new.keras", "--format", "litert"], "new.keras is no file of the format litert."),
        (["-o", "new.tflite", "--format", "litert", "--format", "keras"], "new.tflite names one file. Received: 2 "),
        (["-o", "new.tflite", "--name", "x"], "new.tflite names one file. Received: --name."),
        (["-o", "new", "--format", "litert-spars"], "Did you mean 'litert-sparse'?"),
        (
            ["-o", "new.tflite", "--format", "litert-int8"],
            "needs data for its ranges: prunekit quantize net.keras --data DATA -o new.tflite. Valid formats: keras, ",
        ),
        (
            ["-o", "my files", "--format", "int16", "--data", "d.npz", "--label", "y"],
            "prunekit quantize net.keras --data d.npz --label y -o 'my files/net.tflite' --activation-bits 16.",
        ),
        (["-o", "new.tflite", "--format", "int4"], "prunekit quantize net.keras --data DATA -o new.tflite --bits 4."),
        (["-o", "d.npz", "--format", "keras"], "-o takes a folder, or the name of a .tflite or .keras file."),
        (["-o", "new.keras", "--label", "x"], "--label needs --data."),
        (["-o", "new.keras", "--data", "gone.npz"], "gone.npz"),
        (
            ["-o", "new.keras", "--data", "digits"],
            " is (None, 6), with the batch first. Received: ",
        ),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(run, stored, words, message):
    assert_mistake(run("export", "net.keras", *words), message)
    assert sorted(path.name for path in Path().iterdir()) == ["d.npz", "net.keras"]


def test_models_that_are_none_are_refused(run):
    Path("bad.keras").write_bytes(b"no model")
    assert_mistake(run("export", "bad.keras", "-o", "new.keras"), "bad.keras")
    assert_mistake(run("export", "gone.keras", "-o", "new.keras"), "gone.keras: no such file.")

"""`prunekit evaluate`, and `--data` of commands that read examples."""

import json

import numpy as np
import pytest
from command_lines import assert_mistake


@pytest.fixture
def files(tmp_path):
    """A compiled classifier, and its data as npz and CSV file."""
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,), name="features"), keras.layers.Dense(3, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    random = np.random.default_rng(0)
    x = random.normal(size=(40, 6)).astype("float32")
    y = keras.ops.convert_to_numpy(model(x)).argmax(-1)
    y[:10] = (y[:10] + 1) % 3
    model.save("net.keras")
    np.savez("d.npz", x_train=x[20:], y_train=y[20:], x_test=x[:20], y_test=y[:20])
    np.savez("all.npz", x=x, y=y)
    rows = [",".join(map(repr, [*map(float, row), int(label)])) for row, label in zip(x, y, strict=True)]
    (tmp_path / "d.csv").write_text("\n".join(["a,b,c,d,e,f,kind", *rows]) + "\n")
    return model, x, y


class TestEvaluate:
    @pytest.mark.every_backend
    def test_a_compiled_model_is_measured_on_the_test_part(self, run, files):
        model, x, y = files
        code, out, err = run("evaluate", "net.keras", "--data", "d.npz", "--json")
        assert (code, err) == (0, "")
        found = json.loads(out)
        assert (found["part"], found["examples"], found["compiled"]) == ("test part", 20, True)
        assert found["metrics"] == pytest.approx(model.evaluate(x[:20], y[:20], verbose=0, return_dict=True))
        assert found["metrics"]["accuracy"] == 0.5

    def test_data_without_parts_are_measured_whole(self, run, files):
        code, out, err = run("evaluate", "net.keras", "--data", "d.csv", "--label", "kind")
        assert (code, err) == (0, "")
        assert out.startswith("net.keras: 40 examples of d.csv (all examples)\n  accuracy: 0.7500\n  loss: ")

    @pytest.mark.parametrize("integers", [False, True], ids=["float inputs", "integer inputs"])
    def test_an_integer_file_is_measured_in_numbers(self, run, files, integers):
        io = ["--integer-io"] if integers else []
        assert run("quantize", "net.keras", "--data", "d.csv", "--label", "kind", "-o", "net.tflite", *io)[0] == 0
        code, out, err = run("evaluate", "net.tflite", "--data", "all.npz", "--json")
        assert code == 0 and err == ""
        found = json.loads(out)
        assert found["examples"] == 40 and found["metrics"]["accuracy"] == pytest.approx(0.75, abs=0.026)
        like = json.loads(run("evaluate", "net.tflite", "--data", "all.npz", "--like", "net.keras", "--json")[1])
        assert like["compiled"] and like["metrics"] == pytest.approx(found["metrics"], rel=1e-5)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["gone.keras", "--data", "d.npz"], "gone.keras: no such file."),
            (["net.h5", "--data", "d.npz"], "MODEL takes the name of a .keras or .tflite file."),
            (["net.keras", "--data", "d.csv"], "name it with --label COLUMN. Columns: a, b, c, d, e, f, kind."),
            (["net.keras", "--data", "d.npz", "--like", "net.keras"], "--like takes the .keras file of a .tflite"),
            (["bad.tflite", "--data", "d.npz"], "bad.tflite is not a LiteRT file with a signature"),
            (["net.keras", "--data", "digits"], "net.keras cannot be measured on digits"),
        ],
    )
    def test_a_mistake_is_one_line(self, run, files, tmp_path, arguments, message):
        (tmp_path / "bad.tflite").write_bytes(b"no model")
        assert_mistake(run("evaluate", *arguments), message)


@pytest.fixture
def two_inputs():
    """Models with two inputs, as a list and as a dictionary, and their data as npz files and as a saved data set."""
    import keras

    keras.utils.set_random_seed(1)
    inputs = {name: keras.Input((size,), name=name) for name, size in (("one", 4), ("two", 6))}
    output = keras.layers.Dense(3, activation="softmax")(keras.layers.Concatenate()(list(inputs.values())))
    models = {"list": keras.Model(list(inputs.values()), output), "dictionary": keras.Model(inputs, output)}
    for name, model in models.items():
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        model.save(f"{name}.keras")
    random = np.random.default_rng(0)
    x = {"two": random.normal(size=(20, 6)).astype("float32"), "one": random.normal(size=(20, 4)).astype("float32")}
    y = keras.ops.convert_to_numpy(models["dictionary"](x)).argmax(-1)
    np.savez("two.npz", **x, y=y)
    np.savez("labels.npz", **x, labels=y)
    np.savez("inputs.npz", **x)
    return x, y


class TestSeveralInputs:
    @pytest.mark.every_backend
    @pytest.mark.parametrize("model", ["list", "dictionary"])
    @pytest.mark.parametrize("data", ["two.npz", "labels.npz"])
    def test_they_stand_under_their_names_beside_the_labels(self, run, two_inputs, model, data):
        code, out, err = run("evaluate", f"{model}.keras", "--data", data, "--json")
        assert (code, err) == (0, "")
        found = json.loads(out)
        assert (found["examples"], found["metrics"]["accuracy"], found["compiled"]) == (20, 1.0, True)

    def test_inputs_without_labels_are_refused_with_the_way_to_save_both(self, run, two_inputs):
        message = "several inputs under their names in the model, beside y."
        assert_mistake(run("evaluate", "list.keras", "--data", "inputs.npz"), "it has 'two', 'one'", message)

    def test_a_saved_data_set_is_read_for_a_file_of_each_kind(self, run, two_inputs):
        import tensorflow as tf

        tf.data.Dataset.from_tensor_slices(two_inputs).save("saved")
        assert run("quantize", "list.keras", "--data", "two.npz", "-o", "two.tflite")[0] == 0
        for words in (["dictionary.keras"], ["two.tflite"], ["two.tflite", "--like", "list.keras"]):
            for data in ("saved", "two.npz"):
                code, out, _ = run("evaluate", *words, "--data", data, "--json")
                assert code == 0 and json.loads(out)["metrics"]["accuracy"] >= 0.9

    def test_other_commands_read_the_labels_too(self, run, two_inputs):
        words = ("prune", "list.keras", "--sparsity", "0.5", "--data", "two.npz", "-o", "new.keras", "--json")
        found = json.loads(run(*words)[1])["report"]
        assert found["damage"]["examples"] == 20
        words = ("sensitivity", "list.keras", "--data", "two.npz", "--sparsity", "0.5", "-o", "scan", "--json")
        assert "accuracy" in json.loads(run(*words)[1])["dense"]
        assert run("init", "list.keras", "--data", "two.npz", "-o", "two.yaml")[0] == 0
        assert run("check", "two.yaml", "--plan")[0] == 0


def test_a_folder_of_images_is_measured_as_the_model_reads_it(run, tmp_path):
    import keras
    from data_folders import write_images

    write_images(tmp_path / "images", classes=("cat", "dog"), each=6)
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(2, activation="softmax")]
    model = keras.Sequential([keras.Input((8, 8, 3)), *layers])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.save("net.keras")
    assert run("quantize", "net.keras", "--data", "images", "-o", "net.tflite")[0] == 0
    found = [
        json.loads(run("evaluate", *words, "--data", "images", "--json")[1])
        for words in (["net.keras"], ["net.tflite", "--like", "net.keras"])
    ]
    assert [(one["part"], one["examples"]) for one in found] == [("all examples", 12)] * 2
    assert found[1]["metrics"]["loss"] == pytest.approx(found[0]["metrics"]["loss"], rel=0.05)
    assert_mistake(run("evaluate", "net.tflite", "--data", "images"), "name the one of net.tflite with --like")


@pytest.mark.parametrize("command", [["prune", "--sparsity", "0.5"], ["shrink", "--macs", "1.0"], ["simplify"]])
def test_the_only_source_is_never_replaced(run, files, tmp_path, command):
    before = (tmp_path / "net.keras").read_bytes()
    name, *options = command
    (tmp_path / "link.keras").symlink_to("net.keras")
    for output in ("net.keras", "./net.keras", "link.keras"):
        found = run(name, "net.keras", *options, "-o", output, "--force")
        assert_mistake(found, "-o names a new file; MODEL is another one.")
    assert (tmp_path / "net.keras").read_bytes() == before


def test_csv_files_and_built_in_data_are_read_by_commands_that_prune(run, files):
    code, _, err = run(
        "prune", "net.keras", "--sparsity", "0.5", "--data", "d.csv", "--label", "kind", "-o", "new.keras"
    )
    assert code == 0 and "error:" not in err
    assert_mistake(
        run("prune", "net.keras", "--sparsity", "0.5", "--label", "kind", "-o", "other.keras"), "--label needs --data."
    )


def test_errors_of_writing_name_the_file_asked_for(tmp_path):
    from prunekit.core.runtime.partial_files import partial_file

    for error in (OSError(28, "No space left", str(tmp_path / ".part-a.keras")), OSError("cannot open .part-a.keras")):
        with pytest.raises(OSError, match="[ /]a.keras") as caught, partial_file(tmp_path / "a.keras", ".part-a.keras"):
            raise error
        assert ".part-" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []

"""The command `quantize`: integer files, JSON, the Keras model, and refusals."""

import json
from pathlib import Path

import pytest
from command_lines import assert_mistake


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A folder with a small model and its data."""
    import keras
    import numpy as np

    folder = tmp_path_factory.mktemp("models")
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(48, activation="relu", name="hidden"), keras.layers.Dense(4, name="out")]
    model = keras.Sequential([keras.Input((24,)), *layers], name="net")
    model.compile("adam", "mse")
    model.save(folder / "net.keras")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(80, 24)).astype("float32"), rng.normal(size=(80, 4)).astype("float32")
    np.savez(folder / "d.npz", x_train=x, y_train=y)
    np.savez(folder / "other.npz", x_train=x[:, :5], y_train=y)
    x[3, 2] = np.nan
    np.savez(folder / "nan.npz", x_train=x, y_train=y)
    return folder


@pytest.fixture
def quantize(run, stored):
    """Runs `quantize` on the model: (exit code, standard output, standard error)."""

    def run_on_model(*arguments, data="d.npz", output="new.tflite"):
        return run("quantize", stored / "net.keras", "--data", stored / data, "-o", output, *arguments)

    return run_on_model


def test_a_model_is_written_as_an_integer_file(quantize, stored):
    before = (stored / "net.keras").read_bytes()
    code, out, err = quantize("--bits", "8", output="new/net.tflite")
    assert (code, err) == (0, "note: the folder new does not exist; it is made.\n")
    titles = ("Quantized weights", "Ranges of tensors", "Integer file")
    assert all(title in out for title in titles) and "hidden/kernel" in out
    report, file = out.splitlines()[-2:]
    assert report.startswith("2 weights on grids of 8 bits (nearest): ")
    size = Path("new/net.tflite").stat().st_size
    assert file.startswith(f"new/net.tflite: {size:,} bytes (0.")
    assert file.endswith("; 0 operations compute in floating point.")
    assert Path("new/net.tflite").read_bytes()[4:8] == b"TFL3"
    assert [path.name for path in Path("new").iterdir()] == ["net.tflite"]
    assert (stored / "net.keras").read_bytes() == before


def test_json_has_the_report_and_the_file(quantize):
    code, out, err = quantize("--bits", "4", "--examples", "60", "--json")
    found = json.loads(out)
    assert (code, err, found["path"]) == (0, "", "new.tflite")
    assert found["report"]["method"] == "gptq" and [one["bits"] for one in found["report"]["weights"]] == [4, 4]
    assert found["file"]["bytes"] == Path("new.tflite").stat().st_size
    assert found["file"]["largest_difference"] <= 1 and found["file"]["skipped"] == []


def test_the_keras_model_is_written_with_its_weights_on_grids(quantize):
    import keras
    import numpy as np

    code, _, _ = quantize("--bits", "3", "--keras", "models/new.keras", "--activation-bits", "float")
    model = keras.models.load_model("models/new.keras")
    assert code == 0 and model.name == "net"
    for layer in model.layers:
        for column in np.array(layer.kernel).T:
            assert len(np.unique(column)) <= 7
    assert [path.name for path in Path("models").iterdir()] == ["new.keras"]


def test_a_keras_file_has_int8_layers_and_no_ranges(quantize):
    import keras

    code, out, _ = quantize("--json", output="models/new.keras")
    found = json.loads(out)
    layers = keras.models.load_model("models/new.keras").layers
    assert (code, found["file"]["int8_layers"]) == (0, ["hidden", "out"])
    assert found["report"]["ranges"] == [] and found["file"]["notes"] == []
    assert [layer.quantization_mode for layer in layers] == ["int8", "int8"]
    assert [path.name for path in Path("models").iterdir()] == ["new.keras"]


def test_the_model_is_not_the_file_to_write(run, stored):
    model = stored / "net.keras"
    before = model.read_bytes()
    found = run("quantize", model, "--data", stored / "d.npz", "-o", model, "--force")
    assert_mistake(found, "-o names a new file; MODEL is another one.")
    assert model.read_bytes() == before


def test_options_are_those_of_python(quantize):
    options = ("--method", "nearest", "--activation-ranges", "minmax", "--exclude", "out", "--bits", "4")
    code, out, _ = quantize(*options, "--json")
    report = json.loads(out)["report"]
    assert code == 0 and report["method"] == "nearest"
    assert [one["name"] for one in report["weights"]] == ["hidden/kernel"]
    assert [(one["name"], one["reason"]) for one in report["skipped"]] == [("out", "excluded by 'out'")]


@pytest.mark.parametrize("bits", ["8", "16"])
def test_integer_inputs_and_outputs_are_written_where_asked(quantize, bits):
    from ai_edge_litert.interpreter import Interpreter

    code, _, _ = quantize("--integer-io", "--activation-bits", bits)
    interpreter = Interpreter(model_path="new.tflite")
    found = [*interpreter.get_input_details(), *interpreter.get_output_details()]
    assert code == 0 and [one["dtype"].__name__ for one in found] == [f"int{bits}"] * 2


def test_inputs_and_outputs_are_uint8_where_asked(quantize):
    from ai_edge_litert.interpreter import Interpreter

    assert quantize("--uint8-io")[0] == 0
    interpreter = Interpreter(model_path="new.tflite")
    found = [*interpreter.get_input_details(), *interpreter.get_output_details()]
    assert [one["dtype"].__name__ for one in found] == ["uint8"] * 2


def test_force_replaces_an_existing_file(quantize):
    Path("new.tflite").write_bytes(b"former")
    Path("new.keras").write_bytes(b"former")
    assert_mistake(quantize(), "new.tflite exists already. Pass --force to replace it.")
    assert_mistake(quantize("--keras", "new.keras", output="a.tflite"), "new.keras exists already. Pass --force")
    assert (Path("new.tflite").read_bytes(), Path("new.keras").read_bytes()) == (b"former", b"former")
    assert quantize("--force", "--keras", "new.keras")[0] == 0
    assert Path("new.tflite").read_bytes()[4:8] == b"TFL3" and Path("new.keras").read_bytes()[:2] == b"PK"


@pytest.mark.parametrize(
    ("options", "words", "message"),
    [
        ({"output": "new.h5"}, [], "-o takes the name of a .tflite or .keras file. Received: 'new.h5'."),
        ({"output": "new"}, [], "-o takes the name of a .tflite or .keras file. Received: 'new'."),
        ({"output": "new.keras"}, ["--keras", "new.keras"], "--keras names a new file; -o is another one."),
        ({"output": "new.keras"}, ["--integer-io"], "--integer-io is about LiteRT files"),
        ({}, ["--integer-io", "--uint8-io"], "--uint8-io makes the integer inputs and outputs uint8."),
        ({}, ["--uint8-io", "--activation-bits", "16"], "--uint8-io is about activations of 8 bits."),
        ({"output": "new.keras"}, ["--sparse"], "--sparse is about LiteRT files"),
        ({}, ["--sparse", "--activation-bits", "float"], "--sparse is about kernels of integer operations"),
        ({"data": "gone.npz"}, [], "gone.npz"),
        (
            {"data": "d.npy"},
            [],
            "DATA is built-in data (digits, diabetes, fashion-mnist), .csv and .npz files, folders",
        ),
        ({"data": "other.npz"}, [], "24"),
        ({"data": "nan.npz"}, [], "NaN"),
        ({}, ["--bits", "9"], "9 is not in the range 2<=x<=8"),
        ({}, ["--bits", "1"], "1 is not in the range 2<=x<=8"),
        ({}, ["--activation-bits", "4"], "'4' is not one of '8'"),
        ({}, ["--group-size", "32"], "--group-size is about files that compute in floating point"),
        ({}, ["--group-size", "8", "--activation-bits", "float"], "16 or more: for fewer, scales take more bytes"),
        ({}, ["--method", "awk"], "'awk' is not one of 'auto', 'nearest', 'gptq', 'awq'"),
        (
            {},
            ["--activation-ranges", "mes"],
            "`activation_ranges` is one of minmax, mse, percentile:0.9999.",
        ),
        ({}, ["--activation-ranges", "percentile:2"], 'write "percentile:0.9999"'),
        ({}, ["--exclude", "hiden"], "Did you mean 'hidden'"),
        ({}, ["--exclude", "*"], "has no weights to quantize"),
        ({}, ["--keras", "new.h5"], "takes the name of a .keras file. Received: 'new.h5'."),
        ({}, ["--examples", "0"], "0 is not in the range x>=1"),
        ({}, ["--memory", "500"], "memory must be bytes, such as 500MB, 1GB or 1e9. Received: '500'."),
        ({}, ["--memory", "much"], "memory must be bytes, such as 500MB, 1GB or 1e9. Received: 'much'."),
        ({}, ["--set", "bits=4"], "--set is for options without a name here. Received: bits."),
        ({}, ["--set", "method=awq"], "--set is for options without a name here. Received: method."),
        ({}, ["--set", "equalise=true"], "Did you mean 'equalize'"),
        ({}, ["--set", "equalize"], "expected name=value. Received: 'equalize'."),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(quantize, options, words, message):
    assert_mistake(quantize(*words, **options), message)
    assert list(Path().iterdir()) == []


def test_options_without_a_flag_are_set_by_name(quantize):
    code, out, _ = quantize("--set", "equalize=true", "--set", "weight_ranges=mse", "--json")
    assert code == 0
    assert any(note.startswith("Equalization") for note in json.loads(out)["report"]["notes"])


def test_weights_alone_need_no_data(run, stored):
    model = stored / "net.keras"
    code, out, err = run("quantize", model, "-o", "new.keras", "--bits", "4", "--json")
    assert (code, err) == (0, "") and json.loads(out)["report"]["method"] == "gptq"
    assert_mistake(run("quantize", model, "-o", "other.keras", "--label", "y"), "--label needs --data.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["net.keras", "-o", "new.tflite"], "Missing option '--data'"),
        (["net.keras", "--data", "d.npz"], "Missing option '-o'"),
        (["--data", "d.npz", "-o", "new.tflite"], "Missing argument 'MODEL'"),
        (["gone.keras", "--data", "d.npz", "-o", "new.tflite"], "gone.keras: no such file."),
        (["bad.keras", "--data", "d.npz", "-o", "new.tflite"], "bad.keras"),
        (["folder.keras", "--data", "d.npz", "-o", "new.tflite"], "MODEL takes the name of a .keras file."),
        (["net.keras", "--data", "d.npz", "-o", "file/new.tflite"], "file/new.tflite cannot be written: "),
        (["net.keras", "--data", "d.npz", "-o", "new.tflite", "--wieghts", "4"], "No such option '--wieghts'"),
    ],
    ids=["no data", "no output", "no model", "unknown file", "bad file", "folder", "no folder", "unknown option"],
)
def test_files_that_cannot_be_are_refused(run, stored, arguments, message):
    for name in ("net.keras", "d.npz"):
        Path(name).write_bytes((stored / name).read_bytes())
    Path("bad.keras").write_bytes(b"no model")
    Path("folder.keras").mkdir()
    Path("file").write_text("")
    assert_mistake(run("quantize", *arguments), message)
    assert not Path("new.tflite").exists()


def test_kernels_with_zeros_are_encoded_sparsely(quantize):
    code, out, err = quantize("--sparsity", "0.8", "--sparse", "--json")
    assert (code, err) == (0, "")
    kernels = json.loads(out)["file"]["kernels"]
    assert [one["dense"] for one in kernels] == [24 * 48, 48 * 4] and kernels[1]["reason"]


def test_a_file_that_fails_its_comparison_is_an_error_and_is_not_written(quantize, monkeypatch):
    from prunekit.delivery.integers import integer_writing
    from prunekit.delivery.integers.integer_comparison import TensorDifference

    monkeypatch.setattr(integer_writing, "tensor_differences", lambda *_: [TensorDifference("hidden", 2, 0.5)])
    assert_mistake(quantize("--keras", "new.keras"), "error: Each tensor of an integer file is at most one step")
    assert list(Path().iterdir()) == []


def test_bits_are_chosen_for_a_budget(quantize):
    code, out, err = quantize("--budget", "1700")
    assert (code, err) == (0, "")
    assert "Bits of each weight" in out and "grids of 4 and 8 bits" in out
    code, out, _ = quantize("--budget", "1700", "--json", "--force")
    found = json.loads(out)
    assert found["choice"]["bytes"] <= 1700 and found["choice"]["bits"] == {
        one["name"]: one["bits"] for one in found["report"]["weights"]
    }


def test_a_budget_and_bits_exclude_each_other_and_a_small_budget_is_refused(quantize):
    assert_mistake(quantize("--budget", "1700", "--bits", "4"), "--budget chooses the bits of each weight")
    assert_mistake(quantize("--budget", "100"), "With the fewest bits the weights of 'net' have")


@pytest.mark.parametrize("names", [("one", "two"), ("x", "y")], ids=str)
def test_a_file_may_have_the_inputs_under_the_names_of_the_model(run, tmp_path, names):
    import keras
    import numpy as np

    inputs = [keras.Input((size,), name=name) for name, size in zip(names, (4, 6), strict=True)]
    keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Concatenate()(inputs))).save(tmp_path / "two.keras")
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=(40, size)).astype("float32") for name, size in zip(names, (4, 6), strict=True)}
    np.savez(tmp_path / "two.npz", **arrays)
    code, out, err = run("quantize", "two.keras", "--data", "two.npz", "-o", "two.tflite", "--integer-io")
    assert (code, err) == (0, "") and Path("two.tflite").is_file()


@pytest.mark.filterwarnings("ignore:When providing `inputs` as a dict")
def test_the_names_of_a_model_that_takes_a_dictionary_are_its_keys(run, tmp_path):
    import keras
    import numpy as np

    inputs = {key: keras.Input((4,), name=name) for key, name in (("left", "one"), ("right", "two"))}
    keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Concatenate()(list(inputs.values())))).save("two.keras")
    np.savez("two.npz", **{key: np.random.default_rng(0).normal(size=(40, 4)) for key in inputs})
    code, out, err = run("quantize", "two.keras", "--data", "two.npz", "-o", "two.tflite")
    assert (code, err) == (0, "") and Path("two.tflite").is_file()


def test_a_model_may_have_an_attribute_of_its_own_that_is_called_inputs(run, tmp_path):
    import keras
    import numpy as np

    from prunekit.anatomy.graph.example_inputs import input_names
    from prunekit.recipe.datasets.data import training_examples
    from prunekit.recipe.start.starting_recipe import named_source

    class Own(keras.Model):
        inputs = (3, 4)

    np.savez("own.npz", x_train=np.zeros((20, 4), "float32"), y_train=np.zeros(20))
    images, _ = training_examples(named_source("own.npz", None, Own()), 10, input_names(Own()))
    assert images.shape == (10, 4)


def test_a_file_without_the_inputs_of_the_model_is_refused_with_their_names(run, tmp_path):
    import keras
    import numpy as np

    inputs = [keras.Input((4,), name=name) for name in ("one", "two")]
    keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Concatenate()(inputs))).save(tmp_path / "two.keras")
    np.savez(tmp_path / "two.npz", one=np.zeros((2, 4)), three=np.zeros((2, 4)))
    assert_mistake(
        run("quantize", "two.keras", "--data", "two.npz", "-o", "new.tflite"),
        "it has 'one', 'three'. Tried: x, ",
        ", or under the names of the model's inputs: 'one', 'two'.",
    )


def test_kernels_are_pruned_while_they_are_rounded(quantize):
    code, out, err = quantize("--bits", "4", "--sparsity", "0.5", "--pattern", "2:4", "--json")
    assert (code, err) == (0, "")
    for one in json.loads(out)["report"]["weights"]:
        assert one["zeros"] >= one["shape"][0] * one["shape"][1] // 2
    assert_mistake(quantize("--pattern", "2:4", "--force"), "`pattern` is that of new zeros: pass `sparsity`, too")


def test_a_model_with_layers_in_floating_point_is_refused_if_asked(run, stored):
    import keras

    layers = [keras.layers.LayerNormalization(name="norm"), keras.layers.Dense(4, name="out")]
    keras.Sequential([keras.Input((24,)), *layers], name="net").save("norm.keras")
    arguments = ("quantize", "norm.keras", "--data", stored / "d.npz", "-o", "norm.tflite")
    assert_mistake(run(*arguments, "--misfits", "error"), "Received: parts in floating point: norm, since")
    assert not Path("norm.tflite").exists()
    assert run(*arguments)[0] == 0


def test_a_full_integer_file_has_no_layer_in_floating_point(run, stored):
    import keras

    layers = [keras.layers.LayerNormalization(name="norm"), keras.layers.Dense(4, name="out")]
    keras.Sequential([keras.Input((24,)), *layers], name="net").save("norm.keras")
    arguments = ("quantize", "norm.keras", "--data", stored / "d.npz", "--full-integer")
    code, out, _ = run(*arguments, "-o", "norm.tflite", "--json")
    found = json.loads(out)
    assert (code, found["report"]["skipped"], found["file"]["skipped"]) == (0, [], [])
    assert_mistake(run(*arguments, "-o", "new.keras"), "--full-integer is about LiteRT files")
    assert_mistake(run(*arguments, "-o", "n.tflite", "--activation-bits", "float"), "compute with integers alone")


def test_groups_of_inputs_have_scales_of_their_own(quantize):
    code, out, err = quantize("--bits", "4", "--group-size", "16", "--activation-bits", "float", "--json")
    rows = json.loads(out)["report"]["weights"]
    assert (code, err) == (0, "") and [(row["scales"], row["group_size"]) for row in rows] == [(96, 16), (12, 16)]
    code, out, _ = quantize("--bits", "4", "--group-size", "16", "--json", output="new.keras")
    assert code == 0 and json.loads(out)["file"]["int4_layers"] == ["hidden", "out"]


def test_awq_is_a_method(quantize):
    code, out, err = quantize("--bits", "4", "--method", "awq")
    assert (code, err) == (0, "") and "grids of 4 bits (awq)" in out


@pytest.mark.parametrize("words", [["--budget", "1700"], ["--integer-io"], ["--uint8-io"]])
def test_options_of_litert_files_are_refused_for_a_keras_file(quantize, words):
    assert_mistake(quantize(*words, output="new.keras"), f"{words[0]} is about LiteRT files")


def test_a_model_that_was_saved_on_its_grids_is_exported_and_gives_the_same_integers_again(quantize, run, stored):
    import keras

    assert quantize("--bits", "4", "--keras", "grids.keras")[0] == 0
    formats = ("--format", "keras", "--format", "litert", "--data", stored / "d.npz", "--json")
    code, out, _ = run("export", "grids.keras", "-o", "floats", *formats)
    rows = json.loads(out)["files"]
    assert (code, [row["status"] for row in rows]) == (0, ["ok", "ok"])
    # Weights of Keras's own file are those on the grids.
    for one, other in zip(
        *(keras.models.load_model(file).get_weights() for file in ("grids.keras", "floats/grids.keras")), strict=True
    ):
        assert (one == other).all()
    again = ("quantize", "grids.keras", "--data", stored / "d.npz", "--bits", "4", "-o", "again.tflite")
    assert run(*again)[0] == 0
    assert Path("again.tflite").read_bytes() == Path("new.tflite").read_bytes()

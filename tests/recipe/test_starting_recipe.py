"""`prunekit init`: a recipe for a model and data that can be planned as it is written."""

import keras
import numpy as np
import pytest
import yaml
from backends import BACKEND, tensorflow_only
from command_lines import assert_mistake
from data_folders import write_csv, write_images

from prunekit.commands.start import init
from prunekit.recipe.run.runner import plan
from prunekit.recipe.settings.compile_fields import MetricSettings
from prunekit.recipe.start.starting_recipe import Start, starting_recipe, write_starting_recipe
from prunekit.recipe.start.starting_steps import GOALS
from prunekit.recipe.text.loader import RecipeError, load_recipe

CHANGES = ["prune", "finetune", "export", *["quantize"] * (BACKEND == "tensorflow"), "expect"]


def saved(path, inputs, units, activation=None, before=()):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Flatten(), keras.layers.Dense(8, "relu", name="hidden")]
    end = keras.layers.Dense(units, activation, name="end")
    keras.Sequential([keras.Input(inputs), *before, *layers, end]).save(path)
    return path


@pytest.fixture
def call(run):
    """Runs init; returns the recipe, loaded from its file, and its text."""

    def written(*arguments):
        code, out, err = run("init", *arguments, "-o", "mine.yaml", "--force")
        assert code == 0, err
        assert err.splitlines()[-1] == "Written to mine.yaml. Next: prunekit check mine.yaml --plan"
        return load_recipe("mine.yaml"), out.strip()

    return written


def test_without_arguments_the_recipe_is_for_the_digits(call):
    found, text = call()
    assert (found.model.builtin, found.data.builtin, found.name) == ("digits-cnn", "digits", "mine")
    assert [step.kind for step in found.steps] == ["train", *CHANGES]
    assert text.count("#") > 8
    assert plan("mine.yaml").steps[1].targets[-1].name == "fc/kernel"


def test_a_model_alone_is_pruned_once(call, tmp_path):
    saved(tmp_path / "net.keras", (6,), 3)
    found, _ = call("net.keras")
    assert (found.model.file, found.data, found.compile) == (str(tmp_path / "net.keras"), None, None)
    assert [step.kind for step in found.steps] == ["prune", "export"]
    # Relative to the recipe, so that both may move.
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text())["model"] == {"file": "net.keras"}


BINARY_LOGITS = MetricSettings(metric="binary_accuracy", arguments={"threshold": 0.0})
CASES = {
    "classes, softmax": (3, "softmax", [0, 1, 2], ("sparse_categorical_crossentropy", ("accuracy",), False)),
    "classes, logits": (3, None, [0, 1, 2], ("sparse_categorical_crossentropy", ("accuracy",), True)),
    "one-hot, logits": (2, None, [[0, 1], [1, 0]], ("categorical_crossentropy", ("accuracy",), True)),
    "two classes": (1, "sigmoid", [0, 1], ("binary_crossentropy", ("binary_accuracy",), False)),
    "two classes, logits": (1, None, [0, 1], ("binary_crossentropy", (BINARY_LOGITS,), True)),
    "several labels": (2, "sigmoid", [[1, 1], [1, 0]], ("binary_crossentropy", ("binary_accuracy",), False)),
    "regression": (1, None, [0.5, 1.25, 7.0], ("mse", ("mae",), False)),
}


@pytest.mark.parametrize(("units", "activation", "values", "expected"), CASES.values(), ids=CASES)
def test_loss_and_metric_follow_from_outputs_and_labels(call, tmp_path, units, activation, values, expected):
    saved(tmp_path / "net.keras", (6,), units, activation)
    rng = np.random.default_rng(2)
    labels = np.resize(np.array(values), (60, *np.shape(values)[1:]))
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(60, 6)).astype("float32") * 9, y=labels)
    found, _ = call("net.keras", "--data", "data.npz")
    compiled = found.compile
    assert (compiled.loss, compiled.metrics, bool(compiled.from_logits)) == expected
    # A model from a file is trained already.
    assert [step.kind for step in found.steps] == CHANGES


def document_for(path, model, labels=None):
    """Returns the document that init writes for a model, and for data with such labels."""
    model.save(path / "net.keras")
    data = None
    if labels is not None:
        data = str(path / "data.npz")
        np.savez(data, x=np.random.default_rng(2).normal(size=(60, 6)).astype("float32"), y=np.resize(labels, 60))
    return yaml.safe_load(starting_recipe(Start(str(path / "net.keras"), data, None, path / "mine.yaml")))


def test_probabilities_rounded_to_bfloat16_are_no_logits(tmp_path):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, dtype="mixed_bfloat16"), keras.layers.Dense(10, "softmax", dtype="mixed_bfloat16")]
    found = document_for(tmp_path, keras.Sequential([keras.Input((6,)), *layers]), range(10))
    assert "from_logits" not in found["compile"]


def test_outputs_without_axes_are_one_number_for_each_example(tmp_path):
    inputs = keras.Input((6,))
    model = keras.Model(inputs, keras.layers.Reshape(())(keras.layers.Dense(1)(inputs)))
    found = document_for(tmp_path, model, [0, 3, 8])
    assert (found["compile"]["loss"], found["compile"]["metrics"]) == ("mse", ["mae"])


def test_the_last_layer_is_left_out_under_any_name_but_not_the_only_layer(tmp_path, call):
    only = keras.Sequential([keras.Input((4, 3)), keras.layers.LSTM(5)])
    assert "exclude" not in document_for(tmp_path, only)["steps"][0]["prune"]
    layers = [keras.layers.Dense(8), keras.layers.Dense(2, name="end, [1]")]
    document_for(tmp_path, keras.Sequential([keras.Input((6,)), *layers]))
    found, _ = call("net.keras")
    assert [target.name for target in plan(found).steps[0].targets] == [f"{layers[0].name}/kernel"]


def test_a_mistake_of_the_plan_does_not_name_the_file_that_is_removed(tmp_path, monkeypatch):
    def plan_with_mistake(recipe):
        raise RecipeError("no.", str(tmp_path / ".unfinished-mine.yaml"), 3, 4)

    monkeypatch.setattr("prunekit.recipe.start.starting_recipe.plan", plan_with_mistake)
    with pytest.raises(RecipeError, match=r"^no\.$"):
        write_starting_recipe(Start(None, "digits", None, tmp_path / "mine.yaml"))


REMOVED = ["train", "shrink", "finetune"]
FOR_GOALS = {
    "phone": ([*REMOVED, *CHANGES], {"channels": 0.5}, {"$final", "formats: [keras, litert]"}),
    "microcontroller": ([*REMOVED, "export", "quantize", "expect"], {"channels": 0.25}, {"full_integer: true"}),
    "server": ([*REMOVED, "export", "quantize", "expect"], {"macs": 0.5}, {"activation_bits: 8"}),
}


@tensorflow_only
@pytest.mark.parametrize(("goal", "expected"), FOR_GOALS.items(), ids=FOR_GOALS)
def test_a_goal_has_the_steps_that_pay_there(call, goal, expected):
    kinds, removal, words = expected
    found, text = call("digits-cnn", "--data", "digits", "--goal", goal)
    assert [step.kind for step in found.steps] == kinds
    assert found.steps[1].settings.model_dump(include=set(removal)) == removal
    assert all(word in text for word in words) and "dynamic" not in text


def test_every_goal_is_an_option_of_the_command():
    (option,) = [one for one in init.params if one.name == "goal"]
    assert tuple(option.type.choices) == GOALS == tuple(FOR_GOALS)


@tensorflow_only
def test_a_model_without_removable_channels_keeps_its_size_and_says_why(tmp_path, call):
    keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "softmax")]).save(tmp_path / "net.keras")
    np.savez(tmp_path / "data.npz", x=np.zeros((60, 6), "float32"), y=np.arange(60) % 3)
    found, text = call("net.keras", "--data", "data.npz", "--goal", "microcontroller")
    assert [step.kind for step in found.steps] == ["export", "quantize", "expect"]
    assert "# - shrink: no channel of this model can be removed" in text


@tensorflow_only
def test_layers_without_integers_are_refused_for_a_microcontroller(run, tmp_path):
    layers = [keras.layers.LSTM(4, name="memory"), keras.layers.Dense(3, "softmax")]
    keras.Sequential([keras.Input((None, 6)), *layers]).save(tmp_path / "net.keras")
    np.savez(tmp_path / "data.npz", x=np.zeros((60, 5, 6), "float32"), y=np.arange(60) % 3)
    result = run("init", "net.keras", "--data", "data.npz", "--goal", "microcontroller")
    assert_mistake(result, "a microcontroller needs a model of integers alone: ")
    assert "memory" in result[2]


def test_one_hot_labels_and_several_outputs(call, tmp_path):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,), name="x")
    hidden = keras.layers.Dense(8, name="hidden")(inputs)
    outputs = [keras.layers.Dense(3, "softmax", name="kind")(hidden), keras.layers.Dense(1, name="size")(hidden)]
    keras.Model(inputs, outputs).save(tmp_path / "net.keras")
    rows = {"kind": np.eye(3, dtype="float32")[np.arange(60) % 3], "size": np.linspace(0, 9, 60, dtype="float32")}
    import tensorflow as tf

    x = np.random.default_rng(1).normal(size=(60, 6)).astype("float32")
    tf.data.Dataset.from_tensor_slices((x, rows)).save(str(tmp_path / "rows"))
    found, _ = call("net.keras", "--data", "rows")
    assert found.compile.loss == {"kind": "categorical_crossentropy", "size": "mse"}
    assert found.compile.metrics == {"kind": ("accuracy",), "size": ("mae",)}
    assert found.steps[-1].settings.drops == {"kind_accuracy": 0.1}


def test_images_are_read_in_the_size_of_the_model(call, tmp_path):
    write_images(tmp_path / "photos", classes=("cat", "dog"))
    saved(tmp_path / "net.keras", (9, 7, 3), 2)
    found, text = call("net.keras", "--data", "photos")
    assert (found.data.size, found.data.color_mode) == ((9, 7), "rgb")
    assert "Rescaling" in text
    saved(tmp_path / "scaling.keras", (9, 7, 1), 2, before=[keras.layers.Rescaling(1 / 255)])
    found, text = call("scaling.keras", "--data", "photos")
    assert found.data.color_mode == "grayscale" and "Rescaling" not in text


@pytest.mark.parametrize(
    ("model", "name"), [((), "MobileNetV2"), pytest.param(("MobileNet",), "MobileNet", marks=pytest.mark.thorough)]
)
def test_an_application_for_images_has_their_classes_and_is_trained_first(call, tmp_path, model, name):
    write_images(tmp_path / "photos", classes=("cat", "dog", "fox"))
    (tmp_path / "photos" / ".cache").mkdir()
    found, text = call(*model, "--data", "photos")
    assert (found.model.application, found.model.classes, found.model.weights) == (name, 3, None)
    assert found.model.input_shape == (*found.data.size, 3) == (96, 96, 3)
    assert [step.kind for step in found.steps] == ["train", *CHANGES]
    assert "Rescaling" in text


def test_notes_of_the_plan_are_told(run, tmp_path):
    saved(tmp_path / "net.keras", (9, 7, 3), 2)
    code, _, err = run("init", "net.keras", "--data", str(write_images(tmp_path / "photos", classes=("cat",))))
    assert code == 0 and "training labels are 0: no training learns from them." in err


def test_a_model_of_open_input_sizes_is_pruned_without_an_export(call, tmp_path):
    sequence = [keras.Input((None, 5)), keras.layers.Conv1D(4, 3, name="scan"), keras.layers.Dense(2, name="end")]
    keras.Sequential(sequence).save(tmp_path / "net.keras")
    found, text = call("net.keras")
    assert [step.kind for step in found.steps] == ["prune"]
    assert "# needs data: the model has inputs of an open size" in text


def test_a_csv_file_needs_the_column_of_the_label(call, run, tmp_path):
    write_csv(tmp_path / "houses.csv", ["rooms", "area", "price"], [[i, 2 * i, i / 4] for i in range(40)])
    saved(tmp_path / "net.keras", (2,), 1)
    found, _ = call("net.keras", "--data", "houses.csv", "--label", "price")
    assert (found.data.label, found.compile.loss) == ("price", "mse")
    assert_mistake(
        run("init", "gone.keras", "--data", "houses.csv"), "name it with --label COLUMN. Columns: rooms, area, price."
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.keras"], "the model gone.keras does not exist. Expected a .keras file, a built-in model (digits-cnn"),
        (["--data", "houses.csv", "--label", "price"], "init needs a model for the data 'houses.csv'"),
        (["--data", "houses.csv"], "the data file houses.csv does not exist."),
        (["--data", "."], "must hold one folder of images for each class. Received: no folder in it."),
        (["Mobilenet"], "the model Mobilenet does not exist. Did you mean 'MobileNet'?"),
        (["MobileNetV2"], "init needs a folder of images for MobileNetV2, which gives the number of classes: add"),
        (["MobileNetV2", "--data", "digits"], "classes: add --data FOLDER. Received: --data digits."),
        (["digits-cnn", "--data", "gone"], "Received: gone, which is no folder."),
        (["digits-cnn", "--data", "diabetes"], "does not accept the inputs of diabetes: "),
        (["net.keras", "--goal", "phone"], "the model net.keras does not exist."),
        (["digits-cnn", "--goal", "server"], "the steps for a server train, and need data: add --data DATA."),
        (["digits-cnn", "--label", "x"], "--label needs --data."),
        (["digits-cnn", "--data", "digits", "--label", "x"], "--label is for CSV files and saved data sets."),
        (["-o", "mine.txt"], "a recipe is a .yaml file. Received: -o mine.txt."),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(run, tmp_path, arguments, message):
    assert_mistake(run("init", *arguments), message)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_recipe_is_kept(run, tmp_path):
    (tmp_path / "recipe.yaml").write_text("precious")
    assert_mistake(run("init"), "recipe.yaml exists already. Pass --force to replace it, or -o FILE.yaml.")
    assert (tmp_path / "recipe.yaml").read_text() == "precious"

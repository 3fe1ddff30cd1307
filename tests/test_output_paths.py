"""Files and folders to write: what cannot be written is refused in one line, what is read is never replaced."""

import os
from pathlib import Path

import keras
import numpy as np
import pytest
from command_lines import assert_mistake

import prunekit as pk
from prunekit.core.runtime.partial_files import replace_file, write_problem
from prunekit.recipe.run.runner import RecipeError

# A folder below a file, a file below a folder of a virtual file system, and a name that no file system takes.
PLACES = ["file/new", "/proc/new", "/proc/gone/new", "x" * 300]
RECIPE = {"version": 1, "model": {"builtin": "digits-cnn"}, "steps": [{"prune": {"sparsity": 0.5}}]}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A model with its data in the working directory, beside a file."""
    monkeypatch.chdir(tmp_path)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    random = np.random.default_rng(0)
    x, y = random.normal(size=(30, 6)).astype("float32"), random.integers(0, 3, 30)
    model.save("net.keras")
    np.savez("d.npz", x=x, y=y)
    Path("file").write_text("precious")
    Path("r.yaml").write_text(
        "version: 1\nvariables: {sparsity: 0.5}\nsteps: [prune: {sparsity: $sparsity}, export: {formats: [keras]}]\n"
    )
    return model, x, y


def of_python(name, model, x, y, place):
    """Calls one of the functions that write."""
    if name.startswith("quantized"):
        pk.quantize(keras.models.clone_model(model), x, activation_bits="float").export(f"{place}{name[9:]}")
    elif name == "sensitivity":
        pk.sensitivity(model, (x, y), sparsity=0.5, output=place)
    elif name == "compress":
        pk.compress(RECIPE, output=place)
    elif name == "sweep":
        recipe = {**RECIPE, "variables": {"final": 0.5}, "steps": [{"prune": {"sparsity": "$final"}}]}
        pk.sweep(recipe, {"final": [0.5, 0.6]}, place)
    else:
        pk.reports.signal_picture(pk.initializers.signal_report(model, x), f"{place}.png")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no virtual file system")
@pytest.mark.parametrize("place", PLACES, ids=["below a file", "virtual", "virtual folder", "long name"])
@pytest.mark.parametrize("name", ["quantized.keras", "sensitivity", "compress", "sweep", "signal_picture"])
def test_functions_refuse_a_place_that_cannot_be_written(files, tmp_path, name, place):
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="cannot be written: ") as refused:
        of_python(name, *files, place)
    message = str(refused.value)
    assert place in message and "partial" not in message and "Errno" not in message and "\n" not in message
    assert sorted(tmp_path.rglob("*")) == before


COMMANDS = {
    "prune": ["prune", "net.keras", "--sparsity", "0.5", "-o", "{}.keras"],
    "quantize": ["quantize", "net.keras", "--data", "d.npz", "-o", "{}.tflite"],
    "init": ["init", "net.keras", "--data", "d.npz", "-o", "{}.yaml"],
    "recipes": ["recipes", "digits", "-o", "{}.yaml"],
    "sensitivity": ["sensitivity", "net.keras", "--data", "d.npz", "--sparsity", "0.5", "-o", "{}"],
    "compress": ["compress", "r.yaml", "--model", "net.keras", "-o", "{}"],
    "sweep": ["sweep", "r.yaml", "--over", "sparsity=0.5,0.6", "--model", "net.keras", "-o", "{}"],
    "export": ["export", "net.keras", "--data", "d.npz", "-o", "{}.tflite"],
    "export into a folder": ["export", "net.keras", "--data", "d.npz", "--format", "keras", "-o", "{}"],
}


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no virtual file system")
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_commands_refuse_a_place_that_cannot_be_written(files, run, tmp_path, words):
    before = sorted(tmp_path.rglob("*"))
    for place in PLACES[:3]:
        path = words[-1].format(place)
        assert_mistake(run(*words[:-1], path), f"{path} cannot be written: ")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_folder_that_is_made_is_told(files, run, words):
    made = "new/one" if words[0] in ("sensitivity", "sweep") or words[-1] == "{}" and words[0] == "export" else "new"
    code, _, err = run(*words[:-1], words[-1].format("new/one"))
    assert code == 0 and err.count(f"note: the folder {made} does not exist; it is made.\n") == 1
    assert err.count("does not exist") == 1


def test_errors_of_writing_name_the_path_alone(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "new", tmp_path):
        with pytest.raises(OSError, match="director") as error:
            replace_file(path, b"x")
        assert str(error.value).endswith(f": '{path}'")


def test_a_place_that_can_be_written_is_left_as_it_is(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "new", tmp_path / "gone" / "new"):
        assert write_problem(path) is None
    assert write_problem(tmp_path / "gone", folder=True) is None and write_problem(tmp_path, folder=True) is None
    assert write_problem(tmp_path) == "it is a folder"
    assert write_problem(tmp_path / "file", folder=True) == f"{tmp_path / 'file'} is not a folder"
    assert os.listdir(tmp_path) == ["file"]


class TestSourcesAreKept:
    """A run never replaces what it reads."""

    @pytest.fixture
    def older(self, files):
        """A run directory, whose model the next run starts from."""
        pk.compress(RECIPE | {"model": {"file": "net.keras"}}, output="older")
        return Path("older/model.keras")

    def test_a_run_into_the_folder_of_its_model_is_refused(self, older, run):
        before = older.read_bytes()
        words = ("compress", "r.yaml", "--model", older, "-o", "older")
        assert_mistake(run(*words, "--force"), "the run reads ", "(model.file), which lies in the output directory")
        Path("link").symlink_to("older")
        with pytest.raises(RecipeError, match="Choose another output directory, or move that file"):
            pk.compress(RECIPE | {"model": {"file": str(older)}}, output="link", force=True)
        assert older.read_bytes() == before
        assert run("compress", "r.yaml", "--model", older, "-o", "other")[0] == 0

    def test_a_sweep_into_the_folders_of_its_points_is_refused(self, files, run):
        words = ("sweep", "r.yaml", "--over", "sparsity=0.5,0.6", "-o", "swept")
        assert run(*words, "--model", "net.keras")[0] == 0
        model = next(Path("swept").rglob("model.keras"))
        before = model.read_bytes()
        assert_mistake(run(*words, "--model", model, "--force"), "which lies in the output directory")
        assert model.read_bytes() == before

    def test_files_of_others_among_the_exports_are_kept(self, older):
        Path("older/exports/notes.txt").write_text("precious")
        with pytest.raises(RecipeError, match="holds 'exports/notes.txt', which no run has written"):
            pk.compress(RECIPE, output="older", force=True)

    def test_an_export_over_its_model_is_refused(self, files, run):
        before = Path("net.keras").read_bytes()
        words = ("export", "net.keras", "--data", "d.npz", "--force")
        assert_mistake(run(*words, "-o", "net.keras"), "-o names a new file; MODEL is another one.")
        assert_mistake(run(*words, "-o", ".", "--name", "net", "--format", "keras"), "MODEL is another one.")
        assert Path("net.keras").read_bytes() == before

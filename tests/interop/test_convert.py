"""Models of tensorflow-model-optimization converted by `prunekit convert`, in processes and places of every kind."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import keras
import legacy_models as old
import numpy as np
import pytest
from legacy_models import answers

import prunekit as pk
from prunekit.interop.tfmot import convert, read_model

SCHEDULE = pk.schedules.PolynomialDecay(0.2, 0.8, 0, 20, frequency=5)


@pytest.fixture(scope="module")
def halfway(tmp_path_factory):
    """A pruned network after 8 of 20 steps, and its three files."""
    return old.saved_halfway(tmp_path_factory.mktemp("halfway"))


def python(code, **environment):
    root = Path(pk.__file__).parent.parent
    variables = {**os.environ, "PYTHONPATH": str(root), **environment}
    return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=240)


@pytest.mark.thorough
def test_neither_importing_nor_reading_changes_the_environment_or_what_keras_is(halfway):
    done = python(
        "import os, keras, tensorflow as tf\n"
        "before = dict(os.environ)\n"
        "from prunekit.interop import tfmot\n"
        "assert not {'tf_keras', 'tensorflow_model_optimization'} & set(__import__('sys').modules)\n"
        f"tfmot.read_model({str(halfway[1]['keras'])!r})\n"
        "assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())\n"
        "assert tf.keras.__version__ == keras.__version__ and keras.__version__[0] == '3'\n"
        "assert tf.keras.layers.Dense is keras.layers.Dense\n"
        "assert keras.config.dtype_policy().name == keras.config.floatx() == 'float32'\n"
        "assert keras.layers.Dense(1).name == 'dense'\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ["tf_keras", "tensorflow_model_optimization"])
@pytest.mark.short(cases=1)
def test_a_missing_package_is_named_with_what_to_install(package, halfway, run, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"no {package} here.*Install them: pip install 'prunekit\[legacy\]'"):
        read_model(halfway[1]["h5"])
    code, out, err = run("convert", halfway[1]["h5"], "new.keras")
    assert (code, out) == (2, "") and "prunekit[legacy]" in err and err.count("\n") == 1


def test_the_command_converts_and_says_what_it_read(halfway, run):
    code, out, err = run("convert", halfway[1]["h5"], "new.keras")
    assert (code, err) == (0, "")
    assert "sparsity 0.5" in out and "at step 8" in out and str(SCHEDULE) in out and "Written to new.keras" in out
    model = keras.models.load_model("new.keras")
    assert int(model.optimizer.iterations) == 8
    np.testing.assert_allclose(answers(model), answers(halfway[0]), atol=1e-6)
    with zipfile.ZipFile("new.keras") as archive:
        assert b"prunekit" not in archive.read("config.json")


def test_the_command_prints_json_for_programs(halfway, run):
    code, out, _ = run("convert", halfway[1]["savedmodel"], "new.keras", "--json")
    report = json.loads(out)
    assert code == 0 and report["path"] == "new.keras" and report["step"] == 8 and report["not_carried"] == []
    assert report["schedules"]["conv/kernel"] == str(SCHEDULE)


def test_the_command_replaces_nothing_unless_forced_and_leaves_no_half_of_a_file(halfway, run, tmp_path, monkeypatch):
    Path("new.keras").write_text("precious")
    code, out, err = run("convert", halfway[1]["h5"], "new.keras")
    assert (code, out) == (2, "") and "new.keras exists already; --force" in err and err.count("\n") == 1
    assert Path("new.keras").read_text() == "precious"
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device", "new.keras"))
        )
        assert run("convert", halfway[1]["h5"], "new.keras", "--force")[0] == 2
    assert Path("new.keras").read_text() == "precious" and [p.name for p in tmp_path.iterdir()] == ["new.keras"]
    assert run("convert", halfway[1]["h5"], "new.keras", "--force")[0] == 0
    assert keras.models.load_model("new.keras").name == "small"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("gone.h5", "new.keras"), "gone.h5: no such file"),
        (("gone.h5", "new.h5"), "must be a .keras file. Received: new.h5"),
        (("model.pkl", "new.keras"), "an unsupported file type"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(run, words, message):
    Path("model.pkl").write_bytes(b"\x80\x04.")
    code, out, err = run("convert", *words)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("file/new.keras", "file/new.keras cannot be written: file is not a folder"),
        ("/dev/null/new.keras", "/dev/null is not a folder"),
        ("/proc/nowhere/new.keras", "/proc/nowhere/new.keras cannot be written: no file can be made there"),
        ("circle.keras/new.keras", "circle.keras is not a folder"),
        ("", "must be a .keras file"),
        (".", "must be a .keras file"),
        ("old.h5", "must be a .keras file. Received: old.h5"),
        ("there.keras", "there.keras exists already; --force (force=True) replaces it"),
        ("circle.keras", "circle.keras exists already; --force"),
        ("folder.keras", "folder.keras exists already."),
        ("folder.keras --force", "folder.keras exists already."),
        ("x" * 300 + ".keras", "File name too long"),
        ("x/" * 3000 + "new.keras", "File name too long"),
    ],
    ids=lambda value: value[:24] or "empty",
)
def test_a_place_that_cannot_be_written_is_reported_and_nothing_is_written(
    halfway, run, tmp_path, monkeypatch, new, message
):
    Path("there.keras").write_text("precious")
    Path("file").write_text("precious")
    Path("folder.keras").mkdir()
    Path("circle.keras").symlink_to("circle.keras")
    shutil.copy(halfway[1]["h5"], "old.h5")
    before = sorted(tmp_path.rglob("*"))
    if "too long" not in message:
        # The old file may be large: what can be known before is told before.
        monkeypatch.setattr("prunekit.interop.tfmot.conversion.read_file", None)
    code, out, err = run("convert", "old.h5", *new.split(" "))
    assert (code, out) == (2, "") and err.startswith("error: ") and message in err and err.count("\n") == 1
    assert new.split(" ")[0][:100] in err and sorted(tmp_path.rglob("*")) == before
    assert Path("there.keras").read_text() == Path("file").read_text() == "precious"


@pytest.mark.parametrize("new", ["old.keras", "link.keras", "hard.keras"])
def test_a_file_is_never_converted_into_itself(halfway, run, monkeypatch, new):
    shutil.copy(halfway[1]["keras"], "old.keras")
    Path("link.keras").symlink_to("old.keras")
    Path("hard.keras").hardlink_to("old.keras")
    before = Path("old.keras").read_bytes()
    monkeypatch.setattr("prunekit.interop.tfmot.conversion.read_file", None)
    code, out, err = run("convert", "old.keras", new, "--force")
    assert (code, out) == (2, "") and f"{new} is the input file" in err and err.count("\n") == 1
    assert Path("old.keras").read_bytes() == before


def test_convert_is_the_command_in_python(halfway, tmp_path):
    converted = convert(halfway[1]["savedmodel"], tmp_path / "new.keras")
    assert converted.step == 8 and (tmp_path / "new.keras").is_file()
    with pytest.raises(ValueError, match="exists already"):
        convert(halfway[1]["savedmodel"], tmp_path / "new.keras")

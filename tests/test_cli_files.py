"""The command line on files: reports, recipes, models, and a whole run in the words of a user."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import ENVIRONMENT, assert_mistake


class TestReport:
    def test_of_an_unfinished_run_it_is_said_how_to_continue(self, run, monkeypatch):
        monkeypatch.setattr(
            "prunekit.recipe.state.directory.kept_checkpoints_line", lambda output: f"Kept of {output}: --resume.\n"
        )
        assert_mistake(
            run("report", "mine"), "mine: not a run directory (no report.json in it). Kept of mine: --resume."
        )

    @pytest.mark.parametrize("text", ["", "{", "[1]", '{"title": 3}', "null", "\x00", "[" * 100_000])
    def test_a_file_that_is_no_report_is_a_mistake(self, run, tmp_path, text):
        (tmp_path / "report.json").write_text(text)
        assert_mistake(run("report", tmp_path), "report.json: not a report")

    def test_json_prints_the_file(self, run, tmp_path):
        (tmp_path / "report.json").write_text('{"title": "x"}')
        code, out, _ = run("report", tmp_path, "--json")
        assert (code, json.loads(out)) == (0, {"title": "x"})


class TestRecipes:
    def test_they_are_listed(self, run):
        code, out, _ = run("recipes")
        assert code == 0
        assert [line.split()[0] for line in out.splitlines()] == [
            *("diabetes", "digits", "fashion-cnn", "fashion-cnn-95", "fashion-mlp", "fashion-mlp-98"),
            *("four-bits-digits", "one-shot", "packed-digits", "pcqat-digits", "pqat-digits", "smallest-digits"),
        ]

    def test_json_gives_their_paths(self, run):
        rows = json.loads(run("recipes", "--json")[1])
        assert all(Path(row["path"]).is_file() and row["description"] for row in rows)

    def test_one_is_printed_and_copied(self, run, tmp_path):
        text = run("recipes", "digits")[1]
        assert text.startswith("#") and "version: 1" in text
        assert run("recipes", "digits", "-o", "mine.yaml")[0] == 0
        assert Path("mine.yaml").read_text() == text
        assert run("check", "mine.yaml")[0] == 0

    def test_a_copy_replaces_nothing_unless_forced(self, run):
        Path("mine.yaml").write_text("precious")
        assert_mistake(run("recipes", "digits", "-o", "mine.yaml"), "exists already. Pass --force to replace it")
        assert Path("mine.yaml").read_text() == "precious"
        assert run("recipes", "digits", "-o", "mine.yaml", "--force")[0] == 0

    def test_a_copy_into_a_folder_keeps_its_name(self, run):
        Path("folder").mkdir()
        run("recipes", "digits", "-o", "folder")
        run("recipes", "digits", "-o", "new/")
        assert Path("folder/digits.yaml").is_file() and Path("new/digits.yaml").is_file()


TINY = """
version: 1
name: tiny
model: {file: in.keras}
data: {npz: data.npz}
compile: {optimizer: adam, from_logits: true, batch_size: 16}
steps:
  - train: {epochs: 1}
  - prune:
      allocation: uniform
      epochs: 2
      schedule: {type: polynomial_decay, final_sparsity: 0.75, end: {epochs: 2}, frequency: 3}
  - export: {formats: [keras]}
  - expect: {sparsity: {min: 0.75, max: 0.75}}
"""


@pytest.mark.every_backend
def test_a_run_from_recipe_to_report_in_the_words_of_a_user(run, tmp_path, perceptron, samples):
    import numpy as np

    x, y = samples
    np.savez(tmp_path / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    perceptron.save(tmp_path / "in.keras")
    (tmp_path / "tiny.yaml").write_text(TINY)
    code, out, _ = run("compress", "tiny.yaml", "--dry-run", "--json")
    assert (code, json.loads(out)["name"]) == (0, "tiny") and not (tmp_path / "run").exists()
    code, out, err = run("compress", "tiny.yaml", "-o", "run", "--json")
    assert code == 0, err
    assert json.loads(out)["met"] and "[2/4 prune] epoch 2/2" in err
    zeros = {"hidden/kernel": 96, "logits/kernel": 48}
    for file in ("run/model.keras", "run/exports/model.keras"):
        rows = json.loads(run("inspect", file, "--json")[1])["weights"]
        assert {row["name"]: row["zeros"] for row in rows if row["name"] in zeros} == zeros
    assert run("verify", "run")[:2] == (0, "run: reproduced, bit for bit.\n")
    assert json.loads(run("report", "run", "--json")[1])["after"]["targets"] == list(zeros)


class TestInspect:
    @pytest.mark.every_backend
    def test_weights_are_shown(self, run, tmp_path):
        import keras

        keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="fc")]).save(tmp_path / "m.keras")
        code, out, _ = run("inspect", "m.keras")
        assert code == 0 and "fc/kernel" in out
        code, out, _ = run("inspect", "m.keras", "--json")
        assert code == 0
        assert {row["name"]: row["size"] for row in json.loads(out)["weights"]} == {"fc/kernel": 12, "fc/bias": 3}

    def test_the_size_of_open_inputs_is_given_and_unknown_figures_are_no_zeros(self, run, tmp_path):
        import keras

        tokens = keras.Input((None,), dtype="int32", name="tokens")
        hidden = keras.layers.Dense(3, name="fc")(keras.layers.Embedding(9, 4, name="table")(tokens))
        keras.Model({"tokens": tokens}, hidden).save(tmp_path / "m.keras")
        _, out, _ = run("inspect", "m.keras")
        cells = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
        assert cells["fc/kernel"][-4:-2] == ["–", "–"]
        assert cells["Whole"][-4] == "–"
        assert "note: MACs are not known." in out and "--input-shape 1,128 on the command line" in out
        for shape in ("1,5", "tokens=1,5"):
            code, out, _ = run("inspect", "m.keras", "--json", "--input-shape", shape)
            found = json.loads(out)
            assert (code, found["macs"], found["macs_complete"], found["notes"]) == (0, 60, True, [])
        assert_mistake(run("inspect", "m.keras", "--input-shape", "token=1,5"), "Did you mean 'tokens'?")
        assert_mistake(run("inspect", "m.keras", "--input-shape", "1x5"), "expected sizes with the batch first")
        assert_mistake(run("inspect", "m.keras", "--input-shape", "1,5", "--input-shape", "1,6"), "expected name=value")

    @pytest.mark.parametrize("raw", [b"", b"PK\x03\x04", b"\x89HDF\r\n"], ids=["empty", "broken zip", "HDF5"])
    def test_a_file_that_is_no_model_is_a_mistake(self, run, tmp_path, raw):
        (tmp_path / "m.keras").write_bytes(raw)
        assert_mistake(run("inspect", "m.keras"), "m.keras")

    @pytest.mark.short(cases=1)
    @pytest.mark.parametrize("level", [{}, {"TF_CPP_MIN_LOG_LEVEL": "3"}], ids=["unset", "3"])
    def test_tensorflow_says_nothing_of_its_own(self, tmp_path, level):
        (tmp_path / "m.keras").write_bytes(b"no model")
        environment = {name: value for name, value in ENVIRONMENT.items() if name != "TF_CPP_MIN_LOG_LEVEL"} | level
        command = [sys.executable, "-m", "prunekit.cli", "inspect", "m.keras"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert_mistake((done.returncode, done.stdout, done.stderr), "m.keras")

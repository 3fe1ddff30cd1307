"""The command factorize."""

import json

import keras
import numpy as np
import pytest
from command_lines import assert_mistake
from networks import dense_network


@pytest.fixture
def stored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dense_network(64, seed=1, hidden=48, out=10).save(tmp_path / "net.keras")
    return "net.keras"


def test_the_new_file_has_two_layers_and_the_report_is_printed(run, stored):
    code, out, _ = run("factorize", stored, "-o", "small.keras", "--rank", "hidden=8")
    assert code == 0 and "hidden/kernel" in out and out.splitlines()[-1].endswith("Written to small.keras")
    model = keras.saving.load_model("small.keras", compile=False)
    assert tuple(model.get_layer("hidden").kernel.shape) == (8, 48)


def test_json_has_the_same(run, stored):
    rng = np.random.default_rng(0)
    np.savez("data.npz", x=rng.normal(size=(80, 64)).astype("float32"), y=rng.integers(0, 10, 80))
    code, out, _ = run("factorize", stored, "-o", "small.keras", "--parameters", "0.6", "--data", "data.npz", "--json")
    found = json.loads(out)
    assert (code, found["path"]) == (0, "small.keras")
    before, after = found["report"]["parameters"]
    assert after <= 0.6 * before and found["report"]["damage"]["examples"] == 80


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["Pass exactly one of", "Received: none"]),
        (["--rank", "4", "--energy", "0.9"], ["--rank and --energy"]),
        (["--rank", "many"], ["--rank"]),
        (["--parameters", "60"], ["share that is left", "pass 0.6"]),
        (["--rank", "hiden=4"], ["hiden"]),
        (["--rank", "4", "--set", "correct_bias=false"], ["correct_bias", "correct_biases"]),
    ],
)
def test_a_mistake_is_one_line(run, stored, arguments, words):
    assert_mistake(run("factorize", stored, "-o", "small.keras", *arguments), *words)


def test_a_form_makes_the_layers_of_convolutions(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keras.Sequential([keras.Input((9, 9, 4)), keras.layers.Conv2D(16, 3, name="conv")]).save("net.keras")
    code, out, _ = run("factorize", "net.keras", "-o", "small.keras", "--rank", "3", "--form", "separable")
    assert code == 0 and "separable" in out
    model = keras.saving.load_model("small.keras", compile=False)
    assert tuple(model.get_layer("conv").kernel.shape) == (1, 3, 3, 16)
    assert_mistake(run("factorize", "net.keras", "-o", "s.keras", "--rank", "3", "--form", "cp"), "--form", "tucker")

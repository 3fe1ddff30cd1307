"""The command cluster."""

import json

import keras
import numpy as np
import pytest
from command_lines import assert_mistake
from networks import dense_network


@pytest.fixture
def stored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dense_network(64, seed=1, hidden=24, out=10).save(tmp_path / "net.keras")
    return "net.keras"


def test_the_new_file_has_few_values_and_the_report_is_printed(run, stored):
    code, out, _ = run("cluster", stored, "-o", "small.keras", "--clusters", "4", "--granularity", "2")
    assert code == 0 and "hidden/kernel" in out and out.splitlines()[-1].endswith("Written to small.keras")
    kernel = keras.saving.load_model("small.keras").get_layer("hidden").kernel.numpy()
    assert max(len(np.unique(part)) for part in np.split(kernel, 12, axis=1)) == 4


def test_json_has_the_same(run, stored):
    rng = np.random.default_rng(0)
    np.savez("data.npz", x=rng.normal(size=(80, 64)).astype("float32"), y=rng.integers(0, 10, 80))
    code, out, _ = run("cluster", stored, "-o", "small.keras", "--data", "data.npz", "--examples", "64", "--json")
    found = json.loads(out)
    assert (code, found["path"], found["report"]["method"]) == (0, "small.keras", "gptq")
    assert [row["values"] for row in found["report"]["weights"]] == [16, 16]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--clusters", "1"], ["--clusters"]),
        (["--granularity", "filter"], ['`granularity` is "tensor", "channel" or a number of channels']),
        (["--include", "hiden"], ["'hiden' in `include`", "hidden"]),
        (["--set", "correct_bias=true"], ["correct_bias", "correct_biases"]),
        (["--method", "gptq"], ['method="gptq" reads calibration data']),
    ],
)
def test_a_mistake_is_one_line(run, stored, arguments, words):
    assert_mistake(run("cluster", stored, "-o", "small.keras", *arguments), *words)

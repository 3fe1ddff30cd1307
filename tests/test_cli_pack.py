"""The commands pack and unpack."""

import json

import keras
import numpy as np
import pytest
from command_lines import assert_mistake
from networks import dense_network


@pytest.fixture
def stored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dense_network(16, seed=1, hidden=12, out=4).save(tmp_path / "net.keras")
    return "net.keras"


def test_a_file_is_packed_and_restored(run, stored):
    code, out, _ = run("pack", stored, "-o", "net.pack")
    assert code == 0 and "gzip -9" in out and out.splitlines()[-1].endswith("Written to net.pack")
    code, out, _ = run("unpack", "net.pack", "-o", "back.keras")
    assert code == 0 and out.startswith("Written to back.keras (")
    for before, after in zip(
        *(keras.saving.load_model(one).get_weights() for one in (stored, "back.keras")), strict=True
    ):
        np.testing.assert_array_equal(before, after)


def test_json_has_the_same(run, stored):
    code, out, _ = run("pack", stored, "-o", "net.pack", "--json")
    found = json.loads(out)
    assert (code, found["path"], found["report"]["kind"]) == (0, "net.pack", "keras")
    code, out, _ = run("unpack", "net.pack", "-o", "back.keras", "--json")
    assert (code, json.loads(out)["path"]) == (0, "back.keras")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pack", "other.keras", "-o", "net.pack"], ["other.keras: no such file"]),
        (["pack", ".", "-o", "net.pack"], ["MODEL takes the name of a .tflite or .keras file", "the folder '.'"]),
        (["pack", "net.keras", "-o", "net.tflite"], ["-o names a packed file"]),
        (["pack", "net.keras", "-o", "net.keras", "--force"], ["-o names a new file"]),
        (["unpack", "net.keras", "-o", "back.keras"], ["does not begin with the mark of a packed model"]),
        (["unpack", "other.pack", "-o", "back.keras"], ["other.pack: no such file"]),
    ],
)
def test_a_mistake_is_one_line(run, stored, arguments, words):
    assert_mistake(run(*arguments), *words)

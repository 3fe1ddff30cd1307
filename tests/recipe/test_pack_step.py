"""The recipe step `pack`: mistakes, the plan, and files beside those that were exported."""

import pytest
from networks import dense_network
from tiny_recipes import mistake_in, recipe

import prunekit as pk
from prunekit.recipe.run.runner import compress, plan

EXPORT = {"export": {"formats": ["keras", "litert"], "name": "small"}}


def test_mistakes_have_their_place(tmp_path):
    found = mistake_in("pack: {}", tmp_path)
    assert "there is no file to pack: no export or quantize step comes before" in found
    found = mistake_in("export: {formats: [keras]}\n  - pack: {formats: [litert]}", tmp_path)
    assert "'litert' is not exported before this step (exported so far: keras)" in found


def network():
    return dense_network(8, seed=5, hidden=32, logits=4)


def test_every_exported_file_is_packed_and_comes_back(tmp_path, pairs):
    steps = (EXPORT, {"pack": {}})
    assert plan(recipe(*steps), network(), pairs).steps[1].text == "all exported files"
    result = compress(recipe(*steps), network(), pairs, tmp_path / "run")
    for name in ("small.keras", "small.tflite"):
        packed = tmp_path / "run" / "exports" / f"{name}.pack"
        back = pk.unpack(packed, tmp_path / f"back{name[5:]}")
        if name.endswith(".tflite"):
            assert back.read_bytes() == (tmp_path / "run" / "exports" / name).read_bytes()
    (section,) = result.report.to_dict()["steps"][1]["sections"]
    assert section["title"] == "Packed files"
    assert [row[0] for row in section["rows"]] == ["small.keras.pack", "small.tflite.pack"]


@pytest.mark.every_backend
def test_only_the_formats_named_are_packed(tmp_path, pairs):
    steps = ({"export": {"formats": ["keras"]}}, {"pack": {"formats": ["keras"]}})
    compress(recipe(*steps), network(), pairs, tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run" / "exports").iterdir()) == ["model.keras", "model.keras.pack"]

"""The recipe step `pack`: mistakes, the plan, and files beside those that were exported."""

import pytest
from networks import dense_network
from tiny_recipes import mistake_in, recipe

import prunekit as pk
from prunekit.delivery.reports.formatting import size
from prunekit.delivery.reports.report_sections import cards
from prunekit.recipe.run.runner import compress, plan

EXPORT = {"export": {"formats": ["keras", "litert"], "name": "small"}}


def test_mistakes_have_their_place(tmp_path):
    found = mistake_in("pack: {}", tmp_path)
    assert "there is no file to pack: no export or quantize step comes before" in found
    found = mistake_in("export: {formats: [keras]}\n  - pack: {formats: [litert]}", tmp_path)
    assert "'litert' is not exported before this step (exported so far: keras)" in found
    found = mistake_in("export: {formats: [keras]}\n  - expect: {bytes: {keras: {packed_max: 9}}}", tmp_path)
    assert "no pack step before this one packs 'keras'" in found


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


def test_bytes_of_the_packed_file_are_expected(tmp_path, pairs):
    bound = {"expect": {"bytes": {"litert": {"packed_max": 100}}}}
    with pytest.raises(pk.errors.ExpectationError, match=r"bytes of litert packed [\d,]+ is above the expected 100"):
        compress(recipe(EXPORT, {"pack": {}}, bound), network(), pairs, tmp_path / "run")
    bound["expect"]["bytes"]["litert"]["packed_max"] = 9_000
    steps = ({"prune": {"sparsity": 0.5}}, EXPORT, {"pack": {}}, bound)
    found = compress(recipe(*steps), network(), pairs, tmp_path / "met").report
    report = found.to_dict()
    rows = {row["format"]: row["packed_bytes"] for row in report["exports"]}
    exports = tmp_path / "met" / "exports"
    assert rows == {
        "keras": (exports / "small.keras.pack").stat().st_size,
        "litert": (exports / "small.tflite.pack").stat().st_size,
    }
    assert report["expectations"][0]["measured"] == rows["litert"]
    assert f" {size(rows['litert'])} packed)" in found.verdict()
    assert f", packed {size(rows['litert'])}" in str(cards(found))


@pytest.mark.every_backend
def test_only_the_formats_named_are_packed(tmp_path, pairs):
    steps = ({"export": {"formats": ["keras"]}}, {"pack": {"formats": ["keras"]}})
    compress(recipe(*steps), network(), pairs, tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run" / "exports").iterdir()) == ["model.keras", "model.keras.pack"]

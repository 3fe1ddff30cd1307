"""Speed and size of a run's models, from the recipe to the report: which models, when, and when not."""

import json

import numpy as np
import pytest
from backends import BACKEND, converts, tensorflow_only
from networks import dense_network
from tiny_recipes import Stop, prune, recipe

import prunekit as pk
from prunekit.delivery.litert.latency import ConversionError
from prunekit.delivery.pages.html_report import render_html
from prunekit.delivery.reports.run_report import RunReport
from prunekit.recipe.run.runner import compress, verify
from prunekit.recipe.state import export_samples, stages
from prunekit.recipe.state.directory import unfinished

pytestmark = converts

TRAIN = {"train": {"epochs": 1}}
SHRINK = {"shrink": {"channels": 0.5}}
FINETUNE = {"finetune": {"epochs": 1}}
EXPORT = {"export": {"formats": ["keras", "litert", "litert-sparse"]}}
WHOLE = recipe(TRAIN, SHRINK, FINETUNE, prune(exclude=["logits"]), FINETUNE, EXPORT)
NAMES = ["before", "after 2. shrink", "after 3. finetune", "after 4. prune", "litert", "litert-sparse"]
NOTHING = "Speed and size of the models were not measured: "


def network(width=32):
    return dense_network(8, seed=20, hidden=width, logits=4)


def names(report):
    return [row.name for row in report.stages]


@tensorflow_only
def test_every_model_from_the_first_removal_on_has_a_row_and_the_last_one_is_the_exported_file(pairs, tmp_path):
    result = compress(WHOLE, network(), pairs, tmp_path / "run")
    rows = dict(zip(names(result.report), result.report.stages, strict=True))
    assert list(rows) == NAMES
    assert [row.kind for row in rows.values()] == ["before", "step", "step", "step", "file", "file"]
    assert all(row.latency > 0 and row.gzip_bytes > 0 for row in rows.values())
    assert rows["before"].bytes > rows["after 2. shrink"].bytes == rows["litert"].bytes
    assert rows["litert"].bytes == (tmp_path / "run" / "exports" / "model.tflite").stat().st_size
    steps = result.report.steps
    assert rows["before"].metrics == steps[0]["metrics"]
    assert [row.metrics for row in list(rows.values())[1:4]] == [step["metrics"] for step in steps[1:4]]
    assert rows["litert"].metrics["accuracy"] == pytest.approx(result.report.metrics["accuracy_after"])
    (conditions,) = result.report.stage_notes
    assert conditions.startswith("Latency: median processor time of a call with 1 example, ")
    assert "turns of all files, one thread, ai-edge-litert" in conditions
    stored = RunReport.from_dict(json.loads((tmp_path / "run" / "report.json").read_text()))
    assert stored.stages == result.report.stages and render_html(stored).count("Speed and size</h2>") == 1
    assert not [path for path in tmp_path.rglob("*.tflite") if path.parent.name != "exports"]
    assert verify(tmp_path / "run", model=network(), data=pairs).identical
    assert not (tmp_path / "run" / "stages").exists()


@pytest.mark.thorough
@tensorflow_only
def test_without_a_removal_there_is_a_model_before_and_one_after(pairs):
    report = compress(recipe(TRAIN, prune(exclude=["logits"]), EXPORT), network(), pairs).report
    assert names(report) == ["before", "litert", "litert-sparse"]
    assert report.stages[0].bytes == report.stages[1].bytes
    assert report.stages[0].gzip_bytes > report.stages[1].gzip_bytes


@pytest.mark.thorough
@tensorflow_only
def test_a_step_that_no_export_follows_has_its_own_row(pairs):
    formats = {"export": {"formats": ["litert-dynamic-int8"]}}
    report = compress(recipe(SHRINK, formats, FINETUNE), network(), pairs).report
    assert names(report) == ["before", "after 1. shrink", "after 3. finetune", "litert-dynamic-int8"]
    assert all(row.latency for row in report.stages)


@pytest.mark.thorough
@tensorflow_only
def test_two_exports_of_one_format_are_told_apart_by_their_files(pairs):
    first, second = ({"export": {"formats": ["litert"], "name": name}} for name in ("one", "two"))
    report = compress(recipe(SHRINK, first, FINETUNE, second), network(), pairs).report
    assert names(report) == ["before", "litert, one.tflite", "litert, two.tflite"]


@tensorflow_only
def test_a_regression_is_measured_by_its_metric():
    rng = np.random.default_rng(5)
    inputs = rng.normal(size=(600, 8)).astype("float32")
    pair = inputs, inputs[:, :4] * 2
    settings = {"optimizer": "adam", "loss": "mse", "metrics": ["mae"], "batch_size": 64}
    report = compress(recipe(TRAIN, SHRINK, EXPORT, compile=settings), network(), (pair, pair)).report
    assert all(set(row.metrics) == {"mae", "loss"} for row in report.stages)
    assert len(report.stage_notes) == 1, "all 600 test examples are measured"


@tensorflow_only
def test_models_and_files_are_measured_on_the_same_test_examples(monkeypatch):
    monkeypatch.setattr(export_samples, "_MOST", 8)
    monkeypatch.setattr(export_samples, "_FEWEST", 8)
    rng = np.random.default_rng(5)
    inputs = rng.normal(size=(60, 8)).astype("float32")
    labels = (inputs @ rng.normal(size=(8, 4))).argmax(axis=1)
    # The model is right on the first examples alone, so that another set has another accuracy.
    test = inputs[:40], np.where(np.arange(40) < 8, labels[:40], (labels[:40] + 1) % 4)
    steps = {"train": {"epochs": 40, "learning_rate": 0.02}}, SHRINK, FINETUNE, FINETUNE, EXPORT, {"quantize": {}}
    report = compress(recipe(*steps), network(), ((inputs, labels), test)).report
    assert report.stage_notes[1] == (
        "Metrics of all rows: on the first 8 of 40 test examples, as the exported files are measured."
    )
    rows = {row.name: row.metrics["accuracy"] for row in report.stages}
    assert rows["before"] >= 0.75 > report.steps[0]["metrics"]["accuracy"]
    assert rows["litert"] in {index / 8 for index in range(9)} and rows["after 3. finetune"] >= 0.5
    (table,) = [one for one in report.steps[-1]["sections"] if one["title"] == "Metrics of the integer model"]
    assert ["accuracy", rows["litert"], rows["litert-integer"], rows["litert-integer"]] in [
        list(row) for row in table["rows"]
    ]


@tensorflow_only
def test_without_data_there_are_latencies_and_no_metrics():
    report = compress({"version": 1, "steps": [SHRINK, EXPORT]}, network()).report
    assert names(report) == ["before", "litert", "litert-sparse"]
    assert all(row.latency and not row.metrics for row in report.stages)


@pytest.mark.thorough
@tensorflow_only
@pytest.mark.parametrize("ends", [6, pytest.param(3, marks=pytest.mark.thorough)])
def test_an_interrupted_run_goes_on_with_the_files_that_it_has(pairs, tmp_path, ends):
    with pytest.raises(KeyboardInterrupt):
        compress(WHOLE, network(), pairs, tmp_path / "run", progress=Stop(ends))
    assert (unfinished(tmp_path / "run") / "stages" / "0.tflite").is_file()
    report = compress(WHOLE, network(), pairs, tmp_path / "run", resume=True).report
    assert names(report) == NAMES and all(row.latency for row in report.stages)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@tensorflow_only
def test_a_model_that_does_not_convert_has_a_note(pairs, monkeypatch):
    convert = stages.plain_file
    seen = []

    def second_fails(model, samples):
        seen.append(model)
        if len(seen) == 2:
            raise ConversionError("no such operation")
        return convert(model, samples)

    monkeypatch.setattr(stages, "plain_file", second_fails)
    report = compress(recipe(SHRINK, FINETUNE, FINETUNE, EXPORT), network(), pairs).report
    assert [row.bytes is None for row in report.stages] == [False, True, False, False, False]
    assert "after 1. shrink: the conversion failed: no such operation" in report.stage_notes
    assert report.stages[2].latency and report.stages[1].latency is None


@tensorflow_only
def test_a_file_that_cannot_be_timed_leaves_the_sizes(pairs, monkeypatch):
    def fails(files, inputs, seconds):
        raise stages.ScriptFailed("crashes the LiteRT interpreter (SIGSEGV)")

    monkeypatch.setattr(stages, "measured_latencies", fails)
    report = compress(recipe(SHRINK, EXPORT), network(), pairs).report
    assert all(row.bytes and row.latency is None for row in report.stages)
    assert report.stage_notes == (
        "Latency was not measured: a file converts, but crashes the LiteRT interpreter (SIGSEGV).",
    )


@pytest.mark.every_backend
@pytest.mark.parametrize("steps", [(SHRINK,), (SHRINK, {"export": {"formats": ["keras"]}})], ids=["nothing", "keras"])
def test_without_a_litert_file_there_is_one_line(pairs, monkeypatch, steps):
    monkeypatch.setattr(stages, "plain_file", lambda *arguments: pytest.fail("no conversion is needed"))
    report = compress(recipe(*steps), network(), pairs).report
    reason = "the recipe exports no LiteRT file."
    if BACKEND != "tensorflow":
        reason = f"LiteRT files are made with Keras's TensorFlow backend, and this run used {BACKEND}."
    assert (report.stages, report.stage_notes) == ((), (NOTHING + reason,))


@pytest.mark.thorough
@tensorflow_only
def test_a_run_that_removes_nothing_has_nothing_to_compare_with(pairs):
    report = compress(recipe(TRAIN, EXPORT), network(), pairs).report
    assert (report.stages, report.stage_notes) == (
        (),
        (f"{NOTHING}no step pruned the model or removed channels.",),
    )


@tensorflow_only
def test_half_of_the_channels_are_measured_to_be_faster(pairs, monkeypatch):
    monkeypatch.setattr("prunekit.recipe.state.stages._SECONDS", 0.5)
    model = dense_network(8, seed=20, hidden=1024, second=1024, logits=4)
    report = compress(recipe(SHRINK, {"export": {"formats": ["litert"]}}), model, pairs).report
    before, after = report.stages
    assert before.latency > 1.5 * after.latency
    assert pk.cost(model).macs > 3 * report.after.macs

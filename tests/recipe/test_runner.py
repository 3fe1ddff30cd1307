import contextlib
import copy
import io
import json
import shutil

import keras
import numpy as np
import pytest
from backends import BACKEND, tensorflow_only
from networks import dense_network
from tiny_recipes import COMPILE, ONE_SHOT, WHOLE, one_shot, prune, recipe, zeros

from prunekit.anatomy.cost.inspection import inspect
from prunekit.anatomy.files.digests import model_digest, weight_arrays
from prunekit.core.runtime import environment
from prunekit.delivery.pages.html_report import render_html
from prunekit.delivery.reports.run_report import RunReport
from prunekit.recipe.run.runner import ExpectationError, compress, verify
from prunekit.recipe.state import progress as progress_module
from prunekit.recipe.state.models import load_model
from prunekit.recipe.text.loader import RecipeError, load_recipe

pytestmark = pytest.mark.every_backend


@pytest.fixture
def every_batch(monkeypatch):
    monkeypatch.setattr(progress_module, "_PAUSE", 0.0)


def saved(model, path):
    model.save(path)
    return {"file": str(path)}


# ---- a whole run -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(pairs, tmp_path_factory):
    """One run of every kind of step: its result, its progress, and what it printed."""
    folder = tmp_path_factory.mktemp("whole")
    model = dense_network(8, seed=20, hidden=16, logits=4)
    seen = []
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(progress_module, "_PAUSE", 0.0)
        patch.setattr("prunekit.recipe.run.runner.render_html", render_html)
        result = compress(WHOLE, model, pairs, folder / "run", progress=seen.append)
    return result, seen, printed.getvalue()


def test_a_run_directory_holds_the_model_the_exports_the_report_and_the_locked_recipe(whole):
    result, _, printed = whole
    assert [entry.name for entry in result.directory.parent.iterdir()] == ["run"] and printed == ""
    names = {"model.keras", "exports", "report.json", "report.html", "recipe.lock.yaml"}
    assert {entry.name for entry in result.directory.iterdir()} == names
    assert [entry.name for entry in (result.directory / "exports").iterdir()] == ["model.keras"]
    assert model_digest(load_model(result.directory / "model.keras")) == model_digest(result.model)
    assert load_recipe(result.directory / "recipe.lock.yaml", data_given=True) == load_recipe(WHOLE, data_given=True)
    values = json.loads((result.directory / "report.json").read_text())
    assert RunReport.from_dict(values).to_dict() == result.report.to_dict()
    assert (result.directory / "report.html").read_text().lstrip().lower().startswith("<!doctype html")


def test_the_report_tells_what_was_done(whole):
    report, model = whole[0].report, whole[0].model
    assert zeros(model, "hidden/kernel") == round(0.8 * 128)
    assert zeros(model, "logits/kernel") == 0
    assert [step["kind"] for step in report.steps] == ["train", "prune", "finetune", "export", "expect"]
    assert report.after.targets == ("hidden/kernel",) and report.before.zeros == 0
    assert {item.name for item in report.after.skipped} == {"hidden/bias", "logits/kernel", "logits/bias"}
    steps = [event.step for event in report.events]
    assert steps[0] == 0 and steps[-1] == 8 and report.events[-1].asked == 0.8
    assert [step for step, _ in report.curve] == [0, 5, 10, 15]
    assert report.curve[0][1] == report.metrics["accuracy_before"]
    assert report.steps[2]["accuracy"] == report.metrics["accuracy_after"]
    assert set(report.steps[1]["history"]) >= {"accuracy", "val_accuracy", "loss", "sparsity"}
    assert len(report.steps[1]["history"]["val_accuracy"]) == 2
    (histogram,) = report.histograms.values()
    assert histogram["zeros_before"] == 0 and histogram["zeros_after"] == 102 and len(histogram["edges"]) == 61
    assert set(report.hashes) == {"recipe", "model", "data", "weights"} and report.seed == 4
    assert {"python", "prunekit", "keras", "tensorflow", "numpy", "platform"} <= set(report.versions)
    assert all(row["met"] for row in report.expectations) and len(report.expectations) == 4
    assert report.schedule["type"] == "polynomial_decay" and report.schedule["end_step"] == 8
    assert report.compressed["hidden/kernel"]["after"] < report.compressed["hidden/kernel"]["before"]
    assert report.advice


@tensorflow_only
def test_the_report_tells_how_far_updates_moved_the_weights(whole):
    report = whole[0].report
    assert set(report.changes) == {"hidden/kernel", "hidden/bias", "logits/kernel", "logits/bias"}
    # Five updates in each of the epochs of the train, prune and finetune steps.
    epochs = sum(len(step["history"]["loss"]) for step in report.steps if "loss" in step["history"])
    assert {row["updates"] for row in report.changes.values()} == {5 * epochs}
    assert report.relative_change("hidden/kernel") == report.changes["hidden/kernel"]["relative"] > 0
    assert report.relative_change("nothing") is None


@tensorflow_only
def test_a_recipe_prunes_by_movement(perceptron, pairs, tmp_path):
    result = compress(recipe(prune(criterion="movement")), perceptron, pairs, tmp_path / "run")
    assert zeros(result.model, "hidden/kernel") == round(0.8 * 128)
    assert result.report.recipe["steps"][0]["prune"]["criterion"] == "movement"


def test_progress_goes_from_step_to_step_and_finishes_once(whole):
    seen = whole[1]
    assert [item.finished for item in seen] == [False] * (len(seen) - 1) + [True]
    assert [item.step for item in seen] == sorted(item.step for item in seen) and seen[-1].step == seen[0].steps == 5
    for step in range(1, 6):
        fractions = [item.fraction for item in seen if item.step == step and not item.finished]
        assert fractions[0] == 0.0 and fractions[-1] == 1.0 and fractions == sorted(fractions)
        ends = [item for item in seen if item.step == step and item.fraction == 1.0 and item.epoch is None]
        assert len([item for item in ends if not item.finished]) == 1, "the last batch of a step is not its end"
    epochs = [item for item in seen if item.epoch and item.kind == "prune"]
    assert [item.epoch for item in epochs] == [1, 2]
    assert epochs[-1].text.startswith("epoch 2/2, accuracy 0.") and epochs[-1].text.endswith("sparsity 0.7969")


def test_the_model_is_free_of_pruning_when_the_run_ends(whole):
    assert "apply" not in vars(whole[0].model.optimizer)
    assert inspect(whole[0].model).zeros >= 102


def test_without_an_output_nothing_is_written(tmp_path, perceptron, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = compress(recipe(one_shot(0.5), {"export": {"formats": ["keras"]}}), perceptron)
    assert result.directory is None and not list(tmp_path.iterdir())
    assert result.report.exports[0].status == "ok" and result.report.exports[0].bytes > 1000


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("optimizer", [{"name": "sgd", "arguments": {"momentum": 0.9, "use_ema": True}}, "muon"])
def test_zeros_hold_after_every_batch_of_later_steps(perceptron, pairs, every_batch, optimizer):
    counts = {"finetune": set(), "train": set()}
    steps = [prune(exclude=["logits"]), {"finetune": {"epochs": 2}}, {"train": {"epochs": 1}}]

    def look(item):
        if item.kind in counts:
            counts[item.kind].add(zeros(perceptron, "hidden/kernel"))

    compress(recipe(*steps, compile={**COMPILE, "optimizer": optimizer}), perceptron, pairs, progress=look)
    assert counts == {"finetune": {102}, "train": {102}}


def test_what_one_step_pruned_holds_while_another_prunes_other_weights(perceptron, pairs, every_batch):
    counts = []
    steps = [prune(include=["hidden"]), prune(include=["logits"], schedule={"final_sparsity": 0.5})]
    report = compress(
        recipe(*steps, {"expect": {"sparsity": {"min": 0.7}}}),
        perceptron,
        pairs,
        progress=lambda item: counts.append((item.step, zeros(perceptron, "hidden/kernel"))),
    ).report
    assert {count for step, count in counts if step == 2} == {102}
    assert zeros(perceptron, "logits/kernel") == 32
    assert report.after.targets == ("hidden/kernel", "logits/kernel")
    assert [event.step for event in report.events if event.asked == 0.5] == [18]
    assert report.expectations[0]["measured"] == pytest.approx((102 + 32) / (128 + 64))


def test_weights_pruned_to_the_last_one_stay_zero(pairs):
    model = dense_network(8, activation=None, narrow=1, out=4)
    all_of_it = one_shot(0.95, include=["narrow"], keep_one=False)
    compress(recipe(all_of_it, {"finetune": {"epochs": 1}}), model, pairs)
    assert zeros(model, "narrow/kernel") == 8


@pytest.mark.skipif(BACKEND == "torch", reason="a layer of PyTorch has no dot in its name")
def test_names_that_look_like_patterns_are_held_too(pairs):
    names = ["a.b", "a-b"]
    model = keras.Sequential([keras.Input((8,)), *[keras.layers.Dense(4, name=name) for name in names]])
    compress(recipe(one_shot(0.5), {"finetune": {"epochs": 1}}), model, pairs)
    assert [zeros(model, f"{name}/kernel") for name in names] == [16, 8]


def test_one_shot_pruning_needs_neither_data_nor_compile(tmp_path, perceptron):
    steps = [one_shot(0.5, pattern="2:4"), {"export": {"formats": ["keras"]}}]
    found = {"version": 1, "name": "once", "steps": steps}
    result = compress(found, saved(perceptron, tmp_path / "in.keras")["file"], output=tmp_path / "run")
    assert zeros(result.model, "hidden/kernel") == 64 and zeros(perceptron, "hidden/kernel") == 0
    assert result.report.metrics == {} and result.report.exports[0].status == "ok"
    assert verify(tmp_path / "run").identical


def test_each_step_trains_at_its_own_learning_rate_and_returns_to_the_first(perceptron, pairs):
    rates = []
    steps = [{"train": {"epochs": 1, "learning_rate": 0.5}}, {"finetune": {"epochs": 1}}]

    def look(item):
        if item.epoch:
            rates.append(float(perceptron.optimizer.learning_rate))

    compress(recipe(*steps), perceptron, pairs, progress=look)
    assert rates == pytest.approx([0.5, 0.01])


def test_the_random_criterion_follows_the_recipes_seed(perceptron, pairs):
    masks = {}
    for seed in (1, 1, 2):
        model = keras.models.clone_model(perceptron)
        compress(recipe(one_shot(0.5, criterion="random"), seed=seed), model, pairs)
        mask = (weight_arrays(model)["hidden/kernel"] == 0).tobytes()
        assert masks.setdefault(seed, mask) == mask
    assert masks[1] != masks[2]


def test_a_run_on_a_gpu_does_not_claim_the_same_bytes(perceptron, pairs, monkeypatch):
    monkeypatch.setattr(environment, "devices", lambda: (environment.Device("GPU:0", "GPU"),))
    assert not any("GPU" in note for note in compress(ONE_SHOT, perceptron).report.notes)
    kept, note = compress(recipe({"train": {"epochs": 1}}), perceptron, pairs).report.notes
    assert "The model came with" in kept and "GPU" in note


# ---- expectations ----------------------------------------------------------------------------------------------------


def test_a_failed_expectation_stops_the_run_and_leaves_a_whole_directory(tmp_path, perceptron, pairs):
    steps = [
        one_shot(0.5),
        {"export": {"formats": ["keras"]}},
        {"expect": {"metrics": {"accuracy": {"min": 1.0}}, "sparsity": {"max": 0.4}, "bytes": {"keras": {"max": 100}}}},
        {"train": {"epochs": 50}},
    ]
    with pytest.raises(ExpectationError) as raised:
        compress(recipe(*steps), perceptron, pairs, tmp_path / "run")
    message = str(raised.value)
    assert message.startswith(
        "accuracy 0."
    ) and "is below the expected 1; sparsity 0.5000 is above the expected 0.4" in (message)
    assert message.endswith("is above the expected 100") and "\n" not in message
    assert raised.value.result.directory == tmp_path / "run"
    values = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [row["met"] for row in values["expectations"]] == [False, False, False]
    assert [step["kind"] for step in values["steps"]] == ["prune", "export", "expect"]
    assert len(list((tmp_path / "run").iterdir())) == 5


def test_a_sparsity_that_misses_by_the_rounding_of_counts_is_met(perceptron, pairs):
    report = compress(recipe(one_shot(0.7), {"expect": {"sparsity": {"min": 0.7}}}), perceptron, pairs).report
    (row,) = report.expectations
    assert row["met"] and row["measured"] == pytest.approx((90 + 45) / 192)
    with pytest.raises(ExpectationError, match="sparsity 0.7031 is below the expected 0.71"):
        steps = [one_shot(0.7), {"expect": {"sparsity": {"min": 0.71}}}]
        compress(recipe(*steps), keras.models.clone_model(perceptron), pairs)


# ---- interruptions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == "finetune" else pytest.mark.thorough)
        for kind in ("prune", "finetune", "expect")
    ],
)
def test_an_interrupted_run_leaves_an_older_one_as_it_was(tmp_path, perceptron, pairs, kind):
    compress(ONE_SHOT, perceptron, output=tmp_path / "run")
    old = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}

    def interrupt(item):
        if item.kind == kind and item.fraction > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(WHOLE, perceptron, pairs, tmp_path / "run", force=True, progress=interrupt)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run", "run.unfinished"]
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == old
    if kind == "finetune":
        assert zeros(perceptron, "hidden/kernel") == 102, "an interrupted finetune leaves the model sparse"


# ---- the same again --------------------------------------------------------------------------------------------------


def test_the_same_recipe_gives_the_same_bytes_in_the_same_process(perceptron, pairs):
    models = [keras.models.clone_model(perceptron) for _ in range(2)]
    for model in models:
        model.set_weights(perceptron.get_weights())
        np.random.default_rng().random(3)
        keras.random.normal((4,))
        compress(WHOLE, model, pairs)
    assert model_digest(models[0]) == model_digest(models[1])


def file_run(tmp_path, perceptron, pairs):
    np.savez(tmp_path / "d.npz", x_train=pairs[0][0], y_train=pairs[0][1], x_test=pairs[1][0], y_test=pairs[1][1])
    found = copy.deepcopy(WHOLE)
    found |= {"model": saved(perceptron, tmp_path / "in.keras"), "data": {"npz": str(tmp_path / "d.npz")}}
    return compress(found, output=tmp_path / "run")


@pytest.mark.thorough
def test_verify_finds_an_untouched_run_identical(tmp_path, perceptron, pairs):
    result = file_run(tmp_path, perceptron, pairs)
    outcome = verify(tmp_path / "run")
    assert outcome.identical and outcome.differences == () and outcome.directory == result.directory
    assert json.loads(json.dumps(outcome.to_dict()))["identical"] is True


@pytest.mark.every_backend(cases=0)
def test_verify_names_the_weights_that_differ_and_what_changed(tmp_path, perceptron, pairs):
    result = file_run(tmp_path, perceptron, pairs)
    kernel = result.model.get_layer("logits").kernel
    kernel.assign(np.where(np.arange(64).reshape(16, 4) == 5, kernel.numpy() + 1, kernel.numpy()))
    result.model.save(tmp_path / "run" / "model.keras")
    outcome = verify(tmp_path / "run")
    assert not outcome.identical
    assert outcome.differences == ("logits/kernel: 1 of 64 values differ, by at most 1",)
    np.savez(tmp_path / "d.npz", x_train=pairs[0][0] * 2, y_train=pairs[0][1], x_test=pairs[1][0], y_test=pairs[1][1])
    assert "data are not what the run started from" in verify(tmp_path / "run").differences


@pytest.mark.thorough
def test_verify_needs_what_only_python_can_give(tmp_path, perceptron, pairs):
    start = keras.models.clone_model(perceptron)
    start.set_weights(perceptron.get_weights())
    compress(WHOLE, perceptron, pairs, tmp_path / "run")
    with pytest.raises(RecipeError, match=r"with model passed as Python objects.*verify\(directory, model=\.\.\.\)"):
        verify(tmp_path / "run", data=pairs)
    with pytest.raises(RecipeError, match="made with data passed as Python objects"):
        verify(tmp_path / "run", model=start)
    assert verify(tmp_path / "run", model=start, data=pairs).identical


def test_verify_refuses_what_is_no_run(tmp_path, whole):
    with pytest.raises(RecipeError, match="is not a run directory"):
        verify(tmp_path)
    shutil.copytree(whole[0].directory, tmp_path / "run")
    (tmp_path / "run" / "report.json").write_text("[1, 2")
    with pytest.raises(RecipeError, match="report.json: not a report, or damaged"):
        verify(tmp_path / "run")


@pytest.mark.every_backend(cases=0)
def test_the_data_give_the_size_of_inputs_that_the_model_leaves_open():
    tokens = keras.Input((None,), dtype="int32")
    hidden = keras.layers.GlobalAveragePooling1D()(keras.layers.Dense(5)(keras.layers.Embedding(9, 4)(tokens)))
    model = keras.Model(tokens, keras.layers.Dense(3)(hidden))
    data = (np.ones((20, 6), "int32"), np.arange(20) % 3)
    report = compress(recipe(one_shot(0.5)), model, (data, data)).report
    assert (report.before.macs, report.after.macs) == (6 * 20 + 15, 6 * 20 + 15)
    assert not [note for note in report.all_notes if "MACs" in note]

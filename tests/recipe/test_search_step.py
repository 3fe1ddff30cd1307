"""The recipe step `search`: mistakes, the plan, and a run that goes on with the model that was found."""

import json

import keras
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from tiny_recipes import mistake_in, one_shot, recipe

import prunekit as pk
from prunekit.delivery.litert.arena import arena_bytes
from prunekit.recipe.datasets.data import load_data
from prunekit.recipe.run.runner import compress, plan
from prunekit.recipe.steps import search_step
from prunekit.recipe.text.loader import RecipeError, load_recipe

TRAIN = {"train": {"epochs": 4}}
MISTAKES = {
    "no question": ("search: {}", "6:13", "expected at least one of drop, bytes, latency"),
    "bytes": ("search: {bytes: small}", "6:21", "expected bytes, such as 200kB"),
    "a time": ("search: {latency: fast}", "6:23", "expected a time such as 2ms"),
    "a share": ("search: {latency: 50}", "6:23", "a share of the time"),
    "a technique": ("search: {drop: 0.1, techniques: [prun]}", "6:38", "Did you mean 'prune'"),
    "a profile": ("search: {drop: 0.1, profile: smal}", "6:34", "Did you mean 'small'"),
    "a profile without a drop": ("search: {bytes: 9kB, profile: fast}", "6:35", "within a drop: add drop"),
    "no epochs": ("search: {drop: 0.1, training: {learning_rate: 0.1}}", "6:35", "'epochs' is missing"),
}


@pytest.fixture(scope="module")
def parts():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = (images[order] / 16).astype("float32"), labels[order]
    return (images[:1400], labels[:1400]), (images[1400:], labels[1400:])


def network():
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(48, activation="relu", name="hidden"), keras.layers.Dense(10, name="logits")]
    # Files have the names of the model and its input.
    return keras.Sequential([keras.Input((64,), name="pixels"), *layers], name="network")


def images_network():
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *network().layers])


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_has_its_place(tmp_path, name):
    step, place, message = MISTAKES[name]
    found = mistake_in(step, tmp_path)
    assert f"r.yaml:{place}" in found and message in found


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([{"cluster": {}}, {"search": {"drop": 0.1}}], "Write the cluster step after this one"),
        (
            [{"search": {"drop": 0.1}}, one_shot(0.5)],
            "an earlier search step chose the levels of all weights and wrote their file",
        ),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(parts, steps, message):
    with pytest.raises(RecipeError, match=message):
        plan(recipe(*steps), network(), parts)


@pytest.mark.thorough
def test_too_few_examples_are_told_by_the_plan(parts):
    (images, labels), test = parts
    with pytest.raises(RecipeError, match=r"search: a search needs 128 examples, better some thousands. Received: 100"):
        plan(recipe({"search": {"drop": 0.1}}), network(), ((images[:100], labels[:100]), test))


def test_the_run_goes_on_with_what_was_found_and_reports_by_the_test_data(parts, tmp_path, monkeypatch):
    seen = []
    drawn = search_step.SearchData

    def data(given, *arguments, **options):
        seen.append(given)
        return drawn(given, *arguments, **options)

    monkeypatch.setattr(search_step, "SearchData", data)
    steps = (
        TRAIN,
        one_shot(0.5, include=["hidden"]),
        {"search": {"drop": 0.05, "target": "packed", "training": {"epochs": 2}}},
        {"expect": {"bytes": {"litert-integer": {"packed_max": 20_000}}}},
    )
    given = recipe(*steps, data={"builtin": "digits", "validation": 0.4})
    planned = plan(given, images_network())
    assert planned.steps[2].text == ("drop 0.05, small, packed, all techniques, 2 epochs for each of the bolder files")
    assert any("follow from measurements of the model as it is then" in note for note in planned.notes)
    result = compress(given, images_network(), output=tmp_path / "run")
    # Not the test data, and not those that are trained on.
    (used,) = seen
    data = load_data(load_recipe(given).data, 4)
    held_out, *others = (set(map(bytes, part.first(2000)[0])) for part in (data.validation, data.test, data.train))
    drawn = set(map(bytes, used[0]))
    assert drawn == held_out and not any(drawn & other for other in others)
    exports = tmp_path / "run" / "exports"
    packed = (exports / "model.tflite.pack").stat().st_size
    assert pk.unpack(exports / "model.tflite.pack", tmp_path / "back.tflite")
    assert (tmp_path / "back.tflite").read_bytes() == (exports / "model.tflite").read_bytes()
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    (export,) = report["exports"]
    assert export["packed_bytes"] == packed and export["status"] == "ok"
    assert "Files that were made" in json.dumps(report) and "Files that were made" in str(result)
    # Zeros of the earlier step stay, whether their inputs were removed or not.
    kernel = result.model.get_layer("hidden").kernel.numpy()
    assert (kernel == 0).mean() >= 0.5
    assert json.loads((exports / "scan-packed.json").read_text())["weights"]


@pytest.mark.thorough
def test_without_validation_data_training_examples_judge_with_a_note(parts, tmp_path):
    asked = {"bytes": "6kB", "target": "microcontroller", "arena": "64kB"}
    given = recipe(TRAIN, {"search": asked})
    assert any("the drop is measured on training examples" in note for note in plan(given, network(), parts).notes)
    result = compress(given, network(), parts, output=tmp_path / "run")
    file = (tmp_path / "run" / "exports" / "model.tflite").read_bytes()
    assert {one["dtype"] for one in Interpreter(model_content=file).get_input_details()} == {np.int8}
    assert arena_bytes(file) <= 64_000 and len(file) <= 6000
    assert any("the drop is measured on training examples" in note for note in result.report.notes)
    assert result.model.get_layer("hidden").units <= 48


@pytest.mark.thorough
def test_a_run_that_was_interrupted_in_a_training_ends_with_the_same_bytes(parts, tmp_path, monkeypatch):
    given = recipe(TRAIN, {"search": {"drop": 0.05, "target": "packed", "training": {"epochs": 1}}})
    fit, fitted, last, drawn = search_step._Fit.__call__, [], [], []
    data = search_step.SearchData
    monkeypatch.setattr(
        search_step, "SearchData", lambda *given, **options: drawn.append(data(*given, **options)) or drawn[-1]
    )

    def counted(self, *arguments):
        fitted.append(self._part)
        if len(fitted) in last:
            raise KeyboardInterrupt
        fit(self, *arguments)

    monkeypatch.setattr(search_step._Fit, "__call__", counted)
    whole = compress(given, network(), parts, output=tmp_path / "whole")
    trained = len(fitted)
    last.append(trained + 2)
    with pytest.raises(KeyboardInterrupt):
        compress(given, network(), parts, output=tmp_path / "run")
    resumed = compress(given, network(), parts, output=tmp_path / "run", resume=True)
    # The first training was kept, the second one is made again.
    assert trained > 1 and len(fitted) == trained + 2 + trained - 1
    files = [tmp_path / name / "exports" / "model.tflite.pack" for name in ("whole", "run")]
    assert files[0].read_bytes() == files[1].read_bytes()
    for one, other in zip(whole.model.weights, resumed.model.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    assert not list((tmp_path / "run").rglob("trained-*.snapshot"))
    # Without validation data, no example is trained on that chooses or judges.
    examples = set(map(bytes, fitted[0].first(10_000)[0]))
    assert len(examples) == fitted[0].examples >= 32 and not examples & set(map(bytes, drawn[0].held_out))

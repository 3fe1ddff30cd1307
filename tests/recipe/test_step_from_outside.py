"""A package outside prunekit adds a kind of step that replaces the model: one file and one row."""

import dataclasses
import json
import re

import keras
import numpy as np
import pytest
import yaml
from backends import tensorflow_only
from outside_step import DRIFT, HALVE
from tiny_recipes import Stop, prune, recipe, resumed, told, zeros

from prunekit.anatomy.files.digests import model_digest, weight_arrays
from prunekit.core.runtime.snapshot import Snapshot, read_snapshot, write_snapshot
from prunekit.delivery.pages.html_report import render_html
from prunekit.recipe.run.runner import compress, plan, verify
from prunekit.recipe.settings.schema import register_step, unregister_step
from prunekit.recipe.state.directory import unfinished
from prunekit.recipe.state.workspace import Workspace
from prunekit.recipe.text.loader import RecipeError, dump_recipe, load_recipe

pytestmark = pytest.mark.every_backend

HALVING = {"halve": {"layer": "hidden"}}
STEPS = recipe({"train": {"epochs": 1}}, prune(exclude=["logits"]), HALVING, {"finetune": {"epochs": 2}})


class Twice(keras.layers.Layer):
    """A layer that is not registered with Keras."""

    def call(self, inputs):
        return 2 * inputs


def network():
    keras.utils.set_random_seed(20)
    layers = [
        keras.layers.Dense(16, activation="relu", name="hidden"),
        Twice(name="twice"),
        keras.layers.Dropout(0.3, name="drop"),
        keras.layers.Dense(4, name="logits"),
    ]
    return keras.Sequential([keras.Input((8,), name="features"), *layers], name="tiny")


@pytest.fixture(autouse=True)
def kinds():
    register_step(HALVE)
    register_step(DRIFT)
    yield
    unregister_step("halve")
    unregister_step("drift")


# ---- a whole run -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def watched(pairs, tmp_path_factory):
    """A run; the models that replaced another; and how many zeros the last one had after each later epoch."""
    models, counts = [], set()
    inner = Workspace.replace_model

    def remember(self, model, *args):
        models.append(model)
        inner(self, model, *args)

    def look(item):
        if item.kind == "finetune" and item.epoch:
            counts.add(zeros(models[0], "hidden/kernel"))

    register_step(HALVE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "replace_model", remember)
        return (
            compress(STEPS, network(), pairs, tmp_path_factory.mktemp("whole") / "run", progress=look),
            models,
            counts,
        )


@pytest.fixture(scope="module")
def whole(watched):
    return watched[0]


@pytest.mark.every_backend(cases=0)
def test_a_step_that_replaces_the_model_works_between_prune_and_finetune(whole):
    result = whole
    assert weight_arrays(result.model)["hidden/kernel"].shape == (8, 8)
    values = json.loads((result.directory / "report.json").read_text())
    assert [step["kind"] for step in values["steps"]] == ["train", "prune", "halve", "finetune"]
    (section,) = values["steps"][2]["sections"]
    assert section["title"] == "Removed units" and [row[0] for row in section["rows"]] == ["hidden"] * 8
    assert not any("sections" in values["steps"][i] for i in (0, 3))
    # The optimizer went on with its slots: five updates in each of five epochs that trained.
    assert int(result.model.optimizer.iterations) == 25
    assert result.report.after.targets == ("hidden/kernel",)
    shapes = {row.name: row.shape for row in result.report.after.weights}
    assert shapes["hidden/kernel"] == (8, 8) and shapes["logits/kernel"] == (8, 4)
    assert result.report.histograms["hidden/kernel"]["zeros_after"] == zeros(result.model, "hidden/kernel")
    assert "Removed units" in render_html(result.report)
    assert result.report.compressed["hidden/kernel"]["after"] < result.report.compressed["hidden/kernel"]["before"]


def test_zeros_hold_in_the_new_model_after_every_epoch(watched):
    result, models, counts = watched
    assert models == [result.model]
    assert counts == {zeros(result.model, "hidden/kernel")} and counts.pop() > 0


@tensorflow_only
def test_changes_of_weights_that_stay_are_counted_on(whole):
    updates = {name: row["updates"] for name, row in whole.report.changes.items()}
    assert updates == {"hidden/kernel": 10, "hidden/bias": 10, "logits/kernel": 10, "logits/bias": 25}


def test_a_prune_step_behind_it_prunes_the_new_model(pairs):
    steps = recipe(HALVING, prune(schedule={"final_sparsity": 0.5}), {"expect": {"sparsity": {"min": 0.5, "max": 0.5}}})
    result = compress(steps, network(), pairs)
    assert zeros(result.model, "hidden/kernel") == 32 and zeros(result.model, "logits/kernel") == 16
    assert result.report.expectations[0]["met"]


# ---- before a weight moves -------------------------------------------------------------------------------------------


def test_the_plan_shows_the_step_and_later_steps_for_the_new_model(pairs):
    found = plan(recipe(HALVING, prune(), {"finetune": {"epochs": 1}}), network(), pairs)
    assert [(step.kind, step.text) for step in found.steps][0] == ("halve", "half of the units of hidden")
    assert [(target.name, target.shape) for target in found.steps[1].targets] == [
        ("hidden/kernel", (8, 8)),
        ("logits/kernel", (8, 4)),
    ]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([{"halve": {"layer": "hiden"}}], r"^steps\[0\]\.halve: expected one of the layers hidden. Received: 'hiden'"),
        (
            [HALVING, prune(include=["logits"], pattern="8:16", schedule={"final_sparsity": 0.5})],
            r"^steps\[1\]\.prune: .*of 16",
        ),
        ([prune(), {"halve": {"layer": "twice"}}], r"^steps\[1\]\.halve: "),
    ],
    ids=["no such layer", "a later step", "a layer without units"],
)
def test_what_the_model_refuses_is_refused_before_a_weight_moves(pairs, steps, message):
    model = network()
    before = model_digest(model)
    with pytest.raises(RecipeError, match=message):
        compress(recipe(*steps), model, pairs)
    assert model_digest(model) == before


TEXT = """\
version: 1
model: {builtin: digits-cnn}
data: {builtin: digits}
compile: {optimizer: adam}
steps:
  - train: {epochs: 1}
  - halve: {layer: fc}
  - STEP
"""


@pytest.mark.parametrize(
    ("step", "place", "message"),
    [
        ("halve: {layer: fc}", "8:20", "steps[2].halve.layer: an earlier step already halves 'fc'."),
        ("halve: {layr: x}", "8:13", "steps[2].halve: unknown key 'layr'. Did you mean 'layer'?"),
        ("halve: {}", "8:12", "steps[2].halve: 'layer' is missing."),
        ("halv: {layer: x}", "8:5", "steps[2]: unknown key 'halv'. Did you mean 'halve'?"),
        ("{halve: {layer: x}, train: {epochs: 1}}", "8:", "expected only one of train, prune, finetune, export"),
    ],
    ids=["an earlier step", "a key", "a missing key", "a kind", "two kinds"],
)
def test_mistakes_in_a_recipe_have_line_and_column(tmp_path, run, step, place, message):
    (tmp_path / "r.yaml").write_text(TEXT.replace("STEP", step))
    code, _, error = run("check", "r.yaml")
    assert code == 2 and f"r.yaml:{place}" in error and message in error


def test_check_describes_the_step(tmp_path, run):
    (tmp_path / "r.yaml").write_text(TEXT.replace("STEP", "finetune: {epochs: 1}"))
    code, out, _ = run("check", "r.yaml")
    assert code == 0 and "  2. halve: half of the units of fc\n" in out


def test_a_recipe_with_the_step_is_written_and_read_again():
    loaded = load_recipe(STEPS, data_given=True)
    assert loaded.steps[2].kind == "halve" and loaded.steps[2].settings.layer == "hidden"
    assert load_recipe(yaml.safe_load(dump_recipe(loaded)), data_given=True) == loaded


def test_the_kind_is_unknown_once_it_is_removed():
    unregister_step("halve")
    try:
        with pytest.raises(RecipeError, match="unknown key 'halve'"):
            load_recipe(STEPS, data_given=True)
    finally:
        register_step(HALVE)


@pytest.mark.parametrize("name", ["", "two words", "train"])
def test_a_name_that_a_step_cannot_have_is_refused(name):
    with pytest.raises(ValueError, match=f"{re.escape(repr(name))}"):
        register_step(dataclasses.replace(HALVE, name=name))


# ---- the same again --------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.short(cases=1)
@pytest.mark.parametrize("ends", [5, 6, 7], ids=["before its checkpoint", "in the step behind it", "an epoch later"])
def test_a_run_that_is_interrupted_ends_with_the_same_bytes(pairs, tmp_path, whole, ends):
    with pytest.raises(KeyboardInterrupt):
        compress(STEPS, network(), pairs, tmp_path / "run", progress=Stop(ends))
    assert unfinished(tmp_path / "run").is_dir()
    found = compress(STEPS, network(), pairs, tmp_path / "run", resume=True)
    assert model_digest(found.model) == model_digest(whole.model)
    assert told(found.report) == told(whole.report)
    variables = zip(found.model.optimizer.variables, whole.model.optimizer.variables, strict=True)
    assert all(np.array_equal(*map(keras.ops.convert_to_numpy, pair)) for pair in variables)


@pytest.mark.thorough
def test_a_finished_run_is_verified_and_returned_as_it_ended(pairs, whole):
    assert verify(whole.directory, model=network(), data=pairs).identical
    again = compress(STEPS, network(), pairs, whole.directory, resume=True)
    assert model_digest(again.model) == model_digest(whole.model)
    assert told(again.report) == told(whole.report)


DRIFTING = recipe(prune(), {"drift": {"epochs": 2}})


@pytest.fixture(scope="module")
def drifted(pairs):
    register_step(DRIFT)
    return compress(DRIFTING, network(), pairs)


@pytest.mark.parametrize("ends", [2, 3, 4, 5], ids=["in its first training", "after it", "between", "in its second"])
def test_a_step_that_trains_with_a_callback_of_its_own_is_resumed_with_its_state(pairs, tmp_path, drifted, ends):
    found = resumed(DRIFTING, network, pairs, tmp_path / "run", Stop(ends))
    assert model_digest(found.model) == model_digest(drifted.model)
    assert told(found.report)["steps"] == told(drifted.report)["steps"]
    assert len(found.report.steps[1]["sections"][0]["rows"]) == 2


@pytest.mark.every_backend(cases=0)
def test_a_damaged_architecture_is_refused_in_one_line(pairs, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        compress(STEPS, network(), pairs, tmp_path / "run", progress=Stop(7))
    for file in unfinished(tmp_path / "run").glob("checkpoint-*"):
        found = read_snapshot(file)
        values = json.loads(json.dumps(found.values).replace('"Twice"', '"Thrice"'))
        write_snapshot(file, Snapshot(values, {name: np.array(array) for name, array in found.arrays.items()}))
    with pytest.raises(RecipeError, match="it needs Thrice, which is not registered here") as refused:
        compress(STEPS, network(), pairs, tmp_path / "run", resume=True)
    assert "\n" not in str(refused.value)

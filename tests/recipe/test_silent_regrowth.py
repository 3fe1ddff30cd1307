"""Recipes keep the zeros that a model came with, whoever made them, and say so once."""

import json

import keras
import numpy as np
import pytest
import yaml
from tiny_recipes import ONE_SHOT, WHOLE, Stop, one_shot, prune, recipe, resumed, zeros

from prunekit.recipe.run.execution import masks_the_model_came_with
from prunekit.recipe.run.preparation import prepare, settled_recipe
from prunekit.recipe.run.runner import compress, verify
from prunekit.recipe.text.loader import load_recipe

FINETUNE = {"finetune": {"epochs": 2}}
LET_GO = {"finetune": {"epochs": 2, "keep_zeros": False}}
LINE = (
    "The model came with 153 zeros in 2 of its weights, and training kept them at zero. Write keep_zeros: false in the "
    "first train or finetune step to let them grow back."
)


@pytest.fixture
def sparse(perceptron):
    """The perceptron with 102 of 128 and 51 of 64 weights at zero, made without prunekit."""
    rng = np.random.default_rng(0)
    for layer, gone in zip(perceptron.layers, (102, 51), strict=True):
        kernel = np.array(layer.kernel)
        kernel.ravel()[rng.choice(kernel.size, gone, replace=False)] = 0
        layer.kernel.assign(kernel)
    return perceptron


def both(model):
    return [zeros(model, name) for name in ("hidden/kernel", "logits/kernel")]


@pytest.mark.every_backend
@pytest.mark.parametrize("steps", [[FINETUNE], [{"train": {"epochs": 1}}, FINETUNE]], ids=["finetune", "train first"])
def test_training_keeps_the_zeros_of_a_file_and_the_report_has_one_note(sparse, pairs, tmp_path, steps):
    sparse.save(tmp_path / "sparse.keras")
    result = compress(recipe(*steps), tmp_path / "sparse.keras", pairs)
    assert both(result.model) == [102, 51]
    assert result.report.notes.count(LINE) == 1


def test_a_model_object_and_the_command_line_give_the_same_note(sparse, pairs, tmp_path, run):
    sparse.save(tmp_path / "sparse.keras")
    (x, y), _ = pairs
    np.savez(tmp_path / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    whole = recipe(FINETUNE, model={"file": "sparse.keras"}, data={"npz": "data.npz"})
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(whole))
    code, out, _ = run("compress", "r.yaml", "-o", "mine")
    assert code == 0 and "note: The model came with 153 zeros in 2 of its weights" in " ".join(out.split())
    assert LINE in json.loads((tmp_path / "mine" / "report.json").read_text())["notes"]
    assert verify(tmp_path / "mine").identical
    assert compress(recipe(FINETUNE), sparse, pairs).report.notes == (LINE,)


def test_keep_zeros_false_lets_them_grow_back_and_says_it_in_the_plan(sparse, pairs, load, run, tmp_path):
    result = compress(recipe(LET_GO, FINETUNE), sparse, pairs)
    assert max(both(result.model)) < 51
    assert result.report.notes == ()
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe(LET_GO, data={"builtin": "digits"})))
    assert "finetune: 2 epochs, zeros that the model came with may grow back" in run("check", "r.yaml")[1]


def test_what_earlier_steps_pruned_holds_also_where_found_zeros_may_grow_back(perceptron, pairs):
    result = compress(recipe(one_shot(0.5), LET_GO), perceptron, pairs)
    assert both(result.model) == [64, 32]


def test_a_prune_step_that_trains_keeps_the_zeros_of_weights_that_it_leaves_out(sparse, pairs):
    result = compress(recipe(prune(exclude=["logits"], schedule={"final_sparsity": 0.9}), FINETUNE), sparse, pairs)
    assert both(result.model) == [115, 51]
    assert "The model came with 51 zeros in 1 of its weights" in result.report.notes[0]


def test_tfmot_has_its_own_rule_for_the_zeros_of_its_targets(sparse, pairs):
    settings = {"schedule": {"final_sparsity": 0.2, "end": {"epochs": 2}}, "policy": "tfmot", "exclude": ["logits"]}
    result = compress(recipe(prune(**settings)), sparse, pairs)
    hidden, logits = both(result.model)
    assert hidden < 102 and logits == 51


def test_a_weight_that_is_zero_throughout_has_learned_nothing_yet(perceptron, pairs):
    perceptron.layers[1].kernel.assign(np.zeros((16, 4)))
    result = compress(recipe(FINETUNE), perceptron, pairs)
    assert both(result.model) == [0, 0]
    assert result.report.notes == ()


def test_a_few_zeros_by_chance_are_kept_without_a_word(perceptron, pairs):
    kernel = np.array(perceptron.layers[0].kernel)
    kernel[3, 4] = 0
    perceptron.layers[0].kernel.assign(kernel)
    result = compress(recipe(FINETUNE), perceptron, pairs)
    assert zeros(result.model, "hidden/kernel") == 1 and result.report.notes == ()


def test_nothing_is_held_where_there_are_no_zeros_or_nothing_trains(perceptron, sparse, pairs):
    for model, document in ((keras.models.clone_model(perceptron), WHOLE), (sparse, ONE_SHOT)):
        prepared = prepare(
            settled_recipe(load_recipe(document, data_given=True), model, pairs), model, pairs, trust=False
        )
        assert masks_the_model_came_with(prepared) == {}


def test_a_run_that_is_resumed_keeps_them_as_one_that_was_not_interrupted(sparse, pairs, tmp_path):
    def model():
        return keras.models.load_model(tmp_path / "sparse.keras")

    sparse.save(tmp_path / "sparse.keras")
    steps = recipe({"finetune": {"epochs": 3}})
    found = resumed(steps, model, pairs, tmp_path / "run", Stop(1, steps=False))
    whole = compress(steps, model(), pairs)
    assert both(found.model) == [102, 51]
    assert found.report.notes == whole.report.notes == (LINE,)
    assert found.report.hashes["weights"] == whole.report.hashes["weights"]


def test_the_setting_is_true_or_false(load):
    with pytest.raises(ValueError, match="keep_zeros"):
        load(
            "version: 1\ndata: {builtin: digits}\ncompile: {optimizer: sgd}\nsteps: [train: {epochs: 1, keep_zeros: 1}]"
        )

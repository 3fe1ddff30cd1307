"""Criteria that need data and policies that regrow, from outside the package, in recipes: run, resumed, reported."""

import json

import numpy as np
import outside_extensions
import pytest
from networks import dense_network
from recipe_documents import recipe

from prunekit.recipe.run.plan import plan
from prunekit.recipe.run.runner import compress
from prunekit.recipe.text.loader import RecipeError, dump_recipe, load_recipe

CONSTANT = {"type": "constant", "target_sparsity": 0.5, "begin": {"steps": 1}, "frequency": 2}


@pytest.fixture(autouse=True)
def registered():
    with outside_extensions.registered():
        yield


def evolving(**options):
    settings = {"epochs": 3, "schedule": CONSTANT, "criterion": "input_weighted", "allocation": "uniform"}
    return {"prune": {**settings, "policy": {"type": "evolving", "fraction": 0.5, "value": 0.01, **options}}}


def document(*steps):
    compiled = {"optimizer": "adam", "batch_size": 16, "from_logits": True}
    return recipe(*steps, model=None, data=None, compile=compiled)


def network():
    return dense_network(8, seed=5, hidden=16, logits=4)


def masks_of(model):
    return {name: np.array(model.get_layer(name).kernel.numpy()) != 0 for name in ("hidden", "logits")}


class Interrupted(Exception):
    pass


def test_a_regrowing_policy_and_a_criterion_with_data_run_and_resume_with_equal_bytes(pairs, tmp_path):
    steps = document(evolving(), {"finetune": {"epochs": 1}}, {"expect": {"sparsity": {"min": 0.5, "max": 0.5}}})
    whole = compress(steps, network(), pairs, tmp_path / "whole")

    def interrupt(progress):
        if progress.epoch == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        compress(steps, network(), pairs, tmp_path / "run", progress=interrupt)
    resumed = compress(steps, network(), pairs, tmp_path / "run", resume=True)
    for one, other in zip(whole.model.get_weights(), resumed.model.get_weights(), strict=True):
        assert one.tobytes() == other.tobytes()
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["recipe"]["steps"][0]["prune"]["policy"] == {"type": "evolving", "fraction": 0.5, "value": 0.01}
    assert [event["reached"] for event in report["events"]] == [0.5] * 8
    assert all(row["met"] for row in report["expectations"])


def test_the_policy_regrew_weights_and_the_next_step_holds_its_last_masks(pairs):
    once = compress(
        document({"prune": {"sparsity": 0.5, "criterion": "input_weighted", "allocation": "uniform"}}), network(), pairs
    )
    before = masks_of(once.model)
    result = compress(document(evolving(), {"finetune": {"epochs": 2}}), network(), pairs)
    after = masks_of(result.model)
    assert {name: int(mask.sum()) for name, mask in after.items()} == {"hidden": 64, "logits": 32}
    assert (after["hidden"] != before["hidden"]).sum() > 16, "half of the weights were exchanged at each update"


def test_a_regrowing_step_may_let_the_zeros_of_an_earlier_step_go_and_keeps_the_sparsity_exact(pairs):
    once = {"prune": {"sparsity": 0.5, "allocation": "uniform", "repair": "none"}}
    first = masks_of(compress(document(once), network(), pairs).model)
    result = compress(document(once, evolving(), {"finetune": {"epochs": 1}}), network(), pairs)
    after = masks_of(result.model)
    assert {name: int(mask.sum()) for name, mask in after.items()} == {"hidden": 64, "logits": 32}
    assert (after["hidden"] & ~first["hidden"]).any()


def test_mistakes_in_options_of_extensions_have_line_and_column(tmp_path):
    path = tmp_path / "recipe.yaml"
    template = (
        "version: 1\nmodel: {builtin: digits-cnn}\nsteps:\n  - prune:\n      sparsity: 0.5\n      policy: POLICY\n"
    )
    for policy, message in {
        "{type: evolving, fracton: 0.5}": "unknown key 'fracton'. Did you mean 'fraction'?",
        "{type: evolving, fraction: much}": "input should be a valid number. Received: 'much'",
        "{type: evolvin}": "unknown value 'evolvin'. Did you mean 'evolving'?",
        "{fraction: 0.5}": "expected the name of a policy, or {type: NAME} with its options",
        "3": "expected the name of a policy",
    }.items():
        path.write_text(template.replace("POLICY", policy))
        with pytest.raises(RecipeError) as refused:
            load_recipe(path)
        assert message in str(refused.value) and str(refused.value).startswith(f"{path}:6:")


def test_a_recipe_with_options_of_extensions_is_written_and_read_again(tmp_path):
    loaded = load_recipe({**document(evolving(seed=7)), "model": {"builtin": "digits-cnn"}}, data_given=True)
    path = tmp_path / "again.yaml"
    path.write_text(dump_recipe(loaded))
    assert load_recipe(path, data_given=True) == loaded
    assert "evolving" in dump_recipe(loaded)


def test_the_plan_names_policy_and_criterion(pairs):
    found = plan(document(evolving()), network(), pairs)
    assert (
        "input_weighted" in found.steps[0].text and "policy evolving (fraction 0.5, value 0.01)" in found.steps[0].text
    )
    assert {target.name: target.pruned for target in found.steps[0].targets} == {
        "hidden/kernel": 64,
        "logits/kernel": 32,
    }


def test_a_recipe_without_data_cannot_use_a_criterion_that_reads_data():
    steps = document({"prune": {"sparsity": 0.5, "criterion": "input_weighted", "allocation": "uniform"}})
    with pytest.raises(RecipeError, match="data"):
        compress(steps, network())

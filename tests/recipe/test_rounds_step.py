"""The recipe step `rounds`: exact counts, rewinding, interruptions, the plan and the refusals."""

import keras
import numpy as np
import pytest
from tiny_recipes import recipe

from prunekit.recipe.loader import RecipeError, load_recipe
from prunekit.recipe.models import model_digest, weight_arrays
from prunekit.recipe.runner import compress, plan
from prunekit.recipe.workspace import Workspace

SETTINGS = {"number": 2, "sparsity": 0.75, "epochs_per_round": 2, "include": ["hidden"]}


def of(**others):
    return recipe({"train": {"epochs": 1}}, {"rounds": {**SETTINGS, **others}}, {"finetune": {"epochs": 1}})


def network():
    keras.utils.set_random_seed(20)
    layers = [
        keras.layers.Dense(16, activation="relu", name="hidden"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.3, name="drop"),
        keras.layers.Dense(4, name="logits"),
    ]
    return keras.Sequential([keras.Input((8,), name="features"), *layers], name="tiny")


def told(report):
    values = report.to_dict()
    for step in values["steps"]:
        del step["seconds"]
    return values


class Stop:
    """Interrupts a run when so many epochs have ended."""

    def __init__(self, epochs):
        self.epochs = epochs

    def __call__(self, item):
        if item.epoch is not None:
            self.epochs -= 1
            if not self.epochs:
                raise KeyboardInterrupt


# Of the eight epochs, one comes before the rounds: the rewind point follows epoch 1, a round starts after 3 and 5.
@pytest.mark.every_backend(cases=1)
@pytest.mark.parametrize(
    "epochs", [5, *(pytest.param(epochs, marks=pytest.mark.thorough) for epochs in (2, 3, 4, 6, 7))]
)
def test_an_interrupted_run_ends_as_one_that_was_not(pairs, tmp_path, epochs):
    whole = compress(of(), network(), pairs, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        compress(of(), network(), pairs, tmp_path / "run", progress=Stop(epochs))
    result = compress(of(), network(), pairs, tmp_path / "run", resume=True)
    assert told(result.report) == told(whole.report)
    assert model_digest(result.model) == model_digest(whole.model)
    (section,) = whole.report.steps[1]["sections"]
    assert [row[:3] for row in section["rows"]] == [[0, 0.0, 0], [1, 0.5, 64], [2, 0.75, 96]]
    assert all(0 <= row[3] <= 1 for row in section["rows"])
    assert len(whole.report.steps[1]["history"]["loss"]) == 6
    assert np.count_nonzero(weight_arrays(whole.model)["hidden/kernel"] == 0) == 96
    assert [(event.step, event.asked) for event in whole.report.after.events] == [(0, 0.5), (10, 0.75)]


@pytest.mark.parametrize("rewind", ["weights", "none"])
def test_every_round_begins_at_the_rewind_point(pairs, monkeypatch, rewind):
    seen, inner = [], Workspace.fit

    def fit(self, *args, **kwargs):
        seen.append((weight_arrays(self.model), int(self.optimizer.iterations)))
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(Workspace, "fit", fit)
    compress(of(rewind=rewind), network(), pairs)
    (start, _), *rounds = seen[1:4]
    assert [steps for _, steps in seen] == ([0, 5, 5, 5, 15] if rewind == "weights" else [0, 5, 15, 25, 35])
    for (weights, _), zeros in zip(rounds, (64, 96), strict=True):
        kept = weights["hidden/kernel"] != 0
        assert np.count_nonzero(~kept) == zeros
        for name, value in weights.items():
            mask = kept if name == "hidden/kernel" else np.ones(value.shape, bool)
            assert np.array_equal(value, np.where(mask, start[name], 0)) == (rewind == "weights")


def test_the_plan_lists_the_sparsity_of_each_round(pairs):
    (_, rounds, _) = plan(of(), network(), pairs).steps
    assert (rounds.epochs, rounds.updates, rounds.pruning) == (6, 30, ((10, 0.5), (20, 0.75)))
    assert [(target.name, target.pruned) for target in rounds.targets] == [("hidden/kernel", 96)]
    assert rounds.text.startswith("2 rounds to 0.75, 2 epochs each, rewinding weights, magnitude")


REFUSED = {
    "N:M": ({"pattern": "2:4", "sparsity": 0.5}, "each round has another sparsity, and 2:4 has one"),
    "criterion of a training": ({"criterion": "movement"}, "'movement' measures how training changes the weights"),
    "nothing to prune": ({"sparsity": 0.0}, "expected a sparsity above 0"),
    "learning rate": ({"rewind": "learning_rate"}, "rewind"),
    "no round": ({"number": 0}, "number"),
}


@pytest.mark.one_backend
@pytest.mark.parametrize(("settings", "said"), REFUSED.values(), ids=REFUSED)
def test_a_rounds_step_that_cannot_run_is_refused(settings, said):
    with pytest.raises(RecipeError, match=said):
        load_recipe(of(**settings), data_given=True)


@pytest.mark.one_backend
def test_rounds_after_a_prune_step_and_an_easier_prune_step_after_rounds_are_refused():
    rounds, easier = {"rounds": SETTINGS}, {"prune": {"sparsity": 0.5, "include": ["hidden"]}}
    with pytest.raises(RecipeError, match="rounds start from a model that no step has pruned"):
        load_recipe(recipe(easier, rounds), data_given=True)
    with pytest.raises(RecipeError, match="pruned weights do not come back"):
        load_recipe(recipe(rounds, easier), data_given=True)

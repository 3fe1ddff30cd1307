"""The recipe step `rounds`: exact counts, rewinding, interruptions, the plan and the refusals."""

import keras
import numpy as np
import pytest
from tiny_recipes import Stop, one_shot, recipe, resumed, told

from prunekit.anatomy.files.digests import model_digest, weight_arrays
from prunekit.recipe.run.runner import compress, plan
from prunekit.recipe.state.workspace import Workspace
from prunekit.recipe.text.loader import RecipeError, load_recipe

SETTINGS = {"rounds": 2, "sparsity": 0.75, "epochs_per_round": 2, "include": ["hidden"]}


def of(**others):
    return recipe({"train": {"epochs": 1}}, {"rounds": {**SETTINGS, **others}})


def network():
    keras.utils.set_random_seed(20)
    layers = [
        keras.layers.Dense(16, activation="relu", name="hidden"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.3, name="drop"),
        keras.layers.Dense(4, name="logits"),
    ]
    return keras.Sequential([keras.Input((8,), name="features"), *layers], name="tiny")


def watched(document, pairs, folder):
    """A run, and the weights and the optimizer's iterations at the start of each training."""
    starts, inner = [], Workspace.fit

    def fit(self, *args, **kwargs):
        starts.append((weight_arrays(self.model), int(self.optimizer.iterations)))
        return inner(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "fit", fit)
        return compress(document, network(), pairs, folder), starts


@pytest.fixture(scope="module")
def whole(pairs, tmp_path_factory):
    return watched(of(), pairs, tmp_path_factory.mktemp("rounds") / "whole")


# Of the seven epochs, one comes before the rounds: the rewind point follows epoch 1, a round starts after 3 and 5.
@pytest.mark.every_backend(cases=1)
@pytest.mark.parametrize("epochs", [5, *(pytest.param(epochs, marks=pytest.mark.thorough) for epochs in (2, 3, 4, 6))])
def test_an_interrupted_run_ends_as_one_that_was_not(pairs, whole, tmp_path, epochs):
    result = resumed(of(), network, pairs, tmp_path / "run", Stop(epochs, steps=False))
    assert told(result.report) == told(whole[0].report)
    assert model_digest(result.model) == model_digest(whole[0].model)


@pytest.mark.every_backend(cases=0)
def test_a_run_reports_each_round_and_ends_with_exact_zeros(whole):
    result, _ = whole
    _, step = result.report.steps
    (section,) = step["sections"]
    assert [row[:3] for row in section["rows"]] == [[0, 0.0, 0], [1, 0.5, 64], [2, 0.75, 96]]
    assert all(0 <= row[3] <= 1 for row in section["rows"])
    assert len(step["history"]["loss"]) == 6
    assert np.count_nonzero(weight_arrays(result.model)["hidden/kernel"] == 0) == 96
    assert [(event.step, event.asked) for event in result.report.after.events] == [(0, 0.5), (10, 0.75)]
    # The first curve point is that of the dense model, before the first pruning.
    assert [step for step, _ in result.report.curve] == [0, 5, 10, 15, 20]


def rewound(starts):
    """For each round and weight, whether the value at the start is that of the rewind point, with the round's zeros."""
    (point, _), *rounds = starts[1:]
    kept = [{"hidden/kernel": weights["hidden/kernel"] != 0} for weights, _ in rounds]
    assert [np.count_nonzero(~masks["hidden/kernel"]) for masks in kept] == [64, 96]
    return [
        np.array_equal(value, np.where(masks.get(name, True), point[name], 0))
        for masks, (weights, _) in zip(kept, rounds, strict=True)
        for name, value in weights.items()
    ]


def test_every_round_begins_at_the_rewind_point(whole):
    _, starts = whole
    assert [steps for _, steps in starts] == [0, 5, 5, 5]
    assert all(rewound(starts))


@pytest.mark.thorough
def test_without_rewinding_training_goes_on(pairs, tmp_path):
    _, starts = watched(of(rewind="none"), pairs, tmp_path / "run")
    assert [steps for _, steps in starts] == [0, 5, 15, 25]
    assert not any(rewound(starts))


@pytest.mark.thorough
def test_later_training_holds_the_zeros_and_criteria_read_data(pairs):
    steps = {"rounds": {**SETTINGS, "criterion": "wanda"}}, {"finetune": {"epochs": 1}}
    model = compress(recipe(*steps), network(), pairs).model
    assert np.count_nonzero(weight_arrays(model)["hidden/kernel"] == 0) == 96


def test_the_plan_lists_the_sparsity_of_each_round(pairs):
    (_, rounds) = plan(of(), network(), pairs).steps
    assert (rounds.epochs, rounds.updates, rounds.pruning) == (6, 30, ((10, 0.5), (20, 0.75)))
    assert [(target.name, target.pruned) for target in rounds.targets] == [("hidden/kernel", 96)]
    assert rounds.text.startswith("2 rounds to 0.75, 2 epochs each, rewinding weights, auto")
    (note,) = plan(of(criterion="magnitude", allocation="global"), network(), pairs).notes
    assert note.startswith("allocation global: how many weights of each target are pruned follows from their values")


def test_limits_of_single_weights_hold_in_each_round_and_reach_their_value_in_the_last(pairs, monkeypatch):
    limits = {"allocation": "global", "overrides": {"hidden": 0.9}, "bounds": {"logits": {"min": 0.3, "max": 0.5}}}
    document = recipe({"rounds": {**SETTINGS, **limits, "epochs_per_round": 1, "include": [], "sparsity": 0.75}})
    (step,) = plan(document, network(), pairs).steps
    assert step.text.endswith("hidden to 0.9, logits at min. 0.3 and max. 0.5")
    kept = []
    inner = Workspace.fit

    def fit(self, *args, **kwargs):
        found = inner(self, *args, **kwargs)
        kept.append([np.count_nonzero(weight_arrays(self.model)[f"{name}/kernel"]) for name in ("hidden", "logits")])
        return found

    monkeypatch.setattr(Workspace, "fit", fit)
    compress(document, network(), pairs)
    # 128 and 64 weights; in the first of two rounds half of all 192, of which the override has 0.9 * 0.5 / 0.75.
    assert kept[0] == [128, 64] and kept[1][0] == 128 - round(128 * 0.6) and sum(kept[1]) == 96
    assert kept[2] == [128 - round(128 * 0.9), 64 - 29] and [target.pruned for target in step.targets] == [115, 29]


REFUSED = {
    "N:M": ({"pattern": "2:4", "sparsity": 0.5}, "each round has another sparsity, and 2:4 has one"),
    "criterion of a training": ({"criterion": "movement"}, "'movement' measures how training changes the weights"),
    "nothing to prune": ({"sparsity": 0.0}, "expected a sparsity above 0"),
    "learning rate": ({"rewind": "learning_rate"}, "rewind"),
    "no round": ({"rounds": 0}, "rounds"),
}


@pytest.mark.one_backend
@pytest.mark.parametrize(("settings", "said"), REFUSED.values(), ids=REFUSED)
def test_a_rounds_step_that_cannot_run_is_refused(settings, said):
    with pytest.raises(RecipeError, match=said):
        load_recipe(of(**settings), data_given=True)


@pytest.mark.one_backend
def test_rounds_after_a_prune_step_and_an_easier_prune_step_after_rounds_are_refused():
    rounds, easier = ({"rounds": SETTINGS}, one_shot(0.5, include=["hidden"]))
    with pytest.raises(RecipeError, match="rounds start from a model that no step has pruned"):
        load_recipe(recipe(easier, rounds), data_given=True)
    with pytest.raises(RecipeError, match="pruned weights do not come back"):
        load_recipe(recipe(rounds, easier), data_given=True)

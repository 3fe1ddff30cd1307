"""The recipe step `factorize`: mistakes, the plan, and a run that goes on with the new model."""

import keras
import numpy as np
import pytest
from networks import dense_network
from tiny_recipes import mistake_in, one_shot, recipe

from prunekit.recipe.run.runner import compress, plan
from prunekit.recipe.text.loader import RecipeError

pytestmark = pytest.mark.every_backend

TRAIN = {"train": {"epochs": 1}}
MISTAKES = {
    "no target": ("factorize: {}", "6:16", "parameters"),
    "two": ("factorize: {rank: 4, energy: 0.9}", "6:34", "rank and energy"),
    "a percentage": ("factorize: {parameters: 50}", "6:29", "share that is left"),
    "a rank": ("factorize: {rank: many}", "6:23", "expected the number of values between the two layers"),
    "a form": ("factorize: {rank: 4, form: tuckers}", "6:32", "Did you mean 'tucker'"),
    "a key": ("factorize: {ranks: 4}", "6:17", "Did you mean 'rank'?"),
}


def network():
    return dense_network(8, seed=5, hidden=32, second=24, logits=4)


@pytest.mark.one_backend
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_has_its_place(tmp_path, name):
    step, place, message = MISTAKES[name]
    found = mistake_in(step, tmp_path)
    assert f"r.yaml:{place}" in found and message in found


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([one_shot(0.5), {"factorize": {"rank": 4}}], "Write the prune step after this one"),
        ([{"cluster": {}}, {"factorize": {"rank": 4}}], "Write the cluster step after this one"),
        ([{"factorize": {"rank": {"haed": 4}}}], "haed"),
        ([{"factorize": {"rank": 500}}], "No layer becomes smaller"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(pairs, steps, message):
    with pytest.raises(RecipeError, match=message):
        plan(recipe(*steps), network(), pairs)


@pytest.mark.every_backend(cases=0)
def test_later_steps_work_on_the_new_layers_and_the_plan_knows_them(pairs):
    steps = (
        TRAIN,
        {"factorize": {"rank": {"second": 6}}},
        {"finetune": {"epochs": 1}},
        one_shot(0.5) | {"prune": {"sparsity": 0.5, "include": ["second_reduction"]}},
    )
    planned = plan(recipe(*steps), network(), pairs)
    assert planned.steps[1].text == "rank second 6"
    assert [one.name for one in planned.steps[3].targets] == ["second_reduction/kernel"]
    result = compress(recipe(*steps), network(), pairs)
    kernel = keras.ops.convert_to_numpy(result.model.get_layer("second_reduction").kernel)
    assert kernel.shape == (32, 6) and np.count_nonzero(kernel) == 96
    titles = [section["title"] for section in result.report.to_dict()["steps"][1]["sections"]]
    assert "Layers of low rank" in titles


def test_a_share_is_planned_from_the_weights_alone(pairs):
    planned = plan(recipe(TRAIN, {"factorize": {"parameters": 0.7}}), network(), pairs)
    assert any("the present weights alone" in note for note in planned.notes)


def test_a_form_is_named_in_the_plan_and_makes_the_layers():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(12, 3, name="first"),
            keras.layers.Conv2D(16, 3, name="second"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(4, name="logits"),
        ]
    )
    rng = np.random.default_rng(0)
    part = rng.normal(size=(64, 8, 8, 3)).astype("float32"), rng.integers(0, 4, 64)
    data = part, part
    steps = TRAIN, {"factorize": {"rank": {"second": 5}, "form": "tucker"}}
    planned = plan(recipe(*steps), model, data)
    assert planned.steps[1].text == "rank second 5, tucker"
    result = compress(recipe(*steps), model, data)
    assert [one.name for one in result.model.layers if one.name.startswith("second")] == [
        "second_reduction",
        "second_core",
        "second",
    ]

"""The recipe steps `remove_blocks` and `simplify`: refusals, plan, what a run writes, masks, interruptions."""

import keras
import numpy as np
import pytest
from tiny_recipes import Stop, prune, recipe, resumed, told, zeros

import prunekit as pk
from prunekit.anatomy.files.digests import model_digest
from prunekit.recipe.run.runner import compress, plan, verify
from prunekit.recipe.text.loader import RecipeError, load_recipe

TRAIN = {"train": {"epochs": 1}}
BLOCK = {"remove_blocks": {"examples": 32}}
SIMPLIFY = {"simplify": {}}


def network():
    """Two residual branches, of which the second adds little, with batch normalization and dropout."""
    keras.utils.set_random_seed(20)
    inputs = keras.Input((8,), name="features")
    x = keras.layers.Dense(12, activation="relu", name="stem")(inputs)
    for name, scale in (("large", 1.0), ("small", 1e-3)):
        y = keras.layers.Dense(12, name=f"{name}_dense")(x)
        y = keras.layers.BatchNormalization(name=f"{name}_norm", gamma_initializer=keras.initializers.Constant(scale))(
            y
        )
        x = keras.layers.Add(name=name)([x, keras.layers.Dropout(0.2, name=f"{name}_drop")(y)])
    return keras.Model(inputs, keras.layers.Dense(4, name="logits")(x), name="tiny")


def layers_of(model):
    return [layer.name for layer in model.layers]


@pytest.mark.every_backend(cases=0)
def test_the_block_that_adds_least_is_removed_and_training_goes_on(pairs):
    result = compress(recipe(TRAIN, BLOCK, {"finetune": {"epochs": 1}}), network(), pairs)
    assert "small_dense" not in layers_of(result.model) and "large_dense" in layers_of(result.model)
    assert int(result.model.optimizer.iterations) == 10
    sections = [section["title"] for section in result.report.to_dict()["steps"][1]["sections"]]
    assert sections[0] == "Blocks"
    assert result.report.to_dict()["before"]["parameters"] > result.report.to_dict()["after"]["parameters"]


@pytest.mark.every_backend
def test_a_simplified_model_has_equal_outputs_and_fewer_layers(pairs):
    trained = compress(recipe(TRAIN), network(), pairs).model
    simpler = compress(recipe(TRAIN, SIMPLIFY), network(), pairs).model
    assert not any(name.endswith(("norm", "drop")) for name in layers_of(simpler))
    x = pairs[0][0][:32]
    np.testing.assert_allclose(simpler.predict(x, verbose=0), trained.predict(x, verbose=0), rtol=1e-4, atol=1e-5)


def test_the_plan_names_the_blocks_and_later_steps_are_planned_without_them(pairs):
    steps = (TRAIN, BLOCK, SIMPLIFY, prune())
    found = plan(recipe(*steps), network(), pairs)
    text = str(found)
    assert "1 block" in text and "the weights that the model has now: small." in " ".join(text.split())
    assert {target.name for target in found.steps[3].targets} == {"stem/kernel", "large_dense/kernel", "logits/kernel"}


def test_zeros_of_earlier_steps_hold_in_both(pairs):
    steps = (prune(exclude=["logits"]), BLOCK, SIMPLIFY, {"finetune": {"epochs": 1}})
    model = compress(recipe(*steps), network(), pairs).model
    for name in ("stem/kernel", "large_dense/kernel"):
        layer = name.partition("/")[0]
        size = int(np.prod(model.get_layer(layer).kernel.shape))
        assert zeros(model, name) == round(0.8 * size)


@pytest.mark.thorough
@pytest.mark.parametrize("ends", [3, *(pytest.param(one, marks=pytest.mark.thorough) for one in (2, 4))])
def test_an_interrupted_run_ends_with_the_same_bytes(pairs, tmp_path, ends):
    steps = recipe(TRAIN, BLOCK, {"finetune": {"epochs": 2}}, SIMPLIFY)
    whole = compress(steps, network(), pairs)
    found = resumed(steps, network, pairs, tmp_path / "run", Stop(ends))
    assert model_digest(found.model) == model_digest(whole.model)
    assert told(found.report)["steps"] == told(whole.report)["steps"]


@pytest.mark.thorough
def test_a_run_is_repeated_by_verify(pairs, tmp_path):
    compress(recipe(TRAIN, BLOCK, SIMPLIFY), network(), pairs, tmp_path / "run")
    assert verify(tmp_path / "run", model=network(), data=pairs).identical


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([{"remove_blocks": {"blocks": 9}}], "fewer blocks that can be removed. Received: blocks=9; 2 can be removed"),
        ([{"remove_blocks": {"include": ["smal"]}}], "matches none. Did you mean 'small'"),
        ([{"remove_blocks": {"blocks": 0}}], "blocks"),
        ([{"simplify": {"layers": 1}}], "unknown key 'layers'"),
    ],
    ids=str,
)
def test_a_mistake_is_refused_before_any_step(pairs, steps, message):
    with pytest.raises(RecipeError, match=message):
        compress(recipe(TRAIN, *steps), network(), pairs)


def test_remove_blocks_needs_data():
    with pytest.raises(RecipeError, match="data"):
        compress(load_recipe({"version": 1, "steps": [BLOCK]}), network())


@pytest.mark.thorough
def test_drops_can_be_expected_after_either_step(pairs):
    bound = {"expect": {"drop": {"accuracy": 1.0}}}
    steps = [step["kind"] for step in compress(recipe(TRAIN, SIMPLIFY, bound), network(), pairs).report.steps]
    assert steps == ["train", "simplify", "expect"]
    with pytest.raises(RecipeError, match="can be measured only after a prune step"):
        compress(recipe(TRAIN, bound), network(), pairs)


def test_progress_counts_every_measured_change():
    calls = []
    data = np.random.default_rng(0).normal(size=(8, 8)).astype("float32")
    pk.remove_blocks(network(), 2, data, progress=lambda *arguments: calls.append(arguments))
    assert [done for done, *_ in calls] == list(range(1, len(calls) + 1))
    assert calls[0] == (1, 3, "large") and calls[-1][0] <= calls[-1][1]

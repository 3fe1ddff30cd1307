"""The recipe step `cluster`: refusals, the plan, and a run whose masks hold."""

import keras
import numpy as np
import pytest
from backends import converts, tensorflow_only
from networks import dense_network
from tiny_recipes import mistake_in, one_shot, recipe

from prunekit.recipe.run.runner import compress, plan
from prunekit.recipe.text.loader import RecipeError, load_recipe

pytestmark = pytest.mark.every_backend

TRAIN = {"train": {"epochs": 1}}
NAMES = ("hidden", "second", "logits")
MISTAKES = {
    "one value": ("cluster: {clusters: 1}", "6:25", "expected the number of values of a weight, 2 to 256"),
    "a pattern's": ("cluster: {clusters: {head: many}}", "6:25", "or numbers by patterns of layers"),
    "a key": ("cluster: {cluster: 4}", "6:15", "unknown key 'cluster'. Did you mean 'clusters'?"),
    "granularity": ("cluster: {granularity: filter}", "6:28", "expected tensor, channel, or a number of channels"),
    "a rate without a training": ("cluster: {learning_rate: 0.1}", "6:30", "write epochs, too"),
    "a method": ("cluster: {method: gtpq}", "6:23", "'gtpq'. Did you mean 'gptq'?"),
}


def network():
    return dense_network(8, seed=5, hidden=16, second=12, logits=4)


def cluster(**settings):
    return {"cluster": settings}


@pytest.mark.one_backend
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_has_its_place(tmp_path, name):
    step, place, message = MISTAKES[name]
    found = mistake_in(step, tmp_path)
    assert f"r.yaml:{place}: " in found and message in found


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            [cluster(), one_shot(0.5)],
            "earlier cluster step gave the weights few.* Write the cluster step after this one",
        ),
        ([cluster(clusters={"haed": 4})], "'haed' in `clusters` matches no layer"),
        ([cluster(method="gptq", include=["logits/bias"])], "no weights to cluster|becomes smaller"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(pairs, steps, message):
    with pytest.raises(RecipeError, match=message):
        plan(recipe(*steps), network(), pairs)


@pytest.mark.one_backend
def test_integers_after_clusters_keep_equal_weights_equal(pairs):
    for settings in ({}, {"epochs": 2}, {"epochs": 2, "bits": 4}):
        load_recipe(recipe(cluster(clusters=4), {"quantize": settings}), data_given=True)
    refused = (
        {"bits": 4},
        {"bits": {"head": 4}},
        {"method": "gptq"},
        {"equalize": True},
        {"group_size": 32, "epochs": 2},
    )
    for settings in refused:
        with pytest.raises(RecipeError, match=f"quantize.{next(iter(settings))}: .* makes weights different"):
            load_recipe(recipe(cluster(), {"quantize": settings | _floats(settings)}), data_given=True)


def _floats(settings):
    return {"activation_bits": "float"} if "group_size" in settings else {}


def values(model):
    return [np.unique(keras.ops.convert_to_numpy(model.get_layer(name).kernel)) for name in NAMES]


@pytest.mark.every_backend(cases=0)
def test_later_trainings_train_the_values_and_keep_their_number_and_the_zeros(pairs):
    steps = TRAIN, one_shot(0.5), cluster(clusters=4)
    before = compress(recipe(*steps), network(), pairs).model
    result = compress(recipe(*steps, {"finetune": {"epochs": 2}}), network(), pairs)
    assert [one.size for one in values(result.model)] == [one.size for one in values(before)] == [4, 4, 4]
    for one, two in zip(values(before), values(result.model), strict=True):
        assert (one == 0).any() and (two == 0).any() and (one != two).any()
    section = result.report.to_dict()["steps"][3]["sections"][0]
    assert section["title"] == "Clustered weights" and section["rows"]


def test_with_epochs_the_step_trains_the_values(pairs):
    before = compress(recipe(TRAIN, cluster(clusters=4)), network(), pairs).model
    steps = recipe(TRAIN, cluster(clusters=4, epochs=2, learning_rate=0.01))
    assert (
        plan(steps, network(), pairs).steps[1].text == "4 values, per tensor, trained for 2 epochs, learning rate 0.01"
    )
    result = compress(steps, network(), pairs)
    for one, two in zip(values(before), values(result.model), strict=True):
        assert one.size == two.size == 4 and (one != two).any()
    row = result.report.to_dict()["steps"][1]
    assert len(row["history"]["loss"]) == 2
    assert [section["title"] for section in row["sections"]] == ["Clustered weights"]


@pytest.mark.one_backend
@converts
@tensorflow_only
@pytest.mark.parametrize("settings", [{"epochs": 2}, {"epochs": 1, "bits": 4}], ids=str)
def test_training_on_integers_keeps_the_values_of_each_channel(pairs, settings):
    model = compress(recipe(TRAIN, cluster(clusters=4), {"quantize": settings}), network(), pairs).model
    for name in NAMES:
        kernel = np.array(model.get_layer(name).kernel)
        assert max(len(np.unique(column)) for column in kernel.T) <= 4


@pytest.mark.one_backend
@converts
@tensorflow_only
def test_a_file_of_8_bits_has_as_few_values_in_each_channel(pairs):
    result = compress(recipe(TRAIN, cluster(clusters=4), {"quantize": {}}), network(), pairs)
    kernel = np.array(result.model.get_layer("hidden").kernel.numpy())
    assert max(len(np.unique(column)) for column in kernel.T) <= 4 < len(np.unique(kernel))


def test_the_plan_lists_the_weights(pairs):
    step = plan(
        recipe(TRAIN, cluster(clusters={"logits": 4}, granularity="channel", misfits="skip")), network(), pairs
    ).steps[1]
    assert step.text == "logits 4, per channel"
    (section,) = step.sections
    assert section.rows == (("logits/kernel", (12, 4), 4, 4),)


@pytest.mark.every_backend(cases=0)
def test_a_run_clusters_what_the_steps_before_left_and_exports_it(pairs, tmp_path):
    steps = TRAIN, one_shot(0.5), cluster(clusters=4), {"export": {"formats": ["keras"]}}
    seen = []
    result = compress(recipe(*steps), network(), pairs, tmp_path / "run", progress=seen.append)
    assert any(item.text == "hidden/kernel, 1 of 3" for item in seen)
    (exported,) = (tmp_path / "run" / "exports").glob("*.keras")
    for model in (result.model, keras.saving.load_model(exported, compile=False)):
        kernels = [np.array(model.get_layer(name).kernel.numpy()) for name in ("hidden", "second", "logits")]
        assert [len(np.unique(kernel)) for kernel in kernels] == [4, 4, 4]
        assert sum(int((kernel == 0).sum()) for kernel in kernels) == 184
    titles = [section["title"] for section in result.report.to_dict()["steps"][2]["sections"]]
    assert "Clustered weights" in titles and "On the data" in titles

"""Frozen weights are left out of pruning in training, by name, unless `include` names them."""

import keras
import pytest

import prunekit as pk
from prunekit.techniques.pruning.training.pruner import Pruner

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
REASON = "frozen (trainable=False): training cannot make up for what is pruned, so it is out unless include names it"
SCHEDULE = pk.schedules.ConstantSparsity(0.5)


@pytest.fixture
def half_frozen(perceptron):
    perceptron.get_layer("hidden").trainable = False
    perceptron.compile("sgd", LOSS)
    return perceptron


def zeros(model, name="hidden"):
    return int((model.get_layer(name).kernel.numpy() == 0).sum())


@pytest.mark.every_backend
def test_fit_leaves_a_frozen_layer_out_and_names_it(half_frozen, batches):
    pruning = pk.PruningCallback(SCHEDULE, allocation="uniform")
    half_frozen.fit(**batches, callbacks=[pruning])
    assert pruning.report.targets == ("logits/kernel",)
    assert {item.name: item.reason for item in pruning.report.skipped}["hidden/kernel"] == REASON
    assert [zeros(half_frozen, name) for name in ("hidden", "logits")] == [0, 32]
    assert f"hidden/kernel: {REASON}" in str(pruning.report)


@pytest.mark.parametrize("include", ["hidden", "hidden/kernel", "re:hidden/kernel", "*/kernel"])
def test_naming_the_weight_or_its_layer_prunes_it_all_the_same(half_frozen, batches, include):
    half_frozen.fit(**batches, callbacks=[pk.PruningCallback(SCHEDULE, include=[include], allocation="uniform")])
    assert zeros(half_frozen) == 64


def test_a_glob_over_layers_does_not_name_it(half_frozen):
    assert [target.name for target in Pruner(half_frozen, SCHEDULE, include=["*"], allocation="uniform").targets] == [
        "logits/kernel"
    ]
    with pytest.raises(ValueError, match="matches nothing that is pruned.*hidden/kernel: frozen .*'hidden/kernel'"):
        Pruner(half_frozen, SCHEDULE, include=["hid*"], allocation="uniform")


@pytest.mark.every_backend
def test_a_pruner_with_an_optimizer_leaves_it_out_and_one_shot_pruning_does_not(half_frozen):
    with Pruner(half_frozen, SCHEDULE, allocation="uniform") as pruner:
        assert [target.name for target in pruner.targets] == ["logits/kernel"]
    assert pk.prune(half_frozen, 0.5, allocation="uniform").targets == ("hidden/kernel", "logits/kernel")
    assert zeros(half_frozen) == 64


def test_a_layer_inside_a_frozen_model_is_frozen_and_the_models_name_asks_for_it():
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="dense")], name="backbone")
    model = keras.Sequential([keras.Input((4,)), inner, keras.layers.Dense(2, name="head")])
    inner.trainable = False
    model.compile("sgd", LOSS)
    assert [target.name for target in Pruner(model, SCHEDULE, allocation="uniform").targets] == ["head/kernel"]
    named = Pruner(model, SCHEDULE, include=["backbone"], allocation="uniform")
    assert [target.name for target in named.targets] == ["backbone/dense/kernel"]


def test_only_frozen_weights_to_prune_is_an_error(half_frozen):
    with pytest.raises(ValueError, match="has no weights to prune. Received: hidden/kernel: frozen "):
        Pruner(half_frozen, SCHEDULE, exclude=["logits"], allocation="uniform")


def test_tfmot_prunes_frozen_weights_as_the_original_does(half_frozen, batches):
    pruning = pk.PruningCallback(pk.schedules.ConstantSparsity(0.5, frequency=1), policy="tfmot")
    half_frozen.fit(**batches, callbacks=[pruning])
    assert zeros(half_frozen) == 64


@pytest.mark.parametrize(
    ("prune", "pruned"),
    [
        ("{sparsity: 0.5, allocation: uniform}", 64),
        ("{epochs: 1, schedule: {type: constant, target_sparsity: 0.5}}", 0),
    ],
    ids=["at once", "while training"],
)
def test_a_prune_step_that_trains_leaves_it_out_and_the_report_names_it(half_frozen, pairs, load, prune, pruned):
    recipe = load(
        "version: 1\nmodel: {file: none.keras}\ndata: {builtin: digits}\n"
        "compile: {optimizer: sgd, loss: sparse_categorical_crossentropy, from_logits: true, batch_size: 16}\n"
        f"steps:\n  - prune: {prune}\n"
    )
    report = pk.compress(recipe, half_frozen, pairs).report
    assert zeros(half_frozen) == pruned
    assert (REASON in report.skipped_reasons) == (pruned == 0)

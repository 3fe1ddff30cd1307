"""A sparsity that would remove all of a weight leaves one unit of it, and says so by name."""

import warnings

import keras
import numpy as np
import pytest
from networks import dense_network

import prunekit as pk
from prunekit.recipe.run.plan import plan
from prunekit.sparsity.selection import removed_count
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.training.pruner import Pruner
from prunekit.techniques.pruning.training.pruning_notes import LATER_TRAINING

SPARED = (
    r"Sparsity 0.95 leaves at most one unit of these weights, and that unit is kept: head/kernel \(1\). "
    "Leave them out with `exclude`"
)


@pytest.fixture
def headed():
    """8 -> 8 -> 1: 0.95 of the head's 8 weights is all of them."""
    return dense_network(8, hidden=8, head=1)


def kept(model, name="head"):
    return np.count_nonzero(model.get_layer(name).kernel.numpy())


@pytest.mark.every_backend
def test_one_weight_of_a_small_head_is_kept_and_the_head_is_named(headed):
    largest = np.argmax(np.abs(headed.get_layer("head").kernel.numpy()))
    with pytest.warns(UserWarning, match=SPARED):
        report = pk.prune(headed, 0.95, criterion="magnitude", allocation="uniform")
    assert np.flatnonzero(headed.get_layer("head").kernel.numpy()).tolist() == [largest]
    assert kept(headed, "hidden") == 64 - round(0.95 * 64)
    (note,) = [note for note in report.notes if note.startswith("Sparsity 0.95 leaves")]
    assert report.notes[-1] == LATER_TRAINING and "head/kernel (1)" in note


@pytest.mark.every_backend
def test_keep_one_false_allows_an_empty_weight_and_names_it(headed):
    with pytest.warns(
        UserWarning, match=r"Sparsity 0.95 leaves nothing of these weights: head/kernel \(8\). Leave them out"
    ):
        report = pk.prune(headed, 0.95, keep_one=False, allocation="uniform")
    assert kept(headed) == 0
    assert "head/kernel (8)" in report.notes[0]


@pytest.mark.parametrize("sparsity", [0.5, 0.8, 0.9])
def test_counts_stay_exact_and_nothing_is_said_where_a_weight_is_left_anyway(headed, sparsity):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = pk.prune(headed, sparsity, allocation="uniform", repair="none")
    assert kept(headed) == 8 - round(sparsity * 8)
    assert report.notes == (LATER_TRAINING,)


@pytest.mark.every_backend
@pytest.mark.parametrize("keep_one", [True, False])
def test_the_global_allocation_spares_the_best_weight_of_a_layer_and_keeps_its_count(headed, keep_one):
    head = headed.get_layer("head").kernel
    head.assign(np.array([[1], [-3], [2], [1], [1], [1], [1], [1]]) * 1e-6)
    with pytest.warns(UserWarning, match=r"head/kernel \(1\)" if keep_one else r"leaves nothing.* head/kernel \(8\)"):
        pk.prune(headed, 0.5, criterion="magnitude", allocation="global", keep_one=keep_one)
    assert np.flatnonzero(head.numpy()).tolist() == ([1] if keep_one else [])
    assert kept(headed) + kept(headed, "hidden") == 72 - 36


def test_the_global_allocation_keeps_one_weight_of_each_where_fewer_would_be_left(headed):
    with pytest.warns(UserWarning, match=r"that unit is kept: hidden/kernel \(1\), head/kernel \(1\)"):
        pk.prune(headed, 0.99, allocation="global")
    assert [kept(headed, name) for name in ("hidden", "head")] == [1, 1]


def test_the_global_allocation_keeps_one_channel(headed):
    headed.get_layer("hidden").kernel.assign(np.full((8, 8), 1e-6))
    wide = keras.Sequential([*headed.layers[:1], keras.layers.Dense(16, name="head")])
    wide.build((None, 8))
    with pytest.warns(UserWarning, match=r"that unit is kept: hidden/kernel \(8\)"):
        pk.prune(wide, 0.5, allocation="global", pattern="channel")
    kernel = wide.get_layer("hidden").kernel.numpy()
    assert np.count_nonzero(kernel.any(axis=0)) == 1


def test_a_pattern_that_would_leave_no_unit_is_refused_by_name(headed):
    with pytest.raises(ValueError, match="channel would remove every weight of hidden/kernel.*`exclude`"):
        pk.prune(headed, 0.95, pattern="channel", allocation="uniform")


def test_fit_spares_and_tells_it_at_its_end(headed, samples):
    headed.compile("sgd", "mse")
    pruning = pk.PruningCallback(pk.schedules.PolynomialDecay(0.0, 0.95, 0, 4, frequency=1), allocation="uniform")
    with pytest.warns(UserWarning, match=SPARED):
        headed.fit(samples[0], np.zeros(70), batch_size=16, verbose=0, callbacks=[pruning])
    assert kept(headed) == 1
    assert "head/kernel (1)" in pruning.report.notes[0]


def test_masks_of_tfmot_are_as_they_were_and_it_has_no_such_option(headed):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = pk.prune(headed, 0.95, policy="tfmot")
    assert kept(headed) == 1 and report.notes == (LATER_TRAINING,)
    with pytest.raises(ValueError, match="always keeps the largest weight. Received: keep_one=False"):
        pk.prune(headed, 0.95, policy="tfmot", keep_one=False)


def test_keep_one_of_a_recipe_is_in_its_report_plan_and_schema(headed, load):
    step = "prune: {sparsity: 0.95, allocation: uniform, keep_one: %s}"
    text = f"version: 1\nmodel: {{file: none.keras}}\nsteps:\n  - {step}\n"
    for keep_one, left in (("true", 1), ("false", 0)):
        model = keras.models.clone_model(headed)
        planned = plan(load(text % keep_one), model).steps[0].targets
        assert planned[1].pruned == 8 - left
        result = pk.compress(load(text % keep_one), model)
        assert kept(model) == left
        assert any("head/kernel" in note for note in result.report.notes)


def test_the_option_is_true_or_false_and_counts_are_whole():
    with pytest.raises(TypeError, match="`keep_one` is True or False. Received: 1"):
        PruningOptions(**{"keep_one": 1})
    counts = [removed_count(0.95, n, keep_one=True) for n in (0, 1, 2, 8, 100)]
    assert counts == [0, 0, 1, 7, 95]


def test_gradual_pruning_never_gives_a_weight_back_under_the_global_allocation(headed):
    headed.get_layer("head").kernel.assign(np.arange(1, 9).reshape(8, 1) * 1e-6)
    pruner = Pruner(headed, pk.schedules.PolynomialDecay(0.0, 0.9, 0, 6, frequency=1), allocation="global")
    before = pruner.masks
    for _ in range(7):
        pruner.step()
        now = pruner.masks
        assert all(not (now[name] & ~before[name]).any() for name in now)
        before = now
    with pytest.warns(UserWarning, match="head/kernel"):
        pruner.finish()
    assert before["head/kernel"].ravel().tolist() == [False] * 7 + [True]

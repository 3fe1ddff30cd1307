"""Weights that the pattern does not fit are an error, or are left out by name."""

import pytest
from keras import layers
from networks import dense_network, sequential

import prunekit as pk


@pytest.fixture
def model():
    return sequential(
        (8, 8, 3),
        layers.Conv2D(8, 3, name="first"),
        layers.Conv2D(8, 3, name="second"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(2, name="head"),
    )


def test_a_misfit_is_an_error_by_default(model):
    with pytest.raises(ValueError, match=r"first/kernel of shape \(3, 3, 3, 8\).*Leave this weight out"):
        pk.prune(model, 0.5, pattern="2:4", allocation="uniform")


def test_a_misfit_is_left_out_by_name(model):
    report = pk.prune(model, 0.5, pattern="2:4", misfits="skip", allocation="uniform")
    assert report.targets == ("second/kernel", "head/kernel")
    (skipped,) = [item for item in report.skipped if item.name == "first/kernel"]
    assert skipped.reason.startswith("the pattern 2:4 does not fit: 2:4 sparsity needs an input axis")
    assert {row.name: row.pattern for row in report.weights}["second/kernel"] == "2:4"


def test_in_training_a_misfit_is_trained_and_not_pruned(model):
    with pk.Pruner(model, pk.schedules.OneShot(0.5), pattern="2:4", misfits="skip", allocation="uniform") as pruner:
        assert list(pruner.masks) == ["second/kernel", "head/kernel"]


def test_a_pattern_that_fits_no_weight_is_an_error(model):
    with pytest.raises(ValueError, match="it ends at sparsity 0.5"):
        pk.prune(model, 0.7, pattern="2:4", misfits="skip", allocation="uniform")


def test_a_sparsity_that_the_pattern_lacks_is_the_error_also_where_the_last_weight_does_not_fit():
    model = dense_network(8, activation=None, first=7, last=4)
    with pytest.raises(ValueError, match="it ends at sparsity 0.5"):
        pk.prune(model, 0.75, pattern="2:4", misfits="skip", allocation="uniform")


def test_the_plan_of_a_recipe_names_misfits(model):
    step = {"prune": {"sparsity": 0.5, "pattern": "2:4", "misfits": "skip", "allocation": "uniform", "repair": "none"}}
    result = pk.compress({"version": 1, "steps": [step]}, model)
    assert "first/kernel" in {item.name for item in result.report.after.skipped}


def test_another_word_is_refused(model):
    with pytest.raises(ValueError, match='`misfits` is "error" or "skip". Received: \'ignore\''):
        pk.prune(model, 0.5, misfits="ignore", allocation="uniform")

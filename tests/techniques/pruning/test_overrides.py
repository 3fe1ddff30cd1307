"""`overrides`: the sparsity of single weights, with the overall sparsity as asked."""

import keras
import numpy as np
import pytest
from backends import zero_counts
from networks import dense_network
from recipe_documents import recipe

import prunekit as pk
from prunekit.recipe.run.plan import plan
from prunekit.recipe.text.loader import RecipeError, dump_recipe, load_recipe
from prunekit.techniques.pruning.masks.options import PruningOptions

pytestmark = pytest.mark.every_backend


@pytest.fixture
def model():
    """Kernels of 128, 256 and 64 entries."""
    return dense_network(8, one=16, two=16, three=4)


@pytest.mark.parametrize("allocation", ["uniform", "erk", "global", "lamp"])
def test_a_weight_gets_its_own_sparsity_and_the_others_the_rest(model, allocation):
    pk.prune(model, 0.5, overrides={"three": 0.25}, allocation=allocation)
    found = zero_counts(model)
    assert found[2] == 16 and sum(found) == 224
    if allocation == "uniform":
        assert found[:2] == [69, 139], "208 of 384 entries, in proportion"


def test_a_weight_may_be_left_dense(model):
    pk.prune(model, 0.5, overrides={"re:one/kernel|three/.*": 0.0}, allocation="uniform")
    assert zero_counts(model) == [0, 224, 0]


def test_the_override_rises_with_the_schedule(model, samples):
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    schedule = pk.schedules.MultiStep(((0, 0.2), (2, 0.4), (4, 0.8)))
    callback = pk.PruningCallback(schedule, overrides={"three": 0.5}, allocation="uniform")
    seen = []
    watching = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(int((~callback.pruner.masks["three/kernel"]).sum()))
    )
    model.fit(*samples, batch_size=14, verbose=0, callbacks=[callback, watching])
    assert seen == [8, 16, 16, 32, 32] and callback.pruner.sparsity == pytest.approx(0.8, abs=2 / 448)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"overrides": {"four": 0.5}}, ValueError, "pattern 'four' in `overrides` matches no layer"),
        ({"overrides": {"one/bias": 0.5}}, ValueError, "must match a pruned weight. Received: 'one/bias'"),
        ({"overrides": {"one": 0.5, "one/kernel": 0.6}}, ValueError, "Received: 0.5 and 0.6 for one/kernel"),
        ({"overrides": {"two": 0.99}}, ValueError, "allow overall sparsities from 0.5657 to 0.9.*. Received: 0.5"),
        ({"overrides": {"one": 0.0, "two": 0.0}}, ValueError, "allow overall sparsities from 0 to 0.1429"),
        ({"overrides": {"one": 1.0}}, ValueError, r"overrides\['one'\] must be a fraction removed, in \[0, 1\)"),
        ({"overrides": 0.5}, TypeError, "`overrides` maps patterns of weights to sparsities. Received: 0.5"),
        ({"overrides": {"one": 0.5}, "pattern": "2:4"}, ValueError, "2:4 gives every weight the sparsity"),
        ({"overrides": {"one": 0.5}, "policy": "tfmot"}, ValueError, "prunes all weights to one sparsity"),
    ],
    ids=[
        "no weight",
        "no target",
        "two values",
        "too much",
        "too little",
        "no fraction",
        "no mapping",
        "N:M",
        "tfmot",
    ],
)
def test_overrides_that_cannot_hold_are_refused_before_a_weight_changes(model, options, error, message):
    before = model.get_weights()
    with pytest.raises(error, match=message):
        pk.prune(model, 0.5, **options)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_options_with_overrides_stay_hashable():
    assert hash(PruningOptions(overrides={"a": 0.5})) == hash(PruningOptions(overrides={"a": 0.5}))


def test_in_a_recipe_the_plan_shows_them_and_the_lock_keeps_them(model, pairs, tmp_path):
    steps = recipe(
        {"prune": {"sparsity": 0.5, "overrides": {"three": 0.25}, "allocation": "uniform", "repair": "none"}},
        model=None,
        data=None,
    )
    found = plan(steps, model, pairs)
    assert [target.pruned for target in found.steps[0].targets] == [69, 139, 16]
    assert "three to 0.25" in found.steps[0].text
    loaded = load_recipe(steps, data_given=True)
    (tmp_path / "again.yaml").write_text(dump_recipe(loaded))
    assert load_recipe(tmp_path / "again.yaml", data_given=True) == loaded
    with pytest.raises(RecipeError, match=r"prune.overrides.three: expected a fraction.*Write 0.25 for 25 %"):
        load_recipe(
            recipe(
                {"prune": {"sparsity": 0.5, "overrides": {"three": 25.0}, "allocation": "uniform", "repair": "none"}},
                model=None,
            ),
            data_given=True,
        )

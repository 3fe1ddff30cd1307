"""`bounds`: least and greatest sparsities of single weights, with the overall sparsity as asked."""

import warnings

import keras
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from recipe_documents import recipe

import prunekit as pk
from prunekit.recipe.run.plan import plan
from prunekit.recipe.text.loader import RecipeError, dump_recipe, load_recipe
from prunekit.sparsity.allocation import Uniform, WeightGeometry
from prunekit.sparsity.bounds import Bounds, shares_within

SIZES = {"one": 128, "two": 256, "three": 64}


@pytest.fixture
def model():
    keras.utils.set_random_seed(4)
    layers = [
        keras.layers.Dense(16, use_bias=False, name="one"),
        keras.layers.Dense(16, use_bias=False, name="two"),
        keras.layers.Dense(4, use_bias=False, name="three"),
    ]
    return keras.Sequential([keras.Input((8,)), *layers])


def zeros(model):
    return {layer.name: int((keras.ops.convert_to_numpy(layer.kernel) == 0).sum()) for layer in model.layers}


def level_within(sizes, removed, limits):
    """Counts of the one sparsity s, clipped to each weight's limits, that removes `removed` entries; by bisection."""
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        total = sum(min(max(middle * n, a), b) for n, (a, b) in zip(sizes, limits, strict=True))
        low, high = (middle, high) if total < removed else (low, middle)
    return [min(max(low * n, a), b) for n, (a, b) in zip(sizes, limits, strict=True)]


@st.composite
def problems(draw):
    """Sizes, limits, and a number of removed entries that they allow."""
    sizes = draw(st.lists(st.integers(10, 500), min_size=1, max_size=6))
    limits = []
    for size in sizes:
        least = draw(st.integers(0, size - 1))
        limits.append((least, draw(st.integers(least, size - 1))))
    least, most = (sum(column) for column in zip(*limits, strict=True))
    return sizes, limits, draw(st.integers(least, most))


@pytest.mark.one_backend
@settings(max_examples=100, deadline=None)
@given(problems(), st.randoms())
def test_a_uniform_share_within_limits_is_one_level(problem, random):
    sizes, limits, removed = problem
    targets = [WeightGeometry((size,), (), (0,)) for size in sizes]

    def counts(order):
        weights = [targets[i] for i in order]
        found = shares_within(
            lambda fixed: Uniform().shares(removed / sum(sizes), weights, overrides=fixed),
            [sizes[i] for i in order],
            [limits[i] for i in order],
            removed,
        )
        shares = dict(zip(order, found, strict=True))
        return [shares[i] * sizes[i] for i in range(len(sizes))]

    order = list(range(len(sizes)))
    expected = level_within(sizes, removed, limits)
    found = counts(order)
    np.testing.assert_allclose(found, expected, atol=2)
    assert round(sum(found), 6) == removed
    assert all(least <= round(n, 6) <= most for n, (least, most) in zip(found, limits, strict=True))
    random.shuffle(order)
    # Only entries left by rounding go to the first of equal weights.
    np.testing.assert_allclose(counts(order), found, atol=1.001)


@pytest.mark.parametrize("allocation", ["uniform", "erk", "global", "lamp"])
def test_bounds_hold_and_the_others_take_the_rest(model, allocation):
    pk.prune(model, 0.5, allocation=allocation, bounds={"three": {"max": 0.125}, "one": {"min": 0.75}})
    found = zeros(model)
    assert found["three"] == (0 if allocation == "erk" else 8) and found["one"] == 96 and sum(found.values()) == 224


def test_the_free_weights_of_a_global_allocation_have_one_threshold(model):
    kernels = {layer.name: np.abs(keras.ops.convert_to_numpy(layer.kernel)) for layer in model.layers}
    pk.prune(model, 0.6, criterion="magnitude", allocation="global", bounds={"three": {"max": 0.25}})
    found = zeros(model)
    assert found["three"] == 16 and sum(found.values()) == 269
    joined = np.sort(np.concatenate([kernels["one"].ravel(), kernels["two"].ravel()]))
    for name in ("one", "two"):
        assert found[name] == np.count_nonzero(kernels[name] < joined[253])


def test_bounds_that_no_weight_meets_change_nothing(model):
    other = keras.models.clone_model(model)
    other.set_weights(model.get_weights())
    pk.prune(model, 0.5, allocation="global")
    pk.prune(other, 0.5, allocation="global", bounds={"*": {"min": 0.01, "max": 0.99}})
    assert all(map(np.array_equal, model.get_weights(), other.get_weights()))


@pytest.mark.parametrize("allocation", ["uniform", "global"])
def test_maxima_hold_at_every_step_and_minima_rise_with_the_schedule(model, samples, allocation):
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    schedule = pk.schedules.MultiStep(((0, 0.2), (2, 0.4), (4, 0.8)))
    bounds = {"three": {"max": 0.25}, "one": {"min": 0.9}}
    callback = pk.PruningCallback(schedule, bounds=bounds, allocation=allocation)
    seen = []

    def note(batch, logs):
        pruned = {name.split("/")[0]: int((~mask).sum()) for name, mask in callback.pruner.masks.items()}
        seen.append((pruned["one"], pruned["three"], sum(pruned.values())))

    watching = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    model.fit(*samples, batch_size=14, verbose=0, callbacks=[callback, watching])
    assert [total for *_, total in seen] == [90, 179, 179, 358, 358]
    assert all(three <= 16 for _, three, _ in seen) and seen[-1][1] <= 16
    assert seen[0][0] >= 28 and seen[1][0] >= 57 and seen[-1][0] >= 116


def test_blocks_meet_bounds_in_whole_blocks(model):
    pk.prune(model, 0.5, pattern="block:4x1", bounds={"two": {"max": 0.3}}, criterion="magnitude", allocation="global")
    found = zeros(model)
    assert found["two"] == 4 * round(0.3 * 64) and sum(found.values()) == 224


@pytest.mark.parametrize("allocation", ["uniform", "global"])
def test_channels_stay_within_bounds_in_whole_units(model, allocation):
    pk.prune(model, 0.5, pattern="channel", allocation=allocation, bounds={"one": {"max": 0.3}, "two": {"min": 0.55}})
    found = zeros(model)
    assert found["one"] / 8 <= 4 and found["two"] / 16 >= 9, "at most 30 % and at least 55 % of 16 channels"


@pytest.mark.parametrize("keep_one", [True, False])
def test_a_threshold_may_lie_above_all_entries_of_a_weight(model, keep_one):
    model.layers[2].kernel.assign(model.layers[2].kernel * 1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        pk.prune(model, 0.5, allocation="global", keep_one=keep_one, bounds={"one": {"max": 0.3}})
    assert zeros(model)["three"] == 64 - keep_one and sum(zeros(model).values()) == 224


@given(problems())
def test_a_share_of_whole_entries_is_exact(problem):
    sizes, limits, removed = problem
    weights = [WeightGeometry((size,), (), (0,)) for size in sizes]
    found = shares_within(
        lambda fixed: Uniform().shares(removed / sum(sizes), weights, overrides=fixed), sizes, limits, removed
    )
    counts = [round(share * size) for share, size in zip(found, sizes, strict=True)]
    assert sum(counts) == removed
    assert all(least <= count <= most for count, (least, most) in zip(counts, limits, strict=True))


def test_a_minimum_rounds_up_and_a_maximum_down_except_below_the_final_sparsity():
    assert Bounds(0.55, 0.95).at(1.0, 100) == (55, 95), "0.55 * 100 is 55.00000000000001"
    assert Bounds(0.5, 0.7).at(1.0, 7) == (4, 4) and Bounds(0.5, 0.7).at(0.99, 7) == (3, 4)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"bounds": {"four": {"max": 0.5}}}, ValueError, "pattern 'four' in `bounds` matches no layer"),
        ({"bounds": {"*": {"max": 0.4}}}, ValueError, "allow overall sparsities from 0 to 0.4. Received: 0.5"),
        ({"bounds": {"two": {"min": 0.9}}}, ValueError, "allow overall sparsities from 0.5143 to 1. Received: 0.5"),
        ({"bounds": {"one": {"max": 1.0}}}, ValueError, r"bounds\['one'\]: max must be a fraction removed"),
        ({"bounds": {"one": {"min": 0.6, "max": 0.5}}}, ValueError, "needs min <= max. Received: min=0.6, max=0.5"),
        ({"bounds": {"one": 0.5}}, TypeError, r'bounds\[\'one\'\] is a mapping such as {"min": 0.2'),
        ({"bounds": {"one": {"most": 0.5}}}, TypeError, "Received: {'most': 0.5}"),
        ({"bounds": 0.5}, TypeError, "`bounds` maps patterns of weights to bounds. Received: 0.5"),
        ({"bounds": {"one": {"max": 0.5}}, "pattern": "2:4"}, ValueError, "2:4 gives every weight the sparsity"),
        ({"bounds": {"one": {"max": 0.5}}, "policy": "tfmot"}, ValueError, "Received: bounds with policy"),
        ({"bounds": {"one": {"max": 0.5}}, "overrides": {"one": 0.2}}, ValueError, "Received: both for one/kernel"),
    ],
    ids="no weight,too much,too little,no fraction,order,number,key,no mapping,N:M,tfmot,override".split(","),
)
def test_bounds_that_cannot_hold_are_refused_before_a_weight_changes(model, options, error, message):
    before = model.get_weights()
    with pytest.raises(error, match=message):
        pk.prune(model, 0.5, **options)
    assert all(map(np.array_equal, before, model.get_weights()))


def test_in_a_recipe_the_plan_shows_them_and_the_lock_keeps_them(model, pairs, tmp_path):
    steps = recipe(
        {"prune": {"sparsity": 0.5, "bounds": {"three": {"max": 0.25}}, "allocation": "uniform", "repair": "none"}},
        model=None,
        data=None,
    )
    found = plan(steps, model, pairs)
    assert [target.pruned for target in found.steps[0].targets] == [69, 139, 16]
    assert "three at max. 0.25" in found.steps[0].text
    loaded = load_recipe(steps, data_given=True)
    (tmp_path / "again.yaml").write_text(dump_recipe(loaded))
    assert load_recipe(tmp_path / "again.yaml", data_given=True) == loaded


@pytest.mark.one_backend
def test_a_wrong_bound_of_a_recipe_is_located(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text("version: 1\nsteps:\n  - prune:\n      sparsity: 0.5\n      bounds:\n        three: {max: 25}\n")
    with pytest.raises(RecipeError, match=r"r\.yaml:6:22: .*bounds.three.max: expected a fraction"):
        load_recipe(file, data_given=True)
    file.write_text(file.read_text().replace("{max: 25}", "{min: 0.5, max: 0.25}"))
    with pytest.raises(RecipeError, match=r"r\.yaml:6:32: .*expected min <= max. Received: 0.5 and 0.25"):
        load_recipe(file, data_given=True)


@pytest.mark.parametrize("allocation", ["uniform", "erk", "global", "lamp"])
def test_a_minimum_that_is_rounded_up_at_the_end_leaves_the_total_exact(allocation):
    sizes = {"a": 33, "b": 31, "c": 7, "d": 4}
    model = keras.Sequential([keras.Input((16,)), *(keras.layers.Dense(n, name=name) for name, n in sizes.items())])
    model.compile("sgd", "mse")
    # At the last two steps the schedule removes the same 1,257 of all 1,796 entries.
    schedule = pk.schedules.PolynomialDecay(0.0, 0.7, 0, 40, frequency=3)
    limits = {"c": {"min": 0.69}, "d": {"max": 0.31}}
    pruning = pk.PruningCallback(schedule, allocation=allocation, bounds=limits)
    model.fit(np.ones((41, 16)), np.ones((41, 4)), batch_size=1, verbose=0, callbacks=[pruning])
    assert sum(int(np.sum(~mask)) for mask in pruning.pruner.masks.values()) == 1257


@pytest.mark.filterwarnings("ignore:Sparsity 0.5 leaves")
@pytest.mark.parametrize("keep_one", [True, False])
@pytest.mark.parametrize("allocation", ["uniform", "erk", "global", "lamp"])
@pytest.mark.parametrize(
    "limits", [{"overrides": {"head": 0.95}}, {"bounds": {"head": {"min": 0.95}}}], ids=["override", "minimum"]
)
def test_a_share_near_one_of_a_small_weight_removes_all_entries_but_those_that_keep_one_keeps(
    limits, allocation, keep_one
):
    layers = [keras.layers.Dense(8, name="body"), keras.layers.Dense(1, name="head")]
    model = keras.Sequential([keras.Input((16,)), *layers])
    pk.prune(model, 0.5, allocation=allocation, keep_one=keep_one, **limits)
    assert [int(np.sum(layer.kernel.numpy() == 0)) for layer in model.layers] == ([61, 7] if keep_one else [60, 8])


def test_limits_that_remove_too_much_of_a_small_model_are_refused_although_rounding_is_allowed_for():
    model = keras.Sequential([keras.Input((2,)), *(keras.layers.Dense(2, name=name) for name in "abc")])
    with pytest.raises(ValueError, match="allow overall sparsities from 0.4667 to 0.8. Received: 0.25"):
        pk.prune(model, 0.25, overrides={"a": 0.4}, bounds={"b": {"min": 0.5}, "c": {"min": 0.5}}, allocation="uniform")
    # 1.2, 1.2 and 1.2 entries, 3.6 in all, are one each, and 4 are asked for.
    pk.prune(model, 0.3, overrides={"*": 0.3}, allocation="uniform")
    assert sum(int(np.sum(layer.kernel.numpy() == 0)) for layer in model.layers) == 3

"""`bounds`: least and greatest sparsity of single weights, with the overall sparsity as asked."""

import keras
import numpy as np
import pytest

import prunekit as pk
from prunekit.techniques.pruning.options import PruningOptions

SIZES = np.array([128, 256, 64])


@pytest.fixture
def model():
    """Kernels of 128, 256 and 64 entries; the last one has the smallest weights."""
    layers = [keras.layers.Dense(units, name=name) for name, units in (("one", 16), ("two", 16), ("three", 4))]
    found = keras.Sequential([keras.Input((8,)), *layers])
    generator = np.random.default_rng(0)
    for layer, scale in zip(layers, (1.0, 0.5, 0.1), strict=True):
        layer.kernel.assign(scale * generator.normal(size=layer.kernel.shape))
    return found


def zeros(model):
    return [int((np.array(layer.kernel.numpy()) == 0).sum()) for layer in model.layers]


@pytest.mark.every_backend
@pytest.mark.parametrize("allocation", ["uniform", "global", pk.Global("l2"), "erk", "lamp"], ids=str)
def test_bounds_hold_and_the_overall_sparsity_is_exact(model, allocation):
    pk.prune(model, 0.7, allocation=allocation, bounds={"one": {"max": 0.6}, "three": {"min": 0.1, "max": 0.25}})
    found = zeros(model)
    assert found[0] <= 76 and 7 <= found[2] <= 16 and sum(found) == round(0.7 * 448)


def test_a_global_threshold_is_taken_among_the_weights_that_are_not_at_a_bound(model):
    kernels = [np.abs(layer.kernel.numpy()).reshape(-1) for layer in model.layers]
    pk.prune(model, 0.5, allocation="global", bounds={"three": {"max": 0.25}})
    threshold = np.sort(np.concatenate(kernels[:2]))[224 - 16]
    assert zeros(model) == [int((kernel < threshold).sum()) for kernel in kernels[:2]] + [16]


def test_a_uniform_rest_is_in_proportion_to_the_sizes(model):
    pk.prune(model, 0.5, bounds={"three": {"max": 0.25}})
    assert zeros(model) == [69, 139, 16]


@pytest.mark.parametrize("allocation", ["uniform", "global"])
def test_a_schedule_is_exact_at_each_step_and_the_minimum_rises_with_it(model, samples, allocation):
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    schedule = pk.MultiStep(((0, 0.2), (2, 0.4), (4, 0.8)))
    bounds = {"one": {"min": 0.9}, "three": {"max": 0.5}}
    callback = pk.PruningCallback(schedule, allocation=allocation, bounds=bounds)
    seen = []
    watching = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(
            [int((~mask).sum()) for mask in callback.pruner.masks.values()]
        )
    )
    model.fit(*samples, batch_size=14, verbose=0, callbacks=[callback, watching])
    assert [sum(row) for row in seen] == [90, 179, 179, 358, 358]
    assert all(row[2] <= 32 for row in seen), "a maximum holds at each step"
    least = [int(0.9 * share * 128) for share in (0.25, 0.5, 0.5)] + [116, 116]
    assert all(row[0] >= bound for row, bound in zip(seen, least, strict=True))


def test_zeros_that_are_there_stay_and_the_total_is_exact(model):
    kernel = model.layers[2].kernel
    kernel.assign(np.where(np.arange(64).reshape(16, 4) < 40, 0, kernel))
    pk.prune(model, 0.5, bounds={"three": {"max": 0.25}})
    assert zeros(model)[2] == 40 and sum(zeros(model)) == 224


@pytest.mark.parametrize("allocation", ["uniform", "global"])
@pytest.mark.parametrize("pattern", ["channel", "block:3x1"])
def test_blocks_are_counted_in_whole_units_within_the_bounds(model, pattern, allocation):
    bounds = {"one": {"max": 0.3}, "three": {"min": 0.6, "max": 0.75}}
    pk.prune(model, 0.5, pattern=pattern, allocation=allocation, bounds=bounds)
    gone = [layer.kernel.numpy() == 0 for layer in model.layers]
    rows = 3 if pattern == "block:3x1" else 16
    removed = [int(np.logical_and.reduceat(zero, np.arange(0, zero.shape[0], rows), axis=0).sum()) for zero in gone]
    units = [48, 96, 24] if pattern == "block:3x1" else [16, 16, 4]
    most = int(0.3 * units[0])
    assert removed[0] <= most and (allocation == "global" or removed[0] == most)
    assert -(-units[2] * 6 // 10) <= removed[2] <= units[2] * 3 // 4
    if allocation == "global":
        assert sum(removed) == round(0.5 * sum(units))


def test_overrides_and_bounds_work_together_and_with_global(model):
    pk.prune(model, 0.5, allocation="global", overrides={"two": 0.5}, bounds={"*": {"max": 0.75}})
    found = zeros(model)
    assert found == [48, 128, 48], "the smallest weights go first, up to their maximum"


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"bounds": {"four": {"max": 0.5}}}, ValueError, "pattern 'four' in `bounds` matches no layer"),
        ({"bounds": {"one/bias": {"max": 0.5}}}, ValueError, "in `bounds` must match a pruned weight"),
        (
            {"bounds": {"one": {"max": 0.5}, "one/kernel": {"max": 0.6}}},
            ValueError,
            "one value in `bounds`. Received: at most 0.5 and at most 0.6 for one/kernel",
        ),
        ({"bounds": {"*": {"max": 0.25}}}, ValueError, "from 0 to 0.25 on these weights. Received: 0.5"),
        ({"bounds": {"*": {"min": 0.75}}}, ValueError, r"from 0.75 to 0.99\d* on these weights. Received: 0.5"),
        (
            {"bounds": {"one": {"max": 0.5}}, "overrides": {"one": 0.6}},
            ValueError,
            "0.6 and at most 0.5 for one/kernel",
        ),
        ({"bounds": {"three": {"min": 0.6, "max": 0.7}}, "pattern": "channel"}, ValueError, "has 4 units. Widen"),
        ({"bounds": [0.5]}, TypeError, r"`bounds` maps patterns of weights to bounds. Received: \[0.5\]"),
        ({"bounds": {"one": {"max": 0.5}}, "pattern": "2:4"}, ValueError, "2:4 gives every weight the sparsity"),
        ({"bounds": {"one": {"max": 0.5}}, "compat": "tfmot"}, ValueError, 'Received: bounds with compat="tfmot"'),
    ],
)
def test_bounds_that_cannot_hold_are_refused_before_a_weight_changes(model, options, error, message):
    before = zeros(model)
    for allocation in ("uniform", "global", "lamp") if len(options) == 1 else ("uniform",):
        with pytest.raises(error, match=message):
            pk.prune(model, 0.5, allocation=allocation, **options)
    assert zeros(model) == before == [0, 0, 0]


def test_options_with_bounds_stay_hashable_and_can_be_replaced():
    one, other = (PruningOptions(bounds={"a": {"max": 0.5}}) for _ in range(2))
    assert hash(one) == hash(other) and one == other == PruningOptions(bounds=one.bounds)

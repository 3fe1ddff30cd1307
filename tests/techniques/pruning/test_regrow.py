"""RigL and SET: one update against plain NumPy, exact counts at every step, clean starts, and resumption."""

import inspect

import keras
import numpy as np
import pytest
from keras import ops
from leak_matrix import OPTIMIZERS, WRAPPERS
from moving_masks import STEADY, make_data, network, trained, values, whole_and_resumed

import prunekit as pk

POLICIES = {"rigl": pk.policies.RigL(), "set": pk.policies.SET(seed=1)}


@pytest.fixture(scope="module")
def data():
    return make_data()


def calibrated(policy, data):
    return {"data": data} if isinstance(policy, pk.policies.RigL) else {}


@pytest.mark.every_backend
@pytest.mark.parametrize("policy", POLICIES)
def test_masks_move_while_counts_are_exact_and_zeros_hold_after_every_batch(policy, data):
    _, pruning, watch = trained(POLICIES[policy], data, allocation="erk", **calibrated(POLICIES[policy], data))
    counts = [[mask.sum() for mask in masks.values()] for masks in watch.masks]
    assert all(count == counts[0] for count in counts) and sum(counts[0]) == round(0.25 * 208)
    assert watch.leaks == 0
    moved = [
        not np.array_equal(before["hidden/kernel"], after["hidden/kernel"])
        for before, after in zip(watch.masks, watch.masks[1:], strict=False)
    ]
    assert sum(moved) >= 4
    assert pruning.pruner.sparsity == 0.75


def test_one_update_of_rigl_is_the_formula(data):
    model = network()
    pruner = pk.Pruner(
        model,
        STEADY,
        data=data,
        policy=pk.policies.RigL(exchanged=0.4),
        criterion="magnitude",
        include="hidden",
        allocation="uniform",
    )
    kept = pruner.masks["hidden/kernel"]
    for _ in range(4):
        model.train_on_batch(data[0][:10], data[1][:10])
        before = values(model)["hidden"]
        pruner.step()
    hidden = np.maximum(data[0] @ before + ops.convert_to_numpy(model.get_layer("hidden").bias), 0)
    head, bias = (ops.convert_to_numpy(weight) for weight in model.get_layer("head").weights)
    error = 2 * (hidden @ head + bias - data[1]) / data[1].size
    gradient = np.abs(data[0].T @ ((error @ head.T) * (hidden > 0)))
    count = int(0.4 * kept.sum())
    dropped = np.argsort(np.where(kept, np.abs(before), np.inf), axis=None)[:count]
    grown = np.argsort(np.where(kept, -np.inf, gradient), axis=None)[-count:]
    expected = kept.ravel().copy()
    expected[dropped], expected[grown] = False, True
    np.testing.assert_array_equal(pruner.masks["hidden/kernel"].ravel(), expected)
    after = values(model)["hidden"].ravel()
    assert not after[dropped].any() and not after[grown].any()
    slots = [v for v in model.optimizer.variables if tuple(v.shape) == (10, 16) and v.dtype == "float32"]
    assert len(slots) == 2 and all(not ops.convert_to_numpy(slot).ravel()[[*dropped, *grown]].any() for slot in slots)
    pruner.finish()


def test_the_exchanged_fraction_follows_a_cosine_to_the_end_of_the_schedule(data):
    schedule = pk.schedules.ConstantSparsity(0.5, begin_step=0, end_step=24, frequency=4)
    _, _, watch = trained(pk.policies.SET(exchanged=0.5), data, schedule=schedule, epochs=3, include="hidden")
    masks = [masks["hidden/kernel"] for masks in watch.masks]
    changed = [int((before & ~after).sum()) for before, after in zip(masks, masks[1:], strict=False)]
    kept = int(masks[0].sum())
    steps = range(4, 25, 4)
    expected = [int(0.5 * (1 + np.cos(np.pi * step / 24)) / 2 * kept) for step in steps]
    assert [changed[step - 2] for step in steps] == expected
    assert not any(changed[24:])


@pytest.mark.every_backend
def test_a_rising_schedule_is_followed_exactly(data):
    schedule = pk.schedules.PolynomialDecay(0.2, 0.8, 0, 16, frequency=4)
    _, pruning, _ = trained(pk.policies.SET(), data, schedule=schedule, epochs=2)
    for event in pruning.report.events:
        assert round(event.reached * 208) == sum(round(event.asked * size) for size in (160, 48))


@pytest.mark.parametrize("allocation", ["lamp", "layer_error", "global"])
@pytest.mark.parametrize("initial", [0.0, 0.75], ids=["rising", "constant"])
def test_weights_that_return_and_stay_at_zero_leave_the_total_exact(allocation, initial, data):
    model = network()
    model.optimizer.learning_rate = 0.0
    schedule = pk.schedules.PolynomialDecay(initial, 0.75, 0, 24, frequency=2)
    pruner = pk.Pruner(model, schedule, data=data, policy=pk.policies.RigL(exchanged=0.5), allocation=allocation)
    for _ in range(30):
        model.train_on_batch(data[0][:10], data[1][:10])
        pruner.step()
    kept = sum(int(mask.sum()) for mask in pruner.masks.values())
    assert len(pruner.events) >= 10 and kept == round(0.25 * sum(mask.size for mask in pruner.masks.values()))
    assert [event.reached for event in pruner.events] == pytest.approx(
        [event.asked for event in pruner.events], abs=1 / 208
    )


def test_blocks_are_exchanged_whole(data):
    _, _, watch = trained(pk.policies.SET(), data, pattern="block:2x2", include="hidden", epochs=1)
    for masks in watch.masks:
        blocks = masks["hidden/kernel"].reshape(5, 2, 8, 2).sum(axis=(1, 3))
        assert np.isin(blocks, (0, 4)).all() and (blocks == 4).sum() == 10


@pytest.mark.every_backend
def test_a_tape_loop_and_fit_take_the_same_policy(data):
    model = network()
    with pk.Pruner(model, STEADY, data=data, policy="rigl", allocation="uniform") as pruner:
        first = pruner.masks["hidden/kernel"]
        for start in range(0, 80, 10):
            model.train_on_batch(*(array[start : start + 10] for array in data))
            pruner.step()
        assert pruner.sparsity == 0.75 and (pruner.masks["hidden/kernel"] != first).any()


@pytest.mark.parametrize(
    "policy", ["rigl", pytest.param({"type": "set", "exchanged": 0.4}, marks=pytest.mark.thorough)], ids=["rigl", "set"]
)
def test_an_interrupted_recipe_ends_with_the_bytes_of_a_whole_one(policy, data, tmp_path):
    schedule = {"type": "constant", "target_sparsity": 0.75, "frequency": 5}
    assert all(map(np.array_equal, *whole_and_resumed(policy, schedule, data, tmp_path)))


def test_what_cannot_be_exchanged_is_refused(data):
    with pytest.raises(ValueError, match="RigL exchanges weights at several updates of a training. Received: OneShot"):
        pk.prune(network(), 0.5, data, policy="rigl", criterion="magnitude", allocation="uniform")
    with pytest.raises(ValueError, match="SET exchanges units of a whole weight. Received: pattern 2:4"):
        pk.Pruner(network(), pk.schedules.ConstantSparsity(0.5), policy="set", pattern="2:4", allocation="uniform")
    with pytest.raises(ValueError, match="'gradient' is collected from data. Received: no data"):
        pk.Pruner(network(), STEADY, policy="rigl", allocation="uniform")
    with pytest.raises(ValueError, match="exchanged must be a fraction"):
        pk.policies.RigL(exchanged=1.5)


def optimizers():
    for name, kind in OPTIMIZERS.items():
        # Ftrl's accumulator is at rest at 0.1; the leak matrix has it.
        if name not in (*WRAPPERS, "Ftrl"):
            yield pytest.param(kind, id=name, marks=[] if name in ("SGD", "Adafactor") else pytest.mark.thorough)


@pytest.mark.parametrize("kind", list(optimizers()))
def test_zeros_and_slots_hold_after_every_update_of_every_optimizer(kind, data):
    model = network()
    arguments = {"momentum": 0.9} if "momentum" in inspect.signature(kind).parameters else {}
    model.compile(kind(0.01, weight_decay=0.01, **arguments), "mse")
    pruning = pk.PruningCallback(
        pk.schedules.ConstantSparsity(0.75, begin_step=0, frequency=3),
        policy=pk.policies.SET(0.5),
        allocation="uniform",
    )
    found = []

    def check(batch, logs):
        masks = pruning.pruner.masks
        for name, weight in values(model).items():
            pruned = ~masks[f"{name}/kernel"]
            found.append(np.count_nonzero(weight[pruned]))
            for slot in model.optimizer.variables:
                # Adafactor's slots are rows and columns; SGD's and Adam's have the shape of the weight.
                if tuple(slot.shape) == weight.shape and slot.dtype == "float32" and name in slot.path:
                    found.append(np.count_nonzero(ops.convert_to_numpy(slot)[pruned]))

    watch = keras.callbacks.LambdaCallback(on_train_batch_end=check)
    model.fit(*data, batch_size=10, epochs=1, verbose=0, callbacks=[pruning, watch])
    assert len(found) >= 24 and not any(found)

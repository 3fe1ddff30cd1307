"""Straight-through training: updates against plain NumPy, the model exactly sparse, and exact resumption."""

import inspect

import keras
import numpy as np
import pytest
from keras import ops
from leak_matrix import OPTIMIZERS, WRAPPERS
from moving_masks import STEADY, make_data, network, trained, values, whole_and_resumed

import prunekit as pk
from prunekit.techniques.pruning.training.pruner_state import PrunerState

RISING = pk.schedules.PolynomialDecay(0.2, 0.75, 0, 16, frequency=4)


@pytest.fixture(scope="module")
def data():
    return make_data()


def in_numpy(kernel, bias, data, decay, steps):
    """Sparse kernels and masks after each step of SGD (0.1) on a linear model, half of the weights pruned every 2."""
    dense, masks, sparse = kernel.astype("float64"), [], []
    for step in range(steps + 1):
        if step % 2 == 0:
            mask = np.zeros(dense.size, bool)
            mask[np.argsort(-np.abs(dense), axis=None)[: dense.size // 2]] = True
            mask = mask.reshape(dense.shape)
        masks.append(mask)
        sparse.append(np.where(mask, dense, 0))
        inputs, targets = (array[10 * step : 10 * step + 10] for array in data)
        error = 2 * (inputs @ sparse[-1] + bias - targets) / targets.size
        dense = dense - 0.1 * (inputs.T @ error + decay * np.where(mask, 0, dense))
        bias = bias - 0.1 * error.sum(axis=0)
    return sparse, masks


@pytest.mark.every_backend(cases=1)
@pytest.mark.parametrize("decay", [0.3, 0.0])
def test_the_updates_are_the_formula(decay, data):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(3, name="head")])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    kernel, bias = (ops.convert_to_numpy(weight) for weight in model.weights)
    sparse, masks = in_numpy(kernel, bias, data, decay, 8)
    schedule = pk.schedules.ConstantSparsity(0.5, begin_step=0, frequency=2)
    with pk.Pruner(model, schedule, policy=pk.policies.StraightThrough(decay=decay), allocation="uniform") as pruner:
        for step in range(9):
            np.testing.assert_array_equal(pruner.masks["head/kernel"], masks[step])
            np.testing.assert_allclose(ops.convert_to_numpy(model.get_layer("head").kernel), sparse[step], atol=1e-5)
            if step < 8:
                model.train_on_batch(*(array[10 * step : 10 * step + 10] for array in data))
                pruner.step()
    # Weights that were pruned came back with other values than zero.
    returned = [~before & after for before, after in zip(masks, masks[1:], strict=False)]
    assert any(gone.any() for gone in returned)


@pytest.mark.every_backend
def test_the_model_is_exactly_sparse_after_every_batch(data):
    model, pruning, watch = trained("straight_through", data, schedule=RISING, allocation="global", epochs=2)
    assert watch.leaks == 0
    for event in pruning.pruner.events:
        assert round(event.reached * 208) == round(event.asked * 208)
    assert sum(np.count_nonzero(kernel) for kernel in values(model).values()) == 52


def test_weights_assigned_between_updates_count_where_they_are_kept(data):
    model = network()
    with pk.Pruner(model, STEADY, policy="straight_through", include="hidden", allocation="uniform") as pruner:
        model.train_on_batch(data[0][:10], data[1][:10])
        pruner.step()
        mask, kernel = pruner.masks["hidden/kernel"], model.get_layer("hidden").kernel
        aside = pruner.run.store.pruned_values["hidden/kernel"]
        assert not aside[mask].any() and aside[~mask].all()
        kernel.assign(np.where(mask, 5.0, 0.0).astype("float32"))
        model.train_on_batch(data[0][:10], data[1][:10])
        pruner.step()
        now = ops.convert_to_numpy(kernel)
        assert (now[mask] > 4).all() and not now[~mask].any()


def test_patterns_of_n_of_m_take_the_policy(data):
    model, _, watch = trained(
        pk.policies.StraightThrough(2e-4), data, pattern="1:2", schedule=pk.schedules.ConstantSparsity(0.5, 0)
    )
    for kernel in values(model).values():
        pairs = kernel.reshape(-1, 2, kernel.shape[1])
        assert (np.count_nonzero(pairs, axis=1) == 1).all()
    assert watch.leaks == 0


def test_a_restored_pruner_goes_on_as_the_first_would(data):
    schedule = pk.schedules.PolynomialDecay(0.2, 0.75, 0, 12, frequency=4)

    def steps(pruner, model, first, last):
        for step in range(first, last):
            model.train_on_batch(*(array[10 * step : 10 * step + 10] for array in data))
            pruner.step()

    model = network()
    with pk.Pruner(model, schedule, policy="straight_through", allocation="uniform") as pruner:
        steps(pruner, model, 0, 6)
        snapshot = pruner.run.state().to_snapshot()
        weights = [variable.numpy() for variable in [*model.variables, *model.optimizer.variables]]
        steps(pruner, model, 6, 12)
        whole = [variable.numpy() for variable in model.variables]
    other = network()
    other.optimizer.build(other.trainable_variables)
    for variable, value in zip([*other.variables, *other.optimizer.variables], weights, strict=True):
        variable.assign(value)
    with pk.Pruner(other, schedule, policy="straight_through", origin=0, allocation="uniform") as pruner:
        pruner.run.restore(PrunerState.from_snapshot(snapshot, pruner.targets))
        steps(pruner, other, 6, 12)
        assert all(np.array_equal(a, b.numpy()) for a, b in zip(whole, other.variables, strict=True))


@pytest.mark.thorough
def test_an_interrupted_recipe_ends_with_the_bytes_of_a_whole_one(data, tmp_path):
    schedule = {
        "type": "polynomial_decay",
        "final_sparsity": 0.75,
        "begin": {"steps": 0},
        "end": {"steps": 30},
        "frequency": 5,
    }
    policy = {"type": "straight_through", "decay": 0.01}
    assert all(map(np.array_equal, *whole_and_resumed(policy, schedule, data, tmp_path)))


def optimizers():
    for name, kind in OPTIMIZERS.items():
        if name not in WRAPPERS:
            yield pytest.param(kind, id=name, marks=[] if name in ("SGD", "Muon") else pytest.mark.thorough)


@pytest.mark.parametrize("kind", list(optimizers()))
def test_dense_weights_follow_a_training_without_masks_where_gradients_are_equal(kind, data):
    """With a learning rate for one step, the values set aside are those of the same update without pruning."""
    arguments = {"momentum": 0.9} if "momentum" in inspect.signature(kind).parameters else {}
    model = network(kind(0.01, weight_decay=0.01, **arguments))
    # ScheduleFreeAdamW copies the weights when it is built.
    model.optimizer.build(model.trainable_variables)
    with pk.Pruner(
        model, pk.schedules.ConstantSparsity(0.5, 0, frequency=50), policy="straight_through", allocation="uniform"
    ) as pruner:
        aside, masks = pruner.run.store.pruned_values, pruner.masks
        plain = network(kind(0.01, weight_decay=0.01, **arguments))
        plain.optimizer.build(plain.trainable_variables)
        gradients_at = {name: np.where(masks[f"{name}/kernel"], kernel, 0) for name, kernel in values(plain).items()}
        for batch in range(3):
            inputs, targets = (ops.convert_to_tensor(array[10 * batch : 10 * batch + 10]) for array in data)
            model.train_on_batch(inputs, targets)
            pruner.step()
            plain.optimizer.apply(gradients_of(plain, gradients_at, inputs, targets), plain.trainable_variables)
            gradients_at = {
                name: np.where(masks[f"{name}/kernel"], kernel, 0) for name, kernel in values(plain).items()
            }
        aside = pruner.run.store.pruned_values
        for name, kernel in values(plain).items():
            mask = masks[f"{name}/kernel"]
            np.testing.assert_allclose(np.where(mask, values(model)[name], aside[f"{name}/kernel"]), kernel, atol=1e-5)


def gradients_of(model, kernels, inputs, targets):
    """Gradients of the mean squared error, with other kernels than the model's."""
    import tensorflow as tf

    dense = values(model)
    for name, kernel in kernels.items():
        model.get_layer(name).kernel.assign(kernel)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(inputs, training=True) - targets))
    gradients = tape.gradient(loss, model.trainable_variables)
    for name, kernel in dense.items():
        model.get_layer(name).kernel.assign(kernel)
    return gradients


def test_averages_written_at_the_end_are_sparse(data):
    model = network(keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9))
    with pk.Pruner(model, STEADY, policy="straight_through", allocation="uniform") as pruner:
        for start in range(0, 60, 10):
            model.train_on_batch(*(array[start : start + 10] for array in data))
            pruner.step()
    before = values(model)["hidden"]
    model.optimizer.finalize_variable_values(model.trainable_variables)
    after = values(model)["hidden"]
    assert (before != after).any() and np.count_nonzero(after) == 40


def test_a_scaled_loss_has_the_decay_of_an_unscaled_one(data):
    found = []
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 1024.0)
    for optimizer in (keras.optimizers.SGD(0.1), scaled):
        _, pruning, _ = trained(pk.policies.StraightThrough(0.5), data, optimizer=optimizer, epochs=1)
        found.append(pruning.pruner.run.store.pruned_values["hidden/kernel"])
    np.testing.assert_allclose(*found, atol=1e-5)


def test_what_cannot_train_straight_through_is_refused(data):
    with pytest.raises(ValueError, match="chooses masks at several updates. Received: OneShot"):
        pk.prune(network(), 0.5, policy="straight_through", allocation="uniform")
    with pytest.raises(ValueError, match="Received: the criterion Movement"):
        pk.Pruner(network(), STEADY, policy="straight_through", criterion="movement", allocation="uniform")
    with pytest.raises(ValueError, match="Received: keep_zeros=True"):
        pk.Pruner(network(), STEADY, policy="straight_through", keep_zeros=True, allocation="uniform")
    with pytest.raises(ValueError, match="decay must be a finite number, 0 or more. Received: decay=-1"):
        pk.policies.StraightThrough(decay=-1)
    with pytest.raises(ValueError, match="Received: adam.* with ema_overwrite_frequency=2"):
        pk.Pruner(
            network(keras.optimizers.Adam(use_ema=True, ema_overwrite_frequency=2)),
            STEADY,
            policy="straight_through",
            allocation="uniform",
        )
    model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(3)])
    with pytest.raises(ValueError, match="Received: no optimizer"):
        pk.Pruner(model, STEADY, policy="straight_through", allocation="uniform")

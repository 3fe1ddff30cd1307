"""Movement: pruned is what the updates drove towards zero, against copies of the weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from weight_copies import LOSS, OPTIMIZERS, Copies, network

import prunekit as pk
from prunekit.anatomy.layers.targets import find_targets
from prunekit.techniques.pruning.policies.movement import Movements


def pruning(**options):
    schedule = pk.schedules.ConstantSparsity(0.5, begin_step=8, frequency=100)
    return pk.PruningCallback(schedule, criterion="movement", **{"allocation": "uniform"} | options)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.short(cases=4)
def test_movement_prunes_what_the_updates_drove_towards_zero(name, samples, precision):
    model, copies, callback = network(), Copies(), pruning()
    model.compile(OPTIMIZERS[name](), LOSS)
    epochs = 4 if name == "accumulating" else 2
    model.fit(*samples, epochs=epochs, batch_size=14, verbose=0, callbacks=[copies, callback])
    batches = 16 if name == "accumulating" else 8
    copies.taken = copies.taken[: batches + 1]
    # The ninth copy is taken before this callback's masks: it shows what the update did, and not what was pruned.
    for index, target in zip((0, 2), ("hidden/kernel", "logits/kernel"), strict=True):
        movement = copies.movements()[index]
        kept = callback.pruner.masks[target]
        assert kept.sum() == kept.size // 2
        # Ranks may swap where two movements differ by rounding.
        slack = 1e-4 * np.abs(movement).max() if precision == "float32" else 1e-12
        assert movement[kept].min() >= movement[~kept].max() - slack


def test_movement_under_gradient_descent_is_the_sum_of_the_paper(perceptron, samples):
    features, labels = map(tf.constant, samples)
    optimizer = keras.optimizers.SGD(0.1)
    kernels = [layer.kernel for layer in perceptron.layers]
    movements, expected = Movements(perceptron, find_targets(perceptron)[0]), [0.0, 0.0]
    with movements.observing([optimizer]):
        for _ in range(5):
            with tf.GradientTape() as tape:
                loss = LOSS(labels, perceptron(features))
            variables = perceptron.trainable_variables
            gradients = tape.gradient(loss, variables)
            for i, kernel in enumerate(kernels):
                expected[i] = expected[i] - 0.1 * kernel.numpy() * gradients[2 * i].numpy()
            optimizer.apply(gradients, variables)
    assert movements.observations == 5
    for found, wanted in zip(movements.values(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("options", [{"allocation": "global"}, {"pattern": "channel"}, {"pattern": "2:4"}], ids=str)
def test_movement_goes_with_every_pattern_and_allocation(options, perceptron, samples):
    perceptron.compile("adam", LOSS)
    callback = pruning(**options)
    perceptron.fit(*samples, epochs=3, batch_size=16, verbose=0, callbacks=[callback])
    assert callback.pruner.sparsity == 0.5
    assert sum(callback.pruner.audit().values()) == 0


def test_a_sparse_model_continues_with_its_masks_where_nothing_was_seen_yet(perceptron, samples):
    pk.prune(perceptron, 0.5, allocation="uniform")
    zeros = [layer.kernel.numpy() == 0 for layer in perceptron.layers]
    perceptron.compile("sgd", LOSS)
    callback = pk.PruningCallback(
        pk.schedules.ConstantSparsity(0.5, begin_step=0, frequency=2), criterion="movement", allocation="uniform"
    )
    perceptron.fit(*samples, batch_size=16, verbose=0, callbacks=[callback])
    for layer, zero in zip(perceptron.layers, zeros, strict=True):
        np.testing.assert_array_equal(layer.kernel.numpy() == 0, zero)


def test_movement_before_any_update_is_an_error_that_names_the_remedy(perceptron, samples):
    perceptron.compile("sgd", LOSS)
    callback = pk.PruningCallback(pk.schedules.OneShot(0.5), criterion="movement", allocation="uniform")
    with pytest.raises(ValueError, match="sparsity 0.5 at step 0, and no update.*Let the schedule begin later"):
        perceptron.fit(*samples, verbose=0, callbacks=[callback])
    with pytest.raises(ValueError, match="pk.prune does not train"):
        pk.prune(perceptron, 0.5, criterion="movement", allocation="uniform")


def test_a_statistic_that_is_not_collected_is_refused_by_name(perceptron):
    class Hungry(pk.criteria.Movement):
        needs = frozenset({"movement", "activations"})

    with pytest.raises(ValueError, match="Unknown statistic. Received: 'activations'. Valid are: movement"):
        pk.Pruner(
            perceptron, pk.schedules.ConstantSparsity(0.5, begin_step=1), criterion=Hungry(), allocation="uniform"
        )


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize("why", ["frozen", "no gradient", "zero so far"])
def test_weights_that_no_update_moved_are_named_and_not_pruned_by_position(why, samples):
    inputs = keras.Input((8,))
    layer = keras.layers.Dense(4, name="still", kernel_initializer="zeros" if why == "zero so far" else "normal")
    still, outputs = layer(inputs), keras.layers.Dense(4, name="logits")(inputs)
    layer.trainable = why != "frozen"
    model = keras.Model(inputs, [outputs, still])
    model.compile("sgd", [LOSS, None if why == "no gradient" else LOSS])
    x, y = samples
    labels = [y, None if why == "no gradient" else y]
    # Named, since a frozen layer is left out by default.
    named = {"criterion": "movement", "include": ["still", "logits"]}
    callback = pk.PruningCallback(pk.schedules.ConstantSparsity(0.5, begin_step=1, frequency=1), **named)
    with pytest.raises(ValueError, match="no change in still/kernel. Layers that are frozen"):
        model.fit(x, labels, batch_size=16, verbose=0, callbacks=[callback])
    assert np.all(model.get_layer("logits").kernel.numpy() != 0), "the masks are as they were"


def test_a_training_that_is_resumed_where_masks_are_due_continues(samples, tmp_path):
    class Crash(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                raise RuntimeError("crash")

    def train(*more):
        model = network()
        model.compile("sgd", LOSS)
        schedule = pk.schedules.PolynomialDecay(final_sparsity=0.5, end_step=4, frequency=1)
        pruning = pk.PruningCallback(schedule, criterion="movement", allocation="uniform")
        # Saved before the pruner's step: the weights are less sparse than the schedule asks at their step.
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), save_freq=2)
        model.fit(*samples, batch_size=8, epochs=2, verbose=0, callbacks=[backup, pruning, *more])
        return pruning.pruner

    with pytest.raises(RuntimeError, match="crash"):
        train(Crash())
    # As a backup that was made without the pruners' state.
    for file in (tmp_path / "backup").glob("prunekit-*"):
        file.unlink()
    pruner = train()
    assert pruner.events[0].step == 3, "what was due at step 2 was done after the first update"
    assert pruner.sparsity == 0.5 and not any(pruner.audit().values())

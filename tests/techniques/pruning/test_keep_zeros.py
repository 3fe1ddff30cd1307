"""KeepZeros: the zeros of a pruned model, held while it trains on."""

import warnings

import keras
import numpy as np
import pytest
from backends import BACKEND, sync_model_state
from networks import dense_network

import prunekit as pk
from prunekit.anatomy.files.digests import weight_arrays

pytestmark = pytest.mark.every_backend
X = np.random.default_rng(3).normal(size=(48, 8)).astype("float32")
Y = X[:, :4] * 2
TENSORFLOW = pytest.mark.skipif(BACKEND != "tensorflow", reason="tape loops are TensorFlow's")


def network(sparsity=0.5):
    model = dense_network(8, activation="tanh", seed=5, hidden=12, head=4)
    model.compile(keras.optimizers.Adam(0.01, clipnorm=1.0), "mse")
    if sparsity:
        pk.prune(model, sparsity, allocation="uniform")
    return model


def zeros(model):
    sync_model_state(model)
    return {name: weight == 0 for name, weight in weight_arrays(model).items() if "kernel" in name}


class Watch(keras.callbacks.Callback):
    """Counts, after each batch, the entries that were zero and are not."""

    def __init__(self, model):
        super().__init__()
        self._model, self._before, self.grown = model, zeros(model), []

    def on_train_batch_end(self, batch, logs=None):
        now = zeros(self._model)
        self.grown.append(sum(int((self._before[name] & ~now[name]).sum()) for name in now))


def fit(model, *callbacks, **options):
    watch = Watch(model)
    history = model.fit(X, Y, batch_size=16, epochs=2, verbose=0, callbacks=[*callbacks, watch], **options).history
    return watch.grown, history


def test_zeros_hold_after_every_batch_and_grow_back_without():
    grown, _ = fit(network())
    assert grown[0] > 50
    model, keep = network(), pk.KeepZeros()
    grown, history = fit(model, keep)
    assert grown == [0] * 6
    assert history["sparsity"] == [0.5, 0.5]
    assert (keep.notes, sum(keep.audit().values())) == ([], 0)
    assert {name: int((~mask).sum()) for name, mask in keep.masks.items()} == {"hidden/kernel": 48, "head/kernel": 24}
    assert keep.report.target_sparsity == 0.5


def test_momentum_from_before_does_not_move_the_zeros():
    model = network(sparsity=0)
    fit(model)
    pk.prune(model, 0.5, allocation="uniform")
    grown, _ = fit(model, pk.KeepZeros())
    assert grown == [0] * 6


def test_weights_that_another_callback_restores_are_zero_again():
    model = network(sparsity=0)
    dense = model.get_weights()
    pk.prune(model, 0.5, allocation="uniform")

    class Restores(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            self.model.set_weights(dense)

    before = zeros(model)
    with pytest.warns(UserWarning, match="72 pruned weights had been written back at the end of training"):
        fit(model, Restores(), pk.KeepZeros())
    after = zeros(model)
    assert all(after[name][before[name]].all() for name in before)


def test_a_new_head_stays_dense_and_is_free():
    model = network()
    model.get_layer("head").kernel.assign(np.ones((12, 4), "float32"))
    keep = pk.KeepZeros()
    fit(model, keep)
    assert list(keep.masks) == ["hidden/kernel"]
    assert not zeros(model)["head/kernel"].any()


def test_zeros_of_training_itself_are_not_added():
    model, keep = network(), pk.KeepZeros()

    class Zeroes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            kernel = keras.ops.convert_to_numpy(model.get_layer("head").kernel).copy()
            kernel[0] = 0
            model.get_layer("head").kernel.assign(kernel)

    before = int((~zeros(model)["head/kernel"]).sum())
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[keep, Zeroes()])
    assert int(keep.masks["head/kernel"].sum()) == before


def test_negative_zeros_are_zeros():
    model = network(sparsity=0)
    kernel = np.ones((8, 12), "float32")
    kernel[:, ::2] = -0.0
    model.get_layer("hidden").kernel.assign(kernel)
    keep = pk.KeepZeros(include=["hidden"])
    fit(model, keep)
    assert int((~keep.masks["hidden/kernel"]).sum()) == 48 and zeros(model)["hidden/kernel"][:, ::2].all()


def test_weights_that_are_zero_throughout_are_not_held_and_named():
    model = network()
    model.get_layer("head").kernel.assign(np.zeros((12, 4), "float32"))
    keep = pk.KeepZeros()
    with pytest.warns(UserWarning, match="zero throughout, which are not trained yet: head/kernel."):
        fit(model, keep)
    assert list(keep.masks) == ["hidden/kernel"] and not zeros(model)["head/kernel"].all()


def test_a_model_without_zeros_is_noted():
    keep = pk.KeepZeros()
    with pytest.warns(UserWarning, match="found no zero in 2 weights, so it holds none. To make weights zero, use"):
        fit(network(sparsity=0), keep)
    assert keep.masks == {}


def test_a_callback_that_is_used_again_leaves_replaced_weights_alone():
    model, keep = network(), pk.KeepZeros()
    fit(model, keep)
    model.get_layer("head").kernel.assign(np.ones((12, 4), "float32"))
    grown, _ = fit(model, keep)
    assert grown[-1] == 0
    assert not zeros(model)["head/kernel"].any()
    assert list(keep.masks) == ["hidden/kernel"]


def test_what_is_no_model_and_another_model_are_refused():
    with pytest.raises(TypeError, match=r"or None for a callback. Received: \['hidden'\]. Names of layers and weights"):
        pk.KeepZeros(["hidden"])
    with pytest.raises(ValueError, match="was created for the model"):
        fit(network(), pk.KeepZeros(network()))


def test_a_frozen_model_needs_no_callback_and_gradients_need_a_model():
    model = network()
    model.trainable = False
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"are frozen, .* Its zeros stay without KeepZeros: leave the callback out"):
        fit(model, pk.KeepZeros())
    with pytest.raises(RuntimeError, match=r"mask_gradients needs a model: write `with pk\.KeepZeros"):
        pk.KeepZeros().mask_gradients([])


def test_the_same_callback_listed_twice_is_refused_by_its_name():
    keep = pk.KeepZeros()
    with pytest.raises(ValueError, match="may contain a KeepZeros once. Received: the same callback twice"):
        fit(network(), keep, keep)


def test_beside_a_pruning_callback_the_weights_must_differ():
    schedule = pk.schedules.ConstantSparsity(0.75, frequency=1)
    with pytest.raises(
        ValueError, match="must prune different weights. Received: PruningCallback and KeepZeros for head/kernel"
    ):
        fit(network(), pk.PruningCallback(schedule, include=["head"], allocation="uniform"), pk.KeepZeros())
    model = network()
    grown, _ = fit(
        model, pk.PruningCallback(schedule, include=["head"], allocation="uniform"), pk.KeepZeros(exclude=["head"])
    )
    assert grown == [0] * 6
    assert [int(found.sum()) for found in zeros(model).values()] == [48, 36]


def test_the_reports_of_pruning_name_it():
    model = network(sparsity=0)
    assert "pk.KeepZeros()" in pk.prune(model, 0.5, allocation="uniform").notes[-1]
    pruning = pk.PruningCallback(pk.schedules.OneShot(0.75), allocation="uniform")
    fit(model, pruning)
    assert "pk.KeepZeros()" in pruning.report.notes[-1]
    assert pruning.notes == []


# ---- loops of one's own ----------------------------------------------------------------------------------------------


def tape_step(model, optimizer):
    import tensorflow as tf

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    return step


@TENSORFLOW
def test_a_tape_loop_keeps_zeros_inside_the_block_and_gets_its_optimizer_back():
    model, optimizer = network(), keras.optimizers.SGD(0.1, momentum=0.9)
    before = zeros(model)
    with pk.KeepZeros(model, optimizer) as keep:
        step = tape_step(model, optimizer)
        for _ in range(4):
            step(X, Y)
            assert sum(keep.audit().values()) == 0
    assert all((zeros(model)[name] == before[name]).all() for name in before)
    assert "apply" not in vars(optimizer)
    tape_step(model, optimizer)(X, Y)
    assert not (zeros(model)["hidden/kernel"] == before["hidden/kernel"]).all()


@TENSORFLOW
def test_updates_of_another_optimizer_than_that_of_the_block_are_an_error():
    model, other = network(), keras.optimizers.SGD(0.1)
    before = zeros(model)
    step = tape_step(model, other)
    with pytest.raises(
        pk.errors.LeakError, match=r"hidden/kernel \(\d+\), head/kernel \(\d+\). Pass the optimizer of your loop"
    ):
        with pk.KeepZeros(model):
            step(X, Y)
    assert all((zeros(model)[name] == before[name]).all() for name in before)
    assert "apply" not in vars(model.optimizer)


@TENSORFLOW
def test_a_loop_without_a_keras_optimizer_masks_its_gradients():
    import tensorflow as tf

    model = network()
    plain = keras.Sequential(model.layers)
    before = zeros(model)
    with pk.KeepZeros(plain) as keep:
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((plain(X) - Y) ** 2)
            gradients = keep.mask_gradients(tape.gradient(loss, plain.trainable_variables))
            for variable, gradient in zip(plain.trainable_variables, gradients, strict=True):
                variable.assign_sub(0.1 * gradient)
    assert all((zeros(model)[name] == before[name]).all() for name in before)


def test_a_block_around_fit_keeps_zeros_too():
    model = network()
    with pk.KeepZeros(model):
        grown, _ = fit(model)
    assert grown[-1] == 0


def test_weights_written_in_a_block_are_an_error_and_zero_again():
    model = network()
    before = zeros(model)
    with warnings.catch_warnings(), pytest.raises(pk.errors.LeakError, match="not zero at the end of the `with` block"):
        warnings.simplefilter("error", UserWarning)
        with pk.KeepZeros(model):
            model.get_layer("head").kernel.assign(np.ones((12, 4), "float32"))
    assert all((zeros(model)[name] == before[name]).all() for name in before)


def test_a_block_needs_a_model_and_is_entered_once():
    with pytest.raises(TypeError, match=r"write `with pk.KeepZeros\(model, optimizer\):`"), pk.KeepZeros():
        pass
    keep = pk.KeepZeros(network())
    with keep, pytest.raises(RuntimeError, match="is entered already"), keep:
        pass


def test_in_a_block_without_zeros_nothing_is_held():
    model = network(sparsity=0)
    with pytest.warns(UserWarning, match="found no zero in 2 weights"), pk.KeepZeros(model) as keep:
        fit(model)
    assert (keep.masks, keep.audit()) == ({}, {})


def test_an_error_in_the_block_leaves_model_and_optimizer_free():
    model = network()
    with warnings.catch_warnings(), pytest.raises(ZeroDivisionError), pk.KeepZeros(model):
        raise ZeroDivisionError
    assert "apply" not in vars(model.optimizer)


def test_keep_zeros_around_a_pruning_callback_adds_its_zeros():
    model = network()
    before = zeros(model)
    with pk.KeepZeros(model):
        fit(
            model,
            pk.PruningCallback(pk.schedules.OneShot(0.75), keep_zeros=False, criterion="random", allocation="uniform"),
        )
    assert all(zeros(model)[name][before[name]].all() for name in before)

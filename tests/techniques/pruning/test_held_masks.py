"""Masks that are given are held in every loop, and leaks are told at the end."""

import warnings

import keras
import numpy as np
import pytest
from backends import BACKEND, sync_model_state, tensorflow_only
from held_zeros import LOSS, assert_pristine, zeros

from prunekit.anatomy.layers.targets import find_targets
from prunekit.techniques.pruning.training.held_masks import holding, masks_of_zeros

pytestmark = pytest.mark.every_backend

MASKS = {"hidden/kernel": np.arange(128).reshape(8, 16) % 4 == 0, "logits/bias": np.array([True, False, True, True])}


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_given_masks_hold_in_fit_and_nothing_is_left_behind(perceptron, batches, optimizer):
    if optimizer == "muon" and not hasattr(keras.optimizers, "Muon"):
        pytest.skip("this Keras has no Muon")
    perceptron.compile(optimizer, LOSS(from_logits=True))
    seen = []

    class Spy(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            sync_model_state(perceptron)
            seen.append(zeros(perceptron)[0])

    perceptron.fit(**batches)
    with holding(perceptron, MASKS) as store:
        perceptron.fit(**batches, callbacks=[Spy()])
        assert set(store.masks) == set(MASKS) and not any(store.audit().values())
    assert seen == [96] * 5
    assert keras.ops.convert_to_numpy(perceptron.layers[-1].bias)[1] == 0.0
    assert_pristine(perceptron)
    perceptron.fit(**batches)
    assert zeros(perceptron)[0] < 96


def test_what_keras_writes_at_the_end_of_fit_is_masked_and_reported(compiled, batches):
    stop = keras.callbacks.EarlyStopping("loss", mode="max", patience=0, restore_best_weights=True)
    before = [np.array(value) for value in compiled.get_weights()]

    class WriteBack(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            self.model.set_weights(before)

    with pytest.warns(UserWarning, match="96 pruned weights had been written back at the end of training"):
        with holding(compiled, {"hidden/kernel": MASKS["hidden/kernel"]}):
            compiled.fit(**batches, callbacks=[stop, WriteBack()])
    assert zeros(compiled)[0] == 96


def test_weight_averages_that_are_written_back_hold_the_masks(perceptron, batches):
    perceptron.compile(keras.optimizers.Adam(0.01, use_ema=True), LOSS(from_logits=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with holding(perceptron, MASKS):
            perceptron.fit(**batches)
    assert zeros(perceptron)[0] == 96


def test_an_exception_leaves_the_weights_masked(compiled, batches):
    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("a callback failed")

    with pytest.raises(RuntimeError, match="a callback failed"), holding(compiled, MASKS):
        compiled.fit(**batches, callbacks=[Fail()])
    sync_model_state(compiled)
    assert zeros(compiled)[0] == 96
    assert_pristine(compiled)


@tensorflow_only
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
def test_a_tape_loop_with_an_optimizer_of_its_own_holds_them(perceptron, samples, traced):
    import tensorflow as tf

    optimizer, loss = keras.optimizers.SGD(0.1, momentum=0.9), LOSS(from_logits=True)

    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, perceptron(x, training=True))
        optimizer.apply_gradients(
            zip(tape.gradient(value, perceptron.trainable_weights), perceptron.trainable_weights, strict=True)
        )

    with holding(perceptron, MASKS, optimizer):
        step = tf.function(step) if traced else step
        for _ in range(3):
            step(*samples)
            assert zeros(perceptron)[0] == 96


@tensorflow_only
def test_a_loop_that_bypasses_the_optimizer_is_reported_at_the_end(compiled, samples):
    with pytest.warns(UserWarning, match="the training loop writes weights without passing through the optimizer"):
        with holding(compiled, MASKS):
            compiled.layers[0].kernel.assign_add(np.ones((8, 16)))
    assert zeros(compiled)[0] == 96


@pytest.mark.skipif(BACKEND == "torch", reason="a layer of PyTorch has no dot in its name")
def test_names_are_exact_and_no_patterns():
    layers = [keras.layers.Dense(4, name=name) for name in ("a.b", "a-b")]
    model = keras.Sequential([keras.Input((4,)), *layers])
    with holding(model, {"a.b/kernel": np.eye(4, dtype=bool)}):
        assert zeros(model) == [12, 0]


def test_a_weight_that_the_model_does_not_have_is_refused(compiled):
    with pytest.raises(ValueError, match="has no weight 'hiden/kernel'. Did you mean 'hidden/kernel'"):
        with holding(compiled, {"hiden/kernel": MASKS["hidden/kernel"]}):
            pass
    with pytest.raises(ValueError, match="Expected one mask of the shape of each target"):
        with holding(compiled, {"logits/kernel": MASKS["hidden/kernel"]}):
            pass
    assert_pristine(compiled)


def test_the_masks_of_existing_zeros_leave_out_what_is_dense_or_untrained(perceptron):
    kernel = np.array(perceptron.layers[0].kernel)
    kernel[::2] = 0
    perceptron.layers[0].kernel.assign(kernel)
    found = masks_of_zeros(find_targets(perceptron)[0])
    assert {name: mask.tolist() for name, mask in found.items()} == {"hidden/kernel": (kernel != 0).tolist()}
    perceptron.layers[0].kernel.assign(np.zeros((8, 16)))
    assert masks_of_zeros(find_targets(perceptron)[0]) == {}

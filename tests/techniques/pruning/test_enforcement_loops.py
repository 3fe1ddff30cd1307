"""Loops and train steps that go around the optimizer: no leak of theirs is silent."""

import keras
import pytest
from backends import BACKEND, tensorflow_only
from held_zeros import AT_ONCE, LOSS, assert_pristine, expected, zeros

from prunekit.sparsity.schedules import ConstantSparsity, PolynomialDecay
from prunekit.techniques.pruning.masks.mask_store import LeakError
from prunekit.techniques.pruning.training.callbacks import PruningCallback
from prunekit.techniques.pruning.training.pruner import Pruner

pytestmark = pytest.mark.every_backend


@tensorflow_only
def test_a_function_traced_before_the_pruner_is_detected_and_the_weights_corrected(compiled, samples):
    import tensorflow as tf

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = compiled.loss(y, compiled(x, training=True))
        gradients = tape.gradient(loss, compiled.trainable_variables)
        compiled.optimizer.apply(gradients, compiled.trainable_variables)

    step(*samples)
    with Pruner(compiled, AT_ONCE, allocation="uniform") as pruner:
        step(*samples)
        with pytest.raises(LeakError, match="build the Pruner before your tf.function is first called"):
            pruner.step()
        assert zeros(compiled) == expected(compiled, 0.5)


def custom_model(*, trains):
    """A model whose train_step trains as usual, or not at all, and then writes a weight."""

    class Custom(keras.Model):
        if BACKEND == "jax":

            def train_step(self, state, data):
                logs = {"loss": 0.0}
                if trains:
                    logs, state = super().train_step(state, data)
                trainable, *others = state
                place = [v.path for v in self.trainable_variables].index("hidden/kernel")
                trainable = [value + 0.01 if i == place else value for i, value in enumerate(trainable)]
                return logs, (trainable, *others)

        else:

            def train_step(self, data):
                logs = super().train_step(data) if trains else {"loss": 0.0}
                kernel = self.get_layer("hidden").kernel
                kernel.assign(kernel + 0.01)
                return logs

    inputs = keras.Input((8,))
    outputs = keras.layers.Dense(4, name="logits")(keras.layers.Dense(16, name="hidden")(inputs))
    model = Custom(inputs, outputs)
    model.compile("adam", LOSS(from_logits=True))
    return model


@pytest.mark.parametrize(
    ("schedule", "epochs", "told"),
    [
        (AT_ONCE, 1, "became non-zero.*hidden/kernel.*assign weights before the optimizer update"),
        (PolynomialDecay(0.5, 0.5, begin_step=0, end_step=0), 3, "became non-zero.*hidden/kernel"),
    ],
    ids=["while the schedule rises", "after it"],
)
def test_a_train_step_that_writes_weights_besides_the_optimizer_is_detected(batches, schedule, epochs, told):
    model = custom_model(trains=True)
    with pytest.raises(LeakError, match=told):
        model.fit(**batches, epochs=epochs, callbacks=[PruningCallback(schedule, allocation="uniform")])
    assert zeros(model) == expected(model, 0.5)
    assert_pristine(model)


def test_a_train_step_that_never_uses_the_optimizer_is_detected(batches):
    model = custom_model(trains=False)
    with pytest.raises(LeakError, match="no update passed through"):
        model.fit(**batches, callbacks=[PruningCallback(AT_ONCE, allocation="uniform")])
    assert zeros(model) == expected(model, 0.5)
    assert_pristine(model)


def test_train_on_batch_with_an_assignment_of_the_users_is_detected(compiled, samples):
    with Pruner(compiled, AT_ONCE, allocation="uniform") as pruner:
        compiled.train_on_batch(*samples)
        kernel = compiled.get_layer("logits").kernel
        kernel.assign(kernel + 0.01)
        with pytest.raises(LeakError, match="logits/kernel.*pruner.enforce"):
            pruner.step()
        assert zeros(compiled) == expected(compiled, 0.5)


def test_a_leak_after_the_last_step_is_not_silent(compiled, samples):
    pruner = Pruner(compiled, AT_ONCE, allocation="uniform")
    compiled.train_on_batch(*samples)
    pruner.step()
    kernel = compiled.get_layer("logits").kernel
    kernel.assign(kernel + 0.01)
    with pytest.warns(UserWarning, match="pruned weights"):
        pruner.finish()
    assert zeros(compiled) == expected(compiled, 0.5)


def test_a_leak_between_two_updates_of_the_masks_is_found_long_before_the_next(compiled, samples):
    with Pruner(compiled, ConstantSparsity(0.5, frequency=1000), allocation="uniform") as pruner:
        compiled.train_on_batch(*samples)
        kernel = compiled.get_layer("logits").kernel
        with pytest.raises(LeakError, match="logits/kernel"):
            for _ in range(20):
                compiled.train_on_batch(*samples)
                kernel.assign(kernel + 0.01)
                pruner.step()


def test_recompiling_inside_a_pruner_is_detected_and_the_model_keeps_its_new_function(compiled, samples):
    compiled.train_on_batch(*samples)
    old = compiled.train_function
    with Pruner(compiled, AT_ONCE, allocation="uniform") as pruner:
        compiled.compile("sgd", LOSS(from_logits=True))
        compiled.train_on_batch(*samples)
        with pytest.raises(LeakError, match="no update passed through Adam"):
            pruner.step()
    # The old function trains with the old optimizer.
    assert compiled.train_function is not old

"""Zeros hold and nothing is left behind where an exception ends a training, wherever it comes from."""

import keras
import numpy as np
import pytest
from backends import BACKEND, tensorflow_only
from held_zeros import AT_ONCE, LOSS, RISE, assert_own, assert_pristine, expected, zeros
from keras import ops

from prunekit.sparsity.schedules import OneShot
from prunekit.techniques.pruning.training.callbacks import PruningCallback
from prunekit.techniques.pruning.training.pruner import Pruner

pytestmark = pytest.mark.every_backend


def assert_dense_training(model, batches):
    """A plain fit afterwards trains pruned weights again."""
    before = zeros(model)
    model.fit(**batches, epochs=2)
    assert all(after < some for after, some in zip(zeros(model), before, strict=True))


class Raise(keras.callbacks.Callback):
    """Raises at one event, the third time it comes."""

    def __init__(self, event, error):
        super().__init__()
        self.times = 0

        def method(*arguments, **keywords):
            self.times += 1
            if self.times == 3:
                raise error

        setattr(self, event, method)


EVENTS = ["on_train_batch_begin", "on_train_batch_end", "on_epoch_begin", "on_epoch_end", "on_test_batch_end"]


@pytest.mark.parametrize(
    ("first", "error"),
    [(True, RuntimeError("broken")), (False, KeyboardInterrupt())],
    ids=["error, listed before", "interrupt, listed after"],
)
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.short(cases=3)
def test_an_exception_in_another_callback_leaves_the_model_detached_and_sparse(compiled, batches, event, error, first):
    compiled.fit(**batches)
    own = compiled.train_function
    raising, pruning = Raise(event, error), PruningCallback(AT_ONCE, allocation="uniform")
    validation = (batches["x"][:9], batches["y"][:9])
    with pytest.raises(type(error)):
        compiled.fit(
            **batches,
            epochs=4,
            validation_data=validation,
            callbacks=[raising, pruning] if first else [pruning, raising],
        )
    assert zeros(compiled) == expected(compiled, 0.5)
    assert compiled.train_function is own
    assert_pristine(compiled)
    assert_dense_training(compiled, batches)


class Fragile(keras.layers.Layer):
    """Raises the fourth time that it is called in a training."""

    times, fragile = 0, True

    def call(self, x, training=False):
        if training and self.fragile:
            self.times += 1
            if self.times == 4:
                raise KeyboardInterrupt
        return x


@pytest.mark.parametrize("own_loop", [False, True], ids=["fit", "train_on_batch"])
def test_an_exception_in_an_eager_step_leaves_the_model_detached_and_sparse(compiled, samples, batches, own_loop):
    fragile = Fragile(name="fragile")
    model = keras.Sequential([keras.Input((8,)), compiled.layers[0], fragile, compiled.layers[1]])
    model.compile("adam", LOSS(from_logits=True), run_eagerly=True)
    fragile.times = 0
    with pytest.raises(KeyboardInterrupt):
        if own_loop:
            with Pruner(model, AT_ONCE, allocation="uniform") as pruner:
                for _ in range(5):
                    model.train_on_batch(*samples)
                    pruner.step()
        else:
            model.fit(**batches, callbacks=[PruningCallback(AT_ONCE, allocation="uniform")])
    assert zeros(model) == expected(model, 0.5)
    assert_pristine(model)
    fragile.fragile = False
    model.make_train_function(force=True)
    assert_dense_training(model, batches)


@tensorflow_only
def test_an_exception_in_a_compiled_step_leaves_the_model_detached_and_sparse(batches):
    import tensorflow as tf

    class Asserting(keras.Model):
        fragile = True

        def train_step(self, data):
            if self.fragile:
                asserted = tf.debugging.assert_less(self.optimizer.iterations.value, tf.constant(3, "int64"))
                with tf.control_dependencies([asserted]):
                    data = (tf.identity(data[0]), data[1])
            return super().train_step(data)

    inputs = keras.Input((8,))
    outputs = keras.layers.Dense(4, name="logits")(keras.layers.Dense(16, name="hidden")(inputs))
    model = Asserting(inputs, outputs)
    model.compile("adam", LOSS(from_logits=True))
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.fit(**batches, callbacks=[PruningCallback(AT_ONCE, allocation="uniform")])
    assert zeros(model) == expected(model, 0.5)
    assert model.train_function.__module__.startswith("keras.")
    assert_pristine(model)
    model.fragile = False
    model.make_train_function(force=True)
    assert_dense_training(model, batches)


@pytest.mark.parametrize("moment", ["before the update", "between the update and its enforcement"])
def test_an_interrupt_inside_an_eager_update_leaves_no_leak(compiled, batches, moment):
    class Interrupted(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            after = moment != "before the update"
            if after:
                variable.assign_add(ops.ones_like(ops.convert_to_tensor(variable)))
            if int(self.iterations) == 2:
                raise KeyboardInterrupt
            super().update_step(gradient, variable, learning_rate)

    compiled.compile(Interrupted(0.1), LOSS(from_logits=True), run_eagerly=True)
    with pytest.raises(KeyboardInterrupt):
        compiled.fit(**batches, callbacks=[PruningCallback(AT_ONCE, allocation="uniform")])
    assert zeros(compiled) == expected(compiled, 0.5)
    assert_pristine(compiled)


def data_errors():
    """What an exception in the data becomes on its way through `fit`."""
    if BACKEND != "tensorflow":
        return ZeroDivisionError
    import tensorflow as tf

    return ZeroDivisionError, tf.errors.OpError


@pytest.mark.parametrize("kind", ["generator", "PyDataset"])
def test_an_exception_in_the_data_leaves_the_model_detached_and_sparse(compiled, batches, kind):
    x, y = batches["x"], batches["y"]

    def generate():
        yield x[:16], y[:16]
        yield x[16:32], y[16:32]
        raise ZeroDivisionError("no more data")

    class Sequence(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            if index == 3:
                raise ZeroDivisionError("no more data")
            return x[index * 16 :][:16], y[index * 16 :][:16]

    data = generate() if kind == "generator" else Sequence()
    with pytest.raises(data_errors(), match="no more data"):
        compiled.fit(data, shuffle=False, verbose=0, callbacks=[PruningCallback(AT_ONCE, allocation="uniform")])
    assert zeros(compiled) == expected(compiled, 0.5)
    assert_pristine(compiled)
    assert_dense_training(compiled, batches)


def test_after_an_interrupt_and_after_an_end_the_history_is_kerass_own(compiled, batches):
    compiled.fit(**batches, callbacks=[PruningCallback(AT_ONCE, allocation="uniform")])
    assert_own(compiled.history)
    with pytest.raises(KeyboardInterrupt):
        compiled.fit(
            **batches,
            callbacks=[
                PruningCallback(AT_ONCE, allocation="uniform"),
                Raise("on_train_batch_end", KeyboardInterrupt()),
            ],
        )
    assert_own(compiled.history)


def test_after_an_interrupt_the_same_callback_continues_where_it_was(compiled, batches):
    pruning = PruningCallback(RISE, allocation="uniform")
    with pytest.raises(KeyboardInterrupt):
        compiled.fit(**batches, epochs=2, callbacks=[pruning, Raise("on_train_batch_end", KeyboardInterrupt())])
    assert pruning.pruner.step_count == 3
    # 3 + 5 steps are just enough: no warning that they are too few, and exact at the end.
    compiled.fit(**batches, callbacks=[pruning])
    assert pruning.pruner.step_count == 8
    assert zeros(compiled) == expected(compiled, 0.75)


def test_a_pruner_whose_loop_raises_is_detached_whatever_the_weights_became(compiled, samples):
    with pytest.raises(ZeroDivisionError), Pruner(compiled, OneShot(0.5, step=1), allocation="uniform"):
        compiled.get_layer("hidden").kernel.assign(np.full((8, 16), np.nan))
        raise ZeroDivisionError
    assert_pristine(compiled)

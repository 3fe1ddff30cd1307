"""Zeros hold in `fit`, whatever the model, its constraints and its optimizers, and from one training to the next."""

import keras
import numpy as np
import pytest
from backends import BACKEND, update
from held_zeros import AT_ONCE, LOSS, RISE, Spy, assert_pristine, expected, kernels, zeros
from keras import ops

from prunekit.sparsity.schedules import ConstantSparsity, PolynomialDecay
from prunekit.techniques.pruning.training.callbacks import PruningCallback
from prunekit.techniques.pruning.training.pruner import Pruner

pytestmark = pytest.mark.every_backend


# ---------------------------------------------------------------- the plain story


def test_frequency_100_and_a_number_of_steps_that_is_no_multiple_of_it_leave_no_small_weights(compiled, samples):
    # 7 epochs of 35 batches are 245 steps: the last update by frequency alone would be at 200.
    schedule = PolynomialDecay(initial_sparsity=0.0, final_sparsity=0.8, begin_step=0, end_step=245, frequency=100)
    spy = Spy()
    callback = PruningCallback(schedule, allocation="uniform")
    compiled.fit(*samples, batch_size=2, epochs=7, verbose=0, callbacks=[callback, spy])
    assert compiled.optimizer.iterations.numpy() == 245
    assert [event.step for event in callback.pruner.events] == [0, 100, 200, 245]
    assert zeros(compiled) == expected(compiled, 0.8)
    for kernel in kernels(compiled):
        left = np.abs(kernel[kernel != 0])
        # No pruned weight lives on as a tiny number: what is left is what ranked highest.
        assert left.min() > 1e-4
        assert not np.any(np.signbit(kernel[kernel == 0]))
    assert_pristine(compiled)


def test_with_accumulation_a_schedule_that_is_too_long_is_announced_in_updates_not_batches(compiled, batches):
    compiled.compile(keras.optimizers.SGD(gradient_accumulation_steps=4), LOSS(from_logits=True))
    # 10 batches are 2 updates.
    with pytest.warns(UserWarning, match="at step 8, but training (has only|ended after) 2 steps") as record:
        compiled.fit(**batches, epochs=2, callbacks=[PruningCallback(RISE, allocation="uniform")])
    assert "has only 2 steps" in next(str(one.message) for one in record if one.category is UserWarning)


@pytest.mark.parametrize("count", [0, 1], ids=["before it is built", "of another number"])
def test_gradients_without_variables_are_refused_by_keras_itself(compiled, samples, count):
    with Pruner(compiled, AT_ONCE, allocation="uniform"):
        for _ in range(count):
            compiled.train_on_batch(*samples)
        message = "optimizer is tracking 4" if count else "must already be built"
        with pytest.raises(ValueError, match=message):
            compiled.optimizer.apply([ops.zeros((8, 16))])


# ---------------------------------------------------------------- models


def test_a_layer_used_twice_is_pruned_once(batches):
    shared = keras.layers.Dense(8, activation="tanh", name="shared")
    inputs = keras.Input((8,))
    model = keras.Model(inputs, keras.layers.Dense(4, name="logits")(shared(shared(inputs))))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), LOSS(from_logits=True))
    pruning, spy = PruningCallback(RISE, allocation="uniform"), Spy()
    model.fit(**batches, epochs=2, callbacks=[pruning, spy])
    assert [target.name for target in pruning.pruner.targets] == ["shared/kernel", "logits/kernel"]
    assert zeros(model) == expected(model, 0.75)


def test_models_inside_models_hold_their_zeros(batches):
    block = keras.Sequential([keras.Input((8,)), keras.layers.Dense(12, name="dense")], name="block")
    outer = keras.Sequential([keras.Input((8,)), block, keras.layers.Dense(4, name="dense")])
    outer.compile("adam", LOSS(from_logits=True))
    spy = Spy()
    outer.fit(**batches, epochs=2, callbacks=[PruningCallback(RISE, allocation="uniform"), spy])
    assert zeros(outer) == expected(outer, 0.75)
    assert len(spy.counts) == 10


def test_a_frozen_layer_is_pruned_and_not_trained_or_left_alone_but_never_half(compiled, batches):
    frozen = compiled.get_layer("hidden")
    frozen.trainable = False
    compiled.compile("adam", LOSS(from_logits=True))
    before = np.array(frozen.kernel.numpy())
    pruning = PruningCallback(RISE, allocation="uniform")
    compiled.fit(**batches, epochs=2, callbacks=[pruning])
    after = np.array(frozen.kernel.numpy())
    names = [target.name for target in pruning.pruner.targets]
    if "hidden/kernel" in names:
        assert np.count_nonzero(after == 0) == round(0.75 * after.size)
        np.testing.assert_array_equal(after[after != 0], before[after != 0])
    else:
        assert any(skipped.name.startswith("hidden") for skipped in pruning.pruner.run.skipped)
        np.testing.assert_array_equal(after, before)


# On JAX, the state of `fit` has one optimizer.
several_optimizers = pytest.mark.skipif(BACKEND == "jax", reason="Keras has one optimizer in a state of JAX")


class TwoPlayers(keras.Model):
    """Two models with an optimizer each, as in a GAN."""

    def __init__(self):
        super().__init__()
        self.maker = keras.Sequential([keras.Input((8,)), keras.layers.Dense(12, name="maker_dense")])
        self.judge = keras.Sequential([keras.Input((12,)), keras.layers.Dense(1, name="judge_dense")])
        self.build((None, 8))

    def build(self, shape):
        self.built = True

    def call(self, x, training=False):
        return self.judge(self.maker(x, training=training), training=training)

    def compile(self, maker_optimizer, judge_optimizer):
        super().compile(loss="mse")
        self.maker_optimizer, self.judge_optimizer = maker_optimizer, judge_optimizer

    def distance(self, x):
        return ops.mean(ops.square(self(x, training=True) - 1.0))

    def train_step(self, data):
        for player, optimizer, sign in (
            (self.judge, self.judge_optimizer, 1.0),
            (self.maker, self.maker_optimizer, -1.0),
        ):
            loss = update(optimizer, player.trainable_variables, lambda sign=sign: sign * self.distance(data[0]))
        return {"loss": loss}


@several_optimizers
def test_two_optimizers_in_one_train_step_both_hold_zeros(batches):
    model = TwoPlayers()
    optimizers = [keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.01, momentum=0.9)]
    model.compile(*optimizers)
    pruning, spy = PruningCallback(RISE, allocation="uniform"), Spy()
    model.fit(**batches, epochs=2, callbacks=[pruning, spy])
    assert zeros(model) == expected(model, 0.75)
    for optimizer, player in zip(optimizers, (model.maker, model.judge), strict=True):
        kernel = np.array(player.layers[0].kernel.numpy())
        slots = [np.array(v.numpy()) for v in optimizer.variables if tuple(v.shape) == kernel.shape]
        assert slots and not any(np.any(slot[kernel == 0]) for slot in slots)
    assert_pristine(model, optimizers)


# These divide by something that is made of gradients or weights.
DIVIDERS = ["Adafactor", "Ftrl", "Adagrad", "Adadelta", "Lamb", "Muon"]


class Shifted(keras.constraints.Constraint):
    """A constraint of the user's that makes non-zeros out of zeros."""

    def __call__(self, w):
        return w + 0.01


@pytest.mark.parametrize(
    "constraint",
    [Shifted(), keras.constraints.MaxNorm(0.5), keras.constraints.UnitNorm()],
    ids=lambda c: type(c).__name__,
)
@pytest.mark.parametrize("use_ema", [False, True])
def test_a_constraint_of_the_users_acts_and_zeros_hold(compiled, batches, constraint, use_ema):
    kernel = compiled.get_layer("hidden").kernel
    kernel.constraint = constraint
    compiled.compile(
        keras.optimizers.SGD(0.05, use_ema=use_ema, ema_overwrite_frequency=2 if use_ema else None), LOSS(True)
    )
    spy = Spy()
    compiled.fit(**batches, epochs=2, callbacks=[PruningCallback(RISE, allocation="uniform"), spy])
    assert kernel.constraint is constraint
    assert zeros(compiled) == expected(compiled, 0.75)
    if isinstance(constraint, keras.constraints.MaxNorm) and not use_ema:
        assert np.linalg.norm(kernel.numpy(), axis=0).max() <= 0.5 + 1e-6


@pytest.mark.parametrize("optimizer", [getattr(keras.optimizers, name) for name in DIVIDERS], ids=DIVIDERS)
@pytest.mark.short(cases=3)
def test_whole_rows_and_columns_that_are_pruned_at_once_do_not_become_nan(compiled, batches, optimizer):
    hidden = compiled.get_layer("hidden")
    kernel = np.array(hidden.kernel)
    kernel[2:, :] /= 100
    kernel[:, 3:] /= 100
    hidden.kernel.assign(kernel)
    hidden.kernel.constraint = keras.constraints.MaxNorm(2.0)
    compiled.compile(optimizer(), LOSS(from_logits=True))
    pruning = PruningCallback(ConstantSparsity(0.95), include="hidden", allocation="uniform")
    compiled.fit(**batches, epochs=3, callbacks=[pruning])
    assert [np.count_nonzero(~mask) for mask in pruning.pruner.masks.values()] == expected(compiled, 0.95)[:1]
    assert not any(pruning.pruner.audit().values())
    assert all(np.isfinite(np.array(v.numpy())).all() for v in [*compiled.variables, *compiled.optimizer.variables])
    compiled.fit(**batches)
    assert all(np.isfinite(np.array(v.numpy())).all() for v in [*compiled.variables, *compiled.optimizer.variables])


def test_weights_that_become_nan_in_fit_are_named(compiled, batches):
    class Poison(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2:
                compiled.get_layer("hidden").kernel.assign(np.full((8, 16), np.nan))

    with pytest.raises(ValueError, match=r"hidden/kernel \(\d+\).*lower the learning rate"):
        compiled.fit(**batches, callbacks=[PruningCallback(AT_ONCE, allocation="uniform"), Poison()])
    assert_pristine(compiled)


# ---------------------------------------------------------------- several trainings


def test_a_recompile_between_two_fits_continues_with_the_schedule(compiled, batches):
    pruning = PruningCallback(PolynomialDecay(0.2, 0.75, begin_step=0, end_step=12, frequency=3), allocation="uniform")
    with pytest.warns(UserWarning, match="lands on sparsity 0.75 at step 12"):
        compiled.fit(**batches, callbacks=[pruning])
    assert pruning.pruner.step_count == 5
    first = compiled.optimizer
    compiled.compile(keras.optimizers.SGD(0.1, momentum=0.9), LOSS(from_logits=True))
    spy = Spy()
    compiled.fit(**batches, epochs=2, callbacks=[pruning, spy])
    assert pruning.pruner.step_count == 15
    assert zeros(compiled) == expected(compiled, 0.75)
    assert_pristine(compiled, [first, compiled.optimizer])


def test_dense_weights_set_between_two_fits_are_pruned_again_when_the_second_begins(compiled, batches):
    dense = compiled.get_weights()
    pruning, spy = PruningCallback(RISE, allocation="uniform"), Spy()
    compiled.fit(**batches, epochs=2, callbacks=[pruning])
    compiled.set_weights(dense)
    assert zeros(compiled) == [0, 0]
    compiled.fit(**batches, callbacks=[pruning, spy])
    assert all(count == expected(compiled, 0.75) for count in spy.counts)
    assert zeros(compiled) == expected(compiled, 0.75)


def test_predict_and_evaluate_change_no_weight(compiled, samples, batches):
    # A leak that nothing has seen yet: evaluating must not repair it either.
    pruning = PruningCallback(AT_ONCE, allocation="uniform")
    compiled.fit(**batches, callbacks=[pruning])
    with Pruner(compiled, AT_ONCE, allocation="uniform") as pruner:
        compiled.get_layer("logits").kernel.assign(np.full((16, 4), 0.25))
        before = [np.array(v.numpy()) for v in [*compiled.variables, *compiled.optimizer.variables]]
        compiled.predict(samples[0], verbose=0)
        compiled.evaluate(*samples, verbose=0)
        compiled.evaluate(*samples, verbose=0, callbacks=[pruning])
        compiled.test_on_batch(*samples)
        compiled(samples[0], training=False)
        for was, variable in zip(before, [*compiled.variables, *compiled.optimizer.variables], strict=True):
            np.testing.assert_array_equal(was, np.array(variable.numpy()))
        pruner.enforce()


def test_a_callback_that_builds_the_train_function_again_is_obeyed(compiled, batches):
    class Unfreeze(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.model.scale = 0.0
                self.model.make_train_function(force=True)

    class Scaled(keras.Model):
        scale = 1.0

        def compute_loss(self, *arguments, **keywords):
            return self.scale * super().compute_loss(*arguments, **keywords)

    inputs = keras.Input((8,))
    model = Scaled(inputs, keras.layers.Dense(4, name="logits")(inputs))
    model.compile(keras.optimizers.SGD(0.1), LOSS(from_logits=True))

    class Keep(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.kept = [*getattr(self, "kept", []), kernels(self.model)[0].copy()]

    keep = Keep()
    model.fit(**batches, epochs=2, callbacks=[PruningCallback(AT_ONCE, allocation="uniform"), Unfreeze(), keep])
    np.testing.assert_array_equal(keep.kept[0], keep.kept[1])

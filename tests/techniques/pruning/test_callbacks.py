"""PruningCallback: the plain story; tests/techniques/pruning/test_enforcement.py attacks it."""

import keras
import numpy as np
import pytest
from backends import BACKEND, tensorflow_only, training_step

from prunekit.sparsity.schedules import ConstantSparsity, PolynomialDecay
from prunekit.techniques.pruning.training.callbacks import PruningCallback
from prunekit.techniques.pruning.training.pruner import Pruner
from prunekit.techniques.pruning.training.pruning_notes import LATER_TRAINING

pytestmark = pytest.mark.every_backend


@pytest.fixture
def compiled(perceptron):
    perceptron.compile(
        keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    return perceptron


def test_fit_ends_exactly_at_the_final_sparsity_and_logs_it(compiled, samples):
    pruning = PruningCallback(PolynomialDecay(0.0, 0.9, 0, 13, frequency=5), allocation="uniform")
    history = compiled.fit(*samples, batch_size=16, epochs=3, verbose=0, callbacks=[pruning])
    assert (compiled.layers[0].kernel.numpy() == 0).sum() == round(0.9 * 128)
    assert (compiled.layers[1].kernel.numpy() == 0).sum() == round(0.9 * 64)
    assert history.history["sparsity"] == sorted(history.history["sparsity"])
    assert history.history["sparsity"][-1] == pytest.approx((115 + 58) / 192)
    assert [event.step for event in pruning.report.events] == [0, 5, 10, 13]
    assert pruning.report.targets == ("hidden/kernel", "logits/kernel")
    assert pruning.report.notes == (LATER_TRAINING,)


def test_fit_and_a_loop_of_the_users_end_in_the_same_bytes(samples):
    x, y = samples[0][:64], samples[1][:64]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    schedule = PolynomialDecay(0.0, 0.8, 1, 7, frequency=2)

    def build():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(4)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, jit_compile=False)
        return model

    fitted = build()
    fitted.fit(
        x,
        y,
        batch_size=16,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[PruningCallback(schedule, allocation="uniform")],
    )

    looped = build()

    step = training_step(looped, looped.optimizer, loss)
    with Pruner(looped, schedule, allocation="uniform") as pruner:
        for i in list(range(0, 64, 16)) * 2:
            step(x[i : i + 16], y[i : i + 16])
            pruner.step()
    # XLA fuses the two compiled steps of JAX each in its own way.
    rounding = 1e-6 if BACKEND == "jax" else 0
    for one, other in zip(fitted.get_weights(), looped.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=rounding)


def test_a_schedule_longer_than_the_training_is_announced_before_and_after_with_figures(compiled, samples):
    pruning = PruningCallback(PolynomialDecay(0.0, 0.9, 0, 1000, frequency=5), allocation="uniform")
    with pytest.warns(UserWarning, match="lands on sparsity 0.9 at step 1000, but training") as caught:
        compiled.fit(*samples, batch_size=16, epochs=2, verbose=0, callbacks=[pruning])
    texts = [str(one.message) for one in caught if one.category is UserWarning and "schedule" in str(one.message)]
    assert ["has only 10 steps" in texts[0], "ended after 10 steps" in texts[1]] == [True, True]
    assert pruning.report.notes == (*texts, LATER_TRAINING)


def test_a_schedule_that_changes_masks_once_is_announced_with_a_frequency(compiled, samples):
    schedule = PolynomialDecay(final_sparsity=0.5, end_step=4, frequency=100)
    pruning = PruningCallback(schedule, allocation="uniform")
    with pytest.warns(
        UserWarning, match="from step 0 to step 4, but the masks change at step 4 only, because frequency=100"
    ):
        compiled.fit(*samples, epochs=2, batch_size=16, verbose=0, callbacks=[pruning])
    assert pruning.notes[0].endswith("pass a smaller frequency, such as 1.")


def test_a_sparsity_alone_fits_its_schedule_to_the_training(compiled, samples):
    pruning = PruningCallback(0.5)
    compiled.fit(*samples, epochs=4, batch_size=len(samples[0]) // 10, verbose=0, callbacks=[pruning])
    steps = int(compiled.optimizer.iterations)
    end = round(0.75 * steps)
    assert pruning.pruner.run.schedule == PolynomialDecay(final_sparsity=0.5, end_step=end, frequency=max(1, end // 60))
    assert pruning.report.events[-1].step == end and pruning.pruner.sparsity == 0.5
    assert {(one.option, one.value) for one in pruning.report.choices} >= {("end_step", str(end)), ("frequency", "1")}
    # A second fit goes on with what the first one fitted, and zeros stay.
    compiled.fit(*samples, epochs=1, verbose=0, callbacks=[pruning])
    assert pruning.pruner.run.schedule.end_step == end and pruning.pruner.sparsity == 0.5


def test_a_training_from_a_later_epoch_on_fits_its_schedule_to_the_rest(compiled, samples):
    pruning = PruningCallback(0.5)
    size = len(samples[0]) // 8
    compiled.fit(*samples, epochs=6, initial_epoch=4, batch_size=size, verbose=0, callbacks=[pruning])
    assert pruning.pruner.run.schedule.end_step == round(0.75 * int(compiled.optimizer.iterations))


def test_an_interrupted_training_goes_on_with_the_schedule_that_it_fitted(compiled, samples, tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def train(*more):
        pruning = PruningCallback(0.5)
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
        compiled.fit(*samples, epochs=4, batch_size=32, verbose=0, callbacks=[pruning, backup, *more])
        return pruning

    with pytest.raises(KeyboardInterrupt):
        train(Stop())
    done = int(compiled.optimizer.iterations)
    compiled.optimizer.iterations.assign(0)
    pruning = train()
    assert int(compiled.optimizer.iterations) == 2 * done
    assert pruning.pruner.run.schedule.end_step == round(0.75 * 2 * done)
    assert pruning.report.events[-1].step == pruning.pruner.run.schedule.end_step


def test_an_epoch_of_unknown_length_needs_an_end(compiled, samples):
    def batches():
        while True:
            yield samples[0][:8], samples[1][:8]

    with pytest.raises(ValueError, match="with `fit`, steps_per_epoch is enough"):
        compiled.fit(batches(), epochs=2, verbose=0, shuffle=False, callbacks=[PruningCallback(0.5)])
    with pytest.raises(ValueError, match="length of the training"):
        Pruner(compiled, PolynomialDecay())


@pytest.mark.one_backend
def test_the_report_before_fit_is_refused():
    with pytest.raises(RuntimeError, match="`report` exist once `fit` has run"):
        _ = PruningCallback(ConstantSparsity(0.5), allocation="uniform").report


def test_a_second_fit_continues_with_the_schedule(compiled, samples):
    pruning = PruningCallback(PolynomialDecay(0.0, 0.8, 0, 10, frequency=1), allocation="uniform")
    with pytest.warns(UserWarning, match="lands on sparsity 0.8 at step 10"):
        compiled.fit(*samples, batch_size=16, epochs=1, verbose=0, callbacks=[pruning])
    halfway = pruning.pruner.sparsity
    assert 0.6 < halfway < 0.8
    compiled.fit(*samples, batch_size=16, epochs=1, verbose=0, callbacks=[pruning])
    assert (compiled.layers[0].kernel.numpy() == 0).sum() == round(0.8 * 128)
    assert [event.step for event in pruning.report.events] == [*range(0, 11)]


@tensorflow_only
def test_a_second_fit_traces_nothing_again_and_one_after_a_compile_does(compiled, samples):
    traced = []

    class Counts(keras.layers.Layer):
        def call(self, x):
            traced.append(1)
            return x

    model = keras.Sequential([*compiled.layers, Counts()])
    model.build((None, 8))
    traced.clear()
    pruning = PruningCallback(PolynomialDecay(0.0, 0.8, 0, 5, frequency=2), allocation="uniform")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    counts = []
    for recompile in (True, False, True):
        if recompile:
            model.compile("adam", loss, jit_compile=False)
        model.fit(*samples, batch_size=16, epochs=1, verbose=0, callbacks=[pruning])
        counts.append(len(traced))
        assert sum(pruning.pruner.audit().values()) == 0
    assert counts[0] > 0 and counts[1] == counts[0] and counts[2] > counts[1]
    assert pruning.pruner.sparsity == pytest.approx(0.8, abs=0.02)


def test_steps_count_from_where_pruning_begins_on_a_model_trained_before(compiled, samples):
    compiled.fit(*samples, batch_size=16, epochs=4, verbose=0)
    pruning = PruningCallback(PolynomialDecay(0.0, 0.8, 0, 10, frequency=5), allocation="uniform")
    compiled.fit(*samples, batch_size=16, epochs=2, verbose=0, callbacks=[pruning])
    assert [(event.step, event.asked) for event in pruning.report.events][0] == (0, 0.0)
    assert (compiled.layers[0].kernel.numpy() == 0).sum() == round(0.8 * 128)


@pytest.mark.one_backend
def test_bad_options_are_refused_at_construction():
    with pytest.raises(TypeError, match="`schedule` must be a schedule"):
        PruningCallback("0.5", allocation="uniform")
    with pytest.raises(TypeError, match="frequency"):
        PruningCallback(ConstantSparsity(0.5), frequency=3, allocation="uniform")

"""AtFinalSparsity: a callback sees only the epochs and batches at the final sparsity."""

import re
import warnings

import keras
import numpy as np
import pytest
from backends import zero_counts

from prunekit.sparsity.schedules import ConstantSparsity, PolynomialDecay
from prunekit.techniques.pruning.training.at_final_sparsity import AtFinalSparsity
from prunekit.techniques.pruning.training.callbacks import PruningCallback
from prunekit.techniques.pruning.training.pruner import Pruner
from prunekit.techniques.pruning.training.pruning_notes import LATER_TRAINING

# Five batches an epoch: lands in the second epoch, after the second batch of it.
RISE = PolynomialDecay(0.0, 0.75, 0, 7, frequency=1, power=1)


class Recorder(keras.callbacks.Callback):
    """Records what it is shown."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_begin(self, logs=None):
        self.seen.append("begin")

    def on_epoch_begin(self, epoch, logs=None):
        self.seen.append(f"epoch {epoch}")

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append(batch)

    def on_train_batch_end(self, batch, logs=None):
        assert self.seen[-1] == batch

    def on_test_end(self, logs=None):
        self.seen.append("test")

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(f"end {epoch} at {logs['sparsity']}" if "sparsity" in logs else f"end {epoch}")

    def on_train_end(self, logs=None):
        self.seen.append("end")


class Score(keras.callbacks.Callback):
    """Gives epochs a score, the densest epochs the best one, and keeps their weights."""

    def __init__(self, *scores):
        super().__init__()
        self.scores, self.weights = scores, []

    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = self.scores[epoch]
        self.weights.append(self.model.get_weights())


def ordered(first, others, pruning):
    return [*others, *pruning] if first else [*pruning, *others]


@pytest.mark.every_backend
@pytest.mark.parametrize("first", [True, False], ids=["listed before", "listed after"])
def test_batches_and_epochs_are_shown_from_the_final_sparsity_on(compiled, batches, samples, first):
    recorder = Recorder()
    callbacks = ordered(first, [AtFinalSparsity(recorder)], [PruningCallback(RISE, allocation="uniform")])
    compiled.fit(**batches, epochs=3, callbacks=callbacks, validation_data=samples)
    second = ["epoch 1", 2, 3, 4, "test", "end 1 at 0.75"]
    third = ["epoch 2", 0, 1, 2, 3, 4, "test", "end 2 at 0.75"]
    assert recorder.seen == ["begin", *second, *third, "end"]


@pytest.mark.parametrize("first", [True, False], ids=["listed before", "listed after"])
def test_files_and_restored_weights_are_the_best_of_the_sparse_epochs(compiled, batches, tmp_path, first):
    best, often, score = tmp_path / "best.keras", tmp_path / "often.keras", Score(9, 5, 7, 6, 1)
    saving = AtFinalSparsity(keras.callbacks.ModelCheckpoint(best, monitor="score", mode="max", save_best_only=True))
    batchwise = AtFinalSparsity(keras.callbacks.ModelCheckpoint(often, save_freq=1))
    stopping = AtFinalSparsity(
        keras.callbacks.EarlyStopping("score", mode="max", patience=1, restore_best_weights=True)
    )
    slower = AtFinalSparsity(keras.callbacks.ReduceLROnPlateau("score", mode="max", patience=1, factor=0.5))
    others = [score, saving, batchwise, stopping, slower]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        history = compiled.fit(
            **batches, epochs=5, callbacks=ordered(first, others, [PruningCallback(RISE, allocation="uniform")])
        )
    # Epochs 1, 2 and 3 are shown: the third one is the best, and the next one is worse.
    assert len(history.epoch) == 4 and stopping.stopped_epoch == 3
    assert saving.best == stopping.best == 7 and saving.monitor == "score"
    assert len(history.history["learning_rate"]) == 3
    for value, restored in zip(score.weights[2], compiled.get_weights(), strict=True):
        np.testing.assert_array_equal(value, restored)
    assert (
        zero_counts(compiled)
        == zero_counts(keras.models.load_model(best))
        == zero_counts(keras.models.load_model(often))
        == [96, 48]
    )


def test_with_several_pruning_callbacks_the_last_one_to_land_decides(compiled, batches):
    recorder = Recorder()
    early = PruningCallback(ConstantSparsity(0.5), include=["hidden"], allocation="uniform")
    late = PruningCallback(PolynomialDecay(0.0, 0.5, 0, 9, frequency=3), include=["logits"], allocation="uniform")
    compiled.fit(**batches, epochs=2, callbacks=[early, AtFinalSparsity(recorder), late])
    assert recorder.seen == ["begin", "epoch 1", 4, "end 1 at 0.5", "end"]


def test_where_nothing_prunes_and_in_a_later_fit_every_epoch_is_shown(compiled, batches, samples):
    recorder, pruning = Recorder(), PruningCallback(RISE, allocation="uniform")
    once = AtFinalSparsity(recorder)
    compiled.fit(**batches, callbacks=[once])
    assert recorder.seen == ["begin", "epoch 0", 0, 1, 2, 3, 4, "end 0", "end"]
    compiled.evaluate(*samples, callbacks=[once], verbose=0)
    assert recorder.seen[-1] == "test"
    compiled.fit(**batches, epochs=2, callbacks=[once, pruning])
    recorder.seen.clear()
    compiled.fit(**batches, callbacks=[once, pruning])
    assert recorder.seen == ["begin", "epoch 0", 0, 1, 2, 3, 4, "end 0 at 0.75", "end"]


def test_a_pruner_that_another_callback_steps_is_waited_for(compiled, batches):
    recorder = Recorder()
    with Pruner(compiled, RISE, allocation="uniform") as pruner:
        step = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: pruner.step())
        compiled.fit(**batches, epochs=2, callbacks=[AtFinalSparsity(recorder), step])
    assert recorder.seen == ["begin", "epoch 1", 2, 3, 4, "end 1", "end"]


@pytest.mark.parametrize("end_step", [6, 30])
def test_a_training_without_an_epoch_at_the_final_sparsity_is_told(compiled, batches, tmp_path, end_step):
    # With 6, the masks reach the final sparsity only when the training ends.
    path = tmp_path / "best.keras"
    pruning = PruningCallback(PolynomialDecay(0.0, 0.75, 0, end_step, frequency=1), allocation="uniform")
    told = rf"AtFinalSparsity showed no epoch to ModelCheckpoint: .* 0.75 at step {end_step}, .* of 5 steps. Train"
    with pytest.warns(UserWarning) as caught:
        compiled.fit(**batches, callbacks=[AtFinalSparsity(keras.callbacks.ModelCheckpoint(path)), pruning])
    notes = [str(one.message) for one in caught]
    assert any(re.search(told, note) for note in notes)
    assert not path.exists() and {*notes, LATER_TRAINING} == set(pruning.report.notes)


def test_the_rules_of_tfmot_save_epochs_with_their_zeros(compiled, batches, tmp_path):
    path = tmp_path / "last.keras"
    pruning = PruningCallback(ConstantSparsity(0.75, begin_step=1, frequency=1), policy="tfmot")
    compiled.fit(**batches, callbacks=[AtFinalSparsity(keras.callbacks.ModelCheckpoint(path)), pruning])
    assert zero_counts(keras.models.load_model(path)) == zero_counts(compiled) == [96, 48]


@pytest.mark.parametrize(
    ("callback", "error", "told"),
    [
        (lambda: keras.callbacks.ModelCheckpoint, TypeError, r"one Keras callback, such as ModelCheckpoint\(...\)"),
        (lambda: keras.callbacks.CallbackList([]), TypeError, "one Keras callback"),
        (
            lambda: PruningCallback(RISE, allocation="uniform"),
            ValueError,
            "PruningCallback needs every epoch.*List it in `fit` beside",
        ),
        (lambda: keras.callbacks.BackupAndRestore("b"), ValueError, "BackupAndRestore needs every epoch"),
    ],
)
def test_what_cannot_wait_is_refused(callback, error, told):
    with pytest.raises(error, match=told):
        AtFinalSparsity(callback())


def test_keras_may_run_batch_hooks_in_a_thread_where_the_inner_callback_allows_it():
    assert AtFinalSparsity(keras.callbacks.EarlyStopping()).async_safe
    assert not AtFinalSparsity(keras.callbacks.ModelCheckpoint("a.keras")).async_safe
    assert not AtFinalSparsity(keras.callbacks.LambdaCallback(on_train_batch_end=print)).async_safe


def test_attributes_are_those_of_the_inner_callback():
    inner = keras.callbacks.EarlyStopping("loss", patience=4)
    once = AtFinalSparsity(inner)
    once.set_params({"epochs": 3})
    assert (once.callback, once.patience, once.monitor, inner.params) == (inner, 4, "loss", {"epochs": 3})
    with pytest.raises(AttributeError, match="'EarlyStopping' object has no attribute 'none'"):
        once.none  # noqa: B018

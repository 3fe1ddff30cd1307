"""Quantization in `fit` that fails, is saved, resumed or goes on in another `fit`."""

import keras
import numpy as np
import pytest
from crashes import Crash
from interrupted_training import crashed, resumed, whole_and_resumed
from quantized_training import X, Y, fit, is_on_a_grid_of, kernels, network, quantizing
from without_prunekit import outputs_in_folder

pytestmark = pytest.mark.every_backend


def test_a_second_fit_goes_on_with_the_ranges():
    model = network()
    callback = quantizing(bits=4)
    fit(model, callback)
    first = callback.report
    before = {one.name: one.scale for one in first.ranges}
    fit(model, callback, epochs=1)
    after = {one.name: one.scale for one in callback.report.ranges}
    assert callback.report is not first and before.keys() == after.keys()
    for name, scale in before.items():
        assert abs(np.log(after[name] / scale)) <= 0.02
    assert before != after


def test_an_error_in_fit_leaves_a_model_of_its_own():
    model = network()
    with pytest.raises(RuntimeError, match="the machine is gone"):
        fit(model, quantizing(), Crash(batch=3))
    assert "call" not in vars(model) and "apply" not in vars(model.optimizer)
    fit(model, epochs=1)


def test_the_best_epochs_weights_go_with_the_best_epochs_ranges():
    model = network()
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=10, restore_best_weights=True, mode="min")
    grids = []
    callback = quantizing(bits=4, range_learning_rate=0.05)

    class Keep(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 2:
                # What comes later is worse.
                stopping.best = -1.0
            grids.append([one.copy() for one in callback._run.work.values()])

    fit(model, stopping, Keep(), callback, epochs=5, validation_data=(X, Y))
    best = stopping.best_epoch
    assert best < 4
    # `Keep` runs in the epoch's end, after the last update of it.
    for kept, used in zip(grids[best], callback._run.work.values(), strict=True):
        np.testing.assert_array_equal(kept, used)
    assert any((one != two).any() for one, two in zip(grids[best], grids[-1], strict=True))


@pytest.mark.parametrize("begin_step", [0, *(pytest.param(begin, marks=pytest.mark.thorough) for begin in (12, 20))])
def test_a_resumed_fit_ends_as_one_that_was_never_interrupted(tmp_path, begin_step):
    (_, expected), (_, found) = whole_and_resumed(
        tmp_path, lambda pruning: [pruning, quantizing(bits=4, begin_step=begin_step)]
    )
    assert found.report.ranges == expected.report.ranges


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["before", "behind"])
def test_checkpoints_of_keras_hold_the_weights_of_their_epoch_and_nothing_else(tmp_path, first):
    model, callback, seen = network(), quantizing(bits=4), []

    class Keep(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append([np.array(one) for one in self.model.get_weights()])

    saving = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras"))
    fit(model, *([saving, callback, Keep()] if first else [callback, saving, Keep()]), epochs=2)
    for epoch, weights in enumerate(seen, 1):
        loaded = keras.models.load_model(tmp_path / f"{epoch}.keras")
        assert [one.path for one in loaded.weights] == [one.path for one in model.weights]
        for one, two in zip(loaded.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(one, two)
        assert len(loaded.optimizer.variables) == len(model.optimizer.variables)
    assert not all(is_on_a_grid_of(one, 4) for one in kernels(loaded).values())
    (tmp_path / "2.keras").rename(tmp_path / "model.keras")
    found, expected = outputs_in_folder(X[:8], tmp_path), keras.ops.convert_to_numpy(loaded(X[:8]))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_backup_of_another_quantization_is_refused(tmp_path):
    crashed(tmp_path, quantizing())
    with pytest.raises(ValueError, match="must quantize the same tensors and weights as before"):
        resumed(tmp_path, quantizing(exclude="logits"))

"""Zeros hold whatever other callbacks are in `fit`, before or after ours."""

import itertools
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
from backends import BACKEND
from held_zeros import LOSS, RISE, Spy, assert_pristine, expected, kernels, zeros
from networks import dense_network

from prunekit.sparsity.schedules import ConstantSparsity
from prunekit.techniques.pruning.training.callbacks import PruningCallback

pytestmark = pytest.mark.every_backend


@pytest.mark.parametrize("first", [True, False], ids=["listed before", "listed after"])
def test_early_stopping_that_restores_denser_weights_is_corrected_and_reported(compiled, batches, first):
    # Nothing is better than the first epoch, which ended at 0.6 of the final sparsity.
    stopping = keras.callbacks.EarlyStopping("loss", mode="max", min_delta=1e9, patience=3, restore_best_weights=True)
    pruning = PruningCallback(RISE, allocation="uniform")
    with pytest.warns(UserWarning, match="written back at the end of training.*AtFinalSparsity"):
        compiled.fit(**batches, epochs=4, callbacks=[stopping, pruning] if first else [pruning, stopping])
    assert zeros(compiled) == expected(compiled, 0.75)
    assert any("zero again" in note for note in pruning.report.notes)
    assert_pristine(compiled)


def test_early_stopping_after_a_history_of_the_users_is_corrected_too(compiled, batches):
    stopping = keras.callbacks.EarlyStopping("loss", mode="max", min_delta=1e9, patience=3, restore_best_weights=True)
    with pytest.warns(UserWarning, match="written back at the end of training"):
        compiled.fit(
            **batches,
            epochs=4,
            callbacks=[keras.callbacks.History(), PruningCallback(RISE, allocation="uniform"), stopping],
        )
    assert zeros(compiled) == expected(compiled, 0.75)
    assert_pristine(compiled)


def test_a_callback_list_of_the_users_without_history_ends_exact_after_an_earlier_fit(compiled, batches):
    # On JAX, Keras leaves average and weight in one array, and cannot donate it twice: no second fit, pruned or not.
    compiled.optimizer = keras.optimizers.SGD(0.1, use_ema=BACKEND != "jax")
    compiled.fit(**batches)
    pruning = PruningCallback(RISE, allocation="uniform")
    callbacks = keras.callbacks.CallbackList([pruning], add_history=False, model=compiled, epochs=2, steps=5)
    compiled.fit(**batches, epochs=2, callbacks=callbacks)
    assert zeros(compiled) == expected(compiled, 0.75)
    assert pruning.pruner.audit() == {"hidden/kernel": 0, "logits/kernel": 0}
    assert_pristine(compiled)


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("first", [True, False], ids=["listed before", "listed after"])
def test_every_checkpoint_is_sparse_and_loads_where_prunekit_cannot_be_imported(compiled, batches, tmp_path, first):
    saving = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch:02d}-{batch:02d}.keras"), save_freq=1)
    pruning = PruningCallback(RISE, allocation="uniform")
    compiled.fit(**batches, epochs=2, callbacks=[saving, pruning] if first else [pruning, saving])
    script = """
        import sys
        sys.modules["prunekit"] = None  # importing it is an ImportError from here on
        import keras, numpy as np, warnings
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        for path in sys.argv[1:]:
            model = keras.models.load_model(path)
            loss = model.evaluate(np.ones((4, 8), "float32"), np.zeros(4), verbose=0)
            counts = [int((np.asarray(layer.kernel) == 0).sum()) for layer in model.layers]
            print(*counts, len(model.optimizer.variables))
            assert np.isfinite(loss) and b"prunekit" not in open(path, "rb").read()
    """
    files = sorted(tmp_path.glob("*.keras"))
    assert len(files) == 10
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, files)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    counts = [tuple(map(int, line.split())) for line in run.stdout.splitlines()]
    # Updates come at 0, 3, 6 and 8; a checkpoint listed before pruning sees a batch before its update.
    asked = [RISE(RISE.latest_update(step - 1 if first else step)) for step in range(1, 11)]
    assert counts == [(*expected(compiled, sparsity), len(compiled.optimizer.variables)) for sparsity in asked]


@pytest.mark.parametrize("broken", [1, 2])
def test_a_run_that_broke_is_resumed_in_a_new_model_and_ends_as_one_that_did_not(samples, tmp_path, broken):
    # An epoch has 4 steps: it breaks between two updates of the masks, and just after the last one.
    class Break(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == broken:
                raise RuntimeError("the machine is gone")

    def fit(*callbacks):
        model = dense_network(8, activation=None, seed=7, hidden=16, logits=4)
        model.compile("adam", LOSS(from_logits=True))
        pruning = PruningCallback(RISE, allocation="uniform")
        error = None
        try:
            model.fit(*samples, batch_size=20, epochs=3, shuffle=False, verbose=0, callbacks=[*callbacks, pruning])
        except RuntimeError as caught:
            error = caught
        return model, pruning, error

    whole, _, _ = fit()
    _, _, error = fit(keras.callbacks.BackupAndRestore(tmp_path), Break())
    assert "the machine is gone" in str(error)
    resumed, pruning, error = fit(keras.callbacks.BackupAndRestore(tmp_path))
    assert error is None
    assert resumed.optimizer.iterations.numpy() == 12
    assert pruning.pruner.step_count == 12
    assert zeros(resumed) == expected(resumed, 0.75)
    for one, other in zip(kernels(whole), kernels(resumed), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("swap_on_epoch", [False, True])
@pytest.mark.parametrize("first", [True, False], ids=["listed before", "listed after"])
def test_swapped_averages_are_as_sparse_as_the_weights(compiled, batches, swap_on_epoch, first):
    class AtTest(keras.callbacks.Callback):
        seen = ()

        def on_test_batch_end(self, batch, logs=None):
            self.seen = (*self.seen, zeros(self.model))

    compiled.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9), LOSS(from_logits=True))
    swapping, pruning, spy, test = (
        keras.callbacks.SwapEMAWeights(swap_on_epoch),
        PruningCallback(RISE, allocation="uniform"),
        Spy(),
        AtTest(),
    )
    order = [swapping, pruning, test, spy] if first else [pruning, swapping, test, spy]
    validation = (batches["x"][:9], batches["y"][:9])
    compiled.fit(**batches, epochs=3, validation_data=validation, callbacks=order)
    assert test.seen == tuple(expected(compiled, RISE(RISE.latest_update(step))) for step in (5, 10, 15))
    assert zeros(compiled) == expected(compiled, 0.75)
    assert_pristine(compiled)


ORDERS = list(itertools.permutations(range(4)))


@pytest.mark.parametrize("order", [ORDERS[i] for i in (0, 5, 9, 16, 23)], ids=str)
def test_the_callbacks_of_a_usual_training_work_in_any_order(compiled, batches, tmp_path, order):
    pytest.importorskip("tensorboard")
    pruning = PruningCallback(RISE, allocation="uniform")
    logger = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    board = keras.callbacks.TensorBoard(str(tmp_path / "board"), histogram_freq=1, update_freq="batch")
    plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=1)
    callbacks = [pruning, logger, board, plateau]
    history = compiled.fit(**batches, epochs=2, callbacks=[callbacks[i] for i in order])
    assert zeros(compiled) == expected(compiled, 0.75)
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert len(lines) == 3
    # A logger has the sparsity wherever it is listed.
    assert "sparsity" in lines[0].split(",")
    assert history.history["sparsity"][-1] == pytest.approx(sum(zeros(compiled)) / (8 * 16 + 16 * 4))
    assert list((tmp_path / "board").rglob("events*"))
    assert_pristine(compiled)


def test_two_pruning_callbacks_in_one_fit_hold_each_its_own_weights(compiled, batches):
    one = PruningCallback(RISE, include="hidden", allocation="uniform")
    other = PruningCallback(ConstantSparsity(0.5), include="logits", allocation="uniform")
    spies = [Spy(), Spy()]
    compiled.fit(**batches, epochs=2, callbacks=[spies[0], one, other, spies[1]])
    assert (kernels(compiled)[0] == 0).sum() == expected(compiled, 0.75)[0]
    assert (kernels(compiled)[1] == 0).sum() == expected(compiled, 0.5)[1]
    assert not any([*one.pruner.audit().values(), *other.pruner.audit().values()])
    assert_pristine(compiled)

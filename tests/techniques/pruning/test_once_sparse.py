"""OnceSparse: callbacks that see only epochs at the final sparsity."""

import keras
import numpy as np
import pytest

import prunekit as pk

pytestmark = pytest.mark.every_backend
X = np.random.default_rng(3).normal(size=(48, 8)).astype("float32")
Y = X[:, :4] * 2
# Three updates per epoch: the schedule lands in the third of four epochs.
SCHEDULE = pk.PolynomialDecay(final_sparsity=0.75, end_step=8, frequency=1)


def network():
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(12, "tanh"), keras.layers.Dense(4)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


class Spy(keras.callbacks.Callback):
    """Notes what it sees, and the sparsity then."""

    def __init__(self):
        super().__init__()
        self.epochs, self.batches, self.others = [], [], []

    def on_train_begin(self, logs=None):
        self.others.append("begin")

    def on_epoch_begin(self, epoch, logs=None):
        self.others.append(epoch)

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(sparsity(self.model))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append((epoch, sparsity(self.model)))

    def on_train_end(self, logs=None):
        self.others.append("end")


def sparsity(model):
    kernels = [keras.ops.convert_to_numpy(layer.kernel) for layer in model.layers]
    return sum(int((kernel == 0).sum()) for kernel in kernels) / sum(kernel.size for kernel in kernels)


def fit(callbacks, epochs=4, model=None):
    model = model or network()
    model.fit(X, Y, batch_size=16, epochs=epochs, verbose=0, callbacks=callbacks)
    return model


@pytest.mark.parametrize("first", [True, False], ids=["listed before", "listed after"])
def test_a_callback_sees_the_epochs_at_the_final_sparsity_alone(first):
    spy, pruning = Spy(), pk.PruningCallback(SCHEDULE)
    listed = [pk.OnceSparse(spy), pruning]
    fit(listed if first else listed[::-1])
    assert spy.epochs == [(2, 0.75), (3, 0.75)]
    assert set(spy.batches) == {0.75}
    assert spy.others == ["begin", 0, 1, 2, 3, "end"]


def test_it_waits_for_every_pruning_callback():
    spy = Spy()
    model = network()
    names = [layer.name for layer in model.layers]
    early = pk.PruningCallback(pk.OneShot(0.75), include=[names[0]])
    late = pk.PruningCallback(SCHEDULE, include=[names[1]])
    fit([early, late, pk.OnceSparse(spy)], model=model)
    assert [epoch for epoch, _ in spy.epochs] == [2, 3]


@pytest.mark.parametrize("save_freq", ["epoch", 1])
def test_the_best_file_has_the_final_sparsity(tmp_path, save_freq, recwarn):
    path = tmp_path / "best.keras"
    monitor = "val_loss" if save_freq == "epoch" else "loss"
    checkpoint = keras.callbacks.ModelCheckpoint(path, monitor, save_best_only=True, save_freq=save_freq)
    wrapped = pk.OnceSparse(checkpoint)
    model = network()
    model.fit(
        X,
        Y,
        batch_size=16,
        epochs=4,
        verbose=0,
        validation_data=(X, Y),
        callbacks=[wrapped, pk.PruningCallback(SCHEDULE)],
    )
    assert sparsity(keras.models.load_model(path)) == 0.75
    assert wrapped.best == checkpoint.best and wrapped.monitor == monitor
    assert not [found for found in recwarn if "has sparsity" in str(found.message)]


def test_early_stopping_counts_and_restores_sparse_epochs():
    stopping = keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True, min_delta=1e9)
    model = fit([pk.OnceSparse(stopping), pk.PruningCallback(SCHEDULE)], epochs=9)
    # The first epoch that it sees is the best; it waits for one more.
    assert (stopping.best_epoch, stopping.stopped_epoch) == (2, 3)
    assert sparsity(model) == 0.75


def test_a_fit_that_never_gets_there_ends_with_a_warning():
    spy = Spy()
    with pytest.warns(UserWarning) as told:
        fit([pk.OnceSparse(spy), pk.PruningCallback(SCHEDULE)], epochs=2)
    assert any("OnceSparse: Spy saw no epoch, because no epoch ended at the final" in str(one.message) for one in told)
    assert spy.epochs == []


def test_without_pruning_it_is_refused():
    with pytest.raises(ValueError, match="Received: a list without one. List the Spy itself"):
        fit([pk.OnceSparse(Spy())])


@pytest.mark.parametrize(
    "callback", [pk.PruningCallback(SCHEDULE), 3, pk.OnceSparse(Spy()), keras.callbacks.BackupAndRestore("folder")]
)
def test_what_must_see_every_epoch_is_refused(callback):
    with pytest.raises(TypeError, match="OnceSparse takes a callback such as ModelCheckpoint"):
        pk.OnceSparse(callback)

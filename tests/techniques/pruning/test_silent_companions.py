"""What other callbacks of a fit see of pruning, and what is said of the files that they save."""

import warnings

import keras
import numpy as np
import pytest

from prunekit.sparsity.schedules import ConstantSparsity, PolynomialDecay
from prunekit.techniques.pruning.training.callbacks import PruningCallback
from prunekit.techniques.pruning.training.pruning_notes import LATER_TRAINING

pytestmark = pytest.mark.every_backend
RISE = PolynomialDecay(0.0, 0.8, 0, 10, frequency=5, power=1)


class Sees(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.values = []

    def on_epoch_end(self, epoch, logs=None):
        self.values.append(logs["sparsity"])


class Best(keras.callbacks.Callback):
    """Gives epochs a score of the test's choice."""

    def __init__(self, *scores):
        super().__init__()
        self.scores = scores

    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = self.scores[epoch]


def zeros(path):
    return [int((layer.kernel.numpy() == 0).sum()) for layer in keras.models.load_model(path).layers]


def test_callbacks_before_and_after_ours_see_the_sparsity_and_history_has_it(compiled, batches, tmp_path):
    before, after = Sees(), Sees()
    named = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}-{sparsity:.2f}.keras"))
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    history = compiled.fit(
        **batches, epochs=2, callbacks=[named, before, log, PruningCallback(RISE, allocation="uniform"), after]
    )
    reached = history.history["sparsity"]
    assert before.values == after.values == reached
    assert reached == [1 - (128 + 64 - 51 - 26) / 192, 1 - (26 + 13) / 192]
    assert {path.name for path in tmp_path.glob("*.keras")} == {f"{i + 1}-{reached[i]:.2f}.keras" for i in range(2)}
    assert "sparsity" in (tmp_path / "log.csv").read_text().splitlines()[0].split(",")


def test_training_can_stop_by_the_sparsity_with_a_callback_listed_first(compiled, batches):
    stopping = keras.callbacks.EarlyStopping(monitor="sparsity", mode="max", patience=1)
    history = compiled.fit(**batches, epochs=9, callbacks=[stopping, PruningCallback(RISE, allocation="uniform")])
    assert len(history.history["sparsity"]) == 3


@pytest.mark.parametrize("first", [True, False], ids=["listed before", "listed after"])
def test_the_best_epoch_that_was_less_sparse_is_named_with_its_file(compiled, batches, tmp_path, first):
    path = str(tmp_path / "best.keras")
    saving = keras.callbacks.ModelCheckpoint(path, monitor="score", mode="max", save_best_only=True)
    pruning = PruningCallback(RISE, allocation="uniform")
    order = [Best(3, 2, 1), saving, pruning] if first else [pruning, Best(3, 2, 1), saving]
    with pytest.warns(UserWarning, match=r"best.keras, which ModelCheckpoint wrote last in epoch 1, has") as caught:
        compiled.fit(**batches, epochs=3, callbacks=order)
    (told,) = [str(one.message) for one in caught if "ModelCheckpoint" in str(one.message)]
    assert "has sparsity 0.4010 in the pruned weights; the model now has 0.7969. Save the model" in told
    assert "pk.AtFinalSparsity(ModelCheckpoint(...))" in told
    assert zeros(path) == [51, 26]
    assert pruning.report.notes == (told, LATER_TRAINING)


def test_files_of_the_final_sparsity_older_files_and_each_epochs_own_are_no_news(compiled, batches, tmp_path):
    former = tmp_path / "best.keras"
    compiled.save(former)
    best = keras.callbacks.ModelCheckpoint(str(former), monitor="score", mode="max", save_best_only=True)
    never = keras.callbacks.ModelCheckpoint(
        str(former), monitor="score", mode="max", save_best_only=True, initial_value_threshold=9
    )
    each = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.weights.h5"), save_weights_only=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        compiled.fit(
            **batches, epochs=2, callbacks=[Best(1, 2), best, each, PruningCallback(RISE, allocation="uniform")]
        )
        compiled.fit(**batches, epochs=2, callbacks=[Best(1, 2), never, PruningCallback(RISE, allocation="uniform")])
    assert zeros(former) == [102, 51]


@pytest.mark.parametrize("first", [True, False], ids=["listed before", "listed after"])
def test_a_file_saved_between_batches_is_as_sparse_as_the_masks_were_then(compiled, batches, tmp_path, first):
    path = str(tmp_path / "often.keras")
    # 10 batches: saved at the fifth and at the tenth, where the schedule lands.
    saving, pruning = keras.callbacks.ModelCheckpoint(path, save_freq=5), PruningCallback(RISE, allocation="uniform")
    if first:
        with pytest.warns(
            UserWarning, match="often.keras, which ModelCheckpoint wrote last in epoch 2, has sparsity 0.4"
        ):
            compiled.fit(**batches, epochs=2, callbacks=[saving, pruning])
        assert zeros(path) == [51, 26]
    else:
        compiled.fit(**batches, epochs=2, callbacks=[pruning, saving])
        assert zeros(path) == [102, 51]


def test_two_callbacks_prune_weights_of_their_own_and_the_log_has_them_together(compiled, batches):
    half = PruningCallback(ConstantSparsity(0.5), include=["hidden"], allocation="uniform")
    most = PruningCallback(ConstantSparsity(0.75), include=["logits"], allocation="uniform")
    history = compiled.fit(**batches, epochs=2, callbacks=[half, most])
    assert history.history["sparsity"] == [1 - (64 + 16) / 192] * 2
    assert [half.pruner.sparsity, most.pruner.sparsity] == [0.5, 0.75]


def test_two_callbacks_that_prune_one_weight_are_refused_by_its_name_before_anything_trains(compiled, batches):
    before = [np.array(weight) for weight in compiled.get_weights()]
    pair = [
        PruningCallback(ConstantSparsity(0.5), allocation="uniform"),
        PruningCallback(ConstantSparsity(0.75), include=["logits"], allocation="uniform"),
    ]
    with pytest.raises(
        ValueError, match="PruningCallback and PruningCallback for logits/kernel. Separate their weights with `include`"
    ):
        compiled.fit(**batches, callbacks=pair)
    for one, other in zip(before, compiled.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_one_callback_listed_twice_is_refused(compiled, batches):
    pruning = PruningCallback(ConstantSparsity(0.5), allocation="uniform")
    with pytest.raises(ValueError, match="may contain a PruningCallback once. Received: the same callback twice"):
        compiled.fit(**batches, callbacks=[pruning, keras.callbacks.TerminateOnNaN(), pruning])


def test_a_list_of_the_users_own_serves_two_fits(compiled, batches):
    sees = Sees()
    listed = keras.callbacks.CallbackList(
        [sees, PruningCallback(RISE, allocation="uniform")],
        add_history=True,
        model=compiled,
        epochs=2,
        steps=5,
        verbose=0,
    )
    compiled.fit(**batches, epochs=2, callbacks=listed)
    compiled.fit(**batches, epochs=1, callbacks=listed)
    assert len(sees.values) == 3 and sees.values[-1] == 1 - (26 + 13) / 192

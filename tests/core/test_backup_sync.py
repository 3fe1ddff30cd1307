import errno
import json
import os

import keras
import numpy as np
import pytest
from backends import BACKEND
from crashes import Crash

import prunekit as pk
from prunekit.core.runtime.snapshot import Snapshot, read_snapshot, write_snapshot
from prunekit.core.training import distribution
from prunekit.core.training.backup_sync import Backup

pytestmark = pytest.mark.every_backend
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# An epoch has four updates.
RISE = pk.schedules.PolynomialDecay(final_sparsity=0.75, begin_step=1, end_step=12, frequency=2)
# One whose sums go on after a resumption, where there is one.
CRITERION = "movement" if BACKEND == "tensorflow" else "magnitude"
WEIGHTS, POSITION = "latest.weights.h5", "training_metadata.json"


def network():
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(16, name="hidden"), keras.layers.Dropout(0.5), keras.layers.Dense(4, name="logits")]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile("adam", LOSS)
    return model


def train(samples, folder, *crash, model=None, pruning=None):
    """(model, callbacks) after four epochs, or after those before the crash."""
    model = model or network()
    pruning = pruning or [pk.PruningCallback(RISE, criterion=CRITERION, allocation="uniform")]
    callbacks = [] if folder is None else [keras.callbacks.BackupAndRestore(folder)]
    try:
        model.fit(*samples, batch_size=20, epochs=4, verbose=0, callbacks=[*callbacks, *pruning, *crash])
    except RuntimeError as error:
        assert crash and "the machine is gone" in str(error)
    return model, pruning


def same(model, other):
    pairs = zip(
        [*model.variables, *model.optimizer.variables], [*other.variables, *other.optimizer.variables], strict=True
    )
    return all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in pairs)


@pytest.fixture
def whole(samples):
    return train(samples, None)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_pruning_state_is_saved_beside_the_backup_and_deleted_with_it(samples, tmp_path, whole):
    train(samples, tmp_path, Crash(2))
    assert names(tmp_path) == [WEIGHTS, "prunekit-000002", "prunekit-000003", POSITION]
    resumed, (pruning,) = train(samples, tmp_path)
    assert same(resumed, whole[0]), "movement sums and dropout go on"
    assert pruning.pruner.events == whole[1][0].pruner.events
    assert not tmp_path.exists()


def test_a_new_callback_on_the_same_model_counts_from_the_first_origin(samples, tmp_path, whole):
    model, _ = train(samples, tmp_path, Crash(3))
    resumed, (pruning,) = train(samples, tmp_path, model=model)
    assert pruning.pruner.run.counter.origin == 0 and pruning.pruner.step_count == 16
    assert same(resumed, whole[0])


def test_several_callbacks_are_saved_at_one_moment(samples, tmp_path):
    def both():
        return [
            pk.PruningCallback(RISE, include=["hidden"], allocation="uniform"),
            pk.PruningCallback(RISE, CRITERION, include=["logits"], allocation="uniform"),
        ]

    whole, _ = train(samples, None, pruning=both())
    train(samples, tmp_path, Crash(2), pruning=both())
    with pytest.raises(ValueError, match="is of a fit with 2 PruningCallbacks. Received: 1"):
        train(samples, tmp_path)
    resumed, _ = train(samples, tmp_path, pruning=both())
    assert same(resumed, whole)


def torn(folder, kind):
    """What a process leaves that is killed while Keras saves, or removes, a backup."""
    if kind == "weights half written":
        (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:1000])
    elif kind == "weights newer than their epoch":
        (folder / POSITION).write_text(json.dumps({"epoch": 1, "batch": 0}))
    elif kind == "epoch half written":
        (folder / POSITION).write_text('{"epo')
    elif kind == "saved, and no state with it yet":
        (folder / POSITION).write_text(json.dumps({"epoch": 3, "batch": 0}))
    elif kind == "state half written":
        (folder / "prunekit-000003").write_bytes((folder / "prunekit-000003").read_bytes()[:1000])
    else:
        (folder / (WEIGHTS if kind == "weights gone" else POSITION)).unlink()


@pytest.mark.short(cases=2)
@pytest.mark.parametrize(
    "kind",
    [
        "weights half written",
        "weights newer than their epoch",
        "epoch half written",
        "saved, and no state with it yet",
        "state half written",
        "weights gone",
        "epoch gone",
    ],
)
def test_a_torn_backup_is_made_whole_again(samples, tmp_path, whole, kind):
    train(samples, tmp_path, Crash(2))
    torn(tmp_path, kind)
    if kind == "state half written":
        with pytest.warns(UserWarning, match="prunekit-000003 is truncated or was modified"):
            resumed, _ = train(samples, tmp_path)
    else:
        resumed, _ = train(samples, tmp_path)
    assert same(resumed, whole[0])


def content(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["weights newer than their epoch", "weights gone"])
def test_of_several_processes_in_one_folder_only_the_chief_writes(samples, tmp_path, kind):
    train(samples, tmp_path, Crash(2))
    torn(tmp_path, kind)
    before = content(tmp_path)
    other = Backup(tmp_path, writes=False)
    assert len(other.states) == 1, "it goes on with what the chief has saved"
    other.mark()
    assert content(tmp_path) == before
    (tmp_path / POSITION).write_text(json.dumps({"epoch": 2, "batch": 0}))
    assert not other.changed, "it makes no copy of what the chief saves"


def test_a_process_that_is_not_the_chief_adds_nothing_to_a_backup(samples, tmp_path, monkeypatch):
    monkeypatch.setattr(distribution, "is_chief", lambda strategy=None: False)
    train(samples, tmp_path, Crash(2))
    assert names(tmp_path) == [WEIGHTS, POSITION]
    (tmp_path / POSITION).unlink()
    Backup.beside([keras.callbacks.BackupAndRestore(tmp_path)], writes=False)
    assert names(tmp_path) == [WEIGHTS], "what is torn is the chief's to set aside"


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("kind", ["weights gone", "epoch gone", "epoch half written"])
def test_a_torn_backup_without_a_state_is_set_aside_and_training_begins(samples, tmp_path, whole, kind):
    train(samples, tmp_path, Crash(2))
    for file in tmp_path.glob("prunekit-*"):
        file.unlink()
    torn(tmp_path, kind)
    left = [f"{name}.torn" for name in names(tmp_path)]
    with pytest.warns(UserWarning, match="is incomplete.*training starts from the beginning"):
        again, _ = train(samples, tmp_path, Crash(3))
    assert set(left) < set(names(tmp_path)), "nothing is lost"
    resumed, _ = train(samples, tmp_path)
    assert same(resumed, whole[0])


def test_what_keras_saved_in_the_first_epoch_counts_once_the_state_is_with_it(samples, tmp_path, whole):
    train(samples, tmp_path, Crash(1))
    (tmp_path / "prunekit-000002").unlink()
    assert read_snapshot(tmp_path / "prunekit-000001").values == {"epoch": 0, "states": None}
    resumed, _ = train(samples, tmp_path)
    assert same(resumed, whole[0])


def test_a_later_backup_of_another_training_is_not_overwritten(samples, tmp_path):
    train(samples, tmp_path, Crash(1))
    (tmp_path / POSITION).write_text(json.dumps({"epoch": 3, "batch": 0}))
    before = (tmp_path / WEIGHTS).read_bytes()
    with pytest.raises(ValueError, match=r"a backup after epoch 3 .* and one with it after epoch 1. Delete prunekit-"):
        train(samples, tmp_path)
    assert (tmp_path / WEIGHTS).read_bytes() == before


@pytest.mark.parametrize("name", ["epoch", "states"])
def test_a_backup_that_lacks_something_is_refused_in_one_line(tmp_path, name):
    write_snapshot(tmp_path / "prunekit-000001", Snapshot({"epoch": 1, "states": None, name: "x"}, {}))
    (tmp_path / WEIGHTS).write_bytes(b"precious")
    with pytest.raises(ValueError, match=f"lacks {name}, or holds it as another version.*Delete prunekit-"):
        Backup(tmp_path)
    assert (tmp_path / WEIGHTS).read_bytes() == b"precious"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"epoch": 1e999}', '{"epoch": []}', "null", "\x00"])
def test_an_empty_position_file_is_set_aside(tmp_path, text):
    (tmp_path / WEIGHTS).write_bytes(b"weights")
    (tmp_path / POSITION).write_text(text)
    with pytest.warns(UserWarning, match="is incomplete"):
        Backup(tmp_path)
    assert names(tmp_path) == [f"{WEIGHTS}.torn", f"{POSITION}.torn"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
@pytest.mark.short(cases=1)
def test_a_full_or_read_only_disk_stops_the_training_and_keeps_the_backup_before(
    samples, tmp_path, whole, monkeypatch, code
):
    replace = os.replace

    def refused(source, target):
        if str(target).endswith("prunekit-000003"):
            raise OSError(code, os.strerror(code), str(target))
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refused)
        with pytest.raises(OSError, match=f"{os.strerror(code)}.*prunekit-000003"):
            train(samples, tmp_path)
    assert names(tmp_path) == [WEIGHTS, "prunekit-000001", "prunekit-000002", POSITION]
    resumed, _ = train(samples, tmp_path)
    assert same(resumed, whole[0])


def test_a_backup_elsewhere_than_in_a_folder_is_left_to_keras(samples):
    pruning = pk.PruningCallback(RISE, allocation="uniform")
    backup = keras.callbacks.BackupAndRestore("gs://bucket/backup")
    with pytest.warns(UserWarning, match="local folders only. Received: gs://bucket/backup"):
        keras.callbacks.CallbackList([backup, pruning], model=network())
    with pytest.warns(UserWarning, match="local folders only"):
        assert Backup.beside([backup, pruning]) is None


def test_a_fit_of_no_epochs_leaves_no_folder_behind(samples, tmp_path):
    model, folder = network(), tmp_path / "backup"
    callbacks = [
        keras.callbacks.BackupAndRestore(folder),
        pk.PruningCallback(pk.schedules.ConstantSparsity(0.5, begin_step=0), allocation="uniform"),
    ]
    before = model.get_weights()
    model.fit(*samples, epochs=0, verbose=0, callbacks=callbacks)
    assert not folder.exists()
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))

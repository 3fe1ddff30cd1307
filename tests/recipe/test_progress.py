"""Progress of a training: the status of an epoch, and the estimate of the time left."""

import types

import pytest

from prunekit.delivery.reports.metrics import keras_metric
from prunekit.recipe.state import progress
from prunekit.recipe.state.progress import EpochProgress, TimeLeft


def told(monkeypatch, durations, epochs, later, logs=None):
    """What is told at the end of each epoch, where epochs take so many seconds."""
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    events = []
    callback = EpochProgress(lambda *event: events.append(event), [keras_metric("mae")], later)
    callback.set_params({"epochs": epochs, "steps": 4})
    for epoch, duration in enumerate(durations):
        callback.on_epoch_begin(epoch)
        clock.now += duration
        callback.on_epoch_end(epoch, logs or {})
    return events


def test_the_time_left_is_that_of_all_later_epochs_at_the_pace_of_the_latest(monkeypatch):
    events = told(monkeypatch, [30.0, 2.0, 4.0, 3.0], epochs=6, later=10)
    # The first epoch compiles the step, and counts only until there is another.
    assert [left for *_, left in events] == [15 * 30.0, 14 * 2.0, 13 * 3.0, 12 * 3.0]


def test_inside_an_epoch_the_time_left_goes_down(monkeypatch):
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    events = []
    callback = EpochProgress(lambda *event: events.append(event), [])
    callback.set_params({"epochs": 2, "steps": 4})
    callback.on_epoch_begin(0)
    callback.on_train_batch_end(0)
    clock.now += 8
    callback.on_epoch_end(0, {})
    callback.on_epoch_begin(1)
    for batch, elapsed in enumerate([3, 20]):
        clock.now = 108 + elapsed
        callback.on_train_batch_end(batch)
    assert [(epoch, left) for _, _, epoch, left in events] == [(None, None), (1, 8.0), (None, 5.0), (None, 0.0)]


@pytest.mark.parametrize(
    ("logs", "text"),
    [
        ({"val_mae": 2.5, "mae": 1.0}, "epoch 1/1, mae 2.5"),
        ({"val_mae": 2.5, "sparsity": 0.5}, "epoch 1/1, mae 2.5, sparsity 0.5000"),
        ({"mae": 1.0}, "epoch 1/1"),
    ],
    ids=["metric", "sparsity", "no validation"],
)
def test_the_status_has_the_metrics_on_the_validation_data(monkeypatch, logs, text):
    assert told(monkeypatch, [1.0], 1, 0, logs)[0][1] == text


def test_the_time_left_of_layers_is_the_mean_time_of_those_since_the_first(monkeypatch):
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    left, found = TimeLeft(), []
    # The preparation takes 50 seconds; a later operation counts from 1 again.
    for done, elapsed in [(1, 50), (2, 54), (4, 58), (10, 100), (1, 101), (2, 103)]:
        clock.now = 100.0 + elapsed
        found.append(left.after(done, 10))
    assert found == [None, 8 * 4.0, 6 * 8 / 3, 0.0, None, 8 * 2.0]

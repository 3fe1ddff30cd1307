"""Latency of LiteRT files, measured in a process of its own."""

import keras
import numpy as np
import pytest
from backends import converts, tensorflow_only
from keras import layers

from prunekit.delivery.litert import stopwatch
from prunekit.delivery.litert.latency import ScriptFailed, input_arrays, measured_latencies, plain_file

pytestmark = [
    tensorflow_only,
    converts,
]


def measured(files, *models, seconds=0.2):
    """Returns the latencies of files of models with the samples (model, samples)."""
    return measured_latencies(files, [input_arrays(*one) for one in models], seconds)


def written(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.tflite").write_bytes(content)
    return [folder / f"{name}.tflite" for name in files]


def perceptron(width, batch=None):
    given = keras.Input((64,), batch_size=batch, name="features")
    hidden = layers.Dense(width, "relu")(layers.Dense(width, "relu")(given))
    return keras.Model(given, layers.Dense(4)(hidden))


def test_a_network_with_less_arithmetic_is_measured_to_be_faster(tmp_path):
    samples = np.ones((5, 64), "float32")
    large, small = perceptron(1024), perceptron(64)
    files = written(tmp_path, large=plain_file(large, samples), small=plain_file(small, samples))
    found = measured(files, (large, samples), (small, samples))
    assert found.seconds(0) > 5 * found.seconds(1) > 0
    assert found.turns.shape[0] >= 6 and found.turns.shape[1] == 2
    share, (low, high) = found.share(1)
    assert low <= share <= high < 0.2 and found.share(0) == (1, (1, 1))


def test_a_file_that_takes_a_batch_is_called_with_a_batch(tmp_path):
    model, samples = perceptron(8, batch=7), np.arange(3.0).repeat(64).reshape(3, 64)
    found = measured(written(tmp_path, seven=plain_file(model, samples)), (model, samples))
    assert found.seconds(0) > 0
    (given,) = input_arrays(model, samples).values()
    assert given.dtype == np.float32 and given[:, 5].tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_inputs_are_given_by_name_and_in_open_shapes(tmp_path):
    words, numbers = keras.Input((None,), dtype="int32", name="words"), keras.Input((3,), name="numbers")
    embedded = layers.GlobalAveragePooling1D()(layers.Embedding(10, 4)(words))
    model = keras.Model([words, numbers], layers.Dense(2)(layers.Concatenate()([embedded, numbers])))
    samples = [np.ones((5, 6), "int64"), np.ones((5, 3))]
    found = measured(written(tmp_path, two=plain_file(model, samples)), (model, samples))
    assert found.seconds(0) > 0
    shapes = {name: (array.shape, array.dtype) for name, array in input_arrays(model, samples).items()}
    assert shapes == {"words": ((1, 6), "int32"), "numbers": ((1, 3), "float32")}


def test_a_file_that_does_not_run_is_an_error_with_a_reason(tmp_path):
    model, samples = perceptron(8), np.ones((3, 64), "float32")
    with pytest.raises(ScriptFailed, match="does not run: "):
        measured(written(tmp_path, broken=b"no model"), (model, samples))


class Clock:
    """An interpreter whose calls take a given time on a clock of its own; the calls of several are on one list."""

    now = 0.0

    def __init__(self, name, seconds, calls):
        self.name, self.seconds, self.calls = name, seconds, calls

    def invoke(self):
        Clock.now += self.seconds(len(self.calls))
        self.calls.append(self.name)


def with_clock(monkeypatch, durations, seconds, precision):
    """Returns the turns of files with given durations of a call, the calls, and the names in the order of opening."""
    calls, opened = [], []
    monkeypatch.setattr(stopwatch, "_clock", lambda: Clock.now)
    monkeypatch.setattr(stopwatch, "perf_counter", lambda: Clock.now)

    def open_file(path, inputs):
        opened.append(path)
        return Clock(path, durations[path], calls).invoke

    monkeypatch.setattr(stopwatch, "_opened", open_file)
    return stopwatch.times(list(durations), [{}] * len(durations), seconds, precision), calls, opened


def test_files_take_turns_and_an_interruption_does_not_move_the_median(monkeypatch):
    # Every hundredth call is interrupted for 4 ms.
    durations = {"a": lambda number: 1e-4 + 4e-3 * (number % 100 == 0), "b": lambda number: 2e-4}
    turns, calls, opened = with_clock(monkeypatch, durations, 1.0, 0.0)
    assert np.median(turns, axis=0) == pytest.approx([1e-4, 2e-4])
    assert len(turns) > 20 and opened == (["a", "b", "b", "a"] * len(turns))[: 2 * len(turns)]
    changes = sum(name != former for name, former in zip(calls[1:], calls, strict=False))
    assert changes >= 10 * len(turns)


def test_turns_end_early_when_the_shares_are_precise(monkeypatch):
    draw = np.random.default_rng(0)
    steady = {"a": lambda number: 1e-3, "b": lambda number: 2e-3}
    noisy = {"a": lambda number: 1e-3, "b": lambda number: 2e-3 * np.exp(draw.normal())}
    assert len(with_clock(monkeypatch, steady, 60.0, 0.01)[0]) == 15
    assert len(with_clock(monkeypatch, noisy, 60.0, 0.01)[0]) > 100
    # A share of itself is always 1.
    assert len(with_clock(monkeypatch, {"b": noisy["b"]}, 1.0, 0.01)[0]) > 15
    slow = {"a": lambda number: 10.0, "b": lambda number: 1.0}
    assert len(with_clock(monkeypatch, slow, 1.0, 0.01)[0]) == 6


def test_the_interval_of_a_median_is_read_from_the_order_of_the_values():
    assert stopwatch.interval(np.array([5.0, 1, 4, 2, 3, 6])) == (1, 6)
    values = np.arange(101.0)
    assert stopwatch.interval(values) == (40, 60)
    # Of many draws of 25 values, the interval holds the true median in about 95 %.
    draw = np.random.default_rng(1).normal(size=(2000, 25))
    held = np.mean([low <= 0 <= high for low, high in map(stopwatch.interval, draw)])
    assert 0.93 <= held <= 0.98

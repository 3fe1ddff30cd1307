"""Latency of LiteRT files, measured in a process of its own."""

import keras
import numpy as np
import pytest
from backends import tensorflow_only
from keras import layers

from prunekit.delivery import stopwatch
from prunekit.delivery.latency import ScriptFailed, measured_latencies, plain_file

pytestmark = [
    tensorflow_only,
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def briefly(monkeypatch):
    monkeypatch.setattr("prunekit.delivery.latency._SECONDS", 0.2)


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
    found = measured_latencies(files, small, samples)
    assert found.seconds[0] > 5 * found.seconds[1] > 0
    assert found.rounds >= 5 and found.batch == (1, 1)


def test_a_file_that_takes_a_batch_is_called_with_a_batch(tmp_path):
    model, samples = perceptron(8, batch=7), np.ones((3, 64), "float32")
    found = measured_latencies(written(tmp_path, seven=plain_file(model, samples)), model, samples)
    assert found.batch == (7,)


def test_inputs_are_given_by_name_and_in_open_shapes(tmp_path):
    words, numbers = keras.Input((None,), dtype="int32", name="words"), keras.Input((3,), name="numbers")
    embedded = layers.GlobalAveragePooling1D()(layers.Embedding(10, 4)(words))
    model = keras.Model([words, numbers], layers.Dense(2)(layers.Concatenate()([embedded, numbers])))
    samples = [np.ones((5, 6), "int64"), np.ones((5, 3))]
    found = measured_latencies(written(tmp_path, two=plain_file(model, samples)), model, samples)
    assert found.seconds[0] > 0


def test_a_file_that_does_not_run_is_an_error_with_a_reason(tmp_path):
    model, samples = perceptron(8), np.ones((3, 64), "float32")
    with pytest.raises(ScriptFailed, match="does not run: "):
        measured_latencies(written(tmp_path, broken=b"no model"), model, samples)


class Clock:
    """An interpreter whose calls take a given time on a clock of its own; the calls of two are on one list."""

    now = 0.0

    def __init__(self, name, seconds, calls):
        self.name, self.seconds, self.calls = name, seconds, calls

    def invoke(self):
        Clock.now += self.seconds(len(self.calls))
        self.calls.append(self.name)


def test_files_take_turns_and_an_interruption_does_not_move_the_median(monkeypatch):
    calls = []
    # Every hundredth call is interrupted for 4 ms.
    interrupted = {"a": lambda number: 1e-4 + 4e-3 * (number % 100 == 0), "b": lambda number: 2e-4}
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: Clock.now)
    monkeypatch.setattr(stopwatch, "prepared", lambda path, inputs: (Clock(path, interrupted[path], calls), 1))
    found = stopwatch.measured(["a", "b"], {}, 0.5)
    assert found["seconds"] == pytest.approx([1e-4, 2e-4])
    turns = [name for name, former in zip(calls[1:], calls, strict=False) if name != former]
    assert len(turns) >= found["rounds"] > 100

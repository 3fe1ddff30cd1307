"""The progress of `pk.prune` while it reads examples, before the first weight is pruned."""

import keras
import numpy as np
import pytest

import prunekit as pk
from prunekit.core.statistics import input_statistics

INPUTS = np.random.default_rng(0).normal(size=(100, 4, 4, 3)).astype("float32")
WEIGHTS = [
    (2 * trial + number, 4, f"trial {trial + 1} of 2: {name}/kernel")
    for trial in range(2)
    for number, name in enumerate(("first", "last"), start=1)
]


def network():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Conv2D(8, 3, name="first"), keras.layers.Flatten(), keras.layers.Dense(5, name="last")]
    return keras.Sequential([keras.Input((4, 4, 3)), *layers])


def told_of(data):
    told = []
    pk.prune(network(), 0.5, data, progress=lambda *step: told.append(step))
    return told


def generated():
    yield from ([INPUTS[:60]], [INPUTS[60:]])


@pytest.mark.parametrize(
    ("data", "reading"),
    [
        (INPUTS, [(64, 100, "examples read"), (100, 100, "examples read")]),
        ((INPUTS, np.zeros(100)), [(64, 100, "examples read"), (100, 100, "examples read")]),
        ([INPUTS[:60], INPUTS[60:]], [(60, 100, "examples read"), (100, 100, "examples read")]),
        (generated, [(0, 2, "60 examples read"), (0, 2, "100 examples read")]),
        (None, [(count, 1024, "examples read") for count in range(64, 1025, 64)]),
    ],
    ids=["array", "with labels", "batches", "of unknown number", "synthetic"],
)
def test_progress_tells_of_the_examples_before_the_weights(data, reading):
    assert told_of(data) == [*reading, *WEIGHTS]


def test_progress_tells_of_the_parts_of_a_batch_that_large_outputs_are_read_in(monkeypatch):
    # The inputs and outputs of the convolution: 48 and 32 numbers.
    monkeypatch.setattr(input_statistics, "_AT_ONCE", 4 * (48 + 32) * 40)
    assert told_of(INPUTS[:64]) == [(40, 64, "examples read"), (64, 64, "examples read"), *WEIGHTS]

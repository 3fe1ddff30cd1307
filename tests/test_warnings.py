"""Operations pass on no warning that their caller can do nothing about."""

import warnings

import keras
import numpy as np
import pytest
from backends import tensorflow_only

import prunekit as pk

pytestmark = pytest.mark.every_backend

X = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
Y = np.arange(40) % 3
# As many as a search needs, and some to train on.
MANY = np.random.default_rng(1).normal(size=(400, 6)).astype("float32")


def network():
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(8),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.Dense(3, activation="softmax"),
    ]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def _refuse_warnings():
    warnings.simplefilter("error")
    # Keras's own, where it saves or copies a model, for tensors of PyTorch and for the learning rate on JAX.
    warnings.filterwarnings("ignore", "__array__", DeprecationWarning)


def trained(model):
    return model.fit(X, Y, epochs=1, verbose=0)


def exported(folder, name):
    # An exception while Keras saves is no error of an export: the file is refused.
    assert [row.status for row in pk.export(network(), folder, X, [name])] == ["ok"]


def run_of_a_recipe(folder):
    steps = [{"prune": {"sparsity": 0.5}}, {"export": {"formats": ["keras"]}}]
    pk.compress({"version": 1, "steps": steps}, network(), ((X, Y), (X, Y)), folder / "run")


OPERATIONS = {
    "prune": lambda _: pk.prune(network(), 0.5),
    "prune with data": lambda _: pk.prune(network(), 0.5, (X, Y)),
    "prune in rounds": lambda _: pk.prune_in_rounds(network(), trained, 0.5, rounds=2),
    "shrink": lambda _: pk.shrink(network(), channels=0.5, data=(X, Y)),
    "simplify": lambda _: pk.simplify(network()),
    "sensitivity": lambda folder: pk.sensitivity(network(), (X, Y), sparsity=0.5, output=folder / "scan"),
    "sensitivity of bits": lambda _: pk.sensitivity(network(), (X, Y), bits=4),
    "choose bits": lambda _: pk.choose_bits(network(), (X, Y), budget=400),
    "export": lambda folder: exported(folder, "keras"),
    "run": run_of_a_recipe,
}
ON_TENSORFLOW = {
    "export to LiteRT": lambda folder: exported(folder, "litert"),
    "quantize": lambda folder: pk.quantize(network(), (X, Y)).export(folder / "net.tflite"),
    "search": lambda _: pk.search(network(), (MANY, MANY.argmax(1) % 3), bytes="20kB"),
    "search with training": lambda _: pk.search(
        network(), (MANY, MANY.argmax(1) % 3), drop=0.5, training={"epochs": 1}, latency="1s"
    ),
    "quantize for Keras": lambda folder: pk.quantize(network(), (X, Y), activation_bits="float").export(
        folder / "net.keras"
    ),
}


@pytest.mark.parametrize(
    "operation",
    [
        *(pytest.param(one, id=name) for name, one in OPERATIONS.items()),
        *(pytest.param(one, id=name, marks=tensorflow_only) for name, one in ON_TENSORFLOW.items()),
    ],
)
def test_an_operation_gives_no_warning(operation, tmp_path):
    with warnings.catch_warnings():
        _refuse_warnings()
        operation(tmp_path)


def test_a_command_gives_no_warning(run, tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array__", DeprecationWarning)
        network().save("net.keras")
    with warnings.catch_warnings():
        _refuse_warnings()
        assert run("prune", "net.keras", "--sparsity", "0.5", "-o", "new.keras")[0] == 0

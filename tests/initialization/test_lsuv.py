"""LSUV: kernels scaled until the output of each layer has the asked variance."""

import math

import keras
import numpy as np
import pytest
from keras import layers
from networks import sequential
from reinitialized_models import kernels

import prunekit as pk
from prunekit.initialization import initializers


class Skipping(keras.Model):
    """Subclassed, with a shared layer, a skip connection and dropout."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(32, "tanh", name="first")
        self.shared = layers.Dense(32, "relu", name="shared")
        self.norm = layers.BatchNormalization(name="norm")
        self.drop = layers.Dropout(0.3)
        self.last = layers.Dense(5, "softmax", name="last")

    def call(self, x, training=False):
        x = self.first(x)
        x = x + self.shared(self.norm(x))
        return self.last(self.drop(x + self.shared(x), training=training))


def images():
    return sequential(
        (8, 8, 3),
        layers.Conv2D(8, 3, activation="relu", name="conv"),
        layers.SeparableConv2D(8, 3, activation="relu", name="separable"),
        layers.Flatten(),
        layers.Dense(10, "softmax", name="logits"),
    )


def test_lsuv_gives_the_output_of_each_layer_the_asked_variance():
    x = np.random.default_rng(0).normal(3, 20, (64, 8, 8, 3)).astype("float32")
    model = images()
    report = initializers.reinitialize(model, initializers.LSUV(x, target=2.0, tolerance=0.02), seed=1)
    # Independently: each layer's function before its activation, by hand.
    tail = keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(8, 3)])
    tail.layers[0].set_weights(model.layers[0].get_weights())
    assert math.isclose(tail(x).numpy().var(), 2, rel_tol=0.02)
    hidden = model.layers[2](model.layers[1](model.layers[0](x))).numpy()
    assert math.isclose((hidden @ model.layers[3].kernel.numpy()).var(), 2, rel_tol=0.02)
    notes = {row.name: row.note for row in report.weights}
    assert notes.pop("separable/depthwise_kernel") == "not scaled: separable/pointwise_kernel is"
    assert set(notes.values()) == {""}


def test_lsuv_works_on_subclassed_models_and_changes_no_state():
    x = np.random.default_rng(0).normal(size=(128, 20)).astype("float32")
    model = Skipping()
    model(x[:2])
    state = [variable.numpy() for variable in model.non_trainable_variables]
    report = initializers.reinitialize(model, initializers.LSUV(x), seed=1)
    assert [row.name for row in report.weights] == ["first/kernel", "shared/kernel", "last/kernel"]
    assert all(abs(row.output_variance - 1) < 0.2 for row in report.weights)
    assert all(map(np.array_equal, state, [variable.numpy() for variable in model.non_trainable_variables]))
    assert "activation" in vars(model.first) and model.first.activation is keras.activations.tanh
    again = initializers.reinitialize(model, initializers.LSUV(x), seed=1)
    assert [row.std_after for row in again.weights] == [row.std_after for row in report.weights]


def test_lsuv_respects_masks():
    x = np.random.default_rng(0).normal(size=(64, 8, 8, 3)).astype("float32")
    model = images()
    pk.prune(model, 0.8, criterion="random", allocation="uniform")
    masks = {name: value != 0 for name, value in kernels(model).items()}
    report = initializers.reinitialize(model, initializers.LSUV(x), masks=masks, seed=1)
    assert all(np.array_equal(value != 0, masks[name]) for name, value in kernels(model).items())
    assert all(abs(row.output_variance - 1) <= 0.05 for row in report.weights if not row.note)


def test_lsuv_says_where_it_could_not_scale():
    model = keras.Sequential([keras.Input((5, 4)), layers.LSTM(6, name="lstm"), layers.Dense(3, name="dense")])
    report = initializers.reinitialize(model, initializers.LSUV(np.zeros((7, 5, 4))), seed=1)
    notes = {row.name: row.note for row in report.weights}
    assert "runs in a loop" in notes["lstm/kernel"] and "runs in a loop" in notes["lstm/recurrent_kernel"]
    assert notes["dense/kernel"] == "not scaled: its output does not vary, or is not finite"
    model.layers[1].bias.assign([0.0, 50.0, 100.0])
    x = np.random.default_rng(0).normal(size=(7, 5, 4))
    (row,) = initializers.reinitialize(model, initializers.LSUV(x, max_iterations=2), include="dense", seed=1).weights
    assert row.note == "not within the tolerance after 2 scalings" and row.output_variance > 100


def test_lsuv_on_data_that_do_not_fit_moves_no_weight(perceptron):
    before = perceptron.get_weights()
    with pytest.raises(ValueError, match="incompatible"):
        initializers.reinitialize(perceptron, initializers.LSUV(np.zeros((4, 9), "float32")))
    assert all(map(np.array_equal, before, perceptron.get_weights()))


@pytest.mark.parametrize("options", [{"target": 0}, {"tolerance": -1}, {"gain": math.nan}, {"max_iterations": 0}])
def test_lsuv_refuses_numbers_out_of_range(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        initializers.LSUV(np.zeros((2, 2)), **options)


def test_lsuv_as_a_layers_initializer_is_refused_by_keras():
    with pytest.raises(ValueError, match="LSUV"):
        layers.Dense(3, kernel_initializer=initializers.LSUV(np.zeros((2, 2))))

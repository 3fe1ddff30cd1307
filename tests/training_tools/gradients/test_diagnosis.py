"""diagnose: each kind of broken chain is found, and the layer that broke it is named."""

import keras
import numpy as np
import pytest
from keras import ops
from networks import sequential

from prunekit.training_tools.gradients.diagnosis import diagnose

layers = keras.layers
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def operation(function, name):
    return layers.Lambda(function, name=name)


def network(*between, dtype="float32"):
    return keras.Sequential(
        [
            keras.Input((8,), dtype=dtype),
            layers.Dense(16, name="first", dtype=dtype),
            *between,
            layers.Dense(4, name="last", dtype=dtype),
        ]
    )


def statuses(found):
    return {row.name: (row.status, row.culprit) for row in found.weights}


BROKEN = {
    "sign": (
        lambda: [operation(ops.sign, "sign")],
        {"first/kernel": ("zero", "sign"), "first/bias": ("zero", "sign"), "last/kernel": ("ok", "")},
    ),
    "a cast to integers": (
        lambda: [layers.ReLU(name="relu"), operation(lambda x: ops.cast(ops.cast(x, "int32"), "float32"), "cut")],
        {"first/kernel": ("none", "cut"), "last/kernel": ("ok", "")},
    ),
    "the square root of zero": (
        lambda: [operation(lambda x: ops.sqrt(0 * x) + ops.sigmoid(x), "root")],
        {"first/kernel": ("nan", "root"), "last/kernel": ("ok", "")},
    ),
    "a logarithm of negative numbers": (
        lambda: [operation(lambda x: ops.log(-ops.abs(x) - 1), "log")],
        {"first/kernel": ("nan", "log, in the forward pass"), "last/bias": ("nan", "log, in the forward pass")},
    ),
    "units that are dead": (
        lambda: [operation(lambda x: x - 100.0, "shift"), layers.ReLU(name="relu"), layers.Dense(16, name="middle")],
        {"first/kernel": ("zero", "relu"), "middle/kernel": ("idle", "middle"), "middle/bias": ("ok", "")},
    ),
    "a factor that makes everything small": (
        lambda: [layers.Dense(9, name="middle"), operation(lambda x: 1e-9 * x, "tiny"), layers.Dense(9, name="third")],
        {"first/kernel": ("small", "tiny"), "middle/bias": ("small", "tiny"), "last/bias": ("ok", "")},
    ),
    "nothing": (lambda: [layers.ReLU()], {"first/kernel": ("ok", ""), "last/bias": ("ok", "")}),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", BROKEN)
def test_the_layer_that_broke_the_chain_is_named(name, dtype, samples):
    between, expected = BROKEN[name]
    found = diagnose(network(*between(), dtype=dtype), cross_entropy, *samples)
    assert {key: statuses(found)[key] for key in expected} == expected
    assert found.ok == (name == "nothing")
    assert all(row.name in str(found) and row.explanation in str(found) for row in found.problems)


def test_only_the_branch_that_is_cut_is_blamed(samples):
    inputs = keras.Input((8,))
    left = operation(ops.sign, "sign")(layers.Dense(16, name="left")(inputs))
    right = layers.ReLU(name="relu")(layers.Dense(16, name="right")(inputs))
    model = keras.Model(inputs, layers.Dense(4, name="out")(layers.Add(name="add")([left, right])))
    found = statuses(diagnose(model, cross_entropy, *samples))
    assert found["left/kernel"] == ("zero", "sign")
    assert found["right/kernel"] == found["out/kernel"] == ("ok", "")


def test_layers_inside_layers_are_named_by_their_path(samples):
    block = sequential((16,), layers.Dense(16, name="inner"), operation(ops.sign, "sign"), name="block")
    found = statuses(diagnose(network(block), cross_entropy, *samples))
    assert found["block/inner/kernel"] == ("zero", "block/sign")


def test_a_loss_without_a_derivative_is_named(samples):
    def hits(truth, output):
        return ops.cast(ops.equal(ops.cast(ops.argmax(output, -1), "float32"), truth), "float32")

    found = statuses(diagnose(network(), hits, *samples))
    assert set(found.values()) == {("none", "the loss")}


def test_frozen_weights_and_layers_that_are_not_called_are_distinguished(samples):
    class Partly(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.frozen, self.left_out = (layers.Dense(4, name=n) for n in ("used", "frozen", "left_out"))
            self.frozen.trainable = False

        def build(self, shape):
            for layer in (self.used, self.frozen, self.left_out):
                layer.build((None, 8))

        def call(self, x):
            return self.used(x) + self.frozen(x)

    model = Partly()
    model.build((None, 8))
    found = statuses(diagnose(model, cross_entropy, *samples))
    assert found["used/kernel"] == ("ok", "")
    assert found["frozen/kernel"] == ("frozen", "")
    assert found["left_out/kernel"] == ("unused", "")


def test_the_size_of_a_gradient_is_the_root_mean_square_of_plain_numpy(samples):
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4, name="out")])
    x, y = samples
    kernel, bias = (np.array(weight, "float64") for weight in model.get_weights())
    logits = x @ kernel + bias
    share = np.exp(logits - logits.max(axis=1, keepdims=True))
    share /= share.sum(axis=1, keepdims=True)
    error = (share - np.eye(4)[y]) / len(y)
    found = {row.name: row.rms for row in diagnose(model, cross_entropy, x, y).weights}
    assert found["out/kernel"] == pytest.approx(np.sqrt(np.mean((x.T @ error) ** 2)), rel=1e-5)
    assert found["out/bias"] == pytest.approx(np.sqrt(np.mean(error.sum(axis=0) ** 2)), rel=1e-5)


def test_weights_and_states_of_layers_stay_as_they_are(samples):
    model = network(layers.BatchNormalization(), layers.Dropout(0.5), layers.ReLU())
    before = [np.array(variable) for variable in model.variables]
    diagnose(model, cross_entropy, *samples)
    for one, other in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(one, np.array(other))


def test_an_embedding_and_a_recurrent_layer_are_seen_through():
    model = keras.Sequential(
        [keras.Input((5,), dtype="int32"), layers.Embedding(9, 6, name="words"), layers.LSTM(7, name="lstm"),
         layers.Dense(4, name="out")]
    )  # fmt: skip
    rng = np.random.default_rng(0)
    found = diagnose(model, cross_entropy, rng.integers(0, 9, (12, 5)), rng.integers(0, 4, 12))
    assert found.ok, str(found)
    assert {"words/embeddings", "lstm/kernel", "out/bias"} <= {row.name for row in found.weights}


def test_what_cannot_be_is_refused(samples):
    with pytest.raises(ValueError, match="one row per example.* Received: x with 70, y with 3"):
        diagnose(network(), cross_entropy, samples[0], samples[1][:3])
    with pytest.raises(ValueError, match="above or below which values are reported.* Received: scale=1"):
        diagnose(network(), cross_entropy, *samples, scale=1)
    with pytest.raises(ValueError, match="is not built"):
        diagnose(keras.Sequential([layers.Dense(3)]), cross_entropy, *samples)

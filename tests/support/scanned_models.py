"""Small models of every kind whose calls a sensitivity scan follows, with inputs."""

import keras
import numpy as np
from keras import layers


def sequential():
    parts = [layers.Conv2D(3, 3), layers.BatchNormalization(), layers.ReLU(), layers.Flatten(), layers.Dense(2)]
    return keras.Sequential([keras.Input((6, 6, 1)), *parts]), _numbers(6, 6, 1)


def branches_and_a_shared_layer():
    left, right = keras.Input((6,), name="left"), keras.Input((4,), name="right")
    shared = layers.Dense(5, name="shared", activation="tanh")
    first = layers.Dense(6, name="first")(left)
    both = shared(first) + shared(layers.Dense(6, name="second")(right))
    joined = keras.ops.concatenate([layers.Dropout(0.5)(both), layers.Dense(5, name="third")(first)], axis=-1)
    outputs = {"p": layers.Dense(2, name="p")(both), "q": layers.Dense(1, name="q")(joined)}
    return keras.Model({"left": left, "right": right}, outputs), {"left": _numbers(6), "right": _numbers(4)}


def masked_sequences():
    tokens = keras.Input((None,), dtype="int32")
    hidden = layers.Embedding(10, 4, mask_zero=True)(tokens)
    hidden = layers.SimpleRNN(3)(layers.Dropout(0.5)(hidden))
    return keras.Model(tokens, layers.Dense(2)(hidden)), np.random.default_rng(1).integers(0, 10, (20, 3), "int32")


def nested():
    parts = [keras.Input((6,)), layers.Dense(5, activation="relu", name="a"), layers.Dense(4, name="b")]
    inputs = keras.Input((6,))
    hidden = keras.Sequential(parts, name="inner")(layers.Dense(6, name="before")(inputs))
    return keras.Model(inputs, layers.Dense(2, name="after")(hidden)), _numbers(6)


def nested_twice():
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(6, name="a")], name="inner")
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(2, name="after")(inner(keras.ops.tanh(inner(inputs))))), _numbers(6)


def nested_in_a_graph_of_its_own_tensors():
    inputs = keras.Input((6,))
    first = layers.Dense(6, name="first")(inputs)
    inner = keras.Model(inputs, layers.Dense(4, name="second")(first), name="inner")
    joined = keras.ops.concatenate([inner(keras.ops.negative(inputs)), first, inputs], axis=-1)
    return keras.Model(inputs, layers.Dense(2, name="after")(joined)), _numbers(6)


class Subclassed(keras.Model):
    """A model without a graph of layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(4), layers.Dense(2)

    def call(self, inputs):
        return self.last(keras.ops.relu(self.first(inputs)))


def subclassed():
    model, inputs = Subclassed(), _numbers(6)
    model(inputs[:1])
    return model, inputs


KINDS = (
    sequential,
    branches_and_a_shared_layer,
    masked_sequences,
    nested,
    nested_twice,
    nested_in_a_graph_of_its_own_tensors,
    subclassed,
)


def _numbers(*shape):
    return np.random.default_rng(0).normal(size=(20, *shape)).astype("float32")

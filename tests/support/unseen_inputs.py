"""A perceptron, and how far a changed copy of it is from it on inputs that resemble no synthetic signal."""

import keras
import numpy as np
from keras import layers as L

from prunekit.sparsity.array_ops import array_of


def perceptron():
    """The same weights each time."""
    keras.utils.set_random_seed(0)
    hidden = [L.Dense(32, activation="relu", name=f"hidden_{i}") for i in range(2)]
    return keras.Sequential([keras.Input((16,)), *hidden, L.Dense(4, name="head")])


def unseen_error(model):
    """Relative error of the outputs on sums of uniform numbers."""
    inputs = np.random.default_rng(1).random((200, 16, 3)).sum(axis=2).astype("float32")
    wanted, found = (array_of(one(inputs, training=False)) for one in (perceptron(), model))
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)

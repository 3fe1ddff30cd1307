"""Networks around a block of normalizations or attention, for files of integers alone."""

import keras
import numpy as np
from architectures import randomize
from keras import layers as L

SHAPE = (6, 8)


def network(block, shape=SHAPE):
    """A Dense layer, the block, a pooling and a Dense layer, with drawn weights."""
    keras.utils.set_random_seed(0)
    x = keras.Input(shape, name="x")
    y = block(L.Dense(8, name="first")(x))
    return randomize(keras.Model(x, L.Dense(3, name="last")(L.GlobalAveragePooling1D()(y))))


def inputs(count=64):
    return np.random.default_rng(1).normal(size=(count, *SHAPE)).astype("float32")

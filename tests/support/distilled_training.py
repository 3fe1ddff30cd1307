"""Students and teachers whose distillation NumPy calculates."""

import keras
import numpy as np
from keras import layers as L
from quantized_training import LOSS


def plain_network(**options):
    """A model without dropout and batch normalization, whose loss NumPy calculates."""
    keras.utils.set_random_seed(5)
    x = keras.Input((8, 8, 1))
    y = L.Dense(6, activation="relu", kernel_regularizer=keras.regularizers.L2(0.1), name="hidden")(L.Flatten()(x))
    model = keras.Model(x, L.Dense(4, name="logits")(y))
    model.compile(keras.optimizers.SGD(0.0), LOSS, **options)
    return model


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def wide_teacher():
    """As `network`, with ten channels."""
    keras.utils.set_random_seed(1)
    x = keras.Input((8, 8, 1))
    y = L.DepthwiseConv2D(3, name="depthwise")(L.Conv2D(10, 3, padding="same", activation="relu", name="wide")(x))
    model = keras.Model(x, L.Dense(4, name="logits")(L.Flatten()(y)))
    model.compile("adam", LOSS)
    return model


def two_outputs(seed):
    keras.utils.set_random_seed(seed)
    x = keras.Input((8, 8, 1))
    y = L.Dense(8, activation="relu")(L.Flatten()(x))
    outputs = [L.Dense(4, activation="softmax", name="which")(y), L.Dense(1, name="size")(y)]
    model = keras.Model(x, outputs)
    model.compile(keras.optimizers.SGD(0.0), {"which": "sparse_categorical_crossentropy", "size": "mse"})
    return model

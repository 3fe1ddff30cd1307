"""A model whose gradients are intercepted, compiled and not, and data for it."""

import keras
import numpy as np
from keras import layers
from networks import sequential


def network(**options):
    model = sequential((5,), layers.Dense(6, "tanh", name="hidden"), layers.Dense(3, name="last", **options))
    rng = np.random.default_rng(4)
    for weight in model.weights:
        weight.assign(rng.normal(size=weight.shape))
    return model


def data(precision, examples=8):
    rng = np.random.default_rng(5)
    return rng.normal(size=(examples, 5)).astype(precision), rng.normal(size=(examples, 3)).astype(precision)


def compiled(model, **options):
    model.compile(keras.optimizers.SGD(1.0), "mse", **{"jit_compile": False, **options})
    return model

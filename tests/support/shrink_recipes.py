"""The network of the tests of the recipe step `shrink`, the step, and the sizes of a model."""

import keras

from prunekit.anatomy.files.digests import weight_arrays

HALF = {"channels": 0.5}


def shrink(**settings):
    return {"shrink": settings or HALF}


def network(width=16):
    keras.utils.set_random_seed(20)
    layers = [
        keras.layers.Dense(width, activation="relu", name="hidden"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.3, name="drop"),
        keras.layers.Dense(12, activation="relu", name="second"),
        keras.layers.Dense(4, name="logits"),
    ]
    return keras.Sequential([keras.Input((8,), name="features"), *layers], name="tiny")


def shapes(model):
    return {name: array.shape for name, array in weight_arrays(model).items() if name.endswith("kernel")}

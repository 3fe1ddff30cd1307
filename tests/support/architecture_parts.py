"""What the small models of many architectures are made of: the table, their inputs and weights, and common parts.

Widths differ wherever the architecture leaves them independent, so that a cut on the wrong axis or layer shows.
"""

import math

import keras
import numpy as np
from keras import layers as L

VOCABULARY = 20
ARCHITECTURES = {}


def architecture(function):
    """The function itself, listed in ARCHITECTURES under its own name."""
    ARCHITECTURES[function.__name__] = function
    return function


def inputs_of(model, seed=0, examples=3):
    """Random inputs in the structure that the model takes: normal floats, or tokens in [0, VOCABULARY)."""
    rng = np.random.default_rng(seed)

    def sample(tensor):
        shape = (examples, *tensor.shape[1:])
        if "int" in keras.backend.standardize_dtype(tensor.dtype):
            return rng.integers(0, VOCABULARY, shape).astype("int32")
        return rng.normal(size=shape).astype("float32")

    if hasattr(model, "inputs"):
        return keras.tree.map_structure(sample, model.input)
    # A subclassed model records only the shape that it was built with.
    return sample(keras.KerasTensor(model.get_build_config()["input_shape"]))


def randomize(model, seed=0):
    """Gives every weight random values under which it contributes to the outputs. Returns the model."""
    rng = np.random.default_rng(seed)
    # `weights` leaves out the states of seed generators, `variables` does not.
    for weight in model.weights:
        if weight.name.endswith("kernel"):
            values = rng.normal(size=weight.shape) / math.sqrt(fan_in(weight))
        elif weight.name in ("gamma", "moving_variance"):
            values = rng.uniform(0.5, 1.5, weight.shape)
        else:
            values = rng.normal(size=weight.shape) * 0.3
        weight.assign(values)
    return model


def fan_in(kernel):
    """How many inputs one output of the kernel sums, judged by the names in its path."""
    if "depthwise" in kernel.path:
        return math.prod(kernel.shape[:-2])
    if kernel.path.split("/")[-2] in ("query", "key", "value"):
        return kernel.shape[0]
    return math.prod(kernel.shape[:-1])


def chain(x, *layers):
    for layer in layers:
        x = layer(x)
    return x


def stack(shape, *layers):
    """A functional model of one layer after another."""
    inputs = keras.Input(shape)
    return keras.Model(inputs, chain(inputs, *layers))


def conv_bn(x, filters, kernel_size, name, activation="relu", **options):
    """Convolution without bias, batch normalization, and an activation unless it is None."""
    x = L.Conv2D(filters, kernel_size, padding="same", use_bias=False, name=name, **options)(x)
    x = L.BatchNormalization(name=f"{name}_bn")(x)
    return x if activation is None else L.Activation(activation, name=f"{name}_{activation}")(x)


def classify(x, classes=5):
    return chain(x, L.GlobalAveragePooling2D(), L.Dense(classes, name="head"))

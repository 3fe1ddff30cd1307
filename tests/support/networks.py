"""Builders of small networks: layers one after another, and Dense layers alone. The outputs of a network."""

import keras
from keras import ops


def sequential(shape, *layers, **options):
    """Returns a Sequential model of inputs of that shape, without the batch."""
    return keras.Sequential([keras.Input(shape), *layers], **options)


def dense_network(inputs, activation="relu", seed=None, **units):
    """Returns a network of Dense layers, name=units each; all but the last have the activation."""
    if seed is not None:
        keras.utils.set_random_seed(seed)
    *hidden, (name, outputs) = units.items()
    layers = [keras.layers.Dense(size, activation=activation, name=each) for each, size in hidden]
    return sequential((inputs,), *layers, keras.layers.Dense(outputs, name=name))


def outputs(model, inputs, training=False):
    """Returns the outputs of a model as arrays, in inference unless training is True."""
    return [ops.convert_to_numpy(one) for one in keras.tree.flatten(model(inputs, training=training))]

"""Roundings that tests put in the place of those of grids, and models, calls and comparisons of simulations."""

import contextlib

import keras
import numpy as np
from architectures import ARCHITECTURES, inputs_of, randomize
from keras import ops

from prunekit.core.runtime.model_function import ModelFunction


def through(value, rounded):
    """Returns the rounded value, with a gradient as if nothing were rounded."""
    return value + ops.stop_gradient(rounded - value)


class Passing:
    """Rounds nothing, and remembers what it was given."""

    def __init__(self):
        self.seen = {}
        self.dtypes = set()

    def running(self, unit):
        return contextlib.nullcontext()

    def tensor(self, value, place):
        self.seen.setdefault(place.name, []).append(value)
        # A new tensor, as from rounding.
        return ops.multiply(value, ops.cast(1, value.dtype))

    def argument(self, value, place):
        return self.tensor(value, place)

    def constant(self, value):
        self.seen.setdefault("constant", []).append(value)
        return value

    def weight(self, value, weight):
        self.dtypes.add(keras.backend.standardize_dtype(value.dtype))
        return value

    def product(self, layer, inputs, kernel, bias):
        return None


class Rounding(Passing):
    """Rounds tensors to multiples of 1/4 and weights to multiples of 1/8."""

    def tensor(self, value, place):
        super().tensor(value, place)
        return through(value, ops.cast(ops.round(value * 4) / 4, value.dtype))

    def constant(self, value):
        return ops.round(ops.convert_to_tensor(value) * 4) / 4

    def weight(self, value, weight):
        return through(value, ops.round(value * 8) / 8)


def arrays(structure) -> list[np.ndarray]:
    """Returns the tensors of a structure as arrays."""
    return [ops.convert_to_numpy(ops.cast(one, "float32")) for one in keras.tree.flatten(structure)]


def outputs_of(model, inputs) -> list[np.ndarray]:
    """Returns the model's outputs in inference, from a compiled function."""
    run = ModelFunction(model, lambda batch: model(batch, training=False))
    return arrays(run(keras.tree.map_structure(ops.convert_to_tensor, inputs)))


def assert_close(found, expected, tolerance):
    """Compares arrays, each with its largest magnitude."""
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert np.abs(one - other).max(initial=0.0) <= tolerance * max(np.abs(other).max(initial=0.0), 1e-3)


def made(name):
    """Returns an architecture with random weights, and inputs."""
    keras.utils.set_random_seed(0)
    model = randomize(ARCHITECTURES[name]())
    return model, inputs_of(model)


def eighths(values):
    """Returns the nearest multiples of 1/8."""
    return np.round(values * 8) / 8


def quarters(values):
    """Returns the nearest multiples of 1/4."""
    return np.round(values * 4) / 4

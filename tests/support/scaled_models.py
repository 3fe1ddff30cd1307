"""Multiplies the channels of models by factors, and compares outputs."""

import numpy as np
from architectures import inputs_of, randomize, stack
from keras import layers as L
from networks import outputs

from prunekit.core.runtime.variable_values import assigned
from prunekit.techniques.quantize.placement.placement import place
from prunekit.techniques.quantize.rescaling.channel_scaling import rescale
from prunekit.techniques.quantize.rescaling.rescaling import rescalable


def multiply_all(model, seed=0, exact=True) -> None:
    """Multiplies every tensor that can be by factors in [0.5, 2]; by 0.5, 1 or 2 if the result is to be exact."""
    rng = np.random.default_rng(seed)
    for scaling in rescalable(place(model)):
        count = scaling.channels
        factors = rng.choice([0.5, 1.0, 2.0], count) if exact else rng.uniform(0.5, 2.0, count)
        with assigned(rescale(scaling, factors)):
            pass


def assert_same(found, expected, tolerance) -> None:
    """Compares arrays, each with its largest magnitude."""
    for one, other in zip(found, expected, strict=True):
        assert np.abs(one - other).max() <= tolerance * np.abs(other).max()


def assert_unchanged_by_factors(model, tolerance=1e-5) -> None:
    """Checks that the weights change and the outputs do not."""
    randomize(model)
    inputs = inputs_of(model)
    before, weights = outputs(model, inputs), [np.array(one) for one in model.get_weights()]
    multiply_all(model, exact=False)
    assert any((one != other).any() for one, other in zip(weights, model.get_weights(), strict=True))
    assert_same(outputs(model, inputs), before, tolerance)


# ---- which tensors ---------------------------------------------------------------------------------------------------


LAST = {"name": "last"}


def image(*layers):
    """Returns a model of images with a Dense layer "head" at the end."""
    return stack((9, 8, 3), *layers, L.GlobalAveragePooling2D(), L.Dense(2, activation="softmax", name="head"))


# ---- refused ---------------------------------------------------------------------------------------------------------


def dense_pair(*between, **options):
    """Returns a model of Dense, the given layers and Dense."""
    return stack((7,), L.Dense(6, name="first", **options), *between, L.Dense(3, name="head"))

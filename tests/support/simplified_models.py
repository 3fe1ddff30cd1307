"""Comparison of simplified models with the models that they were."""

import keras
import numpy as np
from architectures import inputs_of, randomize
from keras import layers as L
from networks import outputs

import prunekit as pk


def check_equal(model, tolerance=1e-5):
    """The report, after the outputs of the simplified model were compared; the model itself stays as it is."""
    if keras.backend.backend() != "tensorflow":
        # JAX computes in float32, and batch normalization on PyTorch has the precision of float32.
        tolerance = max(tolerance, 1e-5)
    randomize(model, seed=3)
    for layer in model._flatten_layers():
        if isinstance(layer, L.Normalization):
            layer.adapt(np.random.default_rng(0).normal(1, 2, (20, *layer._build_input_shape[1:])).astype("float32"))
    inputs, before = inputs_of(model, seed=1, examples=5), model.get_weights()
    wanted = outputs(model, inputs)
    simplified, report = pk.simplify(model)
    for found, expected in zip(outputs(simplified, inputs), wanted, strict=True):
        assert found.shape == expected.shape and found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    assert report.parameters == (model.count_params(), simplified.count_params())
    return simplified, report


def names(model):
    return [layer.name for layer in model.layers if not isinstance(layer, L.InputLayer)]

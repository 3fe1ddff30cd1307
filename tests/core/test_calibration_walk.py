from collections import Counter

import keras
import numpy as np
import pytest
from keras import ops

import prunekit as pk
from prunekit.core.layerwise import layerwise
from prunekit.core.layerwise.calibration_walk import Pair, walk
from prunekit.core.layerwise.inner_inputs import run

IMAGES = np.random.default_rng(0).normal(size=(6, 8, 8, 3)).astype("float32")


def inverted_residuals():
    """A network with wide tensors between narrow ones, the second half as a model inside it."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 3))
    narrow = keras.layers.Conv2D(4, 1, name="stem")(inputs)
    wide = keras.layers.ReLU(name="relu")(keras.layers.Conv2D(32, 1, name="expand")(narrow))
    wide = keras.layers.DepthwiseConv2D(3, padding="same", name="depthwise")(wide)
    narrow = keras.layers.Add(name="add")([narrow, keras.layers.Conv2D(4, 1, name="project")(wide)])
    head = [keras.Input((8, 8, 4)), keras.layers.Flatten(name="flatten"), keras.layers.Dense(5, name="head")]
    return keras.Model(inputs, keras.Sequential(head, name="inner")(narrow))


def walked(model, memory):
    """Returns (outputs of the last call, number of computations of each layer)."""
    computed, last = Counter(), []

    def visit(call):
        def outputs(pair):
            computed[call.operation.name] += 1
            found = run(call.operation, pair.before)
            return Pair(found, found)

        last[:] = [ops.convert_to_numpy(outputs(pair).before) for pair in call.arguments]
        computed[call.operation.name] -= len(last)
        return outputs

    walk(model, [IMAGES[:3], IMAGES[3:]], visit, memory)
    return np.concatenate(last), computed


@pytest.mark.every_backend
def test_tensors_beyond_the_memory_are_computed_again_and_are_the_same():
    model = inverted_residuals()
    kept, once = walked(model, np.inf)
    found, again = walked(model, 3 * IMAGES[..., :1].nbytes * 4)
    assert set(once.values()) <= {0, 2}
    # The narrow tensors, one of which two calls read, are kept.
    assert again["stem"] == 2 and again["project"] == 2
    assert again["expand"] > 2 and again["relu"] > 2
    np.testing.assert_array_equal(found, kept)
    np.testing.assert_allclose(found, ops.convert_to_numpy(model(IMAGES)), rtol=1e-5, atol=1e-6)


@pytest.mark.every_backend
def test_memory_changes_no_mask_and_outputs_by_rounding_alone():
    found = []
    for memory in (1e9, 1.0):
        model = inverted_residuals()
        pk.prune(model, 0.5, IMAGES, criterion="magnitude", allocation="uniform", memory=memory)
        zeros = [ops.convert_to_numpy(weight) == 0 for weight in model.weights]
        found.append((ops.convert_to_numpy(model(IMAGES)), zeros))
    (outputs, zeros), (others, other_zeros) = found
    for one, other in zip(zeros, other_zeros, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(outputs, others, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "operation",
    [
        lambda model, **kw: pk.prune(model, 0.5, IMAGES, **kw),
        lambda model, **kw: pk.shrink(model, channels=0.5, data=IMAGES, **kw),
        pk.quantize,
    ],
    ids=["prune", "shrink", "quantize"],
)
def test_a_memory_of_nothing_is_refused(operation):
    with pytest.raises(ValueError, match="memory"):
        operation(inverted_residuals(), memory=0)


def test_shrink_keeps_no_more_activations_than_asked(monkeypatch):
    given, plain = [], layerwise.walk
    monkeypatch.setattr(layerwise, "walk", lambda *args: given.append(args[-1]) or plain(*args))
    named, found = {"criterion": "l2", "allocation": "uniform"}, []
    for memory in (1e9, 1.0):
        smaller, _ = pk.shrink(inverted_residuals(), channels=0.5, data=IMAGES, memory=memory, **named)
        found.append(ops.convert_to_numpy(smaller(IMAGES)))
    assert given == [1e9, 1.0]
    np.testing.assert_allclose(*found, rtol=1e-3, atol=1e-4)

"""The moments of a layer's inputs and former outputs against their sums written out."""

import keras
import numpy as np
import pytest
from keras import ops

from prunekit.anatomy.layers.targets import find_targets
from prunekit.core.layerwise.layer_fit import LayerFit
from prunekit.core.statistics.layer_inputs import LayerMoments
from prunekit.core.statistics.layer_products import product_of


def built(layer, shape):
    model = keras.Sequential([keras.Input(shape), layer])
    (target,) = find_targets(model)[0]
    return product_of(target), np.array(target.variable)


LAYERS = {
    "fewer outputs than inputs": (lambda: keras.layers.Dense(3), (8,)),
    "as many": (lambda: keras.layers.Dense(8), (8,)),
    "more": (lambda: keras.layers.Dense(30), (5, 8)),
    "groups": (lambda: keras.layers.Conv1D(24, 1, groups=2), (6, 4)),
    "windows": (lambda: keras.layers.Conv1D(16, 2), (6, 4)),
}


# Examples of each call, and whether the layer receives other inputs than before.
CALLS = {
    "the same": [(20, False), (3, False)],
    "changed": [(20, True), (3, True)],
    "one of three changed": [(7, False), (7, True), (7, False)],
}


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", LAYERS)
def test_moments_are_the_sums_over_all_rows(name, calls):
    make, shape = LAYERS[name]
    product, kernel = built(make(), shape)
    rng = np.random.default_rng(0)
    matrix = product.matrix(kernel).astype("float32")
    moments, before, after = LayerMoments(product, matrix), [], []
    for examples, changed in calls:
        was = rng.normal(size=(examples, *shape)).astype("float32")
        now = was + rng.normal(size=was.shape).astype("float32") * 0.3 + 0.1 if changed else was
        moments.observe((ops.convert_to_tensor(was),), (ops.convert_to_tensor(now),) if changed else None)
        before.append(np.array(product.rows((ops.convert_to_tensor(was),))))
        after.append(np.array(product.rows((ops.convert_to_tensor(now),))))
    moments.finish()
    x, former = (np.concatenate(rows, axis=1).astype("float64") for rows in (after, before))
    y = former @ matrix
    assert moments.same is not any(changed for _, changed in calls)
    close = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(moments.inputs.gram, np.swapaxes(x, 1, 2) @ x, **close)
    np.testing.assert_allclose(moments.cross, np.swapaxes(x, 1, 2) @ y, **close)
    np.testing.assert_allclose(moments.output_sums, y.sum(axis=1), **close)
    np.testing.assert_allclose(moments.output_squares, np.square(y).sum(axis=1), **close)


def test_outputs_of_a_layer_with_many_are_not_formed(monkeypatch):
    product, kernel = built(keras.layers.Dense(30), (8,))
    moments = LayerMoments(product, product.matrix(kernel))
    monkeypatch.setattr(LayerMoments, "_add_outputs", None)
    # A deep copy of a layer saves and loads it, which takes longer than all sums.
    monkeypatch.setattr(keras.layers.Dense, "__reduce__", None)
    rows = ops.ones((4, 8))
    moments.observe((rows,), (2.0 * rows,))
    moments.finish()
    np.testing.assert_allclose(moments.output_sums[0], 4.0 * kernel.sum(axis=0), rtol=1e-5)


def test_the_error_of_a_table_is_that_of_the_rows_that_are_read():
    product, table = built(keras.layers.Embedding(10, 4), ())
    matrix = product.matrix(table).astype("float32")
    moments = LayerMoments(product, matrix)
    moments.observe((ops.convert_to_tensor([[0, 3, 3]]),), None)
    moments.observe((ops.convert_to_tensor([[7, 0, 3]]),), None)
    moments.finish()
    other = np.where(np.arange(10)[:, None] == 7, 2 * matrix, matrix + 0.1)
    read = matrix[0, [0, 3, 3, 7, 0, 3]]
    np.testing.assert_allclose(moments.output_sums[0], read.sum(axis=0), rtol=1e-5)
    np.testing.assert_allclose(moments.output_squares[0], np.square(read).sum(axis=0), rtol=1e-5)
    wanted = np.square(other[0, [0, 3, 3, 7, 0, 3]] - read).sum() / np.square(read).sum()
    assert LayerFit(product, moments, centred=False).error(other) == pytest.approx(wanted, rel=1e-5)
    assert LayerFit(product, moments, centred=False).error(matrix) == 0.0 and not moments.cross.size

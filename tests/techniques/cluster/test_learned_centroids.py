"""Values of one forward pass on centroids, and their gradients, against plain NumPy."""

import keras
import numpy as np
import pytest
from keras import ops

from prunekit.core.runtime.differentiation import gradient
from prunekit.techniques.cluster.codebooks import Channels, Codebooks
from prunekit.techniques.cluster.learned_centroids import LearnedCentroids

pytestmark = pytest.mark.every_backend
LAYOUTS = {
    "tensor": ((6, 10), (1,), None),
    "channel": ((6, 10), (1,), 1),
    "groups of channels, a shorter last one": ((3, 3, 2, 7), (3,), 3),
    "output axis in front": ((4, 9), (0,), 1),
}


def weight_and_centroids(layout, clusters=5, averages=True, seed=0):
    shape, axes, run = LAYOUTS[layout]
    rng = np.random.default_rng(seed)
    value = rng.normal(size=shape).astype("float32")
    value[rng.uniform(size=shape) < 0.3] = 0.0
    books = Codebooks.fitted(value, Channels(shape, axes, run), clusters)
    variable = keras.Variable(value, name="kernel")
    return variable, books, LearnedCentroids([variable], [books], averages=averages)


def array(value):
    return ops.convert_to_numpy(ops.stop_gradient(ops.convert_to_tensor(value)))


def by_hand(value, books):
    """(Value of the nearest centroid, place of it in the flat table) of each entry, from all distances."""
    numbers = np.broadcast_to(books.channels.of_axes, value.shape)
    table = books.table.astype("float64")
    distances = np.abs(value.astype("float64")[..., None] - table[numbers])
    nearest = distances.argmin(axis=-1)
    found = np.take_along_axis(table[numbers], nearest[..., None], axis=-1)[..., 0]
    return np.where(value == 0, 0.0, found).astype("float32"), numbers * table.shape[1] + nearest


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("clusters", [2, 4, 5])
def test_each_entry_has_the_value_of_its_nearest_centroid_and_zeros_stay(layout, clusters):
    variable, books, found = weight_and_centroids(layout, clusters)
    ((weight, value),) = found.for_pass()
    assert weight is variable
    np.testing.assert_array_equal(array(value), by_hand(array(variable), books)[0])
    np.testing.assert_array_equal(array(value), books.nearest(array(variable)))
    np.testing.assert_array_equal(found.codebooks()[0].table, books.table)


def test_centroids_that_passed_each_other_are_sorted():
    variable, books, found = weight_and_centroids("channel", 4)
    crossed = np.where(np.isfinite(books.table), books.table, np.float32(1e37))[:, ::-1]
    found.variables[0].assign(crossed.ravel())
    np.testing.assert_array_equal(array(found.for_pass()[0][1]), books.nearest(array(variable)))
    np.testing.assert_array_equal(found.codebooks()[0].table, np.sort(books.table, axis=1))


@pytest.mark.parametrize("averages", [True, False], ids=["average", "sum"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_of_an_entry_goes_to_it_and_to_its_centroid(layout, averages):
    variable, books, found = weight_and_centroids(layout, averages=averages)
    value = array(variable)
    factors = np.random.default_rng(1).normal(size=value.shape).astype("float32")

    def loss(values):
        with keras.StatelessScope(state_mapping=list(zip((variable, found.variables[0]), values, strict=True))):
            return ops.sum(found.for_pass()[0][1] * ops.convert_to_tensor(factors))

    of_weight, of_centroids = map(array, gradient(loss, [variable.value, found.variables[0].value]))
    kept = value != 0
    np.testing.assert_allclose(of_weight, np.where(kept, factors, 0.0), rtol=1e-6)
    places = by_hand(value, books)[1]
    sums = np.bincount(places[kept], factors[kept], books.table.size)
    if averages:
        sums /= np.maximum(np.bincount(places[kept], minlength=books.table.size), 1)
    np.testing.assert_allclose(of_centroids, sums, rtol=1e-4, atol=1e-5)


def test_a_soft_value_lies_between_the_two_nearest_and_a_cold_one_on_the_nearest():
    variable, books, found = weight_and_centroids("tensor", 5)
    value, table = array(variable).astype("float64"), books.table[0].astype("float64")
    order = np.abs(value[..., None] - table).argsort(axis=-1)
    first, second = table[order[..., 0]], table[order[..., 1]]
    for temperature in (0.5, 0.1):
        found.warm(temperature)
        gap = (second - first) ** 2
        share = 1 / (1 + np.exp(((value - first) ** 2 - (value - second) ** 2) / (temperature * gap)))
        expected = np.where(value == 0, 0.0, share * first + (1 - share) * second)
        np.testing.assert_allclose(array(found.for_pass()[0][1]), expected, rtol=1e-4, atol=1e-5)
    found.warm(1e-6)
    far_from_borders = np.abs(np.abs(value - first) - np.abs(value - second)) > 1e-3
    np.testing.assert_allclose(
        array(found.for_pass()[0][1])[far_from_borders], books.nearest(array(variable))[far_from_borders], rtol=1e-5
    )


@pytest.mark.parametrize("values", [[0.5, 0.5, 0.5, -2.0], [3.0, 3.0, 0.0, 3.0]], ids=["two values", "one value"])
def test_fewer_values_than_clusters(values):
    value = np.array(values, "float32").reshape(2, 2)
    variable = keras.Variable(value, name="kernel")
    books = Codebooks(Channels((2, 2), (1,)), np.array([[*sorted({*values} - {0.0}), np.inf, np.inf]], "float32"))
    for temperature in (0.0, 0.3):
        found = LearnedCentroids([variable], [books], averages=True)
        found.warm(temperature)
        result = array(found.for_pass()[0][1])
        assert np.isfinite(result).all()
        np.testing.assert_allclose(result, value, atol=0.3)
        np.testing.assert_array_equal(found.codebooks()[0].table, books.table)

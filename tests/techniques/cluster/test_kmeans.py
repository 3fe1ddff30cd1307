"""Centroids of numbers, against all ways to cut a short list, and against what k-means promises on a long one."""

import itertools

import numpy as np
import pytest

from prunekit.techniques.cluster.kmeans import SortedValues, kmeans, nearest


def error(values, centroids, weights=1.0):
    """The weighted squared distance of all values from their nearest centroids, by a table of all distances."""
    distances = np.abs(np.asarray(values, "float64")[:, None] - centroids)
    return float((weights * distances.min(axis=1) ** 2).sum())


def least(values, weights, clusters):
    """The smallest error, over all ways to cut the sorted values into runs."""
    order = np.argsort(values)
    values, weights = values[order], weights[order]
    found = np.inf
    for cuts in itertools.combinations(range(1, len(values)), clusters - 1):
        total = 0.0
        for run in np.split(np.arange(len(values)), cuts):
            mean = np.average(values[run], weights=weights[run])
            total += float((weights[run] * (values[run] - mean) ** 2).sum())
        found = min(found, total)
    return found


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("clusters", [1, 2, 3, 4])
def test_the_optimum_is_the_best_of_all_cuts(seed, clusters):
    rng = np.random.default_rng(seed)
    values, weights = rng.standard_t(2, 9), rng.uniform(0.1, 3, 9)
    found = kmeans(values, clusters, weights, "optimum")
    assert len(found) == clusters and np.all(np.diff(found) > 0)
    assert error(values, found, weights) == pytest.approx(least(values, weights, clusters), rel=1e-9)


# Max 1960, table I; Paez & Glisson 1972, table II.
@pytest.mark.parametrize(
    ("draw", "clusters", "signal"),
    [
        ("normal", 4, 9.30),
        ("normal", 8, 14.62),
        ("normal", 16, 20.22),
        ("laplace", 4, 7.54),
        ("laplace", 8, 12.64),
        ("laplace", 16, 18.13),
    ],
)
def test_the_signal_to_noise_is_that_of_the_best_quantizer(draw, clusters, signal):
    values = getattr(np.random.default_rng(0), draw)(size=60_000)
    ratios = [
        10 * np.log10((values**2).sum() / error(values, kmeans(values, clusters, start=start)))
        for start in ("auto", "optimum", "quantile")
    ]
    assert ratios == pytest.approx([signal] * 3, abs=0.15)
    assert ratios[0] >= ratios[1] - 0.01


def test_lloyd_ends_where_each_centroid_is_the_mean_of_its_values():
    values = np.random.default_rng(1).normal(size=5000).astype("float32")
    weights = np.random.default_rng(2).uniform(size=5000)
    found = kmeans(values, 16, weights)
    places = nearest(values, found)
    np.testing.assert_array_equal(places, np.abs(values[:, None] - found).argmin(axis=1))
    means = [
        np.average(values[places == number].astype("float64"), weights=weights[places == number])
        for number in range(16)
    ]
    np.testing.assert_allclose(found, means, rtol=1e-9)


def test_fewer_different_values_than_clusters_are_their_own_centroids():
    values = np.array([3.0, -1.0, 3.0, 0.5, -1.0])
    np.testing.assert_array_equal(kmeans(values, 3), [-1.0, 0.5, 3.0])
    np.testing.assert_array_equal(kmeans(values, 16), [-1.0, 0.5, 3.0])
    np.testing.assert_array_equal(kmeans(np.full(7, 2.5), 4, np.zeros(7)), [2.5])


def test_values_far_from_zero_lose_no_digits():
    values = 1e6 + np.arange(100) % 10 * 1e-2 + np.random.default_rng(0).uniform(0, 1e-4, 100)
    found = kmeans(values, 10, start="optimum")
    assert error(values, found) <= 100 * 1e-8


def test_weights_decide_which_values_are_near_a_centroid():
    values = np.array([0.0, 1.0, 10.0, 11.0])
    weights = np.array([1.0, 1.0, 1e6, 1e6])
    found = kmeans(values, 3, weights, "optimum")
    np.testing.assert_allclose(found, [0.5, 10.0, 11.0])


def test_values_without_weight_have_a_cluster_and_cost_nothing():
    found = kmeans(np.array([0.0, 1.0, 2.0, 50.0]), 2, np.array([1.0, 1.0, 1.0, 0.0]), "optimum")
    np.testing.assert_allclose(found[0], 0.5, atol=1e-6)


def test_runs_stand_for_all_values():
    values = np.random.default_rng(3).laplace(size=20_000)
    found = SortedValues.of(values).runs(256)
    assert len(found.values) <= 256 and np.all(np.diff(found.values) > 0)
    assert found.weights.sum() == pytest.approx(20_000)
    assert (found.values * found.weights).sum() == pytest.approx(values.sum())


def test_an_unknown_start_is_refused():
    with pytest.raises(ValueError, match='`start` is "auto", "optimum" or "quantile". Received: \'random\''):
        kmeans(np.arange(9.0), 2, start="random")

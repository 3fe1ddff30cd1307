"""The same training on centroids by tensorflow-model-optimization on tf_keras, and by prunekit on Keras 3."""

import keras
import numpy as np
import original
import pytest
import tf_keras
from tensorflow_model_optimization.python.core.clustering.keras import clustering_centroids
from tensorflow_model_optimization.python.core.clustering.keras.cluster_config import GradientAggregation
from twins import convolutional, data, dense

import prunekit as pk
from prunekit.techniques.cluster import training as training_on_centroids
from prunekit.techniques.cluster.codebooks import Codebooks

theirs = original.tfmot.clustering.keras
# k-means++ is drawn by their own generator, with a seed of their own.
STARTS = {"linear": "LINEAR", "density": "DENSITY_BASED"}


def twins_on_centroids(monkeypatch, build, optimizer, clusters, start, gradients):
    """(Wrapped tf_keras model, Keras 3 model, callback), of the same weights; both begin with their centroids."""
    old, new = build(tf_keras), build(keras)
    rng = np.random.default_rng(1)
    weights = [0.3 * rng.normal(size=weight.shape).astype("float32") for weight in new.weights]
    old.set_weights(weights)
    new.set_weights(weights)
    old = theirs.cluster_weights(
        old,
        clusters,
        cluster_centroids_init=getattr(theirs.CentroidInitialization, STARTS[start]),
    )
    wrapped = wrapped_in(old)
    for layer in wrapped:
        # The public call does not pass it on.
        for algorithm in layer.clustering_algorithms.values():
            algorithm.cluster_gradient_aggregation = getattr(GradientAggregation, gradients)
    tables = [layer.cluster_centroids["kernel"].numpy() for layer in wrapped]
    begun = iter(tables)

    def fitted(kernel, channels, *args, **kwargs):
        return Codebooks(channels, np.sort(np.atleast_2d(next(begun)), axis=1).astype("float32"))

    monkeypatch.setattr(training_on_centroids.Codebooks, "fitted", fitted)
    for library, model in ((tf_keras, old), (keras, new)):
        model.compile(optimizer(library), library.losses.SparseCategoricalCrossentropy(from_logits=True))
    callback = pk.ClusterCallback(clusters, gradients={"SUM": "sum", "AVG": "average"}[gradients], misfits="error")
    return old, new, callback


def wrapped_in(old):
    return [layer for layer in old.layers if "kernel" in getattr(layer, "cluster_centroids", {})]


def momentum(library):
    return library.optimizers.SGD(0.05, momentum=0.9)


def adam(library):
    return library.optimizers.Adam(0.01)


def rows_of(old, new, callback, epochs):
    """Centroids and weights of both after each epoch; the same batches in the same order."""
    x, y = data()
    rows = []
    wrapped, seen = wrapped_in(old), []

    class Keep(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            books = [one.table for one in callback._work._centroids.codebooks()]
            seen.append((books, [np.array(one) for one in new.trainable_weights]))

    new.fit(x, y, batch_size=16, epochs=epochs, shuffle=False, verbose=0, callbacks=[callback, Keep()])
    for tables, weights in seen:
        old.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
        theirs_tables = [np.sort(np.atleast_2d(one.cluster_centroids["kernel"].numpy()), axis=1) for one in wrapped]
        originals = [one.original_clusterable_weights["kernel"].numpy() for one in wrapped]
        rows.append((theirs_tables, originals, tables, [one for one in weights if one.ndim > 1]))
    return rows


FAMILY = {
    "dense, linear, sum, momentum": (dense, momentum, 4, "linear", "SUM"),
    "dense, density, average, Adam": (dense, adam, 5, "density", "AVG"),
    "convolutions, linear, sum, Adam": (convolutional, adam, 4, "linear", "SUM"),
}


@pytest.mark.parametrize("setting", FAMILY.values(), ids=list(FAMILY))
@pytest.mark.short(cases=2)
def test_weights_and_centroids_train_as_the_originals(monkeypatch, setting):
    build, optimizer, clusters, start, gradients = setting
    old, new, callback = twins_on_centroids(monkeypatch, build, optimizer, clusters, start, gradients)
    for tables_old, weights_old, tables, weights in rows_of(old, new, callback, epochs=3):
        for one, other in zip(tables_old, tables, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)
        for one, other in zip(weights_old, weights, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-5)
    stripped = theirs.strip_clustering(old)
    for one, other in zip(stripped.get_weights(), new.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-4)


# ---- what the original gets wrong ------------------------------------------------------------------------------------


def kernel_of(values):
    """A model of one Dense layer with this kernel."""
    model = keras.Sequential([keras.Input((values.shape[0],)), keras.layers.Dense(values.shape[1], name="only")])
    model.layers[0].kernel.assign(values)
    return model


def with_zeros(values, share=0.5):
    values[np.random.default_rng(3).uniform(size=values.shape) < share] = 0.0
    return values


def test_a_weight_that_is_alone_on_its_side_of_zero_becomes_no_zero():
    """The original shares its centroids by the number of weights on either side: one side may be left without."""
    values = with_zeros(np.abs(np.random.default_rng(2).normal(size=(12, 10))).astype("float32"))
    values[0, 0] = -0.5
    model = kernel_of(values)
    pk.cluster(model, 4, method="kmeans", correct_biases=False)
    found = np.array(model.layers[0].kernel)
    np.testing.assert_array_equal(found == 0, values == 0)
    start = clustering_centroids.LinearCentroidsInitialisation(values, 4, preserve_sparsity=True)
    centroids = np.asarray(start.get_cluster_centroids())
    theirs_found = centroids[np.abs(values[..., None] - centroids).argmin(axis=-1)]
    assert theirs_found[0, 0] == 0 != values[0, 0]


def convolution(values, data_format="channels_last", groups=1):
    channels = values.shape[2] * groups
    shape = (5, 5, channels) if data_format == "channels_last" else (channels, 5, 5)
    layer = keras.layers.Conv2D(values.shape[-1], values.shape[0], data_format=data_format, name="only")
    model = keras.Sequential([keras.Input(shape), layer])
    layer.kernel.assign(values)
    return model


def test_a_channel_of_zeros_stays_one_beside_others_of_all_clusters():
    """Per channel, the original makes a table of ragged rows, and fails."""
    values = np.random.default_rng(0).normal(size=(3, 3, 8, 4)).astype("float32")
    values[..., 1] = 0.0
    model = convolution(values)
    pk.cluster(model, 4, granularity="channel", method="kmeans", correct_biases=False)
    found = np.array(model.layers[0].kernel)
    assert [np.unique(found[..., channel]).size for channel in range(4)] == [4, 1, 4, 4]
    np.testing.assert_array_equal(found == 0, values == 0)


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_channels_are_the_output_channels_in_either_layout(data_format):
    """The original takes axis 1 of the kernel for channels_first, which is an axis of positions."""
    values = np.random.default_rng(0).normal(size=(3, 3, 8, 4)).astype("float32")
    model = convolution(values, data_format)
    pk.cluster(model, 4, granularity="channel", method="kmeans", correct_biases=False)
    found = np.array(model.layers[0].kernel)
    assert [np.unique(found[..., channel]).size for channel in range(4)] == [4] * 4


def test_a_convolution_of_one_position_keeps_its_clusters_per_channel():
    """The original gave each channel one value (its issue 979)."""
    values = np.random.default_rng(0).normal(size=(1, 1, 64, 4)).astype("float32")
    model = convolution(values)
    pk.cluster(model, 4, granularity="channel", method="kmeans", correct_biases=False)
    assert [np.unique(np.array(model.layers[0].kernel)[..., channel]).size for channel in range(4)] == [4] * 4


def test_fewer_weights_than_clusters_are_left_alone_and_named():
    values = np.random.default_rng(0).normal(size=(3, 2)).astype("float32")
    model = keras.Sequential(
        [keras.Input((40,)), keras.layers.Dense(3), keras.layers.Dense(2, name="small"), keras.layers.Dense(40)]
    )
    model.get_layer("small").kernel.assign(values)
    report = pk.cluster(model, 8, method="kmeans", correct_biases=False)
    np.testing.assert_array_equal(model.get_layer("small").kernel, values)
    assert "small/kernel" in {one.name for one in report.skipped}

"""pk.cluster: few values, zeros kept, outputs kept, and a model that is whole whatever happens."""

import json

import keras
import numpy as np
import pytest
from keras import layers as L
from networks import outputs

import prunekit as pk
from prunekit.reports import ClusterReport
from prunekit.techniques.cluster import weight_clustering

pytestmark = pytest.mark.every_backend

X = np.random.default_rng(7).normal(size=(160, 8, 8, 2)).astype("float32")
KERNELS = ["conv/kernel", "depthwise/kernel", "hidden/kernel", "head/kernel"]


def network():
    keras.utils.set_random_seed(3)
    x = keras.Input((8, 8, 2), name="x")
    y = L.Conv2D(8, 3, activation="relu", name="conv")(x)
    y = L.DepthwiseConv2D(3, name="depthwise")(y)
    y = L.ReLU(name="relu")(L.BatchNormalization(name="norm")(y))
    y = L.Dense(24, activation="relu", name="hidden")(L.Flatten(name="flat")(y))
    return keras.Model(x, L.Dense(5, name="head")(y), name="net")


def kernels(model):
    return {path: np.array(model.get_layer(path.split("/")[0]).kernel.numpy()) for path in KERNELS[:1] + KERNELS[2:]}


def output_error(model, before, inputs=X):
    return float(np.square(outputs(model, inputs)[0] - before[0]).sum() / np.square(before[0]).sum())


@pytest.mark.parametrize("granularity", ["tensor", "channel", 4])
def test_each_weight_has_as_many_values_as_asked_for(granularity):
    model = network()
    report = pk.cluster(model, 4, X, granularity=granularity)
    assert isinstance(report, ClusterReport) and report.method == "gptq"
    for name, kernel in kernels(model).items():
        run = {"tensor": kernel.shape[-1], "channel": 1, 4: 4}[granularity]
        parts = np.split(kernel, range(run, kernel.shape[-1], run), axis=-1)
        assert max(len(np.unique(part)) for part in parts) == 4, name
        (row,) = [row for row in report.weights if row.name == name]
        assert (row.values, row.codebooks) == (4, len(parts))
        # Two bits an entry, four floats of four bytes a codebook.
        assert row.bytes == -(-2 * kernel.size // 8) + 16 * len(parts)


def test_data_lose_less_than_none_and_than_the_nearest_values():
    before, errors = outputs(network(), X), []
    for data, options in ((X, {}), (None, {}), (None, {"method": "kmeans", "correct_biases": False})):
        model = network()
        pk.cluster(model, 4, data, **options)
        errors.append(output_error(model, before))
    assert errors[0] < 0.5 * min(errors[1:])


def test_centroids_fitted_to_the_outputs_beat_k_means_on_the_same_data():
    before, errors = outputs(network(), X), []
    for method in ("gptq", "kmeans"):
        model = network()
        pk.cluster(model, 4, X, method=method)
        errors.append(output_error(model, before))
    assert errors[0] < 0.5 * errors[1]


@pytest.mark.every_backend(cases=0)
def test_centroids_that_are_fitted_lose_less_than_those_of_k_means(monkeypatch):
    # Neighbouring inputs are alike, as those of pictures are.
    smooth = np.cumsum(np.cumsum(X, axis=1), axis=2) / 8
    before, errors = outputs(network(), smooth), []
    for _ in range(2):
        model = network()
        pk.cluster(model, 2, smooth)
        errors.append(output_error(model, before, smooth))
        monkeypatch.setattr(weight_clustering, "_refitted", lambda wanted, hessian, books, *rest: books)
    assert errors[0] < 0.95 * errors[1]


@pytest.mark.parametrize("data", [None, X], ids=["no data", "data"])
def test_zeros_stay_and_no_weight_becomes_one(data):
    model = network()
    pk.prune(model, 0.6, X)
    before = {name: kernel == 0 for name, kernel in kernels(model).items()}
    report = pk.cluster(model, 4, data)
    for name, kernel in kernels(model).items():
        np.testing.assert_array_equal(kernel == 0, before[name])
        assert len(np.unique(kernel)) <= 4
    clustered = {row.name: row.zeros for row in report.weights}
    assert clustered == {row.name: row.zeros for row in pk.inspect(model).weights if row.name in clustered}


def test_a_clustered_model_stays_as_it_is():
    model = network()
    pk.cluster(model, 4, method="kmeans", correct_biases=False)
    before = model.get_weights()
    pk.cluster(model, 4, method="kmeans", correct_biases=False)
    for new, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(new, old)


def test_clusters_by_patterns_and_what_stays_as_it_is():
    model, start = network(), kernels(network())
    report = pk.cluster(model, {"conv": "float", "head": 2}, X)
    assert {row.name: row.values for row in report.weights} == {
        "depthwise/kernel": 16,
        "hidden/kernel": 16,
        "head/kernel": 2,
    }
    np.testing.assert_array_equal(kernels(model)["conv/kernel"], start["conv/kernel"])
    assert "`clusters` leaves it in floating point" in {one.name: one.reason for one in report.skipped}["conv/kernel"]


def test_a_weight_that_would_not_become_smaller_is_named():
    model = network()
    report = pk.cluster(model, 16, X, granularity="channel")
    reasons = {one.name: one.reason for one in report.skipped}
    assert reasons["depthwise/kernel"] == (
        "8 codebooks of 16 values and the indices of 72 entries take 548 bytes, and the entries 288"
    )
    with pytest.raises(ValueError, match='conv/kernel does not become smaller.* Pass misfits="skip"'):
        pk.cluster(network(), 16, X, granularity="channel", misfits="error")
    with pytest.raises(ValueError, match="No weight becomes smaller by clusters"):
        pk.cluster(network(), 256, granularity="channel")


def test_the_report_says_what_was_done():
    model = network()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    report = pk.cluster(model, 8, (X, np.arange(160) % 5))
    before, after = report.bytes
    assert before == 4 * model.count_params()
    assert report.verdict() == (
        f"4 weights on codebooks of 8 values (gptq): {before:,} -> {after:,} bytes as indices and codebooks."
    )
    assert report.damage.examples == 160 and {one.name for one in report.damage.metrics} >= {"accuracy"}
    titles = [section.title for section in report.sections()]
    assert titles[-1] == "Clustered weights" and len(titles) == 2
    assert all(0 < row.entropy <= 3 and row.error < 0.2 for row in report.weights)
    values = json.loads(json.dumps(report.to_dict()))
    assert [row["name"] for row in values["weights"]] == KERNELS and values["weights"][0]["bytes"] == 86
    assert list(report.to_dataframe().index) == KERNELS
    assert "LiteRT on phones does not" in str(report.sections()[-1])


def test_the_optimum_is_at_least_as_near_as_the_iterations():
    errors = {}
    for centroids in ("optimum", "auto", "quantile"):
        report = pk.cluster(network(), 5, method="kmeans", correct_biases=False, centroids=centroids)
        errors[centroids] = [row.error for row in report.weights]
    for optimum, auto, quantile in zip(*errors.values(), strict=True):
        assert optimum <= min(auto, quantile) * (1 + 1e-6)
    assert errors["optimum"] != errors["quantile"]


def test_an_interruption_leaves_the_model_as_it_was():
    model = network()
    before = model.get_weights()

    def stop(done, total, name):
        assert (total, name) == (4, KERNELS[done - 1])
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pk.cluster(model, 4, X, progress=stop)
    for new, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(new, old)


def test_the_model_loads_without_prunekit_and_a_group_of_a_convolution_is_fitted(tmp_path):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 6, 4))
    model = keras.Model(inputs, L.Conv2D(8, 3, groups=2, name="grouped")(inputs))
    if keras.backend.backend() != "tensorflow":
        data = X[:, :6, :6].repeat(2, axis=-1)
    else:
        data = X[:, :6, :6].repeat(2, axis=-1) + 0.1 * np.random.default_rng(0).normal(size=(160, 6, 6, 4))
    report = pk.cluster(model, 4, data.astype("float32"))
    assert report.method == "gptq" and report.weights[0].error < 0.2
    model.save(tmp_path / "net.keras")
    stored = keras.saving.load_model(tmp_path / "net.keras")
    assert len(np.unique(stored.get_layer("grouped").kernel.numpy())) == 4


REFUSED = {
    "one cluster": (lambda m: pk.cluster(m, 1), ValueError, "an int from 2 to 256.* Received: 1"),
    "a text": (lambda m: pk.cluster(m, "8"), TypeError, "Received: '8'"),
    "bits in their place": (lambda m: pk.cluster(m, bits=4), TypeError, "Unknown option. Received: 'bits'"),
    "a granularity": (lambda m: pk.cluster(m, granularity="chanel"), ValueError, "Did you mean 'channel'"),
    "no channels": (lambda m: pk.cluster(m, granularity=0), ValueError, "granularity"),
    "a method": (lambda m: pk.cluster(m, method="gtpq"), ValueError, "Did you mean 'gptq'"),
    "centroids": (lambda m: pk.cluster(m, centroids="optimun"), ValueError, "Did you mean 'optimum'"),
    "no data": (lambda m: pk.cluster(m, method="gptq"), ValueError, 'method="gptq" reads calibration data'),
    "a pattern": (lambda m: pk.cluster(m, {"haed": 4}), ValueError, "Did you mean 'head'"),
    "a pattern of biases": (lambda m: pk.cluster(m, {"head/bias": 4}), ValueError, "must match a clustered weight"),
    "nothing left": (lambda m: pk.cluster(m, exclude="*"), ValueError, "no weights to cluster"),
    "data of another shape": (lambda m: pk.cluster(m, 4, X[:, :4]), ValueError, "calibration data of shape"),
}


@pytest.mark.one_backend
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_in_one_line(name):
    call, kind, message = REFUSED[name]
    model = network()
    before = model.get_weights()
    with pytest.raises(kind, match=message) as caught:
        call(model)
    assert "\n" not in str(caught.value)
    for new, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.one_backend
def test_weights_that_are_not_finite_or_on_grids_are_refused():
    model = network()
    model.get_layer("head").kernel.assign(np.full((24, 5), np.nan))
    with pytest.raises(ValueError, match="Received: NaN or infinite values in head/kernel"):
        pk.cluster(model, 4)
    model = network()
    pk.quantize(model, X, bits=4)
    with pytest.raises(ValueError, match="Clustering gives weights values between the steps.* Cluster first"):
        pk.cluster(model, 4)

"""Clusters after training: k-means, GPTQ with fitted centroids, and the starts of tensorflow-model-optimization."""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
from tensorflow_model_optimization.python.core.clustering.keras import clustering_centroids as centroids_of_tfmot

import prunekit as pk
from prunekit.techniques.cluster.codebooks import Channels, Codebooks
from prunekit.techniques.cluster.kmeans import kmeans
from studies import fashion
from studies.few_bits import FewBits
from studies.quantization import EXAMPLES, NETWORKS, RATE, Study
from studies.results import Results, measure_networks

CLUSTERS = (16, 8, 4, 2)
# Centroids without an iteration; k-means++ draws with a seed of its own.
STARTS = {
    "linear": centroids_of_tfmot.LinearCentroidsInitialisation,
    "density": centroids_of_tfmot.DensityBasedCentroidsInitialisation,
    "k-means++": centroids_of_tfmot.KmeansPlusPlusCentroidsInitialisation,
}
WAYS: dict[str, dict[str, Any]] = {
    "k-means": {"method": "kmeans", "correct_biases": False},
    "on synthetic inputs": {},
    "GPTQ": {"data": True},
    "GPTQ, per channel": {"data": True, "granularity": "channel"},
}
PAGE = Path("docs/measured/clusters.md")
HEAD = f"""# Measured: clusters after training

The networks are those of [quantization](quantization.md), without further training. Accuracies are on the 10,000 test
images; the error is the squared change of the outputs on them, relative to the variance of the outputs. {EXAMPLES:,}
training images are read, drawn with seed 0; one run each. The call: `pk.cluster(model, clusters, images)`; "k-means"
and "on synthetic inputs" read no data. `scripts/study clusters` makes this page.

Wanted on data: no loss with 16 clusters, at most 0.3 points with 8, at most 1 point with 4 per channel. With centroids
per tensor, 8 lose more on the inverted residuals, whose kernels differ most from channel to channel; per channel they
do not.

"""
SIGNALS = """
## Signal to noise of the weights

Squares of a weight's entries over the squared error, in decibels, of k-means above the best of the starts of
tensorflow-model-optimization (linear, density, k-means++), which runs no iteration before its training: least and
median of the layers.

| network | 16 | 8 | 4 | 2 |
|---|---:|---:|---:|---:|
"""

OPTIMUM, WITH_OPTIMUM = "optimum", ("mnist", "resnet8", "mobilenet")
REASON = """
2.5 were wanted, and are not possible: the centroids of least squared error, found by dynamic programming, are at most
{:.1g} decibels better than those of k-means (all kernels of three of the networks). Data help, as the first table
shows.
"""


def signal(kernel: np.ndarray, centroids: np.ndarray) -> float:
    """Decibels of a kernel on its nearest centroids."""
    wide = kernel.ravel().astype("float64")
    error = np.abs(wide[:, None] - np.unique(centroids)).min(axis=1)
    return float(10 * np.log10(np.square(wide).sum() / max(np.square(error).sum(), 1e-30)))


TRAINED_CLUSTERS = (4, 2)
TRAINED = ", trained"
TRAINING = f"""
## One epoch of training

Accuracy after one epoch with Adam and a learning rate that falls from {RATE:g} to 0 by half a cosine. "as tfmot": from
the centroids that tensorflow-model-optimization starts with by default (k-means++ seeds), with sums of gradients
(`pk.ClusterCallback(4, gradients="sum")` from its centroids trains as it does: `tests/parity/test_tfmot_clusters.py`).
"on data": `pk.ClusterCallback(4, images)`.

| network (dense) | clusters | as tfmot | without data | on data | soft, on data |
|---|---:|---:|---:|---:|---:|
"""


@contextlib.contextmanager
def starting_as_tfmot() -> Iterator[None]:
    """Callbacks begin with the k-means++ seeds of tensorflow-model-optimization."""

    def fitted(kernel: np.ndarray, channels: Channels, clusters: int, *_: Any, **__: Any) -> Codebooks:
        start = STARTS["k-means++"](kernel, clusters).get_cluster_centroids()
        return Codebooks(channels, np.unique(np.asarray(start, "float32"))[None])

    with mock.patch.object(Codebooks, "fitted", fitted):
        yield


class Clusters(FewBits):
    """Measures one network."""

    def signals(self) -> dict[str, Any]:
        """Decibels of k-means above the best start, by the number of clusters: one for each kernel."""
        kernels = [np.asarray(one) for one in self._weights if one.ndim > 1 and one.size > 4 * max(CLUSTERS)]
        found: dict[str, Any] = {}
        for clusters in CLUSTERS:
            rows = []
            for kernel in kernels:
                starts = [
                    signal(kernel, np.asarray(start(kernel, clusters).get_cluster_centroids()))
                    for start in STARTS.values()
                ]
                rows.append(signal(kernel, kmeans(kernel, clusters)) - max(starts))
            found[str(clusters)] = rows
        return found

    def started(self, clusters: int) -> dict[str, dict[str, float]]:
        """Error and accuracy with the nearest centroids of each start."""
        found = {}
        for name, start in STARTS.items():
            values = []
            for one in self._weights:
                if one.ndim > 1 and one.size > clusters:
                    table = np.unique(np.asarray(start(one, clusters).get_cluster_centroids(), "float32"))
                    books = Codebooks(Channels(one.shape, ()), table[None])
                    one = books.values(np.intp(0), books.number_of(one))
                values.append(one)
            self._model.set_weights(values)
            found[name] = self._measured()
        return found

    def clustered(self, clusters: int, options: dict[str, Any]) -> dict[str, float]:
        """Error and accuracy of `pk.cluster`."""
        self._model.set_weights(self._weights)
        given = {name: value for name, value in options.items() if name != "data"}
        report = pk.cluster(self._model, clusters, self.images if options.get("data") else None, **given)
        return self._measured() | {"bytes": report.bytes[1], "float": report.bytes[0]}

    def run(self) -> dict[str, Any]:
        """All figures of the network."""
        found: dict[str, Any] = {"signals": self.signals(), "dense": float(self._dense_accuracy())}
        for clusters in CLUSTERS:
            found[f"{clusters} tfmot"] = self.started(clusters)
            found |= {f"{clusters} {way}": self.clustered(clusters, options) for way, options in WAYS.items()}
        return found

    def trained(self, clusters: int) -> dict[str, float]:
        """Accuracy after an epoch on centroids, by the way to begin and to train."""
        found = {}
        ways: dict[str, tuple[bool, dict[str, Any]]] = {
            "tfmot": (False, {"gradients": "sum"}),
            "callback": (False, {}),
            "cluster": (True, {}),
            "soft": (True, {"assignment": "soft"}),
        }
        for name, (first, options) in ways.items():
            self._model.set_weights(self._weights)
            with starting_as_tfmot() if name == "tfmot" else contextlib.nullcontext():
                self._fit(pk.ClusterCallback(clusters, self.images if first else None, **options))
            found[name] = self._measured()["accuracy"]
        return found

    def _fit(self, callback: Any) -> None:
        steps = -(-len(self.train[1]) // fashion.BATCH)
        fashion.compile_falling(keras, self._model, RATE, steps)
        keras.utils.set_random_seed(0)
        self._model.fit(*self.train, batch_size=fashion.BATCH, epochs=1, callbacks=[callback], verbose=2)

    def _dense_accuracy(self) -> float:
        self._model.set_weights(self._weights)
        return self._measured()["accuracy"]


def short_of_optimum() -> float:
    """Returns the most decibels by which the centroids of least squared error are better than those of k-means."""
    found = []
    for name in WITH_OPTIMUM:
        kernels = [one for one in Study(name).dense().get_weights() if one.ndim > 1 and one.size > 4 * max(CLUSTERS)]
        for kernel, clusters in itertools.product(map(np.asarray, kernels), CLUSTERS):
            best = signal(kernel, kmeans(kernel, clusters, start="optimum"))
            found.append(best - signal(kernel, kmeans(kernel, clusters)))
    return max(found)


def page(results: Results) -> str:
    """Returns the page as Markdown."""
    ways = list(WAYS)
    lines = [
        f"| network (dense) | clusters | best start of tfmot | {' | '.join(ways)} | bytes |",
        f"|---|---:|{'---:|' * (len(ways) + 2)}",
    ]
    signals = []
    for _, title, found in results.of(NETWORKS):
        for clusters in CLUSTERS:
            best = min(found[f"{clusters} tfmot"].values(), key=lambda one: one["error"])
            cells = [
                f"{one['accuracy']:.4f} ({one['error']:.2g})"
                for one in (best, *(found[f"{clusters} {way}"] for way in ways))
            ]
            size = found[f"{clusters} GPTQ"]
            lines.append(
                f"| {title} ({found['dense']:.4f}) | {clusters} | {' | '.join(cells)} | "
                f"{size['bytes']:,} of {size['float']:,} |"
            )
        cells = [
            f"{min(found['signals'][str(one)]):.1f}, {np.median(found['signals'][str(one)]):.1f}" for one in CLUSTERS
        ]
        signals.append(f"| {title} | {' | '.join(cells)} |")
    trained = []
    for name, title in NETWORKS.items():
        for clusters, row in results.values.get(f"{name}{TRAINED}", {}).items():
            dense = results.values[name]["dense"]
            cells = " | ".join(f"{row[one]:.4f}" for one in ("tfmot", "callback", "cluster", "soft"))
            trained.append(f"| {title} ({dense:.4f}) | {clusters} | {cells} |")
    head = "## Accuracy (error of the outputs)\n\n"
    tail = "\nBytes: of all weights, with indices and codebooks per tensor in the place of the clustered ones.\n"
    return (
        HEAD
        + head
        + "\n".join(lines)
        + "\n"
        + tail
        + TRAINING
        + "\n".join(trained)
        + "\n"
        + SIGNALS
        + "\n".join(signals)
        + "\n"
        + (REASON.format(results.values[OPTIMUM]) if OPTIMUM in results.values else "")
    )


def measured(run: str) -> Any:
    """Returns the figures of a network, of its training, or of the optimum."""
    if run == OPTIMUM:
        return short_of_optimum()
    network = Clusters(run.removesuffix(TRAINED))
    if run.endswith(TRAINED):
        return {str(clusters): network.trained(clusters) for clusters in TRAINED_CLUSTERS}
    return network.run()


if __name__ == "__main__":
    runs = [*NETWORKS, *(f"{name}{TRAINED}" for name in NETWORKS), OPTIMUM]
    measure_networks(__doc__, runs, PAGE, measured, page)

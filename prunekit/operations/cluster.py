"""cluster: gives the weights of a trained model few different values, in place."""

from __future__ import annotations

from typing import Any, Unpack

from prunekit.core.data.calibration import CheckedData
from prunekit.core.layerwise.layerwise import Progress
from prunekit.core.outputs.baseline import Baseline
from prunekit.keyword_options import keyword_options
from prunekit.sparsity.arguments import MEMORY, check_functions, number_of_bytes
from prunekit.techniques.cluster.after_training import cluster_model
from prunekit.techniques.cluster.cluster_report import ClusterReport
from prunekit.techniques.cluster.options import ClusterKeywords, ClusterOptions, Clusters
from prunekit.techniques.quantize.rounding.simulation import check_computes_in_floats


@keyword_options(ClusterOptions, ClusterKeywords)
def cluster(
    model: Any,
    clusters: Clusters = 16,
    data: Any = None,
    *,
    memory: float | str = MEMORY,
    progress: Progress | None = None,
    **options: Unpack[ClusterKeywords],
) -> ClusterReport:
    """Gives the weights of a trained model few different values, in place; returns a `ClusterReport`.

    Zeros stay zero, and no other entry becomes zero. The model stays a Keras model that loads without prunekit. An
    interruption or an error leaves it as it was. Training afterwards moves the weights off their centroids.

    Args:
        model: A built Keras model.
        clusters: Largest number of different values of a weight, zero included, 2 to 256; or clusters by patterns of
            layers and weights, {"head": 64, "block_*": "float"}.
        data: Calibration data, as `pk.prune` takes them. None = synthetic inputs (random signals), which lose more than
            data, and far less than the nearest values.
        memory: Largest number of bytes of activations that are kept between layers; with less, those of wide layers are
            computed again, which takes time and changes no result.
        progress: Told of each weight: (done, total, name).
        **options: `granularity` ("tensor", "channel" or a number of channels), `method` ("auto", "kmeans", "gptq"),
            `centroids` ("auto", "optimum", "quantile"), `correct_biases`, `include`, `exclude`, `misfits`: see
            `pk.ClusterOptions`.

    Raises:
        ValueError: An option has a wrong value; data are not finite or do not fit; a pattern matches nothing.
        TypeError: `model` is not a Keras 3 model; an option is unknown.

    Sources: Han et al. 2016, arXiv:1510.00149 (clusters); Frantar et al. 2022, arXiv:2210.17323 (GPTQ), with centroids
        in the place of a grid.
    """
    check_functions(progress=progress)
    chosen, memory = ClusterOptions(clusters, **options), number_of_bytes("memory", memory)
    check_computes_in_floats(model)
    if data is None:
        return cluster_model(model, chosen, progress=progress, memory=memory)
    checked = CheckedData(model, data)
    baseline = Baseline(model, checked)
    report = cluster_model(model, chosen, checked, progress, memory)
    remedy = "Take more clusters, a codebook for each channel, or exclude the layers of large errors."
    return baseline.with_damage(report, remedy)

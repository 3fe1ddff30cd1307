"""Clusters a trained model without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prunekit.anatomy.layers.model_weights import quantized_by_keras, weights_in
from prunekit.anatomy.layers.targets import Target, check_finite, find_targets, values_by_name
from prunekit.anatomy.records.reports import Skipped
from prunekit.core.data.calibration import batches_of
from prunekit.core.data.synthetic_inputs import stand_in
from prunekit.core.layerwise.layerwise import LayerwiseRepair, Progress
from prunekit.core.runtime.kept_grids import check_off_grids
from prunekit.core.runtime.variable_values import assigned
from prunekit.core.statistics.layer_products import unfitted
from prunekit.sparsity.arguments import MEMORY
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.cluster.cluster_report import ClusteredWeight, ClusterReport, stored_bytes
from prunekit.techniques.cluster.codebooks import Channels, Codebooks, entropy
from prunekit.techniques.cluster.options import ClusterOptions
from prunekit.techniques.cluster.weight_clustering import WeightClusterer

# Roles of the weights that are clustered.
_ROLES = ("kernel", "recurrent_kernel", "depthwise_kernel", "embedding")


@dataclass(frozen=True, eq=False)
class Clusterable:
    """A weight that is clustered.

    Attributes:
        target: The weight.
        channels: Which entries share a codebook.
        clusters: Largest number of values in a codebook.
    """

    target: Target
    channels: Channels
    clusters: int


def clusterable(model: Any, options: ClusterOptions) -> tuple[list[Clusterable], list[Skipped]]:
    """Returns the weights that are clustered, and the others with reasons.

    Args:
        model: A built model.
        options: Which weights, and how many clusters.

    Raises:
        TypeError: `model` is not a Keras 3 model.
        ValueError: The model is not built or Keras quantized it; a pattern matches nothing, or nothing is left; a
            weight is a misfit, and these are errors.
    """
    others = quantized_by_keras(model)
    if others:
        raise ValueError(
            "Clusters are values in floating point. Received: layers that Keras has quantized already: "
            f"{', '.join(others[:5])}. Cluster the model as it was before."
        )
    targets, skipped = find_targets(
        model, options.include, options.exclude, also=("depthwise_kernel", "embedding"), verb="cluster"
    )
    targets = [target for target in targets if target.role in _ROLES]
    named = values_by_name(model, targets, options.patterns, "clusters", verb="cluster")
    found: list[Clusterable] = []
    for target in targets:
        clusters = named.get(target.name, options.default_clusters)
        if clusters is None:
            skipped.append(Skipped(target.name, "`clusters` leaves it in floating point"))
            continue
        channels = Channels(tuple(target.shape), tuple(target.out_axes), options.run)
        bytes_after, bytes_before = stored_bytes(target.size, clusters, channels.count), 4 * target.size
        if bytes_after < bytes_before:
            found.append(Clusterable(target, channels, clusters))
            continue
        reason = (
            f"{channels.count} codebook{'s' if channels.count > 1 else ''} of {clusters} values and the indices of "
            f"{target.size} entries take {bytes_after:,} bytes, and the entries {bytes_before:,}"
        )
        if options.misfits == "error":
            raise ValueError(
                f'The weight {target.name} does not become smaller: {reason}. Pass misfits="skip", fewer clusters, or '
                "fewer codebooks."
            )
        skipped.append(Skipped(target.name, reason))
    # Biases and normalizations are few numbers.
    usual = {weight.name for weight in weights_in(model) if weight.spec.role in ("bias", "normalization")}
    skipped = [one for one in skipped if one.name not in usual]
    if not found:
        raise ValueError("No weight becomes smaller by clusters. Pass fewer `clusters`, or granularity='tensor'.")
    return found, skipped


def cluster_model(
    model: Any, options: ClusterOptions, data: Any = None, progress: Progress | None = None, memory: float = MEMORY
) -> ClusterReport:
    """Puts the weights of a model on centroids, in place.

    Zeros stay zero, and no other entry becomes zero. An interruption or an error leaves the model as it was.

    Args:
        model: A built model.
        options: What is clustered, and how.
        data: Calibration data, as `pk.prune` takes them.
        progress: Told of each step: (done, total, name).
        memory: Largest number of bytes of activations that are kept between layers.

    Raises:
        TypeError, ValueError: As for `pk.cluster`.
    """
    found, skipped = clusterable(model, options)
    check_off_grids(model, "Clustering", "Cluster first, then quantize.")
    check_finite([one.target for one in found])
    notes: list[str] = []
    standing_in = stand_in(model) if data is None and options.may_stand_in else None
    inputs = data if standing_in is None else standing_in.inputs
    method, _ = options.with_data(inputs)
    if inputs is None:
        notes += [] if standing_in is None else [standing_in.note]
        values, rows = _nearest(found, options)
    elif standing_in is None:
        values, rows = _on_data(model, found, options, inputs, progress, memory)
    else:
        try:
            with standing_in.renormalization(model) as statistics:
                values, rows = _on_data(model, found, options, inputs, progress, memory)
                values = [(variable, statistics.on_data(id(variable), value)) for variable, value in values]
            notes.append(standing_in.note)
        except ValueError as error:
            # Nobody asked for synthetic inputs: what cannot be fitted to them takes the nearest centroids.
            notes.append(standing_in.failed(error).note)
            method, (values, rows) = "kmeans", _nearest(found, options)
    with assigned(values):
        return ClusterReport(
            model_name=model.name,
            method=method,
            weights=tuple(rows),
            skipped=tuple(skipped),
            parameters=model.count_params(),
            notes=tuple(notes),
        )


Values = list[tuple[Any, Any]]


def _nearest(found: Sequence[Clusterable], options: ClusterOptions) -> tuple[Values, list[ClusteredWeight]]:
    """Returns new values and rows of the report for the nearest centroids."""
    values: Values = []
    rows = []
    for one in found:
        weight = array_of(one.target.variable).astype("float32")
        books = Codebooks.fitted(weight, one.channels, one.clusters, start=options.centroids)
        new = books.nearest(weight)
        values.append((one.target.variable, new))
        rows.append(row_of(one, new, books, relative_change(weight, new)))
    return values, rows


def _on_data(
    model: Any,
    found: Sequence[Clusterable],
    options: ClusterOptions,
    data: Any,
    progress: Progress | None,
    memory: float,
) -> tuple[Values, list[ClusteredWeight]]:
    """Clusters layer after layer, each on the inputs that the clustered layers before it compute."""
    method, corrects = options.with_data(data)
    lacking = unfitted([one.target for one in found])
    fitted = [one for one in found if one.target.name not in lacking]
    values, rows = _nearest([one for one in found if one.target.name in lacking], options)
    clusterer = WeightClusterer(
        [one.target for one in fitted],
        [one.channels for one in fitted],
        [one.clusters for one in fitted],
        method=method,
        corrects_biases=corrects,
        start=options.centroids,
    )
    work = LayerwiseRepair(model, [one.target for one in fitted], clusterer, progress, values=values, memory=memory)
    work.run([inputs for inputs, _ in batches_of(data)])
    new = {id(variable): array_of(value) for variable, value in work.values}
    made = {row.name: row for row in rows}
    for one in fitted:
        key = id(one.target.variable)
        value = new.get(key, array_of(one.target.variable)).astype("float32")
        made[one.target.name] = row_of(one, value, clusterer.codebooks[key], work.errors[one.target.name].error)
    return work.values, [made[one.target.name] for one in found]


def relative_change(weight: np.ndarray, new: np.ndarray) -> float:
    """Returns the squared change of a weight, relative to its squares."""
    energy = float(np.square(weight, dtype="float64").sum())
    return float(np.square(weight - new, dtype="float64").sum()) / energy if energy else 0.0


def row_of(one: Clusterable, value: np.ndarray, books: Codebooks, error: float) -> ClusteredWeight:
    """Returns the row of the report for a weight on centroids."""
    zeros = int(value.size - np.count_nonzero(value))
    values = int(np.isfinite(books.table).sum(axis=1).max()) + bool(zeros)
    return ClusteredWeight(
        one.target.name, tuple(one.target.shape), values, one.channels.count, zeros, entropy(value), error
    )

"""Reads the layers, masks, clusters and ranges in the layer wrappers of tensorflow-model-optimization."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prunekit.core.runtime import patching
from prunekit.interop.tfmot import legacy
from prunekit.interop.tfmot.layers import NotCarried

_CLUSTERS = ("ClusterWeights", "ClusterWeightsMHA", "ClusterWeightsRNN")
_QUANTIZERS = ("QuantizeWrapper", "QuantizeWrapperV2")


@dataclass(frozen=True, eq=False)
class Pruned:
    """One pruned weight: legacy variable, mask (True = kept), and threshold of the last mask update."""

    variable: Any
    mask: np.ndarray
    threshold: float


@dataclass(frozen=True, eq=False)
class Wrapping:
    """Contents of a wrapper.

    Attributes:
        layer: tf_keras layer inside the wrapper.
        kind: "pruned", "clustered" or "quantized".
        variables: Variables that contain the layer's weights; None means the layer's own weights.
        masks: Pruned weights with their masks.
        step: Number of training forward passes that a pruning wrapper counted; None for other wrappers.
        settings: Pruning wrapper's `pruning_schedule`, `block_size`, `block_pooling_type` and `sparsity_m_by_n`.
        clusters: Number of clusters; 0 if the layer is not clustered.
        ranges: "LAYER/NAME" of a fake quantization -> (lowest, highest) of its range, arrays.
    """

    layer: Any
    kind: str
    variables: Any = None
    masks: tuple[Pruned, ...] = ()
    step: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    clusters: int = 0
    ranges: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


def wrapping(layer: Any) -> Wrapping | None:
    """Returns the contents of the wrapper `layer`; None if `layer` is not a wrapper."""
    kind = _kind(layer)
    if kind == "PruneLowMagnitude":
        return _pruned(layer)
    if kind in _CLUSTERS:
        return _clustered(layer)
    if kind in _QUANTIZERS:
        return Wrapping(layer.layer, "quantized", variables=layer.weights, ranges=_ranges(layer, layer.layer.name))
    if kind == "QuantizeLayer":
        return Wrapping(layer, "quantized", ranges=_ranges(layer, layer.name))
    return None


def passes_through(layer: Any) -> bool:
    """Returns True if a layer is an input, or returns its input unchanged except for fake quantization."""
    return _kind(layer) == "QuantizeLayer" or type(layer).__name__ == "InputLayer"


def bare_activation(activation: Any) -> Any:
    """Returns the original activation that a quantization wrapper has replaced; other activations unchanged."""
    if type(activation).__name__ == "QuantizeAwareActivation":
        activation = activation.activation
    if type(activation).__name__ == "NoOpActivation":
        return legacy.tf_keras().activations.linear
    return activation


@contextlib.contextmanager
def without_rounding(model: Any) -> Iterator[None]:
    """Context manager in which eager calls of a quantization-aware model compute without rounding."""
    with contextlib.ExitStack() as stack:
        for layer in model._flatten_layers():
            if _kind(layer) == "QuantizeLayer":
                stack.enter_context(patching.shadowed(layer, "quantizer", None))
            elif _kind(layer) in _QUANTIZERS:
                stack.enter_context(patching.shadowed(layer, "_make_quantizer_fn", lambda _q, x, *_: lambda: x))
                for activation in layer._quantize_activations:
                    stack.enter_context(patching.shadowed(activation, "quantizer", lambda x, *_, **__: x))
        yield


def _kind(layer: Any) -> str:
    """Returns the name of the layer's tensorflow-model-optimization class; empty for other layers."""
    theirs = (base for base in type(layer).__mro__ if base.__module__.startswith("tensorflow_model_optimization."))
    return getattr(next(theirs, None), "__name__", "")


def _ranges(layer: Any, name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    found = {variable.name.split("/")[-1].split(":")[0]: variable.numpy() for variable in layer.weights}
    pairs = {low.removesuffix("_min"): low for low in found if low.endswith("_min")}
    return {
        f"{name}/{what}": (found[low], found[f"{what}_max"]) for what, low in pairs.items() if f"{what}_max" in found
    }


def _pruned(layer: Any) -> Wrapping:
    masks = tuple(
        Pruned(variable, mask.numpy().astype(bool), float(threshold.numpy()))
        for variable, mask, threshold in layer.pruning_vars
    )
    names = ("pruning_schedule", "block_size", "block_pooling_type", "sparsity_m_by_n")
    settings = {name: getattr(layer, name, None) for name in names}
    return Wrapping(layer.layer, "pruned", masks=masks, step=int(layer.pruning_step.numpy()), settings=settings)


def _clustered(layer: Any) -> Wrapping:
    if type(layer).__name__ != "ClusterWeights":
        raise NotCarried(f"{layer.layer.name!r} ({type(layer.layer).__name__}: clustered, and more than one matrix)")
    if layer.preserve_sparsity:
        _restore_zeros(layer)
    layer.update_clustered_weights_associations()
    # The wrapper keeps the trained variable; the layer computes with a clustered tensor in place of the variable.
    variables = [
        _Clustered(original, layer.get_weight_from_layer(name))
        for name, original in layer.original_clusterable_weights.items()
    ]
    clustered = {id(one.original) for one in variables}
    rest = [variable for variable in layer.layer.weights if id(variable) not in clustered]
    clusters = layer.number_of_clusters if variables else 0
    return Wrapping(layer.layer, "clustered", variables=[*rest, *variables], clusters=clusters)


class _Clustered:
    """A weight with its clustered values, under the name of the trained variable."""

    def __init__(self, original: Any, values: Any):
        self.original = original
        self.name = original.name
        self.shape = original.shape
        self._values = values

    def numpy(self) -> np.ndarray:
        return self._values.numpy()


def _restore_zeros(layer: Any) -> None:
    """Restores the masks of a clustering wrapper that preserves sparsity.

    No file contains the masks: loading derives them from the random weights of the new model. The file contains the
    cluster of each weight, and one cluster is zero.
    """
    import tensorflow as tf

    for name, indices in layer.pulling_indices.items():
        zero = tf.argmin(tf.abs(layer.cluster_centroids[name]), axis=-1)
        layer.zero_idx[name] = zero
        with contextlib.suppress(KeyError):
            weight = layer.original_clusterable_weights[name]
            values = layer.clustering_algorithms[name].get_clustered_weight(indices, weight)
            pinned = tf.reduce_min(tf.abs(layer.cluster_centroids[name]))
            layer.sparsity_masks[name] = tf.cast(tf.abs(values) > pinned, weight.dtype)

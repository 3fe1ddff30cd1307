"""Clustered and quantization-aware models of tensorflow-model-optimization, without their wrappers."""

import keras
import legacy_models as old
import numpy as np
import pytest
from keras import ops
from legacy_models import L, answers, keras2, saved, tfmot, their_noise
from tensorflow_model_optimization.python.core.quantization.keras.collab_opts.cluster_preserve import (
    default_8bit_cluster_preserve_quantize_scheme as cluster_preserving,
)
from tensorflow_model_optimization.python.core.quantization.keras.collab_opts.prune_preserve import (
    default_8bit_prune_preserve_quantize_scheme as prune_preserving,
)

from prunekit.interop.tfmot import read_model

clustering = tfmot.clustering.keras


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    """A quantization-aware network, trained, and its three files."""
    folder = tmp_path_factory.mktemp("rounded")
    with their_noise():
        model = old.trained(tfmot.quantization.keras.quantize_model(old.small_network()))
    return model, {kind: saved(model, folder, name) for kind, name in old.FORMATS.items()}


@pytest.fixture(scope="module")
def clustered(tmp_path_factory):
    """A clustered network, trained, and its three files."""
    folder = tmp_path_factory.mktemp("clustered")
    with their_noise():
        model = old.trained(clustering.cluster_weights(old.small_network(), number_of_clusters=4))
    return model, {kind: saved(model, folder, name) for kind, name in old.FORMATS.items()}


@pytest.mark.parametrize("kind", old.FORMATS)
@pytest.mark.short(cases=2)
def test_a_clustered_model_has_the_weights_of_strip_clustering(clustered, kind):
    model, files = clustered
    with their_noise():
        stripped = clustering.strip_clustering(model)
    converted = read_model(files[kind])
    assert converted.clusters == {"conv": 4, "pointwise": 4, "classes": 4} and converted.masks == {}
    for name in converted.clusters:
        kernel = ops.convert_to_numpy(converted.model.get_layer(name).kernel)
        np.testing.assert_array_equal(kernel, stripped.get_layer(name).kernel.numpy())
        assert len(np.unique(kernel)) <= 4
    np.testing.assert_allclose(answers(converted.model), answers(stripped), atol=1e-6)
    assert any("the clustering of 'conv': its weights are in 4 clusters" in line for line in converted.not_carried)


def test_zeros_that_clustering_preserved_are_zero_although_the_file_has_no_mask(tmp_path):
    network = old.small_network()
    kernel = network.get_layer("classes").kernel
    zeros = np.arange(kernel.shape.num_elements()).reshape(kernel.shape) % 2 == 0
    kernel.assign(np.where(zeros, 0, kernel.numpy()))
    from tensorflow_model_optimization.python.core.clustering.keras.experimental import cluster

    with their_noise():
        model = old.trained(cluster.cluster_weights(network, number_of_clusters=5, preserve_sparsity=True))
        converted = read_model(saved(model, tmp_path, "sparse.h5"))
        stripped = clustering.strip_clustering(model)
    ours = ops.convert_to_numpy(converted.model.get_layer("classes").kernel)
    assert (ours[zeros] == 0).all()
    np.testing.assert_array_equal(ours, stripped.get_layer("classes").kernel.numpy())


@pytest.mark.parametrize("kind", old.FORMATS)
@pytest.mark.short(cases=2)
def test_a_quantization_aware_model_has_its_float_weights_and_names_its_ranges(rounded, kind):
    """tf_keras itself cannot load the `.keras` file."""
    model, files = rounded
    converted = read_model(files[kind])
    inner = {weight.name.split(":")[0]: weight.numpy() for weight in model.weights}
    for layer, names in {"conv": ["kernel", "bias"], "bn": ["gamma", "moving_variance"], "classes": ["kernel"]}.items():
        for name in names:
            ours = ops.convert_to_numpy(getattr(converted.model.get_layer(layer), name))
            np.testing.assert_array_equal(ours, inner[f"{layer}/{name}"])
    depthwise = ops.convert_to_numpy(converted.model.get_layer("depthwise").kernel)
    np.testing.assert_array_equal(depthwise, inner["depthwise/depthwise_kernel"])
    low, high = converted.ranges["classes/kernel"]
    assert (low, high) == (inner["quant_classes/kernel_min"], inner["quant_classes/kernel_max"])
    assert "quantize_layer/quantize_layer" in converted.ranges and "add/output" in converted.ranges
    assert converted.difference < 1e-6, "compared without rounding"
    assert any(f"classes/kernel from {low:.6g} to {high:.6g}" in line for line in converted.not_carried)
    assert any("rounding of fake quantization: without it outputs differ by" in line for line in converted.not_carried)
    assert [layer.name for layer in converted.model.layers][:2] == ["image", "conv"]
    assert converted.model.get_layer("classes").activation is keras.activations.softmax


def test_reading_a_live_quantization_aware_model_leaves_it_as_it_was(rounded):
    model, _ = rounded
    before = answers(model)
    read_model(model)
    np.testing.assert_array_equal(answers(model), before)


def _recurrent(x):
    return L.LSTM(3, name="lstm")(x)


def _attending(x):
    return L.MultiHeadAttention(2, 3, name="attention")(x, x)


@pytest.mark.parametrize("kind", ["live", "h5"])
@pytest.mark.parametrize("layer", [_recurrent, _attending])
def test_clustered_layers_of_several_matrices_are_refused(layer, kind, tmp_path):
    inputs = keras2.Input((5, 4))
    with their_noise():
        model = clustering.cluster_weights(keras2.Model(inputs, layer(inputs), name="old"), number_of_clusters=3)
    source = model if kind == "live" else saved(model, tmp_path, old.FORMATS[kind])
    with pytest.raises(
        ValueError, match=r"cannot be converted to Keras 3: .*clustered, and more than one matrix"
    ) as error:
        read_model(source)
    assert "\n" not in str(error.value)


def preserving(scheme):
    """A dense network with every other weight of "classes" zero, trained quantization-aware by a scheme; the zeros."""
    network = old.dense_network()
    kernel = network.get_layer("classes").kernel
    zeros = np.arange(48).reshape(8, 6) % 2 == 0
    kernel.assign(np.where(zeros, 0, kernel.numpy()))
    quantization = tfmot.quantization.keras
    with their_noise():
        return old.trained(quantization.quantize_apply(quantization.quantize_annotate_model(network), scheme)), zeros


def test_pruning_preserving_quantization_is_read_as_quantization_and_the_zeros_are_there(tmp_path):
    model, zeros = preserving(prune_preserving.Default8BitPrunePreserveQuantizeScheme())
    for name in ("model.h5", "model.keras"):
        converted = read_model(saved(model, tmp_path, name))
        kernel = ops.convert_to_numpy(converted.model.get_layer("classes").kernel)
        np.testing.assert_array_equal(kernel == 0, zeros)
        assert "classes/kernel" in converted.ranges


def test_cluster_preserving_quantization_is_read_from_a_saved_model_alone(tmp_path):
    model, _ = preserving(cluster_preserving.Default8BitClusterPreserveQuantizeScheme())
    inner = {weight.name.split(":")[0]: weight.numpy() for weight in model.weights}
    converted = read_model(saved(model, tmp_path, "model"))
    kernel = ops.convert_to_numpy(converted.model.get_layer("classes").kernel)
    np.testing.assert_array_equal(kernel, inner["classes/kernel"])
    assert any(line.startswith("the state of the optimizer Adam") for line in converted.not_carried)
    for name, words in (("model.h5", "Weight count mismatch"), ("model.keras", "Save the model as a SavedModel")):
        with pytest.raises(ValueError, match=words) as error:
            read_model(saved(model, tmp_path, name))
        assert "\n" not in str(error.value)

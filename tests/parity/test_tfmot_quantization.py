"""Quantization-aware training by tensorflow-model-optimization on tf_keras, and by prunekit on Keras 3."""

import keras
import numpy as np
import pytest
import tf_keras
from backends import tensorflow_only
from quantized_networks import NETWORKS
from quantized_twins import (
    HELD_OUT,
    batches,
    by_original,
    by_prunekit,
    kernels,
    mobile,
    plain,
    preserving,
    pruned,
    scores,
    split,
    trained,
)
from rounded_places import differences, original_places, own_places, quantized_pair, quantizers_in, theirs

import prunekit as pk
from prunekit.techniques.quantize.grids.grids import IntegerFormat
from prunekit.techniques.quantize.options import QuantizationOptions

pytestmark = tensorflow_only


@pytest.mark.parametrize("build, expected", NETWORKS.values(), ids=list(NETWORKS))
def test_the_same_weights_and_tensors_are_rounded_except_where_a_reason_is_given(build, expected):
    old, new = original_places(build), own_places(build)
    assert differences(old, new) == {name: pair for reason in expected for name, pair in reason.items()}
    assert {name for name in new if name in old} and len(new) >= 3


def test_codes_are_of_the_same_kind():
    weights, tensors = set(), set()
    for build, _ in NETWORKS.values():
        for _, rounded, *others in quantizers_in(quantized_pair(build)[1]):
            weights |= {(one.num_bits, one.symmetric, one.narrow_range) for _, one, _ in rounded}
            tensors |= {(one.num_bits, one.symmetric, one.narrow_range) for each in others for one in each}
    assert (weights, tensors) == ({(8, True, True)}, {(8, False, False)})
    options = QuantizationOptions()
    codes = IntegerFormat(options.default_bits)
    for form, (lowest, highest) in ((codes, (-127, 127)), (options.activation_format, (-128, 127))):
        assert (form.bits, form.symmetric, form.lowest, form.highest) == (8, lowest == -127, lowest, highest)


@pytest.mark.parametrize("name", ["convolution, normalization, ReLU", "residual", "branches"])
def test_kernels_with_the_same_scales_are_rounded_to_the_same_values(name):
    build, expected = NETWORKS[name]
    old, new = build(tf_keras), build(keras)
    rng = np.random.default_rng(3)
    values = [rng.uniform(0.5, 2.0, weight.shape) * rng.choice([1, -1]) for weight in new.weights]
    values = [np.abs(value) if value.ndim == 1 else value - value.mean() for value in values]
    new.set_weights(values)
    old.set_weights(values)
    pk.quantize(new, activation_bits="float")
    quantized = theirs.quantize_model(old)
    other_scales = {layer for reason in expected for layer in reason}
    compared = 0
    for layer, rounded, *_ in quantizers_in(quantized):
        for weight, quantizer, variables in rounded:
            if f"{layer.name}/kernel" not in other_scales:
                kernel = np.array(new.get_layer(layer.name).kernel)
                np.testing.assert_allclose(quantizer(weight, True, variables), kernel, rtol=1e-5, atol=1e-6)
                compared += np.unique(kernel).size > 50
    assert compared


# ---- training


def compared(build, seeds, epochs, rate, start=trained, scheme=None, callbacks=lambda: ()):
    """Losses and accuracies on held-out images, shape (seeds, 2 libraries, 2)."""
    rows = []
    for seed in seeds:
        weights, data = start(build, seed), batches(seed, epochs)
        old = by_original(build, weights, data, rate, scheme and scheme())
        rows.append(scores(old, by_prunekit(build, weights, data, rate, *callbacks())))
    return np.array(rows)


def assert_as_good(found):
    """The loss changes with every weight: it shows what a few images more or fewer leave open."""
    losses, accuracies = np.moveaxis(found, 2, 0)
    assert (losses[:, 1] < losses[:, 0]).all(), found
    # Whole images, so that as many over all seeds are exactly as many.
    right = np.rint(accuracies * HELD_OUT).sum(axis=0)
    assert right[1] >= right[0] and accuracies[:, 0].mean() > 0.9, found


LONGER = pytest.mark.thorough


@pytest.mark.parametrize(
    "build, seeds, epochs, rate",
    [
        pytest.param(plain, 2, 1, 1e-4),
        pytest.param(plain, 8, 1, 1e-4, marks=LONGER),
        pytest.param(mobile, 3, 1, 1e-4, marks=LONGER),
        pytest.param(mobile, 3, 3, 1e-3, marks=LONGER),
    ],
)
def test_as_many_epochs_on_integers_end_at_least_as_good(build, seeds, epochs, rate):
    assert_as_good(compared(build, range(seeds), epochs, rate))


@pytest.mark.thorough
@pytest.mark.parametrize("build, seeds", [(plain, 8), (mobile, 8)])
def test_as_many_epochs_on_integers_with_held_zeros_end_at_least_as_good(build, seeds):
    found = compared(build, range(seeds), 1, 1e-4, pruned, preserving, lambda: [pk.KeepZeros()])
    assert_as_good(found)


def test_zeros_that_the_preserving_scheme_loses_are_kept():
    names = ["conv", "depthwise", "logits"]
    weights, data = pruned(split, 0, names), batches(0, 1)
    zeros = {name: kernel == 0 for name, kernel in zip(names, weights[::2], strict=True)}
    assert {name: int(one.sum()) for name, one in zeros.items()} == {"conv": 54, "depthwise": 54, "logits": 960}
    new = by_prunekit(split, weights, data, 1e-3, pk.KeepZeros(include=names))
    for name in names:
        assert (np.array(new.model.get_layer(name).kernel)[zeros[name]] == 0).all()
    old = by_original(split, weights, data, 1e-3, preserving())
    kept = {name: int((kernels(old)[name][zeros[name]] == 0).sum()) for name in names}
    # The kernel of a linear convolution before a ReLU layer is not rounded there, so it has no mask.
    assert kept["logits"] == 960 and kept["conv"] < 20 and kept["depthwise"] < 20, kept

"""Pruning before the rounding: counts, patterns, grids, the same model as after two calls, and refusals."""

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES, inputs_of, randomize, stack
from keras import layers as L, ops

from prunekit.operations.prune import prune
from prunekit.sparsity.selection import pruned_count
from prunekit.techniques.quantize.after_training import quantize_model
from prunekit.techniques.quantize.options import QuantizationOptions
from prunekit.techniques.quantize.quantization_state import unique_weights

pytestmark = pytest.mark.every_backend
FLOAT = dict(activation_bits="float")


def layers_of(kind):
    """Returns the shape of the inputs and the layers of a small network."""
    dense = [L.Dense(32, activation="relu", name="hidden"), L.Dense(8, name="head")]
    if kind == "dense":
        return (24,), dense
    first = [L.Conv2D(8, 3, activation="relu", name="conv"), L.Conv2D(8, 3, groups=2, name="grouped")]
    return (8, 8, 2), [*first, L.DepthwiseConv2D(3, name="depthwise"), L.Flatten(name="flat"), *dense]


def network(kind="dense", seed=0):
    """Returns a model with random weights and correlated calibration data."""
    keras.utils.set_random_seed(seed)
    shape, layers = layers_of(kind)
    model = randomize(stack(shape, *layers))
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape))
    data = rng.normal(size=(256, 8)) @ rng.normal(size=(8, size)) + 0.3 * rng.normal(size=(256, size))
    return model, data.reshape(256, *shape).astype("float32")


def values_of(model):
    return {one.path: np.array(ops.convert_to_numpy(one)) for one in model.weights}


def joint(model, data, sparsity, weights=4, **options):
    return quantize_model(model, QuantizationOptions(bits=weights, sparsity=sparsity, **FLOAT | options), data)


@pytest.mark.parametrize("kind", ["dense", "convolutions"])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.77, 0.98])
@pytest.mark.parametrize("bits", [3, 8])
def test_the_kernels_have_the_wanted_zeros_and_lie_on_their_grids(kind, sparsity, bits):
    model, data = network(kind)
    found = joint(model, data, sparsity, bits)
    entries = zeros = kernels = 0
    for weight in unique_weights(found.placement):
        value = ops.convert_to_numpy(weight.variable)
        assert found.weights[id(weight.variable)].holds(value), weight.name
        if "depthwise" not in weight.name:
            entries, zeros, kernels = entries + value.size, zeros + np.sum(value == 0), kernels + 1
    least = min(pruned_count(sparsity, entries), entries - kernels)
    # Small weights that are kept may be rounded to zero, too.
    assert least <= zeros and (bits < 8 or zeros <= least + 0.03 * entries)


def test_depthwise_kernels_are_not_pruned():
    model, data = network("convolutions")
    joint(model, data, 0.75, 8)
    kernel = ops.convert_to_numpy(model.get_layer("depthwise").kernel)
    assert np.count_nonzero(kernel) > 0.95 * kernel.size


def test_two_of_every_four_weights_are_kept():
    model, data = network()
    found = joint(model, data, 0.5, pattern="2:4")
    for name in ("hidden", "head"):
        groups = ops.convert_to_numpy(model.get_layer(name).kernel).reshape(-1, 4, model.get_layer(name).units)
        assert (np.count_nonzero(groups, axis=1) <= 2).all() and groups.any()
    (note,) = found.report.notes
    assert note == "Pruned to 0.5 before the rounding, by pk.prune: allocation uniform, criterion output_error."


def test_a_kernel_that_the_pattern_does_not_fit_is_named_and_rounded_whole():
    model = randomize(stack((6,), L.Dense(8, name="six"), L.Dense(8, name="eight")))
    data = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
    found = joint(model, data, 0.5, 8, pattern="2:4")
    assert np.count_nonzero(ops.convert_to_numpy(model.get_layer("six").kernel)) > 40
    assert np.count_nonzero(ops.convert_to_numpy(model.get_layer("eight").kernel)) <= 32
    pruned, note = found.report.notes
    assert pruned.startswith("Pruned to 0.5") and note.startswith("Not pruned: six/kernel, since the pattern")


def test_layers_in_floating_point_are_not_pruned_and_layers_of_a_users_own_are_pruned_by_magnitude():
    class Doubled(L.Dense):
        def call(self, inputs):
            return 2 * super().call(inputs)

    x = keras.Input((8,))
    model = randomize(keras.Model(x, L.Dense(4, name="head")(Doubled(8, name="own")(x))))
    data = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    own, head = (model.get_layer(name).kernel for name in ("own", "head"))
    former, kernel = model.get_weights(), np.array(ops.convert_to_numpy(own))
    joint(model, data, 0.5, {"own": "float", "head": 4})
    np.testing.assert_array_equal(ops.convert_to_numpy(own), kernel)
    assert np.count_nonzero(ops.convert_to_numpy(head)) <= 16
    model.set_weights(former)
    notes = joint(model, data, 0.5).report.notes
    assert any(note.startswith("own/kernel is pruned by magnitude, without repair") for note in notes)
    assert np.count_nonzero(ops.convert_to_numpy(own)) < kernel.size


def test_zeros_of_a_pruned_model_stay_and_count():
    model, data = network()
    prune(model, 0.6, allocation="uniform")
    before = {name: value == 0 for name, value in values_of(model).items()}
    joint(model, data, 0.6, 8)
    for name, value in values_of(model).items():
        if "kernel" in name:
            assert not value[before[name]].any(), name
            # No further weight was chosen: those that are zero beside them were rounded to zero.
            assert np.mean(value == 0) < 0.63, name


@pytest.mark.parametrize("kind", ["dense", "convolutions"])
@pytest.mark.parametrize(("sparsity", "bits"), [(0.5, 8), (0.75, 4)])
def test_the_model_is_that_of_two_calls(kind, sparsity, bits):
    model, data = network(kind)
    former = model.get_weights()
    found = joint(model, data, sparsity, bits)
    assert any(
        note.startswith(f"Pruned to {sparsity:g} before the rounding, by pk.prune: ") for note in found.report.notes
    )
    one = model.get_weights()
    model.set_weights(former)
    prune(model, sparsity, data)
    quantize_model(model, QuantizationOptions(bits=bits, method="gptq", **FLOAT), data)
    for first, second in zip(one, model.get_weights(), strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-6, atol=1e-7)


def test_a_second_quantization_keeps_zeros_and_values():
    model, data = network()
    joint(model, data, 0.5)
    before = values_of(model)
    joint(model, data, 0.5)
    for name, value in values_of(model).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


@pytest.mark.parametrize("name", ["grouped", "bidirectional", "transformer_encoder", "conv3d", "nested", "separable"])
def test_every_kind_of_kernel_is_pruned_and_rounded(name):
    keras.utils.set_random_seed(0)
    model = randomize(ARCHITECTURES[name]())
    data = inputs_of(model, examples=12)
    found = joint(model, (data, None) if isinstance(data, list) else data, 0.5)
    rows = [one for one in found.report.weights if "depthwise" not in one.name]
    zeros, entries = (sum(getattr(one, name) for one in rows) for name in ("zeros", "size"))
    assert zeros >= round(0.5 * entries) and sum(one.zeros > 0 for one in rows) > 1


def test_an_error_in_a_later_batch_leaves_the_model_as_it_was():
    model, data = network()
    before = values_of(model)
    bad = data.copy()
    bad[-1, 0] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        joint(model, bad, 0.5)
    for name, value in values_of(model).items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(sparsity=1.0), r"`sparsity` is a fraction of the weights, in \[0, 1\), or None. Received: 1.0"),
        (dict(sparsity=-0.1), "`sparsity` is a fraction .* Received: -0.1"),
        (dict(sparsity=float("nan")), "`sparsity` is a fraction .* Received: nan"),
        (dict(sparsity="0.5"), "`sparsity` is a fraction .* Received: '0.5'"),
        (dict(sparsity=True), "`sparsity` is a fraction .* Received: True"),
        (dict(pattern="2:4"), "pass `sparsity`, too. Received: '2:4'"),
        (dict(sparsity=0.5, pattern="2of4"), "2of4"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        QuantizationOptions(**options)


def test_pruning_reads_data():
    with pytest.raises(ValueError, match=r"with sparsity=0.5 and method='gptq' .* reads calibration data"):
        QuantizationOptions(sparsity=0.5, activation_bits="float", bits=8).with_data(None)

"""Scales for groups of inputs: which inputs share one, rounding by each method, training, reports, refusals."""

import keras
import numpy as np
import pytest
from architectures import randomize
from keras import layers as L, ops
from plain_quantization import plain_code, plain_parameters

import prunekit as pk
from prunekit.anatomy.layers.targets import find_targets
from prunekit.core.statistics.layer_products import product_of
from prunekit.techniques.quantize.after_training import planned_quantization
from prunekit.techniques.quantize.options import QuantizationOptions
from prunekit.techniques.quantize.placement.placement import place
from prunekit.techniques.quantize.quantization_state import unique_weights
from prunekit.techniques.quantize.rescaling import activation_scaling
from prunekit.techniques.quantize.rescaling.awq import Reading

pytestmark = pytest.mark.every_backend
SIZE = 16


def values(tensor):
    return np.array(ops.convert_to_numpy(tensor))


def network(*layers, shape=(40,), seed=0):
    keras.utils.set_random_seed(seed)
    return randomize(keras.Sequential([keras.Input(shape), *layers], name="net"))


def inputs_for(model, examples=64):
    return np.random.default_rng(1).normal(size=(examples, *model.input_shape[1:])).astype("float32")


# Layers with the shape of their inputs, and their kernel as (inputs of an output in order, outputs).
KERNELS = {
    "dense": ((40,), lambda: L.Dense(6, name="w"), lambda kernel: kernel),
    "equation": ((3, 40), lambda: L.EinsumDense("abc,cde->abde", (3, 2, 5), name="w"), lambda k: k.reshape(40, 10)),
    "two input axes": ((3, 5, 8), lambda: L.EinsumDense("abde,dec->abc", (3, 6), name="w"), lambda k: k.reshape(40, 6)),
    "parallel axis": (
        (2, 20),
        lambda: L.EinsumDense("abc,bcd->abd", (2, 4), name="w"),
        lambda kernel: kernel.transpose(1, 0, 2).reshape(20, 8),
    ),
    "convolution": ((6, 6, 5), lambda: L.Conv2D(4, 3, name="w"), lambda kernel: kernel.reshape(45, 4)),
    "convolution of one axis": ((9, 7), lambda: L.Conv1D(4, 3, name="w"), lambda kernel: kernel.reshape(21, 4)),
    "groups of channels": ((6, 6, 8), lambda: L.Conv2D(6, 3, groups=2, name="w"), lambda kernel: kernel.reshape(36, 6)),
    "depthwise": ((8, 8, 3), lambda: L.DepthwiseConv2D(5, name="w"), lambda kernel: kernel.reshape(25, 3)),
    "transposed": (
        (5, 5, 3),
        lambda: L.Conv2DTranspose(4, 3, name="w"),
        lambda kernel: kernel.transpose(0, 1, 3, 2).reshape(27, 4),
    ),
}


@pytest.mark.parametrize("bits", [3, 8])
@pytest.mark.parametrize("name", KERNELS)
def test_the_nearest_values_are_those_of_plain_loops_over_the_inputs_of_each_output(name, bits):
    shape, layer, by_input = KERNELS[name]
    model = network(layer(), shape=shape)
    (variable,) = [one for one in model.weights if "kernel" in one.path]
    before = by_input(values(variable))
    found = pk.quantize(
        model, bits=bits, activation_bits="float", group_size=SIZE, weight_ranges="minmax", method="nearest"
    )
    after = by_input(values(variable))
    inputs, outputs = before.shape
    for output in range(outputs):
        for start in range(0, inputs, SIZE):
            group = before[start : start + SIZE, output]
            scale, _ = plain_parameters(float(group.min()), float(group.max()), bits, True)
            expected = [float(np.float32(plain_code(one, scale, 0, bits, True)) * scale) for one in group]
            assert after[start : start + SIZE, output].tolist() == expected
    (row,) = found.weights
    assert (row.group_size, row.scales) == (SIZE, -(-inputs // SIZE) * outputs)
    assert row.granularity.endswith("and 16 entries")
    with found.simulating():
        np.testing.assert_array_equal(by_input(values(variable)), after)


def test_the_model_computes_with_these_values_in_the_simulation():
    model = network(L.Dense(6, name="w"))
    inputs, kernel = inputs_for(model), model.layers[0].kernel
    found = pk.quantize(model, bits=4, activation_bits="float", group_size=SIZE)
    grid = found.state.weights[id(kernel)]
    expected = inputs @ values(kernel) + values(model.layers[0].bias)
    with found.simulating() as simulated:
        np.testing.assert_allclose(simulated.predict(inputs, verbose=0), expected, rtol=1e-5, atol=1e-5)
    assert grid.scale.shape == (3, 6)
    assert pk.quantize(model, bits=4, activation_bits="float", group_size=SIZE).weights[0].error == 0.0


@pytest.mark.parametrize("name", KERNELS)
def test_groups_are_those_of_the_rows_that_methods_round_one_after_another(name):
    shape, layer, _ = KERNELS[name]
    model = network(layer(), shape=shape)
    (weight,) = unique_weights(place(model, group_size=SIZE))
    (target,) = find_targets(model, "w", also=("depthwise_kernel",))[0]
    product, granularity = product_of(target), weight.granularity
    groups = np.arange(np.prod(granularity.parameter_shape(target.shape)))
    spread = granularity.spread(groups.reshape(granularity.parameter_shape(target.shape)), target.shape)
    matrices = product.matrix(np.broadcast_to(spread, target.shape))
    for matrix in matrices:
        for column in matrix.T:
            _, first = np.unique(column, return_index=True)
            assert sorted(first) == list(range(0, product.inputs, SIZE))


def test_rows_of_a_table_have_groups_along_their_entries():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,), dtype="int32"), L.Embedding(5, 40, name="table")])
    before = values(model.layers[0].embeddings)
    (row,) = pk.quantize(model, bits=4, activation_bits="float", group_size=SIZE).weights
    after = values(model.layers[0].embeddings)
    assert (row.scales, row.bytes) == (15, 5 * 48 // 2 + 4 * 15)
    for line in range(5):
        for start in range(0, 40, SIZE):
            part = after[line, start : start + SIZE]
            assert len(np.unique(np.abs(part))) <= 8
            assert np.abs(part - before[line, start : start + SIZE]).max() <= 0.6 * np.abs(part).max() / 7 * 2


# Methods -------------------------------------------------------------------------------------------------------------


def correlated(model):
    rng = np.random.default_rng(0)
    width = model.input_shape[-1]
    return (rng.normal(size=(256, *model.input_shape[1:])) @ rng.normal(size=(width, width))).astype("float32")


@pytest.mark.parametrize("name", ["dense", "convolution", "two input axes", "groups of channels"])
def test_gptq_with_groups_keeps_the_outputs_better_than_the_nearest_values(name):
    shape, layer, _ = KERNELS[name]
    errors = {}
    for method in ("nearest", "gptq"):
        model = network(layer(), shape=shape)
        data = correlated(model)
        exact = model.predict(data, verbose=0)
        options = dict(bits=3, activation_bits="float", group_size=SIZE, correct_biases=False)
        found = pk.quantize(model, data, method=method, **options)
        errors[method] = float(np.square(model.predict(data, verbose=0) - exact).sum())
        assert all(found.state.weights[id(one.variable)].holds(values(one.variable)) for one in weights_of(found))
        assert found.weights[0].group_size == SIZE
    assert errors["gptq"] < 0.8 * errors["nearest"]


@pytest.mark.parametrize("ranges", ["minmax", "mse"])
@pytest.mark.parametrize("name", KERNELS)
def test_groups_lower_the_error_of_the_weights(name, ranges):
    shape, layer, _ = KERNELS[name]
    errors = []
    for size in (SIZE, None):
        model = network(layer(), shape=shape)
        options = {"bits": 3, "activation_bits": "float", "method": "nearest", "weight_ranges": ranges}
        report = pk.quantize(model, group_size=size, **options)
        errors.append(report.weights[0].error)
    assert errors[0] < 0.95 * errors[1]


def weights_of(found):
    return unique_weights(found.state.placement)


@pytest.mark.parametrize("method", ["nearest", "gptq", "awq"])
def test_zeros_stay_zeros(method):
    model = network(L.Dense(32, activation="relu", name="one"), L.Dense(20, name="two"))
    kernel = values(model.layers[0].kernel)
    kernel[np.random.default_rng(2).random(kernel.shape) < 0.7] = 0.0
    kernel[:SIZE, 3] = 0.0
    model.layers[0].kernel.assign(kernel)
    pk.quantize(model, inputs_for(model), bits=3, activation_bits="float", group_size=SIZE, method=method)
    assert (values(model.layers[0].kernel)[kernel == 0.0] == 0.0).all()


@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
def test_weights_are_pruned_and_rounded_in_one_pass(pattern):
    model = network(L.Dense(12, name="w"))
    found = pk.quantize(
        model, inputs_for(model), bits=4, activation_bits="float", group_size=SIZE, sparsity=0.5, pattern=pattern
    )
    kernel = values(model.layers[0].kernel)
    assert (kernel == 0.0).mean() >= 0.5
    if pattern == "2:4":
        assert ((kernel.reshape(10, 4, 12) != 0).sum(axis=1) <= 2).all()
    (grid,) = found.state.weights.values()
    assert grid.scale.shape == (3, 12) and grid.holds(kernel)


def test_the_search_of_activation_aware_scaling_rounds_in_groups(monkeypatch):
    seen = []

    def noted(*args, **kwargs):
        seen.append(Reading(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(activation_scaling, "Reading", noted)
    model = network(L.Dense(40, activation="relu", name="one"), L.Dense(12, activation="relu", name="two"), L.Dense(4))
    pk.quantize(model, inputs_for(model), bits=3, activation_bits="float", group_size=SIZE, method="awq")
    # The last layer has fewer inputs than a group.
    assert [(one.matrices.shape[1], one.granularity.group_size) for one in seen] == [(40, SIZE), (12, None)]


def test_bits_are_chosen_with_the_errors_and_bytes_of_groups():
    model = network(L.Dense(12, name="one"), L.Dense(6, name="two"))
    data = inputs_for(model)
    choice = pk.choose_bits(model, data, budget=10**6, bits=(3, 8), activation_bits="float", group_size=SIZE)
    whole = pk.choose_bits(model, data, budget=10**6, bits=(3, 8), activation_bits="float")
    # 40 inputs are three groups, and a file stores the last one as long as the others. The second layer has 12 inputs.
    assert choice.weights[0].bytes == (48 * 12 // 2 + 4 * 36, 48 * 12 + 4 * 36)
    assert choice.weights[1] == whole.weights[1]
    assert choice.weights[0].errors[0] < 0.9 * whole.weights[0].errors[0]
    quantized = pk.quantize(model, data, bits=choice.bits, activation_bits="float", group_size=SIZE)
    assert quantized.weights[0].bytes == choice.weights[0].bytes[1]


# Training ------------------------------------------------------------------------------------------------------------


def test_training_learns_a_scale_for_each_group():
    model = network(L.Dense(12, activation="relu", name="one"), L.Dense(3, name="two"))
    model.compile(keras.optimizers.SGD(0.05), "mse")
    data = inputs_for(model)
    quantization = pk.QuantizationCallback(
        bits=3, activation_bits="float", group_size=SIZE, weight_ranges="minmax", range_learning_rate=0.02
    )
    before = values(model.layers[0].kernel)
    model.fit(data, data[:, :3], epochs=2, batch_size=16, verbose=0, callbacks=[quantization])
    (grid, other) = quantization.report.state.weights.values()
    assert grid.scale.shape == (3, 12) and other.scale.shape == (1, 3)
    kernel = values(model.layers[0].kernel)
    assert grid.holds(kernel) and not np.array_equal(kernel, before)
    starts = np.stack([np.abs(before[start : start + SIZE]).max(axis=0) / 3 for start in (0, 16, 32)])
    # Each group of each output was trained by itself.
    assert len(np.unique((grid.scale / starts).round(5))) > 12
    assert quantization.report.weights[0].group_size == SIZE
    assert any("at most 16 inputs: two/kernel" in note for note in quantization.report.notes)


# Reports and refusals ------------------------------------------------------------------------------------------------


def test_the_report_names_weights_with_one_scale_for_each_output():
    model = network(L.Conv2D(4, 3, name="conv"), L.DepthwiseConv2D(3, name="deep"), L.Flatten(), L.Dense(3, name="out"),
                    shape=(6, 6, 2))  # fmt: skip
    found = pk.quantize(model, bits=8, activation_bits="float", group_size=SIZE)
    rows = {row.name: (row.granularity, row.scales, row.group_size) for row in found.weights}
    assert rows == {
        "conv/kernel": ("per index of axis 3 and 16 entries", 8, 16),
        "deep/kernel": ("per index of axes 2, 3", 4, None),
        "out/kernel": ("per index of axis 1", 3, None),
    }
    assert found.notes == ("One scale for each output, which has at most 16 inputs: deep/kernel, out/kernel.",)
    assert found.to_dict()["weights"][0]["group_size"] == 16
    planned = planned_quantization(model, QuantizationOptions(activation_bits="float", group_size=SIZE))
    assert [row[3] for row in planned.weights] == [row.granularity for row in found.weights]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (dict(group_size=32), ValueError, "No integer kernel .*Received: group_size=32 and activation_bits=8."),
        (dict(group_size=32, activation_bits=16), ValueError, "Received: group_size=32 and activation_bits=16"),
        (dict(group_size=15, activation_bits="float"), ValueError, "16 or more: .*Received: 15"),
        (dict(group_size=-1, activation_bits="float"), ValueError, "16 or more: .*Received: -1"),
        (dict(group_size=32.5, activation_bits="float"), TypeError, "group_size"),
        (dict(group_size="32", activation_bits="float"), TypeError, "group_size"),
        (dict(group_size=True, activation_bits="float"), TypeError, "group_size"),
    ],
    ids=str,
)
def test_groups_that_no_file_holds_are_refused_before_any_work(options, error, match):
    model = network(L.Dense(3))
    before = values(model.layers[0].kernel)
    for call in (lambda: pk.quantize(model, **options), lambda: pk.QuantizationCallback(**options)):
        with pytest.raises(error, match=match):
            call()
    np.testing.assert_array_equal(values(model.layers[0].kernel), before)

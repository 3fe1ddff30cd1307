"""Include and exclude: what is quantized, what computes in floating point, and what the report says of it."""

import keras
import numpy as np
import pytest
from architectures import inputs_of, randomize, stack
from keras import layers as L, ops

from prunekit.techniques.quantize.after_training import planned_quantization, quantize_model
from prunekit.techniques.quantize.options import QuantizationOptions
from prunekit.techniques.quantize.placement.placement import place
from prunekit.techniques.quantize.targeting import selected

# Names and NumPy: two of the tests stand for all on other backends in the short suite.
pytestmark = pytest.mark.every_backend(cases=0)


def network():
    """Returns convolutions with batch normalization and activations as layers, and a Dense layer."""
    model = stack(
        (8, 7, 3),
        L.Conv2D(6, 3, name="conv"),
        L.BatchNormalization(name="norm"),
        L.ReLU(name="relu"),
        L.SeparableConv2D(5, 3, name="separable"),
        L.ReLU(name="second_relu"),
        L.GlobalAveragePooling2D(name="pool"),
        L.Dense(4, name="head"),
    )
    randomize(model)
    return model


def units_with(placement, name):
    """Returns the units that call a layer of this name."""
    found = [unit for units in placement.units.values() for unit in units]
    return [unit for unit in found if name in [one.operation.name for one in unit.calls]]


def placed(**patterns):
    """Returns (placement, selection) of the network."""
    model = network()
    selection = selected(model, **patterns)
    return place(model, selection.kept_float), selection


def report_of(model, **options):
    """Returns the report of a quantization of a model with data."""
    return quantize_model(model, QuantizationOptions(**options), inputs_of(model, examples=8)).report


def reasons_of(report):
    """Returns {name: reason} of what computes in floating point."""
    return {one.name: one.reason for one in report.skipped}


def names_in(report):
    """Returns the names of the quantized weights."""
    return [one.name for one in report.weights]


@pytest.mark.every_backend
def test_without_patterns_all_kernels_are_quantized_and_nothing_is_skipped():
    report = report_of(network())
    assert names_in(report) == [
        "conv/kernel",
        "separable/depthwise_kernel",
        "separable/pointwise_kernel",
        "head/kernel",
    ]
    assert report.skipped == ()


@pytest.mark.every_backend
def test_an_excluded_layer_is_left_in_floating_point_with_the_pattern_as_the_reason():
    model = network()
    before = ops.convert_to_numpy(model.get_layer("head").kernel).copy()
    report = report_of(model, exclude="he*", bits=4)
    assert reasons_of(report) == {"head": "excluded by 'he*'"}
    assert np.array_equal(ops.convert_to_numpy(model.get_layer("head").kernel), before)


def test_an_excluded_layer_computes_in_the_simulation_with_the_rounded_tensors_that_it_reads():
    x = keras.Input((6,), name="x")
    hidden = L.Dense(4, name="first")(x)
    model = randomize(keras.Model(x, [hidden, L.Dense(5, name="only")(hidden)]))
    data = inputs_of(model, examples=8)
    found = quantize_model(model, QuantizationOptions(exclude="only"), data)
    with found.simulating():
        read, computed = map(ops.convert_to_numpy, model(data))
    kernel, bias = map(ops.convert_to_numpy, model.get_layer("only").weights)
    assert [place.name for place in found.ranges] == ["x", "first"]
    assert np.allclose(computed, read @ kernel + bias, rtol=1e-5, atol=1e-6)
    assert not np.array_equal(read, ops.convert_to_numpy(model(data)[0]))


def test_a_batch_normalization_is_folded_and_an_activation_fused_unless_excluded():
    placement, _ = placed()
    (unit,) = units_with(placement, "conv")
    assert [call.operation.name for call in unit.calls] == ["conv", "norm", "relu"]


def test_an_excluded_batch_normalization_is_not_folded():
    placement, _ = placed(exclude="norm")
    (unit,) = units_with(placement, "conv")
    assert [call.operation.name for call in unit.calls] == ["conv"] and unit.normalization is None
    (alone,) = units_with(placement, "norm")
    assert alone is not unit
    assert ("norm", "excluded by 'norm'") in [(one.name, one.reason) for one in placement.skipped]


def test_an_excluded_activation_is_not_fused():
    placement, _ = placed(exclude="relu")
    (unit,) = units_with(placement, "conv")
    assert "relu" not in [call.operation.name for call in unit.calls]
    assert [(one.name, one.reason) for one in placement.skipped] == [("relu", "excluded by 'relu'")]


@pytest.mark.parametrize("place", [0, 1], ids=["depthwise", "pointwise"])
def test_a_separable_convolution_with_one_kernel_excluded_computes_in_floating_point(place):
    names = ["separable/depthwise_kernel", "separable/pointwise_kernel"]
    model, name, other = network(), names[place], names[1 - place]
    before = [ops.convert_to_numpy(one).copy() for one in model.get_layer("separable").weights[:2]]
    report = report_of(model, exclude=name, bits=4)
    after = [ops.convert_to_numpy(one) for one in model.get_layer("separable").weights[:2]]
    assert reasons_of(report) == {"separable": f"excluded by {name!r}"}
    assert names_in(report) == ["conv/kernel", other, "head/kernel"]
    # The other kernel is stored as integers.
    assert [np.array_equal(*pair) for pair in zip(before, after, strict=True)] == [place == 0, place == 1]
    assert "separable" not in [one.name for one in report.ranges]


def test_include_quantizes_the_matching_layers_alone():
    report = report_of(network(), include=["conv", "head"])
    assert names_in(report) == ["conv/kernel", "head/kernel"]
    assert reasons_of(report) == {"separable": "not matched by include"}


def test_exclude_overrides_include():
    report = report_of(network(), include="*", exclude=["re:conv|separable", "pool"])
    assert names_in(report) == ["head/kernel"]
    assert reasons_of(report) == {
        "conv": "excluded by 're:conv|separable'",
        "separable": "excluded by 're:conv|separable'",
        "pool": "excluded by 'pool'",
    }


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_typo_in_a_pattern_is_refused_with_a_hint(option):
    with pytest.raises(ValueError, match=rf"The pattern 'haed' in `{option}` matches no layer.*Did you mean 'head'"):
        selected(network(), **{option: "haed"})


def test_an_include_that_takes_nothing_says_what_quantizing_is_refused():
    with pytest.raises(ValueError, match="matches nothing that is quantized.*To quantize a weight that is out"):
        selected(network(), include="norm")


def test_a_model_whose_weights_are_all_excluded_is_refused_with_the_word_quantize():
    with pytest.raises(ValueError, match="has no weights to quantize. Received: .*excluded by"):
        selected(network(), exclude="*")


def test_a_refusal_leaves_the_weights_as_they_were():
    model = network()
    before = [ops.convert_to_numpy(one).copy() for one in model.variables]
    with pytest.raises(ValueError, match="Did you mean 'conv'"):
        quantize_model(model, QuantizationOptions(exclude="cnov"), inputs_of(model))
    assert all(np.array_equal(ops.convert_to_numpy(a), b) for a, b in zip(model.variables, before, strict=True))


def test_a_table_shared_with_the_head_is_on_one_grid_and_excluded_for_both():
    tokens = keras.Input((6,), dtype="int32", name="tokens")
    table = L.ReversibleEmbedding(20, 8, name="table")
    model = randomize(keras.Model(tokens, table(L.Dense(8, name="dense")(table(tokens)), reverse=True)))
    assert names_in(report_of(model)) == ["table/embeddings", "dense/kernel"]
    report = report_of(model, exclude="table")
    assert names_in(report) == ["dense/kernel"]
    assert reasons_of(report)["table"] == "excluded by 'table'"


# ---- parts in floating point that nobody asked for -------------------------------------------------------------------


def normalized():
    """Returns a model with a layer normalization, which has no integers."""
    return randomize(stack((6,), L.Dense(8, name="first"), L.LayerNormalization(name="norm"), L.Dense(3, name="head")))


def test_a_model_with_parts_in_floating_point_is_refused_if_asked_before_anything_changes():
    model, data = normalized(), np.ones((8, 6), "float32")
    before = [ops.convert_to_numpy(one).tobytes() for one in model.variables]
    with pytest.raises(ValueError, match="Received: parts in floating point: norm, since .*allow them with `exclude`"):
        quantize_model(model, QuantizationOptions(misfits="error"), data)
    assert [ops.convert_to_numpy(one).tobytes() for one in model.variables] == before
    with pytest.raises(ValueError, match="norm, since"):
        planned_quantization(model, QuantizationOptions(misfits="error"))


@pytest.mark.parametrize(
    "options",
    [
        {"exclude": "norm"},
        {"exclude": ["norm", "head"]},
        {"bits": {"head": "float", "first": 4}, "exclude": "norm"},
        {"activation_bits": "float"},
    ],
    ids=str,
)
def test_what_was_asked_to_stay_in_floating_point_is_no_misfit(options):
    data = np.ones((8, 6), "float32")
    report = quantize_model(normalized(), QuantizationOptions(misfits="error", **options), data).report
    assert report.weights


def test_a_layer_without_a_kernel_of_16_bits_is_planned_reported_and_a_misfit():
    model, data = stack((6,), L.Dense(8, name="first"), L.ELU(name="elu"), L.Dense(3, name="head")), np.ones((8, 6))
    wide, narrow = ({"activation_bits": bits, "misfits": "error"} for bits in (16, 8))
    with pytest.raises(ValueError, match="floating point: elu, since LiteRT has no ELU of 16 bits"):
        planned_quantization(model, QuantizationOptions(**wide))
    assert planned_quantization(model, QuantizationOptions(**narrow)).skipped == ()
    assert [one.name for one in planned_quantization(model, QuantizationOptions(activation_bits=16)).skipped] == ["elu"]
    report = quantize_model(model, QuantizationOptions(**wide, exclude="elu"), data.astype("float32")).report
    assert [(one.name, one.reason) for one in report.skipped] == [("elu", "excluded by 'elu'")]


def test_an_unknown_value_of_misfits_is_refused():
    with pytest.raises(ValueError, match=r'`misfits` is "skip" or "error". Received: \'refuse\''):
        QuantizationOptions(misfits="refuse")


def test_a_weight_without_integers_is_a_misfit_also_with_activations_in_floating_point():
    class Scale(L.Layer):
        def build(self, shape):
            self.matrix = self.add_weight(shape=(shape[-1], 4), name="matrix")

        def call(self, inputs):
            return ops.matmul(inputs, self.matrix)

    model = stack((6,), L.Dense(8, name="first"), Scale(name="own"))
    with pytest.raises(ValueError, match="own"):
        quantize_model(model, QuantizationOptions(misfits="error", activation_bits="float"))
    assert quantize_model(
        model, QuantizationOptions(misfits="error", activation_bits="float", exclude="own")
    ).report.weights

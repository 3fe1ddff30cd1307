"""Factors and offsets of normalizations in the layers that read them: no operation and no rounding of their own."""

import numpy as np
import pytest
from keras import layers as L
from normalized_blocks import inputs, network

import prunekit as pk
from prunekit.delivery.litert.litert_graph import LiteRTGraph
from prunekit.techniques.quantize.after_training import planned_quantization
from prunekit.techniques.quantize.options import QuantizationOptions

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def attention(x):
    y = L.LayerNormalization(name="norm")(x)
    return L.Add()([x, L.MultiHeadAttention(2, 4, name="attention")(y, y)])


def grouped(x):
    return L.Dense(8, activation="gelu")(L.GroupNormalization(4, name="norm")(x))


def without_offsets(x):
    return L.Dense(8, use_bias=False)(L.RMSNormalization(name="norm")(x))


def read_by_a_sum(x):
    return L.Add()([x, L.LayerNormalization(name="norm")(x)])


def read_by_a_dense_layer_and_a_sum(x):
    y = L.LayerNormalization(name="norm")(x)
    return L.Add()([y, L.Dense(8)(y)])


def read_without_biases(x):
    return L.Dense(8, use_bias=False)(L.LayerNormalization(name="norm")(x))


def followed_by_a_relu(x):
    return L.Dense(8)(L.ReLU(name="relu")(L.LayerNormalization(name="norm")(x)))


def padded_behind(x):
    return L.Conv1D(8, 3, padding="same")(L.LayerNormalization(name="norm")(x))


MOVED = [attention, grouped, without_offsets]
STAYING = [read_by_a_sum, read_by_a_dense_layer_and_a_sum, read_without_biases, followed_by_a_relu, padded_behind]
FULL = QuantizationOptions(full_integer=True)


def ranges(found):
    return {name for name, _ in found.ranges}


@pytest.mark.parametrize("block", MOVED)
def test_layers_behind_take_factors_and_offsets_and_the_model_computes_the_same(block, tmp_path):
    model, x = network(block), inputs()
    norm, expected = model.get_layer("norm"), model.predict(x, verbose=0)
    before = {weight.path: np.array(weight) for weight in norm.weights}
    plan = planned_quantization(model, FULL)
    assert "norm_scaled" not in ranges(plan) and "norm_normalized" in ranges(plan)
    assert all(np.array_equal(weight, before[weight.path]) for weight in norm.weights)
    quantized = pk.quantize(model, x, full_integer=True)
    factors, *offsets = norm.weights
    assert (np.array(factors) == 1).all() and not any(np.any(np.array(one)) for one in offsets)
    assert [one.name for one in quantized.ranges] == [name for name, _ in plan.ranges]
    assert any("factors and offsets of norm" in note for note in quantized.notes)
    assert np.abs(model.predict(x, verbose=0) - expected).max() < 0.03 * np.ptp(expected)
    made = quantized.export(tmp_path / "moved.tflite")
    graph = LiteRTGraph((tmp_path / "moved.tflite").read_bytes())
    assert "DEPTHWISE_CONV_2D" not in {graph.kind(one) for one in graph.operators}
    assert made.skipped == () and all((one.largest or 0) <= 1 for one in made.tensors)


@pytest.mark.parametrize("block", STAYING)
def test_a_normalization_keeps_factors_and_offsets_that_a_reader_cannot_take(block):
    model = network(block)
    norm = model.get_layer("norm")
    before = norm.get_weights()
    # A ReLU behind is computed together with them.
    assert {"norm_scaled", "relu"} & ranges(planned_quantization(model, FULL))
    pk.quantize(model, inputs(), full_integer=True)
    assert all(np.array_equal(one, two) for one, two in zip(before, norm.get_weights(), strict=True))


@pytest.mark.parametrize("options", [{"bits": 4}, {"method": "awq"}])
def test_kernels_of_few_bits_and_those_that_awq_scales_take_no_factors(options):
    model = network(attention)
    assert "norm_scaled" in ranges(planned_quantization(model, QuantizationOptions(full_integer=True, **options)))
    if "method" not in options:
        before = model.get_layer("norm").get_weights()
        pk.quantize(model, inputs(), full_integer=True, **options)
        assert all(np.array_equal(*pair) for pair in zip(before, model.get_layer("norm").get_weights(), strict=True))


def test_a_second_quantization_changes_nothing_and_kernels_on_grids_stay_there():
    model, x = network(attention), inputs()
    pk.quantize(model, x, full_integer=True)
    first = model.get_weights()
    again = pk.quantize(model, x, full_integer=True)
    assert all(np.array_equal(one, two) for one, two in zip(first, model.get_weights(), strict=True))
    assert "norm_scaled" not in {one.name for one in again.ranges}
    other = network(attention)
    pk.quantize(other, x)
    kept = other.get_weights()
    pk.quantize(other, x, full_integer=True)
    assert all(np.array_equal(one, two) for one, two in zip(kept, other.get_weights(), strict=True))


def test_factors_that_changed_since_are_refused_by_the_export(tmp_path):
    model = network(attention)
    quantized = pk.quantize(model, inputs(), full_integer=True)
    gamma = model.get_layer("norm").gamma
    gamma.assign(gamma * 1.5)
    with pytest.raises(ValueError, match="Received: norm/gamma with other values"):
        quantized.export(tmp_path / "changed.tflite")


def test_an_error_behind_the_move_leaves_the_model_as_it_was(monkeypatch):
    model = network(attention)
    before = model.get_weights()

    def fail(self):
        raise KeyboardInterrupt

    monkeypatch.setattr("prunekit.techniques.quantize.after_training._Quantization._rounded", fail)
    with pytest.raises(KeyboardInterrupt):
        pk.quantize(model, inputs(), full_integer=True)
    assert all(np.array_equal(one, two) for one, two in zip(before, model.get_weights(), strict=True))

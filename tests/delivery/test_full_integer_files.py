"""Files without an operation in floating point: normalizations and attention as plain operations on integers."""

import keras
import numpy as np
import pytest
from integer_files import float_operations, graph_of_file
from keras import layers as L, ops
from normalized_blocks import inputs, network

import prunekit as pk
from prunekit.techniques.quantize.after_training import planned_quantization
from prunekit.techniques.quantize.options import QuantizationOptions
from prunekit.techniques.quantize.placement.placement import place
from prunekit.techniques.quantize.rescaling.rescaling import rescalable

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def encoder(x):
    y = L.LayerNormalization(name="before")(x)
    y = L.Add()([x, L.MultiHeadAttention(2, 4, name="attention")(y, y)])
    wide = L.Dense(16, activation="gelu")(L.LayerNormalization(name="behind")(y))
    return L.Add()([y, L.Dense(8)(wide)])


def group_and_root_mean_square(x):
    return L.Add()([L.GroupNormalization(4, name="groups")(x), L.RMSNormalization(name="root")(x)])


def without_weights(x):
    return L.GroupNormalization(2, center=False)(L.LayerNormalization(center=False, scale=False)(x))


def attention_of_other_layers(x):
    dropped = L.MultiHeadAttention(2, 4, dropout=0.1, name="dropped")(x, x)
    shared = L.GroupQueryAttention(4, 4, 2, name="shared")(x, x)
    heads = ops.reshape(x, (-1, 6, 4, 2))
    return L.Add()(
        [dropped, ops.reshape(ops.dot_product_attention(heads, heads[:, :, :2], heads[:, :, 2:]), (-1, 6, 8)), shared]
    )


BLOCKS = [encoder, group_and_root_mean_square, without_weights, attention_of_other_layers]


@pytest.mark.parametrize("block", BLOCKS)
def test_plan_report_and_file_compute_in_integers_alone_and_as_the_simulation(block, tmp_path):
    model, x = network(block), inputs()
    expected = model.predict(x, verbose=0)
    assert planned_quantization(model, QuantizationOptions()).skipped
    assert not planned_quantization(model, QuantizationOptions(full_integer=True)).skipped
    quantized = pk.quantize(model, x, full_integer=True)
    made = quantized.export(tmp_path / "full.tflite")
    assert quantized.skipped == () and made.skipped == ()
    assert float_operations(graph_of_file(tmp_path / "full.tflite")) == []
    assert all((one.largest or 0) <= 1 for one in made.tensors) and made.simulation.mean_error < 0.02
    assert sum(one.largest is not None for one in made.tensors) > 0.8 * len(made.tensors)
    with quantized.simulating():
        found = model.predict(x, verbose=0)
    assert np.sqrt(np.mean((found - expected) ** 2)) < 0.05 * np.ptp(expected)


def test_results_inside_layers_have_the_names_of_these_before_theirs():
    found = planned_quantization(network(encoder), QuantizationOptions(full_integer=True))
    names = {name for name, _ in found.ranges}
    assert {"before_mean", "before_rsqrt", "behind_normalized", "attention_scores", "attention_softmax"} <= names


def test_inputs_and_outputs_may_be_integers_too(tmp_path):
    quantized = pk.quantize(network(encoder), inputs(), full_integer=True)
    quantized.export(tmp_path / "whole.tflite", integer_io=("inputs", "outputs"))
    graph = graph_of_file(tmp_path / "whole.tflite")
    assert not {"QUANTIZE", "DEQUANTIZE"} & {graph.kind(one) for one in graph.operators}


def masked(x):
    return L.MultiHeadAttention(2, 4, name="attention")(L.Masking(name="masking")(x), x)


REFUSED = {
    "causal attention": (
        lambda x: L.MultiHeadAttention(2, 4, name="attention")(x, x, use_causal_mask=True),
        "attention_dot_product_attention.*, since its mask has no integer kernel",
    ),
    "masked attention": (masked, "attention, since its mask has no integer kernel"),
    "normalization of positions": (
        lambda x: L.LayerNormalization(axis=1, name="norm")(x),
        "norm, since normalizations have an integer form for the last axis",
    ),
}


@pytest.mark.parametrize(("block", "message"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_integer_form_is_refused_by_name_before_anything_changes(block, message):
    model = network(block)
    before = model.get_weights()
    for attempt in (
        lambda: pk.quantize(model, inputs(), full_integer=True),
        lambda: planned_quantization(model, QuantizationOptions(full_integer=True)),
    ):
        with pytest.raises(ValueError, match=f"With full_integer=True nothing.*{message}.*or leave full_integer out"):
            attempt()
    assert all(np.array_equal(one, two) for one, two in zip(before, model.get_weights(), strict=True))


def test_open_lengths_and_excluded_layers_are_refused():
    with pytest.raises(ValueError, match="before, since .* if the lengths of all axes but the batch are known"):
        planned_quantization(network(encoder, (None, 8)), QuantizationOptions(full_integer=True))
    with pytest.raises(ValueError, match="last, since excluded by 'last'"):
        planned_quantization(network(encoder), QuantizationOptions(full_integer=True, exclude="last"))
    with pytest.raises(ValueError, match="epsilon|rsqrt"):
        planned_quantization(network(encoder), QuantizationOptions(full_integer=True, activation_bits=16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"full_integer": 1}, "is True or False. Received: 1"),
        ({"activation_bits": "float"}, 'Received: activation_bits="float"'),
    ],
)
def test_options_that_contradict_full_integer_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        QuantizationOptions(**{"full_integer": True, **options})


def test_bits_for_a_floor_are_refused_since_weights_may_stay_in_floating_point():
    options = {"evaluate": lambda model: 1.0, "floor": 0.5, "full_integer": True}
    with pytest.raises(ValueError, match="no weight stays in floating point.*Pass a budget"):
        pk.choose_bits(network(encoder), inputs(), **options)


def test_a_training_on_integers_moves_the_weights_of_normalizations(tmp_path):
    model, x = network(encoder), inputs()
    # The variance of such an example has the code of 0.
    x[0] = 0.0
    model.compile(keras.optimizers.SGD(0.01), "mse")
    norm = model.get_layer("before")
    before = norm.gamma.numpy(), norm.beta.numpy()
    callback = pk.QuantizationCallback(x, full_integer=True)
    model.fit(x, np.ones((64, 3)), batch_size=16, epochs=1, verbose=0, callbacks=[callback])
    after = norm.gamma.numpy(), norm.beta.numpy()
    assert all(np.isfinite(one).all() and not np.array_equal(one, two) for one, two in zip(after, before, strict=True))
    made = callback.report.export(tmp_path / "trained.tflite")
    assert made.skipped == () and float_operations(graph_of_file(tmp_path / "trained.tflite")) == []


def test_channels_that_a_normalization_computes_can_be_scaled_as_where_it_stays_whole():
    model = network(lambda x: L.Dense(8, name="second")(L.LayerNormalization(name="norm")(x)))
    found = {one.producer.name: one for one in rescalable(place(model, full_integer=True))}
    norm = model.get_layer("norm")
    assert [one.variable for one in found["norm_scaled"].written] == [norm.gamma, norm.beta]
    assert [one.name for one in found["norm_scaled"].readers] == ["second"]

"""Recurrent layers in files without an operation in floating point: LSTMs as one operation, others step by step."""

import keras
import numpy as np
import pytest
from architectures import randomize
from integer_files import float_operations, graph_of_file
from keras import layers as L

import prunekit as pk
from prunekit.core.runtime.model_function import ModelFunction
from prunekit.techniques.quantize.after_training import planned_quantization
from prunekit.techniques.quantize.grids.ranges import Sample
from prunekit.techniques.quantize.options import QuantizationOptions
from prunekit.techniques.quantize.rounding.calibration import grid_of_cell

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
LENGTH, FEATURES, FUSED = 3, 3, "UNIDIRECTIONAL_SEQUENCE_LSTM"
FULL = QuantizationOptions(full_integer=True)


def two_lstms(x):
    return L.LSTM(6, go_backwards=True, name="last")(L.LSTM(5, return_sequences=True, use_bias=False, name="all")(x))


def both_directions(x):
    y = L.Bidirectional(L.LSTM(4, return_sequences=True), name="lstms")(x)
    return L.Bidirectional(L.SimpleRNN(3), merge_mode="sum", name="simple")(y)


def grus(x):
    first, state = L.GRU(5, return_sequences=True, return_state=True, name="after")(x)
    return L.GRU(5, reset_after=False, use_bias=False, go_backwards=True, name="before")(first, initial_state=state)


def step_by_step(x):
    y, hidden, cell = L.LSTM(4, return_sequences=True, return_state=True, name="with_state")(x)
    y = L.LSTM(4, return_sequences=True, name="goes_on")(y, initial_state=[hidden, cell])
    return L.RNN(L.SimpleRNNCell(4, activation="relu"), name="simple")(y)


NETWORKS = {"LSTM": (two_lstms, 2), "Bidirectional": (both_directions, 2), "GRU": (grus, 0), "steps": (step_by_step, 0)}


def network(block, shape=(LENGTH, FEATURES)):
    keras.utils.set_random_seed(0)
    x = keras.Input(shape, name="x")
    return randomize(keras.Model(x, L.Dense(3, name="out")(block(x))))


def inputs(count=48):
    return np.random.default_rng(1).normal(size=(count, LENGTH, FEATURES)).astype("float32")


def kinds(graph):
    return [graph.kind(one) for one in graph.operators]


def answers(path, *batches):
    """The outputs of one interpreter for one batch after the other."""
    from ai_edge_litert.interpreter import Interpreter

    runner = Interpreter(str(path), num_threads=1).get_signature_runner()
    return [np.array(next(iter(runner(x=one).values()))) for one in batches]


@pytest.mark.parametrize(("block", "fused"), NETWORKS.values(), ids=NETWORKS)
def test_plan_report_and_file_have_no_float_and_the_file_computes_as_the_simulation(block, fused, tmp_path):
    model, x = network(block), inputs()
    expected = model.predict(x, verbose=0)
    assert planned_quantization(model, QuantizationOptions()).skipped
    plan = planned_quantization(model, FULL)
    assert not plan.skipped
    quantized = pk.quantize(model, x, full_integer=True)
    made = quantized.export(tmp_path / "full.tflite")
    assert [name for name, _ in plan.ranges] == [one.name for one in quantized.ranges]
    assert [one[0] for one in plan.weights] == [one.name for one in quantized.weights]
    assert quantized.skipped == () and made.skipped == ()
    graph = graph_of_file(tmp_path / "full.tflite")
    assert float_operations(graph) == [] and kinds(graph).count(FUSED) == fused
    assert all(one.largest is not None and one.largest <= one.allowed for one in made.tensors)
    assert made.simulation.mean_error < 0.01
    with quantized.simulating():
        found = model.predict(x, verbose=0)
    assert np.sqrt(np.mean((found - expected) ** 2)) < 0.03 * np.ptp(expected)


def test_a_file_remembers_nothing_of_earlier_calls_and_takes_any_number_of_examples(tmp_path):
    x = inputs()
    pk.quantize(network(two_lstms), x, full_integer=True).export(tmp_path / "lstm.tflite")
    first, again, three, one = answers(tmp_path / "lstm.tflite", x[:1], x[:1], x[:3], x[1:2])
    assert np.array_equal(first, again)
    assert np.array_equal(three[:1], first) and np.array_equal(three[1:2], one)


def test_report_counts_the_bytes_of_kernels_that_the_file_stores_once(tmp_path):
    quantized = pk.quantize(network(lambda x: L.GRU(5, name="gru")(x)), inputs(), full_integer=True)
    quantized.export(tmp_path / "gru.tflite")
    graph = graph_of_file(tmp_path / "gru.tflite")
    read = {int(index) for one in graph.operators for index in one.inputs if graph.kind(one) == "FULLY_CONNECTED"}
    stored = sum(codes.size for codes in map(graph.codes, read) if codes is not None)
    assert stored == sum(one.stored.entries for one in quantized.weights)
    # A kernel and a bias of the inputs, of the state in all steps, and of the last layer. The first state has another
    # grid than later ones, and with it another bias.
    assert len(read - {int(index) for one in graph.operators for index in one.outputs}) == 7


@pytest.mark.parametrize("block", [two_lstms, grus])
def test_zeros_of_pruned_kernels_are_zeros_in_the_file(block, tmp_path):
    model, x = network(block), inputs()
    pk.prune(model, 0.5)
    zeros = sum(int((one.numpy() == 0).sum()) for one in model.weights if "kernel" in one.path)
    quantized = pk.quantize(model, x, full_integer=True)
    quantized.export(tmp_path / "pruned.tflite")
    graph = graph_of_file(tmp_path / "pruned.tflite")
    kernels = {int(i) for one in graph.operators for i in one.inputs if graph.kind(one) in (FUSED, "FULLY_CONNECTED")}
    found = [graph.codes(index) for index in kernels if index >= 0]
    assert sum(int((one == 0).sum()) for one in found if one is not None) >= zeros


def test_all_gates_share_a_scale_each_and_the_step_of_the_cell_state_is_a_power_of_two():
    report = pk.quantize(network(two_lstms), inputs(), full_integer=True)
    of_lstm = [one for one in report.weights if one.name.startswith(("all", "last"))]
    assert len(of_lstm) == 4 and all(one.scales == 4 for one in of_lstm)
    assert of_lstm[0].granularity == "per 5 indices of axis 1"
    cells = [one for one in report.ranges if one.name.endswith("(its cell state)")]
    assert len(cells) == 2 and all(one.bits == 16 and np.log2(one.scale) % 1 == 0 for one in cells)


def test_steps_with_tensors_of_16_bits_are_more_exact():
    found = {}
    for bits in (8, 16):
        model, x = network(lambda x: L.GRU(5, use_bias=False)(x)), inputs()
        expected = model.predict(x, verbose=0)
        quantized = pk.quantize(model, x, full_integer=True, activation_bits=bits)
        assert quantized.skipped == ()
        with quantized.simulating():
            found[bits] = np.sqrt(np.mean((model.predict(x, verbose=0) - expected) ** 2))
    assert found[16] < found[8] / 2


def test_lstms_of_16_bits_are_computed_step_by_step(tmp_path):
    model = network(lambda x: L.LSTM(4, name="lstm")(x))
    quantized = pk.quantize(model, inputs(), full_integer=True, activation_bits=16)
    made = quantized.export(tmp_path / "wide.tflite")
    graph = graph_of_file(tmp_path / "wide.tflite")
    assert made.skipped == () and FUSED not in kinds(graph) and float_operations(graph) == []


@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_small_cell_states_have_a_grid_that_the_kernel_knows(scale, tmp_path):
    model = network(lambda x: L.LSTM(1, return_sequences=True, name="lstm")(x), (1, FEATURES))
    quantized = pk.quantize(model, scale * inputs()[:, :1], full_integer=True)
    made = quantized.export(tmp_path / "small.tflite")
    assert all(one.largest is not None and one.largest <= 1 for one in made.tensors)
    assert [one.high for one in quantized.ranges if "cell" in one.name] == [32767 / 32768]


@pytest.mark.parametrize(("largest", "end"), [(0.0, 1), (1.0, 1), (1.01, 2), (60.0, 64), (1e3, 64)])
def test_the_range_of_a_cell_state_is_a_power_of_two_between_1_and_64(largest, end):
    grid = grid_of_cell(Sample(np.array([[0.0, -largest]], "float32")))
    assert float(grid.scale) == end / 32768 and grid.format.bits == 16


def test_all_values_of_a_gate_may_be_zero(tmp_path):
    model = network(lambda x: L.LSTM(4, name="lstm")(x))
    cell = model.get_layer("lstm").cell
    kernel = cell.kernel.numpy()
    kernel[:, 4:8] = 0.0
    cell.kernel.assign(kernel)
    made = pk.quantize(model, inputs(), full_integer=True).export(tmp_path / "zeros.tflite")
    assert all(one.largest is not None and one.largest <= 1 for one in made.tensors)


def test_a_layer_that_is_called_twice_has_kernels_of_4_bits_once_and_reads_and_computes_integers(tmp_path):
    x, lstm = keras.Input((LENGTH, FEATURES), name="x"), L.LSTM(FEATURES, return_sequences=True, name="lstm")
    model = randomize(keras.Model(x, L.GRU(3, name="gru")(lstm(lstm(x)))))
    quantized = pk.quantize(model, inputs(), bits=4, full_integer=True)
    made = quantized.export(tmp_path / "twice.tflite", integer_io=("inputs", "outputs"))
    graph = graph_of_file(tmp_path / "twice.tflite")
    assert made.skipped == () and not {"DEQUANTIZE"} & set(kinds(graph)) and float_operations(graph) == []
    first, second = (one for one in graph.operators if graph.kind(one) == FUSED)
    assert first.inputs[1:9].tolist() == second.inputs[1:9].tolist()
    assert all(np.abs(graph.codes(int(index))).max() <= 7 for index in first.inputs[1:9])


def test_a_training_on_integers_moves_the_weights_of_recurrent_layers(tmp_path):
    model, x = network(lambda x: L.GRU(3, name="gru")(L.LSTM(4, return_sequences=True, name="lstm")(x))), inputs(32)
    model.compile(keras.optimizers.SGD(0.05), "mse")
    watched = [model.get_layer(name).cell.bias for name in ("lstm", "gru")]
    before = [one.numpy() for one in watched]
    callback = pk.QuantizationCallback(x, full_integer=True)
    model.fit(x, np.ones((32, 3)), batch_size=16, epochs=1, verbose=0, callbacks=[callback])
    assert all(np.isfinite(one.numpy()).all() for one in model.weights)
    assert not any(np.array_equal(one.numpy(), two) for one, two in zip(watched, before, strict=True))
    made = callback.report.export(tmp_path / "trained.tflite")
    assert made.skipped == () and float_operations(graph_of_file(tmp_path / "trained.tflite")) == []


def test_codes_by_gptq_lie_on_the_scales_of_the_kernel(tmp_path):
    model = network(lambda x: L.LSTM(4, name="lstm")(x))
    made = pk.quantize(model, inputs(), method="gptq", full_integer=True).export(tmp_path / "gptq.tflite")
    assert all(one.largest is not None and one.largest <= 1 for one in made.tensors)


OPEN = "known length: build the model on keras.Input"
REFUSED = {
    "open length": (lambda x: L.LSTM(4, name="lstm")(x), (None, FEATURES), OPEN),
    "mask": (lambda x: L.GRU(4, name="lstm")(L.Masking()(x)), (LENGTH, FEATURES), "its mask has no integer kernel"),
    "cells": (
        lambda x: L.RNN([L.GRUCell(4), L.GRUCell(4)], name="lstm")(x),
        (LENGTH, FEATURES),
        "the cell StackedRNNCells has no integer form",
    ),
    "activation": (
        lambda x: L.GRU(4, activation="softsign", name="lstm")(x),
        (LENGTH, FEATURES),
        "the activation softsign has no integer form inside recurrent layers",
    ),
    "both directions": (lambda x: L.Bidirectional(L.LSTM(4), name="lstm")(x), (None, FEATURES), OPEN),
}


@pytest.mark.parametrize(("block", "shape", "message"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_integer_form_is_refused_by_name(block, shape, message):
    with pytest.raises(ValueError, match=f"With full_integer=True nothing.*lstm, since .*{message}"):
        planned_quantization(network(block, shape), FULL)


def test_a_layer_of_a_kind_of_its_own_is_not_computed_as_its_base():
    class Doubled(L.LSTM):
        def call(self, sequences, initial_state=None, mask=None, training=False):
            return 2 * super().call(sequences, initial_state, mask, training)

    with pytest.raises(ValueError, match="lstm, since"):
        planned_quantization(network(lambda x: Doubled(4, name="lstm")(x)), FULL)


def test_observing_gives_the_results_of_the_layers():
    """The operations compute what the layers do, before anything is rounded."""
    from prunekit.techniques.quantize.placement.placement import place
    from prunekit.techniques.quantize.rounding.rounding import NoRounding
    from prunekit.techniques.quantize.rounding.simulation import simulating

    for block, _ in NETWORKS.values():
        model, x = network(block), inputs(8)
        expected = model.predict(x, verbose=0)
        with simulating(place(model, full_integer=True, fused_lstm=True), NoRounding()):
            found = ModelFunction(model, lambda given, model=model: model(given, training=False))(x)
        np.testing.assert_allclose(np.asarray(found), expected, atol=1e-5)

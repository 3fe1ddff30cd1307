"""Factors of channels that recurrent layers read and that tables compute: exact, also under masks; smaller errors."""

import keras
import numpy as np
import pytest
from architectures import inputs_of, randomize, stack
from keras import layers as L, ops
from networks import outputs
from scaled_models import assert_same, multiply_all

from prunekit.core.runtime.variable_values import assigned
from prunekit.techniques.quantize.after_training import quantize_model
from prunekit.techniques.quantize.grids.grids import Granularity, IntegerFormat
from prunekit.techniques.quantize.grids.ranges import grid_of
from prunekit.techniques.quantize.options import QuantizationOptions
from prunekit.techniques.quantize.placement.placement import place
from prunekit.techniques.quantize.rescaling.awq import Reading, output_error, table_product
from prunekit.techniques.quantize.rescaling.equalization import channel_ranges, equalized
from prunekit.techniques.quantize.rescaling.rescaling import rescalable

pytestmark = pytest.mark.every_backend
WORDS, LENGTH = 30, 5


def words(*layers, masked=True, first=None):
    """Returns a model of a table "first" for words, of which 0 is masked, and the layers."""
    tokens = x = keras.Input((LENGTH,), dtype="int32")
    for layer in (first or L.Embedding(WORDS, 8, mask_zero=masked, name="first"), *layers):
        x = layer(x)
    return keras.Model(tokens, x)


def sequence(*layers):
    """Returns a model of the layers for sequences of vectors."""
    return stack((LENGTH, 4), *layers)


def sentences(model, examples=3):
    """Returns inputs; sentences end with words that are masked."""
    inputs = inputs_of(model, examples=examples)
    for one in keras.tree.flatten(inputs):
        one[::2, 3:] = 0
    return inputs


def found_in(model) -> list[str]:
    """Returns "producer -> readers" of each tensor that can be multiplied."""
    return [
        f"{one.producer.first.name} -> {' '.join(reader.first.name for reader in one.readers)}"
        for one in rescalable(place(model))
    ]


def decoder():
    """Returns a model with a recurrent layer that starts from a state which another layer computes."""
    tokens, state = keras.Input((LENGTH,), dtype="int32"), keras.Input((4,))
    x = L.Embedding(WORDS, 8, name="first")(tokens)
    return keras.Model([tokens, state], L.GRU(6, name="last")(x, initial_state=L.Dense(6)(state)))


def both_ways(**options):
    """Returns a bidirectional layer of two LSTM layers."""
    return L.Bidirectional(L.LSTM(3, return_sequences=True), name="last", **options)


FOUND = {
    "words and LSTM": lambda: words(L.LSTM(3, name="last"), masked=False),
    "masked words and LSTM": lambda: words(L.Dropout(0.1), L.LSTM(3, name="last")),
    "masked words, both ways": lambda: words(L.SpatialDropout1D(0.1), both_ways(), L.GRU(2)),
    "both ways without a mask": lambda: words(both_ways(merge_mode="sum"), masked=False),
    "GRU with the reset gate before": lambda: words(L.GRU(3, reset_after=False, name="last")),
    # Keras 3.15 cannot run it with a mask on PyTorch.
    "backwards and unrolled": lambda: words(
        L.LSTM(3, go_backwards=True, unroll=True, name="last"), masked=keras.backend.backend() != "torch"
    ),
    "Dense and SimpleRNN": lambda: sequence(L.Dense(6, activation="relu", name="first"), L.SimpleRNN(3, name="last")),
    "masked vectors": lambda: sequence(L.Masking(), L.Dense(6, name="first"), L.LSTM(3, name="last")),
    "mask of zeros after a ReLU": lambda: sequence(
        L.Dense(6, activation="relu", name="first"), L.Masking(0.0), L.LSTM(3, name="last")
    ),
    "convolution and stacked cells": lambda: sequence(
        L.Conv1D(6, 3, padding="causal", name="first"), L.RNN([L.LSTMCell(3), L.GRUCell(4)], name="last")
    ),
    "normalization and several readers": lambda: sequence(
        L.LayerNormalization(name="first"), L.RNN(L.SimpleRNNCell(3), return_sequences=True, name="last")
    ),
    "repeated vector": lambda: stack((4,), L.Dense(6, name="first"), L.RepeatVector(3), L.GRU(3, name="last")),
    "initial state": decoder,
    "words and convolution": lambda: words(L.Conv1D(4, 3, name="last"), masked=False),
    "words and their mean": lambda: words(L.GlobalAveragePooling1D(), L.Dense(3, activation="tanh", name="last")),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_outputs_stay_with_factors_of_channels_that_a_recurrent_layer_reads(name):
    model = FOUND[name]()
    assert found_in(model)[0] in ("first -> last", "first -> last last")
    randomize(model)
    inputs = sentences(model)
    before, weights = outputs(model, inputs), [np.array(one) for one in model.get_weights()]
    multiply_all(model, exact=False)
    changed = [one.path for one, former in zip(model.weights, weights, strict=True) if (array(one) != former).any()]
    assert any("first" in path for path in changed) and all("recurrent" not in path for path in changed)
    assert_same(outputs(model, inputs), before, 1e-5)


def array(variable) -> np.ndarray:
    """Returns the values of a variable."""
    return ops.convert_to_numpy(variable)


class OwnCell(L.LSTMCell):
    """A cell of the user."""


def shared_cell():
    x, cell = keras.Input((LENGTH, 4)), L.LSTMCell(3)
    y = L.Dense(6)(x)
    return keras.Model(x, [L.RNN(cell)(y), L.RNN(cell, go_backwards=True)(y)])


def state_of_itself():
    x = keras.Input((4,))
    y = L.Dense(6)(x)
    return keras.Model(x, L.GRU(6)(L.RepeatVector(3)(y), initial_state=y))


def table_in_an_operation():
    tokens, table = keras.Input((LENGTH,), dtype="int32"), L.Embedding(WORDS, 8)
    return keras.Model(tokens, ops.matmul(L.LSTM(WORDS)(table(tokens)), table.embeddings))


def table_of_two_inputs():
    one, other, table = keras.Input((4,), dtype="int32"), keras.Input((4,), dtype="int32"), L.Embedding(WORDS, 8)
    return keras.Model([one, other], [L.LSTM(3)(table(one)), L.GRU(3)(table(other))])


REFUSED = {
    "recurrent layers compute": lambda: sequence(L.LSTM(3, return_sequences=True), L.GRU(4), L.Dense(2)),
    "recurrent layer with ReLU": lambda: sequence(L.SimpleRNN(3, activation="relu"), L.Dense(2)),
    "cell of two layers": shared_cell,
    "cell of the user": lambda: sequence(L.Dense(6), L.RNN(OwnCell(3))),
    "sequence that is the initial state too": state_of_itself,
    "constraint of the recurrent layer": lambda: sequence(L.Dense(6), L.LSTM(3, kernel_constraint="unit_norm")),
    "constraint of the table": lambda: words(L.LSTM(3), first=L.Embedding(WORDS, 8, embeddings_constraint="unit_norm")),
    "regularized words": lambda: words(L.LSTM(3), first=L.Embedding(WORDS, 8, activity_regularizer="l2")),
    "table that computes logits too": table_in_an_operation,
    "reversible table": lambda: words(L.LSTM(3), first=L.ReversibleEmbedding(WORDS, 8)),
    "table of two inputs": table_of_two_inputs,
    "mask of another value": lambda: sequence(L.Dense(6), L.Masking(1.0), L.LSTM(3)),
    "activation that is not homogeneous": lambda: sequence(L.Dense(6, activation="tanh"), L.LSTM(3)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_channels_around_recurrent_layers_and_tables_that_take_no_factors(name):
    assert found_in(REFUSED[name]()) == []


# ---- the error of a rounded table -----------------------------------------------------------------------------------


def test_the_error_of_a_rounded_table_is_that_of_what_reads_the_words():
    rng = np.random.default_rng(0)
    table, kernel = rng.normal(size=(WORDS, 6)), rng.normal(size=(6, 4)).astype("float32")
    tokens, factors = rng.integers(0, 20, 200), np.exp(rng.normal(size=6))
    rows = table[tokens]
    reading = Reading(kernel[None], (rows.T @ rows)[None], np.arange(6)[None])
    product = table_product(table, np.bincount(tokens, minlength=WORDS), [reading], [200])
    rounded = grid_of((table * factors).astype("float32"), IntegerFormat(4), Granularity((0,))).nearest(table * factors)
    expected = np.square((rounded / factors - table)[tokens] @ kernel).sum()
    assert np.isclose(output_error(product, 1 / factors, IntegerFormat(4)), expected, rtol=1e-3)
    # Words that do not occur do not count.
    assert product.matrices.shape == (1, 6, 20)


def test_each_position_of_a_window_reads_its_own_words():
    rng = np.random.default_rng(1)
    table, kernel = rng.normal(size=(WORDS, 3)), rng.normal(size=(12, 5)).astype("float32")
    tokens = rng.integers(0, WORDS, (4000, 4))
    # Four words side by side, as Flatten and a Dense layer read them.
    channels = np.tile(np.arange(3), 4)[None]
    reading = Reading(kernel[None], np.zeros((1, 12, 12)), channels)
    product = table_product(table, np.bincount(tokens.ravel(), minlength=WORDS), [reading], [4000])
    rounded = grid_of(table.astype("float32"), IntegerFormat(4), Granularity((0,))).nearest(table)
    expected = np.square((rounded - table)[tokens].reshape(4000, 12) @ kernel).sum()
    assert np.isclose(output_error(product, np.ones(3), IntegerFormat(4)), expected, rtol=0.1)


# ---- rounding --------------------------------------------------------------------------------------------------------


def with_outliers(make, seed):
    """Returns sequences for a model in which the layer reads some channels a hundred times as large as others."""
    keras.utils.set_random_seed(seed)
    layer = make()
    model = sequence(L.Dense(16, activation="relu", name="first"), layer, L.Dense(3, name="head"))
    factors = np.where(np.arange(16) % 8, 1.0, 100.0)
    model.get_layer("first").kernel.assign(array(model.get_layer("first").kernel) * factors)
    for variable in layer.weights:
        if variable.path.endswith("/kernel"):
            variable.assign(array(variable) / factors[:, None] ** 0.8)
    return model, np.random.default_rng(seed).normal(size=(64, LENGTH, 4)).astype("float32")


def with_uneven_words(make, seed):
    """Returns sentences for a model of a table whose columns have different magnitudes."""
    keras.utils.set_random_seed(seed)
    model = words(make(), L.Dense(3, name="head"))
    rng = np.random.default_rng(seed)
    table = model.get_layer("first").embeddings
    table.assign(rng.normal(size=table.shape) * 4.0 ** rng.normal(size=8))
    return model, sentences(model, examples=64)


def error_of(model, weights, data, **options) -> float:
    """Returns the squared change of the recurrent layer's outputs after quantization, and restores the weights."""
    part = keras.Model(model.inputs, model.get_layer("last").output)
    model.set_weights(weights)
    before = ops.convert_to_numpy(part(ops.convert_to_tensor(data)))
    quantize_model(model, QuantizationOptions(bits=4, activation_bits="float", **options), data)
    return float(np.square(ops.convert_to_numpy(part(ops.convert_to_tensor(data))) - before).sum())


LAYERS = {
    "SimpleRNN": lambda: L.SimpleRNN(4, name="last"),
    "LSTM": lambda: L.LSTM(4, name="last"),
    "GRU": lambda: L.GRU(4, name="last"),
    "both ways": both_ways,
}


@pytest.mark.parametrize("make", [with_outliers, with_uneven_words])
@pytest.mark.parametrize("name", LAYERS)
def test_factors_lower_the_error_of_the_outputs_of_a_recurrent_layer(name, make):
    errors = []
    for seed in range(6):
        model, data = make(LAYERS[name], seed)
        weights = model.get_weights()
        ways = [{"method": "nearest"}, {"method": "awq"}, {"method": "nearest", "equalize": True}]
        errors.append([error_of(model, weights, data, **way) for way in ways])
    # Geometric means over the seeds: the errors of one model may be twenty times as large as those of another.
    ratios = np.exp(np.log(np.array(errors)[:, 1:] / np.array(errors)[:, :1]).mean(axis=0))
    assert (ratios < (0.05 if make is with_outliers else 0.9)).all(), errors
    found = quantize_model(model, QuantizationOptions(bits=4, method="awq", activation_bits="float"), data)
    assert found.report.notes


def test_zeros_of_a_table_and_of_a_recurrent_kernel_stay_zeros():
    model, data = with_uneven_words(LAYERS["LSTM"], 0)
    variables = [model.get_layer("first").embeddings, model.get_layer("last").cell.kernel]
    for variable in variables:
        variable.assign(np.where(np.random.default_rng(1).random(variable.shape) < 0.5, 0.0, array(variable)))
    zeros = [array(variable) == 0.0 for variable in variables]
    found = quantize_model(
        model, QuantizationOptions(bits=8, method="awq", equalize=True, activation_bits="float"), data
    )
    assert found.report.notes[0] == "Equalization changed the channels of 1 of 1 layers: first."
    assert all((array(one)[where] == 0.0).all() for one, where in zip(variables, zeros, strict=True))


def test_ranges_of_a_table_and_of_both_directions_become_equal_and_the_report_names_the_reader_once():
    model, data = with_uneven_words(both_ways, 0)
    before, found = outputs(model, data), equalized(place(model))
    assert found.converged and [(one.producer, one.readers) for one in found.layers] == [("first", ("last",))]
    with assigned(found.values):
        pass
    assert_same(outputs(model, data), before, 1e-5)
    (scaling,) = rescalable(place(model))
    table, last = model.get_layer("first").embeddings, model.get_layer("last")
    computed, read = channel_ranges(scaling)
    kernels = [array(one.cell.kernel) for one in (last.forward_layer, last.backward_layer)]
    assert np.allclose(computed, np.abs(array(table)).max(axis=0))
    assert np.allclose(read, np.max([np.abs(one).max(axis=1) for one in kernels], axis=0))
    assert np.allclose(computed, read, rtol=3e-3)

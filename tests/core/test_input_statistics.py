"""Norms and Hessians of layer inputs against plain NumPy."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from networks import sequential

from prunekit.anatomy.layers.targets import find_targets
from prunekit.core.statistics.input_statistics import InputMoments
from prunekit.core.statistics.statistics import Collectors


def statistics(model, data, name, **selection):
    targets, _ = find_targets(model, **selection)
    found = Collectors([name], model, targets, data).values()
    return {target.name: row[name] for target, row in zip(targets, found, strict=True)}


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).normal(size=(70, 5, 6, 3)).astype("float32")


@pytest.fixture(scope="module")
def network():
    keras.utils.set_random_seed(0)
    return sequential(
        (5, 6, 3),
        layers.Conv2D(4, 3, padding="same", activation="relu", name="conv"),
        layers.Flatten(),
        layers.Dense(5, name="dense"),
    )


def windows(images):
    """The 3x3 windows of "same" padding, shape (positions, 27)."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    each = [padded[:, i : i + 5, j : j + 6] for i in range(3) for j in range(3)]
    return np.concatenate(each, axis=-1).reshape(-1, 27)


@pytest.mark.every_backend
def test_norms_are_those_of_the_inputs_that_each_weight_multiplies(network, images):
    found = statistics(network, images, "input_norm")
    expected = np.linalg.norm(windows(images), axis=0).reshape(3, 3, 3, 1)
    np.testing.assert_allclose(ops.convert_to_numpy(found["conv/kernel"]), np.repeat(expected, 4, -1), rtol=1e-4)
    hidden = ops.convert_to_numpy(network.layers[0](images)).reshape(70, -1)
    expected = np.repeat(np.linalg.norm(hidden, axis=0)[:, None], 5, -1)
    np.testing.assert_allclose(ops.convert_to_numpy(found["dense/kernel"]), expected, rtol=1e-4, atol=1e-5)


def test_hessians_are_products_of_the_inputs_per_example(network, images):
    found = statistics(network, images, "hessian")
    rows = windows(images).astype("float64")
    np.testing.assert_allclose(found["conv/kernel"]["hessian"][0], rows.T @ rows / 70, rtol=1e-4, atol=1e-3)
    hidden = ops.convert_to_numpy(network.layers[0](images)).reshape(70, -1).astype("float64")
    np.testing.assert_allclose(found["dense/kernel"]["hessian"][0], hidden.T @ hidden / 70, rtol=1e-4, atol=1e-3)
    assert found["dense/kernel"]["curvature"].shape == (120, 5)


@pytest.mark.every_backend
@pytest.mark.parametrize("kind", [layers.GRU, layers.SimpleRNN, layers.LSTM])
def test_recurrent_kernels_see_inputs_and_states_of_all_steps(kind):
    model = keras.Sequential([keras.Input((4, 3)), kind(5, return_sequences=True, name="rnn")])
    x = np.random.default_rng(0).normal(size=(6, 4, 3)).astype("float32")
    found = statistics(model, x, "input_norm")
    kernel, recurrent = (ops.convert_to_numpy(found[f"rnn/{name}"]) for name in ("kernel", "recurrent_kernel"))
    np.testing.assert_allclose(kernel[:, 0], np.sqrt(np.square(x).sum(axis=(0, 1))), rtol=1e-4)
    # The states of the steps are the outputs of the steps before; the first state is zero.
    states = ops.convert_to_numpy(model(x))[:, :-1]
    np.testing.assert_allclose(recurrent[:, 0], np.sqrt(np.square(states).sum(axis=(0, 1))), rtol=1e-4)


def test_an_embedding_counts_its_lookups_and_padding_is_left_out():
    words = layers.Embedding(6, 2, mask_zero=True, name="words")
    model = keras.Sequential([keras.Input((3,), dtype="int32"), words, layers.Dense(2, name="dense")])
    tokens = np.array([[1, 2, 0], [2, 5, 2]], "int32")
    norms = statistics(model, tokens, "input_norm")
    np.testing.assert_allclose(ops.convert_to_numpy(norms["words/embeddings"])[:, 0] ** 2, [1, 1, 3, 0, 0, 1])
    hessian = statistics(model, tokens, "hessian")["words/embeddings"]["hessian"]
    np.testing.assert_allclose(hessian, np.array([1, 1, 3, 0, 0, 1]) / 2)
    table = ops.convert_to_numpy(model.layers[0].embeddings)[[1, 2, 2, 5, 2]]
    np.testing.assert_allclose(
        ops.convert_to_numpy(norms["dense/kernel"])[:, 0], np.sqrt(np.square(table).sum(axis=0)), rtol=1e-4
    )


@pytest.mark.every_backend
def test_layers_inside_time_distributed_and_attention_are_observed():
    inputs = keras.Input((4, 6))
    attended = layers.MultiHeadAttention(2, 3, name="attention")(inputs, inputs)
    model = keras.Model(inputs, layers.TimeDistributed(layers.Dense(2, name="inner"), name="each")(attended))
    x = np.random.default_rng(0).normal(size=(5, 4, 6)).astype("float32")
    found = statistics(model, x, "input_norm")
    assert len(found) == 5
    expected = np.sqrt(np.square(x).sum(axis=(0, 1)))
    for name in ("query", "key", "value"):
        row = next(value for key, value in found.items() if name in key)
        np.testing.assert_allclose(ops.convert_to_numpy(row)[:, 0, 0], expected, rtol=1e-4)
    after = ops.convert_to_numpy(model.layers[1](x, x))
    row = next(value for key, value in found.items() if "inner" in key)
    np.testing.assert_allclose(ops.convert_to_numpy(row)[:, 0], np.sqrt(np.square(after).sum(axis=(0, 1))), rtol=1e-4)


def test_a_layer_without_a_formula_is_named():
    class Own(layers.Dense):
        def call(self, inputs):
            return super().call(inputs) * 2

    model = keras.Sequential([keras.Input((4,)), Own(3, name="own")])
    with pytest.raises(ValueError, match="own/kernel cannot be stated .* no formula for the call of Own"):
        statistics(model, np.ones((2, 4), "float32"), "hessian")


def test_a_gru_that_resets_before_its_product_is_named():
    model = keras.Sequential([keras.Input((4, 3)), layers.GRU(2, reset_after=False, name="gru")])
    with pytest.raises(ValueError, match="gru/recurrent_kernel .* reset_after=False"):
        statistics(model, np.ones((2, 4, 3), "float32"), "input_norm")


def test_moments_of_an_embedding_are_numbers_of_lookups_and_those_of_its_reader_magnitudes():
    model = keras.Sequential([keras.Input((4,), dtype="int32"), layers.Embedding(9, 3, name="table"), layers.Dense(2)])
    tokens = np.random.default_rng(0).integers(0, 6, (20, 4))
    targets, _ = find_targets(model, include=["table", "dense*"], also=("embedding",))
    moments = InputMoments(model, targets)
    moments.reset()
    for part in (tokens[:12], tokens[12:]):
        moments.observe(part, None)
    table, dense = moments.values()
    counts, rows = (
        np.bincount(tokens.ravel(), minlength=9),
        ops.convert_to_numpy(model.layers[0](tokens)).reshape(80, 3),
    )
    assert (table["rows"], dense["rows"]) == (80, 80)
    np.testing.assert_array_equal(table["gram"], counts)
    np.testing.assert_allclose(table["mean_abs"], counts[None] / 80)
    np.testing.assert_allclose(dense["gram"][0], rows.T @ rows, rtol=1e-5)
    np.testing.assert_allclose(dense["mean_abs"], np.abs(rows).mean(axis=0, keepdims=True), rtol=1e-5)

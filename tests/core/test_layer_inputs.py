"""Inputs of layers: recurrent layers while their cells are observed, under masks too; samples of many rows."""

import keras
import numpy as np
import pytest
from keras import layers as L, ops

import prunekit as pk
from prunekit.anatomy.layers.targets import find_targets
from prunekit.core.statistics.layer_inputs import InputProducts, observing_inputs, rows_in_parts, sampled_rows
from prunekit.core.statistics.layer_products import product_of

pytestmark = pytest.mark.every_backend

# Sentences that begin or end with words that are masked.
SENTENCES = np.array([[1, 2, 3, 0, 0], [0, 0, 3, 4, 5], [1, 2, 3, 4, 5], [0, 2, 0, 4, 0]], "int32")
LAYERS = {
    "LSTM": lambda: L.LSTM(3, return_sequences=True),
    "LSTM backwards": lambda: L.LSTM(3, go_backwards=True),
    "GRU backwards": lambda: L.GRU(3, go_backwards=True, return_sequences=True),
    "zeros at masked steps": lambda: L.RNN(L.SimpleRNNCell(3), zero_output_for_mask=True),
    "zeros at masked steps backwards": lambda: L.RNN(
        L.SimpleRNNCell(3), go_backwards=True, return_sequences=True, zero_output_for_mask=True
    ),
    "both ways": lambda: L.Bidirectional(L.LSTM(3, return_sequences=True)),
}


def model_of(layer):
    """Returns a model of masked words."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((5,), dtype="int32")
    return keras.Model(tokens, layer(L.Embedding(6, 4, mask_zero=True)(tokens)))


@pytest.mark.parametrize("name", LAYERS)
def test_a_masked_recurrent_layer_computes_the_same_while_its_cell_is_observed(name):
    model, seen = model_of(LAYERS[name]()), []
    cells = [one for one in model._flatten_layers() if hasattr(one, "state_size") and not isinstance(one, L.RNN)]
    before = ops.convert_to_numpy(model(SENTENCES))
    with observing_inputs(cells, lambda layer, args: seen.append(layer)):
        observed = ops.convert_to_numpy(model(SENTENCES))
    assert len(seen) == 5 * len(cells)
    np.testing.assert_allclose(observed, before, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ops.convert_to_numpy(model(SENTENCES)), before, rtol=1e-5, atol=1e-6)


def test_a_masked_bidirectional_layer_is_rounded_by_gptq():
    model = model_of(L.Bidirectional(L.LSTM(3)))
    report = pk.quantize(model, SENTENCES, bits=4, activation_bits="float")
    assert report.method == "gptq" and len(report.weights) == 5


SAMPLED = {
    "convolution": lambda: L.Conv2D(5, 3, padding="same", strides=2),
    "depthwise": lambda: L.DepthwiseConv2D(3),
    "groups": lambda: L.Conv2D(6, 3, groups=3),
    "transposed": lambda: L.Conv2DTranspose(2, 2, strides=2),
    "dense": lambda: L.Dense(4),
    "einsum": lambda: L.EinsumDense("bxyc,cd->bxyd", (None, None, 4)),
}


def product_and_images(layer, size):
    """Returns the product of a layer's kernel, and two images of neighbouring pixels that are alike."""
    noise = np.random.default_rng(0).normal(size=(2, size, size, 3)).astype("float32")
    images = 1.0 + np.cumsum(np.cumsum(noise, axis=1), axis=2) / size
    layer.build(images.shape)
    model = keras.Sequential([keras.Input(images.shape[1:]), layer])
    (target,) = find_targets(model, "*/kernel")[0]
    return product_of(target), ops.convert_to_tensor(images)


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sample_of_many_rows_counts_as_all_of_them(name):
    product, images = product_and_images(SAMPLED[name](), 100)
    whole, sample = InputProducts(product), InputProducts(product)
    for rows in rows_in_parts(product, (images,)):
        whole.add(rows)
    parts = list(sampled_rows(product, (images,)))
    assert sum(rows.shape[1] for rows, _ in parts) == 2 * 1024
    sample.observe((images,))
    assert sample.rows == whole.rows
    size = np.abs(whole.gram).max()
    # Of a transposed convolution, a row has the inputs of one of four positions: these are means over 512 rows.
    np.testing.assert_allclose(sample.gram, whole.gram, atol=0.08 * size)
    np.testing.assert_allclose(sample.sums, whole.sums, atol=0.08 * np.abs(whole.sums).max())
    again = [ops.convert_to_numpy(rows) for rows, _ in sampled_rows(product, (images,))]
    for one, (other, _) in zip(again, parts, strict=True):
        np.testing.assert_array_equal(one, ops.convert_to_numpy(other))


@pytest.mark.parametrize("name", SAMPLED)
def test_all_rows_of_a_layer_with_few_positions_are_read(name):
    product, images = product_and_images(SAMPLED[name](), 22)
    parts = zip(rows_in_parts(product, (images,)), sampled_rows(product, (images,)), strict=True)
    for rows, (sample, weight) in parts:
        assert weight == 1.0
        np.testing.assert_array_equal(*map(ops.convert_to_numpy, (rows, sample)))

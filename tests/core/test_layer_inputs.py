"""Recurrent layers compute the same while their cells are observed, under masks too."""

import keras
import numpy as np
import pytest
from keras import layers as L
from keras import ops

import prunekit as pk
from prunekit.core.layer_inputs import observing_inputs

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
    report = pk.quantize(model, SENTENCES, weights=4, activations=None).report
    assert report.method == "gptq" and len(report.weights) == 5

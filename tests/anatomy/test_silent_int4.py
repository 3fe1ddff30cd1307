"""Weights that Keras has quantized to int4, two to a byte, are counted one by one."""

import keras
import numpy as np
import pytest

import prunekit as pk

L = keras.layers
pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize`:UserWarning"),
]


def quantized(layer, shape, block_size, dtype="float32"):
    """The layer's kernel with its first row at zero and no other zero, quantized."""
    model = keras.Sequential([keras.Input(shape, dtype=dtype), layer])
    variable = layer.weights[0]
    values = np.ones(variable.shape, "float32")
    values[0] = 0
    variable.assign(values)
    layer.quantize(config=keras.quantizers.Int4QuantizationConfig(block_size=block_size))
    return model


@pytest.mark.parametrize("block_size", [-1, 2, 128], ids=["no groups", "groups", "one group"])
@pytest.mark.parametrize(
    ("layer", "shape", "kernel", "bytes"),
    [
        (lambda: L.Dense(5, name="layer"), (4,), (4, 5), 4 * 3),
        (lambda: L.Dense(6, name="layer"), (3,), (3, 6), 3 * 3),
        (lambda: L.EinsumDense("abc,cde->abde", (None, 2, 3), name="layer"), (7, 4), (4, 2, 3), 4 * 3),
        (lambda: L.Embedding(9, 5, name="layer"), (3,), (9, 5), 9 * 3),
    ],
    ids=["odd outputs", "even outputs", "einsum", "embedding"],
)
def test_size_and_zeros_are_of_weights_and_bytes_of_what_is_stored(layer, shape, kernel, bytes, block_size):
    dtype = "int32" if len(kernel) == 2 and kernel[0] == 9 else "float32"
    model = quantized(layer(), shape, block_size, dtype)
    row = next(row for row in pk.inspect(model).weights if row.name in ("layer/kernel", "layer/embeddings"))
    assert (row.shape, row.size, row.bytes) == (kernel, int(np.prod(kernel)), bytes)
    assert row.zeros == int(np.prod(kernel[1:]))
    assert row.sparsity == 1 / kernel[0]


def test_a_whole_model_quantized_as_keras_does_it_keeps_its_zeros(perceptron):
    before = {row.name: row for row in pk.prune(perceptron, 0.75, allocation="uniform").weights}
    perceptron.quantize("int4")
    after = {row.name: row for row in pk.inspect(perceptron).weights}
    for name in ("hidden/kernel", "logits/kernel"):
        assert after[name].size == before[name].size == 2 * after[name].bytes
        assert after[name].zeros >= before[name].zeros

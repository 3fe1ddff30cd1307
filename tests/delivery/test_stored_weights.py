"""The bytes of weights that a report and a choice of bits count are those that the written file holds."""

from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers as L

import prunekit as pk

pytestmark = [pytest.mark.one_backend, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

IMAGES = {
    # The second and the third layer have as many zero points.
    "convolutions": lambda: [
        L.Conv2D(16, 3, activation="relu"),
        L.DepthwiseConv2D(3, depth_multiplier=2),
        L.Conv2D(32, 1),
        L.Conv2DTranspose(12, 3),
        L.GlobalAveragePooling2D(),
        L.Dense(10),
    ],
    "few for a scale": lambda: [L.GlobalAveragePooling2D(), L.Dense(64, activation="relu"), L.Dense(10)],
    "three dimensions": lambda: [L.Reshape((8, 8, 4, 1)), L.Conv3D(12, 3), L.Flatten(), L.Dense(10)],
    "a loop": lambda: [L.Reshape((16, 16)), L.Bidirectional(L.LSTM(12)), L.Dense(10)],
    "steps of a loop": lambda: [L.Reshape((4, 64)), L.GRU(12, unroll=True), L.Dense(10)],
    "projections": lambda: [L.Reshape((16, 16)), L.EinsumDense("abc,cde->abde", (16, 2, 12)), L.Flatten(), L.Dense(9)],
}
TABLES = {
    "a table of integers": lambda: [L.Embedding(50, 16), L.Conv1D(12, 3, activation="relu"), L.Flatten(), L.Dense(10)],
    "a table of floats": lambda: [L.Embedding(50, 16), L.GRU(16), L.Dense(10)],
}


def network(name):
    """Returns a model whose kernels have no zeros, and data."""
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    if name in TABLES:
        return keras.Sequential([keras.Input((12,), dtype="int32"), *TABLES[name]()]), rng.integers(0, 50, (16, 12))
    model = keras.Sequential([keras.Input((8, 8, 4)), *IMAGES[name]()])
    return model, rng.normal(size=(16, 8, 8, 4)).astype("float32")


def held(path, sizes):
    """Returns the bytes of entries, scales and zero points of the constants with so many entries, in all graphs."""
    from tensorflow.lite.python import schema_py_generated as schema

    content = Path(path).read_bytes()
    model, total, zero_points = schema.Model.GetRootAs(content), 0, {}
    found = [graph.Tensors(at) for graph in graphs_of(model) for at in range(graph.TensorsLength())]
    for tensor in found:
        buffer, shape = model.Buffers(tensor.Buffer()), tensor.ShapeAsNumpy()
        kinds = schema.TensorType.FLOAT32, schema.TensorType.INT8, schema.TensorType.INT4
        if not buffer.DataLength() or tensor.Type() not in kinds or np.size(shape) < 2 or np.prod(shape) not in sizes:
            continue
        total += buffer.DataLength()
        grid = tensor.Quantization()
        if grid is not None and grid.ScaleLength() > 1:
            total += 4 * grid.ScaleLength()
            # Where the vector is in the file: its field is the fourth one.
            place = grid._tab.Vector(grid._tab.Offset(10))
            zero_points[place] = 8 * grid.ZeroPointLength()
    return total + sum(zero_points.values())


def graphs_of(model):
    return [model.Subgraphs(at) for at in range(model.SubgraphsLength())]


@pytest.mark.parametrize("activations", [8, 16, "float"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", [*IMAGES, *TABLES])
def test_reported_bytes_are_those_of_the_file(tmp_path, name, bits, activations):
    model, data = network(name)
    options = dict(activation_bits=activations, method="nearest", correct_biases=False)
    choice = pk.choose_bits(model, data, budget=10**7, bits=(bits,), **options)
    found = pk.quantize(model, data, bits=bits, **options)
    others = 4 * (found.parameters - sum(row.size for row in found.weights))
    found.export(tmp_path / "w.tflite")
    sizes = {row.size for row in found.weights}
    assert found.bytes[1] - others == held(tmp_path / "w.tflite", sizes)
    assert choice.bytes == found.bytes[1] and choice.other_bytes == others


def test_a_table_on_the_grid_of_its_readers_has_no_scales_of_rows():
    model, data = network("a table of integers")
    table = pk.quantize(model, data).weights[0]
    assert (table.scales, table.bytes, table.stored.zero_points) == (50, 50 * 16, 0)
    model, data = network("a table of floats")
    table = pk.quantize(model, data).weights[0]
    assert (table.bytes, table.stored.zero_points) == (50 * 16 + 4 * 50, 50)

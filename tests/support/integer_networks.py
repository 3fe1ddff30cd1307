"""Small networks whose integer files tests write and run."""

from pathlib import Path

import keras
import numpy as np
from architectures import ARCHITECTURES, inputs_of, randomize

from prunekit.delivery.litert.litert_graph import LiteRTGraph

INT8, INT4 = 9, 17


def made(name, examples=32):
    """Returns an architecture with random weights, and inputs."""
    keras.utils.set_random_seed(0)
    model = randomize(ARCHITECTURES[name]())
    return model, inputs_of(model, examples=examples)


def stored_weights(path):
    """Returns {kind of an operation with weights: (type, codes, scales)}, of the operation or its DEQUANTIZE."""
    graph, found = LiteRTGraph(Path(path).read_bytes()), {}
    made_by = {int(index): one for one in graph.operators for index in one.outputs}
    for one in graph.operators:
        kind = graph.kind(one)
        if kind not in ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"):
            continue
        index = int(one.inputs[1])
        while index in made_by:
            assert graph.kind(made_by[index]) == "DEQUANTIZE"
            index = int(made_by[index].inputs[0])
        tensor = graph.tensor(index)
        data = np.asarray(graph._model.buffers[tensor.buffer].data, "uint8")
        if tensor.type == INT4:
            assert len(data) == -(-np.prod(graph.shape(index)) // 2)
            # The first of two codes lies in the lower bits.
            data = np.stack([data & 15, data >> 4], axis=1).reshape(-1)[: np.prod(graph.shape(index))]
            codes = np.where(data > 7, data.astype("int32") - 16, data)
        else:
            codes = data.view("int8").astype("int32")
        scales = np.asarray(tensor.quantization.scale)
        found[kind] = tensor.type, codes.reshape(graph.shape(index)), scales
    return found

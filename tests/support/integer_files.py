"""Runs integer files, and compares them tensor by tensor with their simulation."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

from prunekit.delivery.integers.integer_comparison import TensorDifference, file_inputs, tensor_differences
from prunekit.delivery.litert.litert import input_specs
from prunekit.delivery.litert.litert_graph import LiteRTGraph
from prunekit.delivery.litert.tensor_probe import opened
from prunekit.techniques.quantize.quantization_state import QuantizationState


def run(made, model, inputs) -> tuple[Any, list[np.ndarray]]:
    """Returns the interpreter after it ran a file, and the outputs in the model's order.

    Args:
        made: An `IntegerFile`.
        model: Its model.
        inputs: Examples in the model's input structure.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = file_inputs(made, input_specs(model, inputs), keras.tree.flatten(inputs))
        interpreter = opened(str(written(made, folder)), given)
        outputs = interpreter.get_signature_runner()(**given)
    names = [re.sub(r"\W", "_", name) for name in getattr(model, "output_names", [])]
    return interpreter, [outputs[name] for name in (names if len(outputs) > 1 else outputs)]


def differences(made, placement, formats, grids, sample) -> list[TensorDifference]:
    """Returns the difference of every rounded tensor.

    Args:
        made: An `IntegerFile`.
        placement: Where tensors are rounded.
        formats: The codes.
        grids: The grid of each range.
        sample: One example in the model's input structure.
    """
    model = placement.graphs.main.model
    # Weights that lie on no grid yet are rounded on grids of their values.
    quantized = QuantizationState(model, placement, formats, grids, weights={}, report=None)
    with tempfile.TemporaryDirectory() as folder:
        found = tensor_differences(made, written(made, folder), quantized, input_specs(model, sample), sample)
    assert len(found) == len(made.roundings)
    return found


def graph_of_file(path) -> LiteRTGraph:
    """Returns the graph of a file."""
    return LiteRTGraph(Path(path).read_bytes())


def float_operations(graph) -> list[str]:
    """Returns the kinds of the operations that read or compute floats, besides conversions."""
    return [
        graph.kind(one)
        for one in graph.operators
        if graph.kind(one) not in ("QUANTIZE", "DEQUANTIZE")
        and any(graph.is_float(int(index)) for index in (*one.inputs, *one.outputs) if index >= 0)
    ]


def written(made, folder) -> Path:
    """Returns the path of a file after writing it."""
    path = Path(folder) / "integers.tflite"
    path.write_bytes(made.content)
    return path

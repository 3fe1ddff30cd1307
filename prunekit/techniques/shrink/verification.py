"""Compares a smaller model with the model that has zeros in the removed channels, on a few inputs."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from prunekit.anatomy.channels import Channels
from prunekit.anatomy.model_graph import graph_of
from prunekit.anatomy.weight_entries import zeroed
from prunekit.core.calibration import batches_of
from prunekit.sparsity.array_ops import array_of

EXAMPLES = 2
# Length of an open axis of drawn inputs.
OPEN = 16
# Far above rounding, also in float16, and far below the effect of a wrong channel.
TOLERANCE = 0.03


def verify(channels: Channels, removed: np.ndarray, smaller: Any, data: Any) -> str:
    """Checks that the smaller model computes what the model with zeros in the removed channels computes.

    Args:
        channels: The channels of the model.
        removed: The removed channels.
        smaller: The smaller model, not repaired.
        data: Calibration data, or None for random inputs.

    Returns:
        "", or the reason why the models were not compared.

    Raises:
        ValueError: The outputs differ.
    """
    model = channels.model
    kept = channels.kept_numbers(removed)
    try:
        inputs = _examples(model, data)
    except Exception as error:  # noqa: BLE001  # inputs of a user's model may be anything
        return f"no inputs could be made ({error})"
    values = zeroed(channels, kept)
    mapping = [(variable, keras.ops.convert_to_tensor(value, variable.dtype)) for variable, value in values]
    try:
        with keras.StatelessScope(state_mapping=mapping):
            wanted = model(inputs, training=False)
    except Exception as error:  # noqa: BLE001  # random inputs may be none that the model accepts
        return f"the model does not accept the inputs ({str(error).splitlines()[0]})"
    pairs = zip(_arrays(wanted), _arrays(smaller(inputs, training=False)), strict=True)
    for index, (one, other) in enumerate(pairs):
        size = np.abs(one).max(initial=0.0)
        if one.shape != other.shape or (np.isfinite(size) and np.abs(one - other).max(initial=0.0) > TOLERANCE * size):
            raise ValueError(
                f"The smaller model computes other outputs than the model {model.name!r} with zeros in the removed "
                f"channels, which is a fault of prunekit. Received: a difference at output {index}. Leave out custom "
                "layers with `exclude`, and report the model."
            )
    return ""


def _arrays(outputs: Any) -> list[np.ndarray]:
    return [np.asarray(array_of(leaf), np.float64) for leaf in keras.tree.flatten(outputs)]


def _examples(model: Any, data: Any) -> Any:
    if data is not None:
        inputs, _ = next(iter(batches_of(data)))
        return keras.tree.map_structure(lambda array: array[:EXAMPLES], inputs)
    graph = graph_of(model)
    if graph is None:
        raise ValueError("the model declares none")
    draw = np.random.default_rng(0)

    def drawn(tensor: Any) -> np.ndarray:
        shape = [EXAMPLES if tensor.shape[0] is None else tensor.shape[0]]
        shape += [OPEN if length is None else length for length in tensor.shape[1:]]
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if "float" in dtype:
            return draw.normal(size=shape).astype(dtype if dtype != "bfloat16" else "float32")
        if dtype == "string":
            raise ValueError("an input is a text")
        # Numbers of any vocabulary; none is padding.
        return np.ones(shape, dtype)

    return keras.tree.map_structure(drawn, graph.input)

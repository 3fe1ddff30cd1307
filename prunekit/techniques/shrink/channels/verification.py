"""Compares a smaller model with the model that has zeros in the removed channels, on a few inputs."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from prunekit.anatomy.channels.channels import Channels
from prunekit.anatomy.channels.recorded_calls import graph_call
from prunekit.anatomy.channels.weight_entries import zeroed
from prunekit.core.data.calibration import batches_of
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.shrink.graph.kept_statistics import kept_statistics

EXAMPLES = 2
# Length of an open axis of drawn inputs.
OPEN = 16
# Far above rounding, also in float16, and far below the effect of a wrong channel.
TOLERANCE = 0.03


class NotComparedError(Exception):
    """Two models cannot be compared; the message is the reason."""


def verify(channels: Channels, removed: np.ndarray, smaller: Any, inputs: Any) -> None:
    """Checks that the smaller model computes what the model with zeros in the removed channels computes.

    Approximated normalizations of the model have the statistics of the kept channels for the comparison.

    Args:
        channels: The channels of the model.
        removed: The removed channels.
        smaller: The smaller model, not repaired.
        inputs: Inputs of the model.

    Raises:
        ValueError: The outputs differ.
        NotComparedError: The model does not accept the inputs.
    """
    with kept_statistics(channels, channels.kept_numbers(removed)):
        error = outputs_error(channels, removed, smaller, inputs)
    if error > TOLERANCE:
        raise ValueError(
            f"The smaller model computes other outputs than the model {channels.model.name!r} with zeros in the "
            f"removed channels, which is a fault of prunekit. Received: a relative difference of {error:.2g}. Leave "
            "out custom layers with `exclude`, and report the model."
        )


def outputs_error(channels: Channels, zero: np.ndarray, smaller: Any, inputs: Any) -> float:
    """Returns the largest difference of an output from the model with zeros in some channels.

    The difference is relative to the largest entry of the output, and infinite for an output of another shape. Outputs
    that are not finite are left out.

    Args:
        channels: The channels of the model.
        zero: The channels whose entries are zero.
        smaller: The smaller model.
        inputs: Inputs of the model.

    Raises:
        NotComparedError: The model does not accept the inputs.
    """
    values = zeroed(channels, channels.kept_numbers(zero))
    mapping = [(variable, keras.ops.convert_to_tensor(value, variable.dtype)) for variable, value in values]
    try:
        with keras.StatelessScope(state_mapping=mapping):
            wanted = channels.model(inputs, training=False)
    except Exception as error:  # random inputs may be none that the model accepts
        raise NotComparedError(f"the model does not accept the inputs ({str(error).splitlines()[0]})") from error
    pairs = zip(_arrays(wanted), _arrays(smaller(inputs, training=False)), strict=True)
    return max((_difference(one, other) for one, other in pairs), default=0.0)


def _difference(one: np.ndarray, other: np.ndarray) -> float:
    if one.shape != other.shape:
        return np.inf
    size, change = np.abs(one).max(initial=0.0), np.abs(one - other).max(initial=0.0)
    if not np.isfinite(size) or change == 0:
        return 0.0
    return float(change / size) if size and np.isfinite(change) else np.inf


def _arrays(outputs: Any) -> list[np.ndarray]:
    return [np.asarray(array_of(leaf), np.float64) for leaf in keras.tree.flatten(outputs)]


def probe_inputs(channels: Channels, data: Any) -> Any:
    """Returns two examples of the calibration data, or random inputs of the model.

    Raises:
        NotComparedError: No inputs could be made.
    """
    try:
        return _examples(channels, data)
    except Exception as error:  # inputs of a user's model may be anything
        raise NotComparedError(f"no inputs could be made ({error})") from error


def _examples(channels: Channels, data: Any) -> Any:
    if data is not None:
        inputs, _ = next(iter(batches_of(data)))
        return keras.tree.map_structure(lambda array: array[:EXAMPLES], inputs)
    call = graph_call(channels.model) or channels.opened[id(channels.model)]
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

    return keras.tree.map_structure(drawn, call.args[0])

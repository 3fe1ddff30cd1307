"""Latency of LiteRT files on this machine, and the plain LiteRT file of a model."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from prunekit.delivery import stopwatch
from prunekit.delivery.isolated_run import ScriptFailed, run_script
from prunekit.delivery.litert import ConversionError, input_specs, trace_and_convert

__all__ = ["ConversionError", "Latencies", "ScriptFailed", "measured_latencies", "plain_file"]

# Duration of all rounds together, in seconds.
_SECONDS = 2.0
# Examples that are given to a file; a file that takes more in one call repeats them.
_EXAMPLES = 64


@dataclass(frozen=True)
class Latencies:
    """Durations of LiteRT files.

    Attributes:
        seconds: Median duration of one call of each file.
        rounds: Number of rounds; each times each file once.
        batch: Number of examples in one call of each file.
    """

    seconds: tuple[float, ...]
    rounds: int
    batch: tuple[int, ...]


def plain_file(model: keras.Model, samples: Any) -> bytes:
    """Returns the model's plain float32 LiteRT file, which is what the format "litert" writes.

    Args:
        model: A built Keras model on the TensorFlow backend.
        samples: Inputs in the model's input structure, samples along axis 0.

    Raises:
        ConversionError: The model does not convert.
    """
    with tempfile.TemporaryDirectory() as folder:
        return trace_and_convert(model, samples, input_specs(model, samples), Path(folder))[1]


def measured_latencies(files: Sequence[Path], model: keras.Model, samples: Any) -> Latencies:
    """Returns the durations of LiteRT files with the same inputs: one thread, the files in turn, in one process.

    Args:
        files: The LiteRT files.
        model: A model with the inputs of the files.
        samples: Inputs in the model's input structure, samples along axis 0.

    Raises:
        ScriptFailed: A file does not run, crashes or hangs.
    """
    arrays = [np.asarray(array)[:_EXAMPLES] for array in keras.tree.flatten(samples)]
    specs = input_specs(model, samples)
    inputs = {spec.name: array.astype(spec.dtype) for spec, array in zip(specs, arrays, strict=True)}
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "inputs.npz", Path(folder) / "latencies.json"
        np.savez(source, allow_pickle=False, **inputs)
        run_script(stopwatch.__file__, [str(source), str(target), str(_SECONDS), *map(str, files)])
        found = json.loads(target.read_text(encoding="utf-8"))
    return Latencies(tuple(found["seconds"]), found["rounds"], tuple(found["batch"]))

"""Latency of LiteRT files on this machine, and the plain LiteRT file of a model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.graph.example_inputs import fixed_batch
from prunekit.delivery.litert import stopwatch
from prunekit.delivery.litert.isolated_run import ScriptFailed, run_script
from prunekit.delivery.litert.litert import ConversionError, input_specs, trace_and_convert

__all__ = ["ConversionError", "Latencies", "ScriptFailed", "input_arrays", "measured_latencies", "plain_file"]


@dataclass(frozen=True)
class Latencies:
    """Durations of calls of LiteRT files.

    Attributes:
        turns: Median duration of a call in seconds, shape (turns, files); each turn times each file.
    """

    turns: np.ndarray

    def seconds(self, file: int) -> float:
        """Returns the median duration of a call of a file."""
        return float(np.median(self.turns[:, file]))

    def share(self, file: int) -> tuple[float, tuple[float, float]]:
        """Returns a file's duration divided by that of the first file, with bounds of about 95 % confidence."""
        shares = self.turns[:, file] / self.turns[:, 0]
        return float(np.median(shares)), stopwatch.interval(shares)


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


def input_arrays(model: keras.Model, samples: Any) -> dict[str, np.ndarray]:
    """Returns the inputs of one call of the model's file by name: one example, or the model's fixed batch size.

    Args:
        model: A built Keras model.
        samples: Inputs in the model's input structure, samples along axis 0; repeated where the batch takes more.
    """
    batch = fixed_batch(model) or 1
    arrays = [np.asarray(array) for array in keras.tree.flatten(samples)]
    return {
        spec.name: np.resize(array, (batch, *array.shape[1:])).astype(spec.dtype)
        for spec, array in zip(input_specs(model, samples), arrays, strict=True)
    }


def measured_latencies(
    files: Sequence[Path], inputs: Sequence[Mapping[str, np.ndarray]], seconds: float, precision: float = 0.0
) -> Latencies:
    """Returns the durations of calls of LiteRT files: one thread, the files in turns, in one process.

    Args:
        files: The LiteRT files.
        inputs: The inputs of one call of each file by name.
        seconds: Duration of all turns together; slow files take at least six turns.
        precision: Earlier end: the half width of the interval of each file's share of the first one, divided by the
            share.

    Raises:
        ScriptFailed: A file does not run, crashes or hangs.
    """
    arrays = {f"{index}/{name}": array for index, named in enumerate(inputs) for name, array in named.items()}
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "inputs.npz", Path(folder) / "latencies.npz"
        np.savez(source, allow_pickle=False, **arrays)
        run_script(stopwatch.__file__, [str(source), str(target), str(seconds), str(precision), *map(str, files)])
        with np.load(target) as stored:
            return Latencies(stored["seconds"])

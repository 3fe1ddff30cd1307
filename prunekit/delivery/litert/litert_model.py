"""A LiteRT file as a Keras model that computes and measures, but does not train."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np


class LiteRTModel(keras.Model):
    """The outputs of a LiteRT file, as floating-point numbers where the file has integers on a grid.

    Keras must run it eagerly: `compile(run_eagerly=True)`.

    Args:
        path: The file.

    Raises:
        ValueError: The file cannot be read, or has no signature.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from ai_edge_litert.interpreter import Interpreter

        super().__init__(name="litert")
        try:
            self._runner = Interpreter(model_path=os.fspath(path)).get_signature_runner()
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{os.fspath(path)} is not a LiteRT file with a signature: {error}") from error
        self._details = self._runner.get_input_details()
        self._results = self._runner.get_output_details()
        self.built = True

    @property
    def input_shape(self) -> tuple[int | None, ...] | None:
        """Shape of the only input, with None for open sizes; None for several inputs."""
        if len(self._details) != 1:
            return None
        detail = next(iter(self._details.values()))
        return tuple(None if length < 0 else int(length) for length in detail["shape_signature"])

    @property
    def signature_inputs(self) -> list[str]:
        """Names of the inputs."""
        return list(self._details)

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Returns the outputs of a batch: a tensor, or tensors by name."""
        given = self._named(inputs)
        count = len(next(iter(given.values())))
        fixed = next((int(one["shape_signature"][0]) for one in self._details.values() if len(one["shape"])), -1)
        size = count if fixed < 0 else fixed
        runs = [
            self._run({name: array[i : i + size] for name, array in given.items()}, size) for i in range(0, count, size)
        ]
        outputs = {
            name: keras.ops.convert_to_tensor(np.concatenate([run[name] for run in runs])[:count])
            for name in self._results
        }
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def _named(self, inputs: Any) -> dict[str, np.ndarray]:
        if isinstance(inputs, list | tuple) and len(inputs) == 1:
            inputs = inputs[0]
        if not isinstance(inputs, Mapping):
            inputs = {next(iter(self._details)): inputs} if len(self._details) == 1 else {}
        if inputs.keys() != self._details.keys():
            raise ValueError(
                f"The file has the inputs {', '.join(self._details)}. Received: {', '.join(inputs) or 'no names'}."
            )
        return {name: keras.ops.convert_to_numpy(array) for name, array in inputs.items()}

    def _run(self, inputs: Mapping[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
        given = {}
        for name, array in inputs.items():
            # A file of a fixed batch size: repeat the last example.
            padded = np.concatenate([array, np.repeat(array[-1:], size - len(array), axis=0)])
            given[name] = _quantized(padded, self._details[name])
        return {name: _dequantized(array, self._results[name]) for name, array in self._runner(**given).items()}


def _quantized(array: np.ndarray, detail: Mapping[str, Any]) -> np.ndarray:
    dtype, grid = np.dtype(detail["dtype"]), detail["quantization_parameters"]
    if not grid["scales"].size or dtype.kind == "f":
        return np.ascontiguousarray(array, dtype)
    bounds = np.iinfo(dtype)
    codes = np.round(array / grid["scales"][0]) + grid["zero_points"][0]
    return np.clip(codes, bounds.min, bounds.max).astype(dtype)


def _dequantized(array: np.ndarray, detail: Mapping[str, Any]) -> np.ndarray:
    grid = detail["quantization_parameters"]
    if not grid["scales"].size or array.dtype.kind == "f":
        return array
    return (array.astype("float32") - grid["zero_points"][0]) * grid["scales"][0]

"""Writes a file under a temporary name, checks that a Keras file holds its model, and renames what is kept."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np

from prunekit.core.runtime.partial_files import save_model, scratch_file
from prunekit.delivery.litert.gzip_size import gzip_size
from prunekit.delivery.litert.isolated_run import ExportRejected
from prunekit.sparsity.array_ops import array_of


@contextlib.contextmanager
def temporary(target: Path) -> Iterator[Path]:
    """Yields a temporary path next to `target`; removes a file that remains there at the end."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_file(target, f".{target.stem}-{secrets.token_hex(4)}{target.suffix}") as path:
        yield path


def kept(path: Path, target: Path) -> tuple[int, int]:
    """Renames a checked file to its final name; returns its bytes, and those after gzip."""
    with path.open("rb") as stream:
        compressed = gzip_size(iter(lambda: stream.read(1 << 20), b""))
    size = path.stat().st_size
    os.replace(path, target)
    return size, compressed


def saved_and_loaded(model: keras.Model, path: Path) -> tuple[keras.Model, int]:
    """Saves a model, without its optimizer; returns the model that is loaded from the file, and its number of zeros.

    Args:
        model: The model.
        path: Name of the file, which ends with ".keras".

    Raises:
        ExportRejected: Keras cannot save the model, the file does not load in safe mode, or holds other weights.
        OSError: The file cannot be written.
    """
    adapted = [layer.name for layer in model._flatten_layers() if getattr(layer, "lora_enabled", False)]
    if adapted:
        raise ExportRejected(
            "failed",
            f"Keras saves LoRA weights as a part of the kernel, so the file has other weights: {', '.join(adapted)}. "
            "Assign the sums, `layer.kernel`, to a model without LoRA, and export that",
        )
    save(model, path)
    try:
        loaded = keras.models.load_model(path, compile=False, safe_mode=True)
    except Exception as error:
        raise ExportRejected("failed", f"the file does not load in safe mode: {_first_line(error)}") from error
    return loaded, _zeros_where_both_are_the_same(model, loaded)


def save(model: keras.Model, path: Path) -> None:
    """Saves a model without its optimizer.

    Raises:
        ExportRejected: Keras cannot save the model.
        OSError: The file cannot be written.
    """
    with _without_training_state(model):
        try:
            save_model(model, path)
        except OSError:
            raise
        except Exception as error:  # user-defined layers may raise any exception
            raise ExportRejected("failed", f"Keras cannot save the model: {_first_line(error)}") from error


def _zeros_where_both_are_the_same(model: keras.Model, loaded: keras.Model) -> int:
    """Returns the number of zero weights, which is equal in both models.

    Raises:
        ExportRejected: The weights of the two models differ.
    """
    zeros, same = 0, len(model.weights) == len(loaded.weights)
    for pair in zip(model.weights, loaded.weights, strict=False):
        # Convert one weight at a time: a model may fill half of the memory.
        left, right = map(array_of, pair)
        same = same and _same(left, right)
        zeros += left.size - int(np.count_nonzero(left))
    if not same:
        raise ExportRejected("failed", "the weights in the file differ from the model's weights")
    return zeros


def _same(left: np.ndarray, right: np.ndarray) -> bool:
    """Returns True if the arrays are bitwise equal: -0.0 differs from 0.0, and NaN equals the same NaN."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    left_bytes, right_bytes = (np.ascontiguousarray(one).reshape(-1).view("uint8") for one in (left, right))
    return np.array_equal(left_bytes, right_bytes)


@contextlib.contextmanager
def _without_training_state(model: keras.Model) -> Iterator[None]:
    """Detaches the optimizer while the model is saved: an exported file needs no slots, which triple its size."""
    state = vars(model)
    hidden = {name: state[name] for name in ("optimizer", "compiled") if name in state}
    state.pop("optimizer", None)
    state["compiled"] = False
    try:
        yield
    finally:
        state.pop("compiled", None)
        state.update(hidden)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

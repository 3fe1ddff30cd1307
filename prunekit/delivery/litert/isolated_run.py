"""Runs exported files in a separate process and compares their outputs with the Keras model's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prunekit.core.outputs.baseline import class_agreement
from prunekit.delivery.litert import probe

_SECONDS = 900  # time limit of one file for all samples


class ExportRejected(Exception):
    """Rejects an exported file: status of the row, reason, and the comparison if the file ran."""

    def __init__(self, status: str, reason: str, found: Comparison | None = None) -> None:
        super().__init__(reason)
        self.status, self.found = status, found


@dataclass(frozen=True)
class Comparison:
    """Errors of a file's outputs against the Keras model's outputs.

    Attributes:
        max_error: Largest absolute error of any output, as a fraction of that output's range over the samples.
        mean_error: Root of the mean squared error, as a fraction of the same range.
        agreement: Fraction of samples with the same most likely class; None where the first output is no classifier.
        accuracy: Fraction of samples whose most likely class is the label; None without labels.
        alike: True if the Keras model's outputs are equal for all samples, so that the comparison proves little.
        metrics: Metrics of the file's outputs, by name; None if not measured.
    """

    max_error: float
    mean_error: float
    agreement: float | None
    accuracy: float | None
    alike: bool = False
    metrics: dict[str, float] | None = None


def compare(
    reference: list[np.ndarray], answers: list[np.ndarray], labels: np.ndarray | None, loss: str | None
) -> Comparison:
    """Compares `answers` with the Keras model's outputs `reference`; every output has shape (samples, ...).

    Args:
        reference: Outputs of the Keras model.
        answers: Outputs to compare.
        labels: Class of each sample, for the accuracy; or None.
        loss: Name of the loss of the first output, which says whether it is one of classes; None if it is not known.

    Raises:
        ExportRejected: The shapes differ.
    """
    shapes = [values.shape for values in answers], [values.shape for values in reference]
    if shapes[0] != shapes[1]:
        raise ExportRejected("failed", f"its outputs have shapes {shapes[0]}, those of the Keras model {shapes[1]}")
    largest, mean = [], []
    for expected, measured in zip(reference, answers, strict=True):
        # The range of an almost constant output is only rounding: scale by its largest magnitude, or by 1 if all zero.
        size = float(np.abs(expected).max(initial=0.0))
        scale = float(np.ptp(expected)) if np.ptp(expected) > 0.01 * size else size or 1.0
        error = np.abs(measured.astype(np.float64) - expected) / scale
        error = np.where(np.isfinite(measured), error, np.inf)
        largest.append(float(error.max(initial=0.0)))
        mean.append(float(np.sqrt(np.mean(error**2))))
    first, accuracy = reference[0], None
    if labels is not None and first.ndim == 2 and first.shape[1] > 1:
        accuracy = float((answers[0].argmax(-1) == labels[: len(answers[0])]).mean())
        loss = "categorical"
    agreement = class_agreement(first, answers[0], loss)
    alike = len(first) > 1 and all(np.allclose(values, values[:1], rtol=1e-6, atol=0.0) for values in reference)
    return Comparison(max(largest), max(mean), agreement, accuracy, alike)


class ScriptFailed(Exception):
    """Raised when a script fails in its process; the message continues after "the model converts, but "."""


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Runs a script of this folder in a separate process that imports neither prunekit nor TensorFlow.

    Raises:
        ScriptFailed: The script does not start, fails, crashes or hangs.
    """
    # Start the script by path and with -P, so that its folder is not on the path.
    command = [sys.executable, "-P", script, *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, capture_output=True, env=environment, timeout=_SECONDS, check=False)
    except OSError as error:
        raise ScriptFailed(f"Python cannot be started to try it: {error}") from error
    except subprocess.TimeoutExpired:
        raise ScriptFailed(f"does not finish within {_SECONDS} s") from None
    if done.returncode < 0:
        raise ScriptFailed(f"crashes the LiteRT interpreter ({signal.Signals(-done.returncode).name})")
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise ScriptFailed(f"does not run: {lines[-1] if lines else 'no message'}")


def run_in_subprocess(path: Path, inputs: dict[str, np.ndarray], runs: dict[int, int]) -> dict[str, np.ndarray]:
    """Runs a LiteRT file in a separate process; returns outputs as "CHUNK/name" for each CHUNK: COUNT of `runs`.

    Raises:
        ExportRejected: The file does not load, does not run, crashes or hangs.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "inputs.npz", Path(folder) / "outputs.npz"
        np.savez(source, allow_pickle=False, **inputs)
        runs_given = [f"{chunk}:{count}" for chunk, count in runs.items()]
        try:
            run_script(probe.__file__, [str(path), str(source), str(target), *runs_given])
        except ScriptFailed as failure:
            raise ExportRejected("failed", f"the model converts, but {failure}") from failure
        with np.load(target) as stored:
            return {name: stored[name] for name in stored.files}

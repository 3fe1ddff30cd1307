"""Measured sizes of a model for `pk.shrink`: bytes of its LiteRT file, and the file's latency on this machine."""

from __future__ import annotations

import contextlib
import importlib
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.graph.example_inputs import declared_inputs, fixed_batch, symbolic_call
from prunekit.core.runtime.environment import version_of
from prunekit.delivery.litert.latency import ConversionError, ScriptFailed, input_arrays, measured_latencies, plain_file
from prunekit.techniques.shrink.channels.measured_size import Measure, Measured

# Turns of both files follow until their share is known to 1 %, or the seconds are used up.
_PRECISION, _SECONDS = 0.01, 12.0


def check_measure(name: str) -> None:
    """Raises if models cannot be measured here.

    Args:
        name: "bytes" or "latency"; other targets are calculated.

    Raises:
        ValueError: Keras runs on a backend from which no LiteRT file is made, or LiteRT is not installed.
    """
    if name not in ("bytes", "latency"):
        return
    remedy = "Use `parameters` or `macs`, or"
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            f"A target in {name} is measured on LiteRT files, which need Keras's TensorFlow backend. Received: the "
            f"backend {keras.backend.backend()!r}. {remedy} run with KERAS_BACKEND=tensorflow."
        )
    try:
        importlib.import_module("ai_edge_litert.interpreter")
    except ImportError as error:
        raise ValueError(
            f"A target in {name} is measured on LiteRT files, which need ai-edge-litert. Received: {error}. {remedy} "
            "install it: pip install ai-edge-litert."
        ) from error


@contextlib.contextmanager
def measure_of(name: str, model: Any, inputs: Any = None) -> Iterator[Measure | None]:
    """Yields the measure of a target for one model; None for a target that is calculated.

    Args:
        name: "bytes", "latency", or another target.
        model: The model with whose size those of smaller models are compared.
        inputs: Example inputs of the model, or their shapes, for inputs without a fixed size.

    Raises:
        ValueError: As `check_measure`. In a comparison: a model cannot be converted or does not run; the inputs have no
            fixed size.
    """
    check_measure(name)
    with tempfile.TemporaryDirectory() as folder:
        files = _Files(model, inputs, Path(folder))
        measures = {"bytes": Measure("parameters", files.bytes), "latency": Measure("macs", files.latency)}
        yield measures.get(name)


class _Files:
    """LiteRT files of a model and of smaller ones; that of the model is made at the first comparison."""

    def __init__(self, model: Any, inputs: Any, folder: Path) -> None:
        self._model, self._inputs, self._folder = model, inputs, folder

    def bytes(self, smaller: Any) -> Measured:
        """Compares the bytes of the files."""
        before, after = (path.stat().st_size for path in self._both(smaller))
        share = after / before
        setting = "LiteRT file in float32, as pk.export writes it"
        return Measured("bytes", before, after, "bytes", share, (share, share), setting)

    def latency(self, smaller: Any) -> Measured:
        """Compares the latencies of the files."""
        paths = self._both(smaller)
        inputs = [input_arrays(model, _samples(model, self._inputs, sized=True)) for model in (self._model, smaller)]
        try:
            found = measured_latencies(paths, inputs, _SECONDS, _PRECISION)
        except ScriptFailed as error:
            raise ValueError(f"The latency of {smaller.name!r} cannot be measured: it {error}. Use `macs`.") from error
        setting = (
            f"LiteRT file in float32, batch of {fixed_batch(smaller) or 1}, one thread, ai-edge-litert "
            f"{version_of('ai-edge-litert')}, {_processor()}; median processor time of a call, {len(found.turns)} "
            "turns of both files"
        )
        before, after = 1000 * found.seconds(0), 1000 * found.seconds(1)
        return Measured("latency", before, after, "ms", *found.share(1), setting)

    def _both(self, smaller: Any) -> list[Path]:
        whole = self._folder / "model.tflite"
        if not whole.exists():
            self._write(self._model, whole)
        return [whole, self._write(smaller, self._folder / "smaller.tflite")]

    def _write(self, model: Any, path: Path) -> Path:
        try:
            content = plain_file(model, _samples(model, self._inputs, sized=False))
        except ConversionError as error:
            raise ValueError(
                f"The model {model.name!r} has no LiteRT file: {error}. Use `parameters` or `macs`."
            ) from error
        path.write_bytes(content)
        return path


def _samples(model: Any, inputs: Any, *, sized: bool) -> Any:
    """Returns a batch of random numbers, and of ones for whole numbers, in the structure of the model's inputs.

    Args:
        model: A built model.
        inputs: Example inputs of the model, or their shapes, or None.
        sized: False: open sizes are 1, which a conversion does not read. True: they are refused.
    """
    declared = declared_inputs(model)
    if sized or declared is None:
        args, _, _ = symbolic_call(model, fixed_batch(model) or 1, inputs)
        if not args:
            raise ValueError(f"The model {model.name!r} does not say which inputs it takes. Pass them as `inputs`.")
        declared = args[0]
    draw = np.random.default_rng(0)

    def drawn(tensor: Any) -> np.ndarray:
        shape, kind = [length or 1 for length in tensor.shape], keras.backend.standardize_dtype(tensor.dtype)
        # Ones are numbers of any vocabulary, and no padding.
        return draw.normal(size=shape).astype(kind) if "float" in kind else np.ones(shape, kind)

    return keras.tree.map_structure(drawn, declared)


def machine() -> str:
    """Returns what latencies depend on: the processor, and the version of LiteRT."""
    return f"{_processor()}, ai-edge-litert {version_of('ai-edge-litert')}"


def _processor() -> str:
    """Returns the name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

"""Estimates where zeros and removed channels pay off: size and speed per runtime, also where there is no gain."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from prunekit.delivery.litert.litert import ConversionError, convert, input_specs, trace
from prunekit.delivery.litert.xnnpack import Verdict, read_verdict
from prunekit.delivery.reports import formatting
from prunekit.delivery.reports.rows import DISK, DOWNLOAD, RuntimeAdvice

if TYPE_CHECKING:
    from prunekit.anatomy.cost.inspection import SparsityReport, WeightRow

# (sparsity, figure) pairs, measured with TensorFlow 2.21, ai-edge-litert 2.3.0 and LiteRT.js 2.5.3 on one thread.
# Sizes of a MobileNetV1-like network of 4.2 M weights, as a fraction of the same file of the dense network.
_GZIP = ((0.0, 1.0), (0.8, 0.308), (0.9, 0.199), (0.95, 0.139))
_SPARSE_ENCODED = ((0.33, 1.0), (0.8, 0.309), (0.9, 0.163), (0.95, 0.089))
# Speed against the dense network: Dense kernels in blocks of (4, 1), float32, batch 1; 1x1 convolutions in WebAssembly.
_BLOCKS_X86 = ((0.7, 1.54), (0.8, 2.28), (0.9, 4.34), (0.95, 6.25))
_POINTWISE_WASM = ((0.7, 1.8), (0.8, 2.5), (0.9, 4.1), (0.95, 5.8))
_SMALL_KERNEL = 256
# Sparsity from which sparse encoding makes a file smaller.
_LEAST_ENCODED = 0.35

_NOTHING = "nothing"


def runtime_advice(
    report: SparsityReport, model: keras.Model | None, before: SparsityReport | None = None
) -> tuple[RuntimeAdvice, ...]:
    """Returns the expected benefit of zeros and of removed channels on each runtime.

    The figures on zeros are from measurements on comparable networks.

    Args:
        report: The model's `prunekit.inspect` report.
        model: The model. A model with sparse 1x1 convolutions is converted once, to find out whether XNNPACK would
            compute these convolutions sparsely. None skips this check.
        before: Report of the model before the run, to tell a model that became smaller.
    """
    rows = [row for row in report.weights if row.zeros and row.role not in ("bias", "normalization", "other")]
    sparsity = sum(row.zeros for row in rows) / report.parameters if rows else 0.0
    pointwise = _pointwise(model, report.weights)
    left = report.parameters / before.parameters if before is not None and before.parameters else 1.0
    runtimes = (
        _x86(rows),
        *_sparse_convolutions(pointwise),
        RuntimeAdvice(
            "ONNX Runtime",
            "a smaller file, no speed" if rows else _NOTHING,
            "sparse initializers shrink the file (3.3x at sparsity 0.9), but are made dense on loading: latency 1.0x",
        ),
        RuntimeAdvice("OpenVINO", _NOTHING, "no gain measured on processors without AMX"),
        _gpu(rows),
    )
    if before is not None and left < 1:
        gain = _less_arithmetic(left, report.macs, before.macs)
        files = (_smaller_download(sparsity, left), _smaller_file(sparsity, left))
        return (*files, *(_with_removal(line, gain) for line in runtimes), _removed(left))
    return (_download(sparsity), _disk(sparsity), *runtimes, _channels(rows))


# ---- zeros -----------------------------------------------------------------------------------------------------------


def _download(sparsity: float) -> RuntimeAdvice:
    if not sparsity:
        return RuntimeAdvice(DOWNLOAD, _NOTHING, "the model has no pruned weights")
    return RuntimeAdvice(
        DOWNLOAD,
        f"about {_interpolate(_GZIP, sparsity):.2f} of the dense download in the same format",
        f"{formatting.sparsity(sparsity)} of all weights are zero, and zeros compress away in every dense format; "
        "integers are smaller still",
    )


def _disk(sparsity: float) -> RuntimeAdvice:
    if sparsity < _LEAST_ENCODED:
        few = f"{formatting.sparsity(sparsity)} of all weights are zero, too few"
        why = f"{few}: sparse encoding makes a file smaller from about {_LEAST_ENCODED} on"
        return RuntimeAdvice(DISK, _NOTHING, why)
    return RuntimeAdvice(
        DISK,
        f"about {_interpolate(_SPARSE_ENCODED, sparsity):.2f} of the dense file, in the '-sparse' formats only",
        "dense formats store every zero; sparse-encoded ones store the others with their positions, float16 smallest",
    )


def _x86(rows: Sequence[WeightRow]) -> RuntimeAdvice:
    runtime = "LiteRT on x86"
    blocks = [row for row in rows if re.fullmatch(r"block (4|8|16|32|64)x1", row.pattern) and len(row.shape) == 2]
    if not blocks:
        why = (
            "XNNPACK has no sparse convolutions on processors with AVX, and Dense kernels gain only in blocks of (4, 1)"
        )
        return RuntimeAdvice(runtime, _NOTHING, why)
    large = [row for row in blocks if min(row.shape) >= _SMALL_KERNEL and row.sparsity >= 0.7]
    if not large:
        why = "the (4, 1) blocks of Dense kernels pay from about 256x256 weights and sparsity 0.7 on"
        return RuntimeAdvice(runtime, _NOTHING, why)
    sparsity = sum(row.zeros for row in large) / sum(row.size for row in large)
    kernels = "1 Dense kernel" if len(large) == 1 else f"{len(large)} Dense kernels"
    return RuntimeAdvice(
        runtime,
        f"{_interpolate(_BLOCKS_X86, sparsity):.1f}x on {kernels} at batch 1, as 'litert-sparse'",
        "(4, 1) blocks of Dense kernels are computed sparsely; at batch 32 they lose below sparsity 0.9",
    )


def _sparse_convolutions(verdict: Verdict | str) -> tuple[RuntimeAdvice, RuntimeAdvice]:
    if isinstance(verdict, str):
        buys, why = (_NOTHING, verdict) if verdict.startswith("no ") else ("not known", verdict)
        speed = buys
    elif verdict.wrong is not None:
        buys = speed = "nothing: wrong numbers if sparse-encoded, so that export is refused"
        why = verdict.wrong
    elif not verdict.switched:
        buys = speed = _NOTHING
        why = "XNNPACK computes 1x1 convolutions sparsely only if more than 2/3 of them are zero and the graph around "
        why += "them is one it can hold channels-first, from a 3x3 stride-2 stem to global average pooling"
        if verdict.zero_fraction is not None:
            why += f" ({formatting.sparsity(verdict.zero_fraction)} of them are zero here)"
    else:
        fraction = verdict.zero_fraction or 0.0
        buys = "1x1 convolutions run sparse, as 'litert-sparse'"
        speed = f"about {_interpolate(_POINTWISE_WASM, fraction):.1f}x, as 'litert-sparse' with a fixed batch size"
        why = (
            f"XNNPACK holds this graph channels-first; {formatting.sparsity(fraction)} of its 1x1 convolutions are zero"
        )
    return RuntimeAdvice("LiteRT on ARM64", buys, why), RuntimeAdvice("LiteRT.js (WebAssembly)", speed, why)


def _gpu(rows: Sequence[WeightRow]) -> RuntimeAdvice:
    if any(row.pattern == "2:4" for row in rows):
        why = "2:4 is the pattern of NVIDIA's sparse matrix units, reached through TensorRT; Keras computes densely"
        return RuntimeAdvice("GPU", "possible with TensorRT; not measured", why)
    why = "GPUs compute these kernels densely; only 2:4 has hardware, and removed channels gain everywhere"
    return RuntimeAdvice("GPU", _NOTHING, why)


def _channels(rows: Sequence[WeightRow]) -> RuntimeAdvice:
    whole = [row for row in rows if row.pattern == "channel"]
    if not whole:
        return RuntimeAdvice("any, by removing channels", _NOTHING, "no weight has whole channels of zeros")
    return RuntimeAdvice(
        "any, by removing channels",
        "speed and size everywhere, once the zero channels are removed",
        f"{len(whole)} weights have whole channels of zeros, which no runtime skips while they are stored; half of the "
        "channels removed made a perceptron 3.5x faster on every runtime",
    )


def _pointwise(model: Any, weights: Sequence[WeightRow]) -> Verdict | str:
    """Returns XNNPACK's verdict on the sparse-encoded model, or a sentence with the reason if there is no verdict."""
    kernels = [row for row in weights if len(row.shape) == 4 and row.shape[:2] == (1, 1) and row.role == "kernel"]
    if not any(row.zeros for row in kernels):
        return "no sparse 1x1 convolution: those are the only layers that XNNPACK computes sparsely there"
    if model is None or not getattr(model, "inputs", None):
        return "not checked: the inputs of a subclassed model are not known here; exporting 'litert-sparse' checks it"
    if keras.backend.backend() != "tensorflow":
        return "not checked: it takes a conversion, and that takes Keras's TensorFlow backend"
    try:
        structure = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
        samples = keras.tree.map_structure(lambda tensor: np.zeros(1), structure)
        with tempfile.TemporaryDirectory() as folder:
            return read_verdict(convert(trace(model, samples, input_specs(model, samples), Path(folder)), sparse=True))
    except ConversionError as error:
        return f"not checked: the model does not convert ({error})"


# ---- removed channels ------------------------------------------------------------------------------------------------


def _less_arithmetic(left: float, macs: int | None, macs_before: int | None) -> str:
    if macs and macs_before:
        return f"{macs / macs_before:.3f} of the multiply-accumulates"
    return f"{left:.3f} of the parameters"


def _smaller_download(sparsity: float, left: float) -> RuntimeAdvice:
    zeros = f", and zeros ({formatting.sparsity(sparsity)} of the rest) compress away in every dense format"
    return RuntimeAdvice(
        DOWNLOAD,
        f"about {left * _interpolate(_GZIP, sparsity):.2f} of the download before in the same format",
        f"{left:.3f} of the parameters are left{zeros if sparsity else ''}; integers are smaller still",
    )


def _smaller_file(sparsity: float, left: float) -> RuntimeAdvice:
    buys, why = f"about {left:.2f} of the file before", f"{left:.3f} of the parameters are left, in every format"
    if sparsity >= _LEAST_ENCODED:
        encoded = left * _interpolate(_SPARSE_ENCODED, sparsity)
        buys = f"about {encoded:.2f} of the file before in the '-sparse' formats, {left:.2f} in the others"
        why += f"; sparse encoding leaves out zeros, {formatting.sparsity(sparsity)} of them"
    return RuntimeAdvice(DISK, buys, why)


def _with_removal(line: RuntimeAdvice, gain: str) -> RuntimeAdvice:
    """Returns the advice on one runtime for a model with zeros and with less arithmetic than before."""
    if line.what_it_buys == _NOTHING:
        why = f"smaller tensors need no support by the runtime; zeros give no more speed: {line.why}"
        return RuntimeAdvice(line.runtime, f"less arithmetic: {gain}", why)
    return RuntimeAdvice(line.runtime, f"less arithmetic: {gain}; of the zeros: {line.what_it_buys}", line.why)


def _removed(left: float) -> RuntimeAdvice:
    why = f"{left:.3f} of the parameters are left; smaller weights need less arithmetic and memory on every runtime. "
    why += "Measure the latency: it falls by less than the arithmetic where a runtime computes channels in groups"
    return RuntimeAdvice("any, by removing channels", "speed and size", why)


def _interpolate(points: Sequence[tuple[float, float]], sparsity: float) -> float:
    places, figures = zip(*points, strict=True)
    return float(np.interp(sparsity, places, figures))

"""Packed files beside those of other compressors: trained networks, pruned and quantized after training."""

import importlib
import lzma
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import prunekit as pk
from prunekit.delivery.packing.coding import encode_symbols, levels_of
from prunekit.delivery.packing.decoder import INTEGER, LITERT, decode, decode_symbols, frequencies
from prunekit.delivery.packing.encoder import encode
from prunekit.delivery.packing.litert_tensors import litert_pieces
from prunekit.delivery.packing.pack_report import COMPRESSORS
from studies.quantization import NETWORKS, Study
from studies.results import Results, measure_networks

PAGE = Path("docs/measured/packing.md")
# At most these shares of the other compressors' bytes for pruned networks.
GZIP, XZ = 0.75, 0.88
TIMES = 5


@dataclass(frozen=True)
class File:
    """How a file is made: `zeros` are pruned first; `bits` None = floating point."""

    zeros: float
    bits: int | None


FILES = {
    "90 % zeros, float32": File(0.9, None),
    "90 % zeros, 8 bits": File(0.9, 8),
    "90 % zeros, 4 bits": File(0.9, 4),
    "95 % zeros, 8 bits": File(0.95, 8),
    "80 % zeros, 8 bits": File(0.8, 8),
    "8 bits": File(0.0, 8),
    "4 bits": File(0.0, 4),
}
HEAD = """# Measured: packed files

Bytes of LiteRT files of [trained networks](quantization.md) after `pk.pack`, and of the same files after gzip -9,
xz -9e, zstd -22 and brotli -q 11. Zeros: `pk.prune(model, zeros, images)`; bits: `pk.quantize(model, images,
bits=bits)`, weights and 8-bit activations, without training. Time: the processor's, of `decode`, the median of 5 calls.
`scripts/study packed` makes this page. How to pack: [packed files](../packing.md).
"""
TABLE = """
| network | file | bytes | not zero | packed | / gzip | / xz | / zstd | / brotli | ideal | rest | decoded in |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|
"""


def measured(name: str) -> dict[str, Any]:
    """Returns the figures of the files of one network."""
    study = Study(name)
    model = study.dense()
    weights = model.get_weights()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for title, file in FILES.items():
            model.set_weights(weights)
            path, packed = Path(folder, "net.tflite"), Path(folder, "net.pack")
            if file.zeros:
                pk.prune(model, file.zeros, study.images)
            if file.bits is None:
                pk.export(model, path, study.images[:64])
            else:
                pk.quantize(model, study.images, bits=file.bits).export(path)
            report = pk.pack(path, packed, compare=tuple(COMPRESSORS))
            found[title] = report.to_dict() | {"seconds": decode_seconds(packed.read_bytes())}
            found[title] |= integers(path.read_bytes())
    return found


def integers(data: bytes) -> dict[str, int]:
    """Returns the bytes of the integer weights of a file alone, packed and by NNCodec, where that is installed."""
    try:
        nnc = importlib.import_module("nncodec.nnc")
    except ImportError:
        return {}
    pieces = [one for one in litert_pieces(data) if one.weights > 1 and one.form.form == INTEGER]
    if not pieces:
        return {}
    arrays = [(piece.form.symbols.astype(np.int32) + piece.form.minimum).reshape(piece.shape) for piece in pieces]
    whole = b"".join(array.astype(np.int8).tobytes() for array in arrays)
    named = {f"weight {i}": array for i, array in enumerate(arrays)}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "net.nnc"))
        coded = nnc.compress(named, bitstream_path=path, use_dq=False, return_bitstream=True)
    return {"integers": len(encode(pieces, whole, LITERT).data), "nncodec": len(coded)}


def decode_seconds(data: bytes) -> float:
    """Returns the median processor time of decoding, which runs in one thread."""
    times = []
    for _ in range(TIMES):
        start = time.process_time()
        decode(data)
        times.append(time.process_time() - start)
    return statistics.median(times)


def lanes() -> dict[str, float]:
    """Returns seconds and bits of 5 million symbols, of which a tenth is not zero, and of as many of 8 bits."""
    rng = np.random.default_rng(0)
    found = {}
    for title, table in {"90 % zeros": [0.9] + [0.1 / 14] * 14, "8 bits": [1 / 255] * 255}.items():
        symbols = rng.choice(len(table), 5_000_000, p=table).astype(np.uint8)
        contexts = np.zeros(len(symbols), np.uint16)
        parts = frequencies(levels_of(np.bincount(symbols)[None]))
        words, lengths = encode_symbols(symbols, contexts, parts, 1000)
        times = []
        for _ in range(TIMES):
            start = time.perf_counter()
            decode_symbols(words, lengths, contexts, parts)
            times.append(time.perf_counter() - start)
        found[title] = statistics.median(times)
        raw = lzma.compress(symbols.tobytes(), preset=6)
        start = time.perf_counter()
        lzma.decompress(raw)
        found[f"{title}, xz"] = time.perf_counter() - start
    return found


def page(results: Results) -> str:
    """Returns the page."""
    rows, worst, least = [], [0.0, 0.0], 0.0
    for name, title in NETWORKS.items():
        for file, found in results.values.get(name, {}).items():
            others = {one["name"]: found["bytes"] / one["bytes"] for one in found["others"]}
            if FILES[file].zeros:
                worst = [max(worst[0], others["gzip -9"]), max(worst[1], others["xz -9e"])]
                least = max(least, others["gzip -9"] * found["ideal_bits"] / 8 / found["bytes"])
            rows.append(_row(title, file, found, others))
    text = HEAD + TABLE + "".join(rows)
    if rows:
        text += (
            f"\nOf the pruned networks, the largest ratio to gzip is {worst[0]:.3f} (wanted: at most {GZIP}), to xz "
            f"{worst[1]:.3f} ({XZ}). The ideal code of "
            f"single entries, by their frequencies, takes up to {least:.3f} of the bytes of gzip: little is left.\n"
        )
    beside = [
        found["integers"] / found["nncodec"]
        for name in NETWORKS
        for file, found in results.values.get(name, {}).items()
        if "nncodec" in found and FILES[file].zeros
    ]
    if beside:
        text += (
            f"\nThe integer weights alone, without the graph, take {min(beside):.3f} to {max(beside):.3f} times the "
            "bytes of NNCodec (`use_dq=False`, tables included; wanted: at most 1).\n"
        )
    speed = results.values.get("lanes")
    if speed:
        text += (
            f"\n5 million weights with 90 % zeros are decoded in {speed['90 % zeros']:.2f} s (xz: "
            f"{speed['90 % zeros, xz']:.2f} s), of 8 bits in {speed['8 bits']:.2f} s.\n"
        )
    return text


def _row(title: str, file: str, found: Mapping[str, Any], others: Mapping[str, float]) -> str:
    ratios = [others.get(name) for name in ("gzip -9", "xz -9e", "zstd -22", "brotli -q 11")]
    cells = [title, file, f"{found['bytes_before']:,}", f"{found['kept']:,}", f"{found['bytes']:,}"]
    cells += ["–" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
    cells += [f"{found['ideal_bits'] / 8:,.0f}", f"{found['text_bytes']:,}", f"{found['seconds']:.2f} s"]
    return f"| {' | '.join(cells)} |\n"


def figures(name: str) -> dict[str, Any]:
    """Returns the figures of a network, or of the coder alone for "lanes"."""
    return lanes() if name == "lanes" else measured(name)


if __name__ == "__main__":
    measure_networks(__doc__, [*NETWORKS, "lanes"], PAGE, figures, page)

"""Bytes and LiteRT latency of integer files whose kernels are encoded sparsely, beside the dense files."""

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

import prunekit as pk
from prunekit.delivery.litert.gzip_size import gzip_size
from prunekit.delivery.litert.latency import input_arrays, measured_latencies
from studies import fashion
from studies.results import Results, measure_networks

NETWORKS = {
    "perceptron": "perceptron, 512-1024-1024-64",
    "resnet8": "ResNet-8",
    "mobilenet": "inverted residuals",
}
# (fraction of zeros, pattern, bits)
WAYS = ((0.8, "unstructured", 8), (0.9, "unstructured", 8), (0.9, "block:16x1", 8), (0.9, "unstructured", 4))
SECONDS, EXAMPLES = 5.0, 64
PAGE = Path("docs/measured/sparse-files.md")
HEAD = f"""# Measured: sparsely encoded integer files

Bytes of LiteRT files with activations of 8 bits, and the processor time of the sparse file (batch 1, one thread, x86)
as a ratio to the dense one, both in turns for {SECONDS:g} seconds, medians. Weights are drawn at random and pruned by
magnitude, `pk.prune(model, 0.9, pattern="unstructured", allocation="lamp")`; depthwise kernels have no zeros.
`scripts/study sparse-files` makes this page. What the option does:
[sparsely encoded files](../quantizing.md#sparsely-encoded-files).

| network | zeros | bits | bytes, dense | gzip | bytes, sparse | gzip | dense / sparse | time |
|---|---|---:|---:|---:|---:|---:|---:|---:|
"""


def network(name: str) -> Any:
    """Returns a network with weights drawn at random."""
    keras.utils.set_random_seed(0)
    if name != "perceptron":
        return fashion.network(keras, name, 0)
    layers = [keras.layers.Dense(1024, "relu"), keras.layers.Dense(1024, "relu"), keras.layers.Dense(64)]
    return keras.Sequential([keras.Input((512,)), *layers])


def measured(name: str) -> list[dict[str, Any]]:
    """Returns the figures of a network, one entry for each of `WAYS`."""
    found = []
    for zeros, pattern, bits in WAYS:
        model = network(name)
        images = np.random.default_rng(0).uniform(size=(EXAMPLES, *model.input_shape[1:])).astype("float32")
        pk.prune(model, zeros, pattern=pattern, allocation="lamp")
        quantized = pk.quantize(model, images, bits=bits, method="nearest")
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / "dense.tflite", Path(folder) / "sparse.tflite"]
            for file, sparse in zip(files, (False, True), strict=True):
                quantized.export(file, sparse=sparse)
            times = measured_latencies(files, [input_arrays(model, images)] * 2, SECONDS)
            contents = [file.read_bytes() for file in files]
        figures = {"bytes": [len(one) for one in contents], "gzip": [gzip_size([one]) for one in contents]}
        found.append({**figures, "ratio": times.share(1)[0]})
    return found


def page(results: Results) -> str:
    """Returns the page as Markdown."""
    rows = []
    for name, title in NETWORKS.items():
        for (zeros, pattern, bits), one in zip(WAYS, results.values.get(name, ()), strict=False):
            (dense, sparse), (dense_gzip, sparse_gzip) = one["bytes"], one["gzip"]
            rows.append(
                f"| {title} | {zeros:.0%}, {pattern} | {bits} | {dense:,} | {dense_gzip:,} | {sparse:,} | "
                f"{sparse_gzip:,} | {dense / sparse:.1f} | {one['ratio']:.2f} |"
            )
    return HEAD + "\n".join(rows) + "\n"


def main() -> None:
    """Measures what is missing, and writes the page."""
    measure_networks(__doc__, NETWORKS, PAGE, measured, page)


if __name__ == "__main__":
    main()

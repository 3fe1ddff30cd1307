"""The smallest file for a drop: all techniques together, beside each at its best setting."""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import prunekit as pk
from studies.quantization import Study
from studies.results import Results, measure_networks

NETWORKS = {"mnist": "MNIST, convolutions", "resnet8": "Fashion-MNIST, ResNet-8"}
DROP, EXAMPLES = 0.005, 5000
WAYS: dict[str, dict[str, tuple[str, ...]]] = {
    "litert": {
        "channels": ("shrink",),
        "bits": ("quantize",),
        "together": ("shrink", "quantize"),
    },
    "packed": {
        "channels": ("shrink",),
        "bits": ("quantize",),
        "zeros": ("prune",),
        "zeros and bits": ("prune", "quantize"),
        "together": ("shrink", "quantize", "prune"),
    },
}
RUNS = [f"{name}; {target}; {way}" for name in NETWORKS for target, ways in WAYS.items() for way in ways]
PAGE = Path("docs/measured/search.md")
HEAD = f"""# Measured: search

`pk.search(model, (images, labels), drop={DROP:g}, target=..., techniques=...)`: the smallest file that loses at most
half a point, without training, of networks trained elsewhere or by `scripts/study`. {EXAMPLES:,} training images are
read, drawn with seed 0; all files have 8-bit activations, and weights of 8 bits where bits are not chosen. Each
technique alone is searched by the same exact choice, so that it stands at its best setting.

"Drop": on the images that no choice has seen; "test": accuracy on the 10,000 test images, used for this alone. "Files":
made and run by the search; "ranks": rank correlation of their predicted and measured errors. Seconds on two shared
cores, other programs running. One run each. `scripts/study search` makes this page; runs that are not listed were not
measured.

| network (dense, test) | bytes of | techniques | bytes | / best alone | drop | test | files | ranks | seconds |
|---|---|---|---:|---:|---:|---:|---:|---:|---:|
"""


def measured(run: str) -> dict[str, Any]:
    """Returns bytes, drop, accuracy and time of one search."""
    name, target, way = run.split("; ")
    study = Study(name)
    drawn = np.sort(np.random.default_rng(0).choice(len(study.train[1]), EXAMPLES, replace=False))
    data = study.train[0][drawn], study.train[1][drawn].reshape(-1)
    begin = time.perf_counter()
    found = pk.search(study.dense(), data, drop=DROP, target=target, techniques=WAYS[target][way])
    seconds = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "small.tflite")
        path.write_bytes(found.file)
        test = study.accuracy(path)
    report = found.report
    return {
        "bytes": report.bytes,
        "drop": round(report.drop, 5),
        "test": test,
        "files": len(report.points),
        "ranks": report.rank_correlation,
        "seconds": round(seconds),
    }


def dense_accuracy(name: str) -> float:
    """Accuracy of a network before, on the test images."""
    study = Study(name)
    found = study.dense().predict(study.test[0], batch_size=500, verbose=0)
    return float((np.asarray(found).argmax(-1) == study.test[1].reshape(-1)).mean())


def page(results: Results) -> str:
    """Returns the page."""
    rows = []
    for run in RUNS:
        if run not in results.values:
            continue
        found, (name, target, way) = results.values[run], run.split("; ")
        dense = results.get(f"{name}; dense", lambda name=name: dense_accuracy(name))
        alone = [
            results.values[key]["bytes"]
            for key, one in ((f"{name}; {target}; {other}", used) for other, used in WAYS[target].items())
            if len(one) == 1 and key in results.values
        ]
        share = f"{found['bytes'] / min(alone):.2f}" if alone else "–"
        ranks = "–" if found["ranks"] is None else f"{found['ranks']:.2f}"
        cells = (f"{found['bytes']:,}", share, f"{found['drop']:.4f}", f"{found['test']:.4f}", found["files"], ranks)
        rows.append(
            f"| {NETWORKS[name]} ({dense:.4f}) | {'LiteRT file' if target == 'litert' else 'packed file'} | {way} | "
            f"{' | '.join(map(str, cells))} | {found['seconds']} |\n"
        )
    return HEAD + "".join(rows)


if __name__ == "__main__":
    measure_networks(__doc__, RUNS, PAGE, measured, page)

"""Bytes against accuracy on Fashion-MNIST, beside pruning, clusters and integers of tensorflow-model-optimization."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import keras
import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
import numpy as np

import prunekit as pk
from prunekit.delivery.litert.gzip_size import gzip_size
from studies import fashion
from studies.quantization import Study
from studies.results import Results, measure_networks

NETWORKS = {"mlp": "Fashion-MNIST, perceptron", "resnet8": "Fashion-MNIST, ResNet-8"}
OWN, TFMOT = "prunekit", "tensorflow-model-optimization"
# Zeros, and the bits of our weights with the price of a bit, or the number of their clusters.
OURS = ((0.8, 4, 0.0), (0.9, 4, 0.0), (0.9, 3, 0.02), (0.95, 4, 0.0), (0.95, 3, 0.02), (0.97, 3, 0.02))
THEIRS = ((0.5, 16), (0.8, 16), (0.8, 8), (0.9, 16), (0.9, 8), (0.95, 16))
# Epochs in which zeros grow, and on integers; learning rates. The other library has two epochs for each of three steps.
ZERO_EPOCHS, INTEGER_EPOCHS, ZERO_RATE, INTEGER_RATE = 4, 2, 1e-3, 5e-4
RUNS: dict[str, tuple[float, ...]] = {
    f"{name}; {OWN}; {zeros:.0%} zeros, {bits} bits{f', rate {rate:g}' if rate else ''}": (zeros, bits, rate)
    for name in NETWORKS
    for zeros, bits, rate in OURS
} | {
    f"{name}; {TFMOT}; {zeros:.0%} zeros, {clusters} clusters": (zeros, clusters)
    for name in NETWORKS
    for zeros, clusters in THEIRS
}
PAGE, PICTURE = Path("docs/measured/pareto.md"), Path("docs/images/pareto.svg")
COLOURS = {OWN: "#0b5cad", TFMOT: "#6a3d9a"}
HEAD = f"""# Measured: bytes against accuracy

Networks for Fashion-MNIST, trained for {fashion.EPOCHS} epochs, then compressed in {ZERO_EPOCHS + INTEGER_EPOCHS}
epochs with Adam and batches of {fashion.BATCH}, to LiteRT files of integer weights and activations; seed 0, one run
each. Accuracies of the files on the 10,000 test images.

- prunekit: {ZERO_EPOCHS} epochs in which zeros grow (`pk.PruningCallback`) and {INTEGER_EPOCHS} on integers
  (`pk.QuantizationCallback`), learning rates {ZERO_RATE:g} and {INTEGER_RATE:g}; `pk.pack`.
- tensorflow-model-optimization: two epochs in which zeros grow, two on clusters that keep them, two on 8-bit integers
  that keep both (PCQAT), learning rates 0.001, 0.0001 and 0.0001; gzip -9.

Learning rates fall by half a cosine. `scripts/study pareto` makes this page; networks that are not listed were not
measured.

![Accuracy against bytes of both libraries](../images/pareto.svg)

| network (dense) | library | settings | accuracy | bytes of the file | download |
|---|---|---|---:|---:|---:|
"""


def own_file(study: Study, path: Path, zeros: float, bits: int, rate: float) -> None:
    """Compresses with prunekit and writes the integer file."""
    model = study.dense()
    for epochs, start, callbacks in (
        (ZERO_EPOCHS, ZERO_RATE, [pk.PruningCallback(zeros)]),
        (INTEGER_EPOCHS, INTEGER_RATE, [pk.KeepZeros(), pk.QuantizationCallback(study.images, bits=bits, rate=rate)]),
    ):
        fashion.compile_falling(keras, model, start, epochs * fashion.STEPS)
        keras.utils.set_random_seed(0)
        model.fit(*study.train, batch_size=fashion.BATCH, epochs=epochs, callbacks=callbacks, verbose=0)
    callbacks[1].report.export(path, data=study.images[:64])


def measured(run: str) -> dict[str, Any]:
    """Returns accuracy and bytes of one file."""
    name, library, _ = run.split("; ")
    study = Study(name)
    with tempfile.TemporaryDirectory() as folder:
        path, weights = Path(folder, "small.tflite"), Path(folder, "weights.npz")
        zeros, number, *rate = RUNS[run]
        if library == OWN:
            own_file(study, path, zeros, int(number), *rate)
            download = pk.pack(path, Path(folder, "small.pack")).bytes
        else:
            np.savez(weights, *study.dense().get_weights())
            command = [sys.executable, "-m", "studies.pareto_tfmot", name, str(weights), str(zeros), str(number)]
            subprocess.run([*command, str(path)], check=True, capture_output=True)
            download = gzip_size([path.read_bytes()])
        return {"accuracy": study.accuracy(path), "bytes": path.stat().st_size, "download": download}


def dense_accuracy(name: str) -> float:
    """Accuracy of the network before."""
    study = Study(name)
    return fashion.measured(study.dense(), study.test)["accuracy"]


def draw(values: dict[str, Any]) -> None:
    """Draws all points, and the best of each library as a line."""
    plt.rcParams.update({"svg.hashsalt": "prunekit", "font.size": 11, "svg.fonttype": "path"})
    names = [name for name in NETWORKS if any(run.startswith(f"{name}; ") for run in values)]
    figure, panels = plt.subplots(1, len(names), figsize=(5 * len(names), 3.6), squeeze=False, layout="constrained")
    for panel, name in zip(panels[0], names, strict=True):
        for library, marker in ((OWN, "o"), (TFMOT, "s")):
            found = [values[run] for run in RUNS if run in values and run.startswith(f"{name}; {library}; ")]
            points = sorted((one["download"] / 1000, one["accuracy"]) for one in found)
            best = [point for i, point in enumerate(points) if all(point[1] > one[1] for one in points[:i])]
            panel.plot(*zip(*points, strict=True), marker, color=COLOURS[library], label=library)
            panel.plot(*zip(*best, strict=True), color=COLOURS[library])
        panel.axhline(values[f"{name}; dense"], color="0.5", linestyle=":", label="dense, float32")
        panel.set(xscale="log", xlabel="kB of the download", ylabel="accuracy", title=NETWORKS[name])
        panel.set_xticks([10, 20, 50, 100], ["10", "20", "50", "100"])
        panel.minorticks_off()
        panel.legend(frameon=False, fontsize=9)
    figure.savefig(PICTURE, facecolor="white", metadata={"Date": None}, bbox_inches="tight")


def page(results: Results) -> str:
    """Returns the page, and draws its picture."""
    rows = []
    for run in RUNS:
        if run in results.values:
            found, (name, library, settings) = results.values[run], run.split("; ")
            dense = results.get(f"{name}; dense", lambda name=name: dense_accuracy(name))
            cells = f"{found['accuracy']:.4f} | {found['bytes']:,} | {found['download']:,}"
            rows.append(f"| {NETWORKS[name]} ({dense:.4f}) | {library} | {settings} | {cells} |\n")
    draw(results.values)
    return HEAD + "".join(rows)


if __name__ == "__main__":
    measure_networks(__doc__, RUNS, PAGE, measured, page)

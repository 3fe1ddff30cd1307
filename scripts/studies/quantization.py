"""Accuracy, bytes and LiteRT latency of networks quantized after training and in training, beside the converter's."""

import gc
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

import prunekit as pk
from prunekit.delivery.litert.gzip_size import gzip_size
from prunekit.delivery.litert.latency import input_arrays, measured_latencies, plain_file
from studies import fashion, mnist
from studies.converter import converter_integers
from studies.results import Results, measure_networks

NETWORKS = {
    "mnist": "MNIST, convolutions",
    "cnn": "Fashion-MNIST, convolutions",
    "resnet8": "Fashion-MNIST, ResNet-8",
    "mobilenet": "Fashion-MNIST, inverted residuals",
}
EXAMPLES, SECONDS, BATCH = 1024, 20.0, 500
SPARSITY = 0.9
EPOCHS, RATE = 1, 1e-4


@dataclass(frozen=True)
class Way:
    """How a file is made.

    Attributes:
        options: Options of the quantization; None for a file in floating point.
        zeros: True for a network that is pruned first.
        epochs: Epochs of training: on integers, or in floating point for a file in floating point.
        converter: True for the converter's own quantization.
    """

    options: dict[str, Any] | None = None
    zeros: bool = False
    epochs: int = 0
    converter: bool = False


TRAINED, ZEROS = f"{EPOCHS} epoch", f"{SPARSITY:.0%} zeros"
FLOAT, EIGHT, FOUR = "float32", "8-bit weights and activations", "4-bit weights, 8-bit activations"
LONGER = f"{FLOAT}, {TRAINED} more"
WAYS = {
    FLOAT: Way(),
    LONGER: Way(epochs=EPOCHS),
    "the converter's int8": Way(converter=True),
    EIGHT: Way({"bits": 8}),
    f"{EIGHT}, {TRAINED}": Way({"bits": 8}, epochs=EPOCHS),
    "8-bit weights": Way({"bits": 8, "activation_bits": "float"}),
    f"{FOUR}, nearest": Way({"bits": 4, "method": "nearest"}),
    f"{FOUR}, GPTQ": Way({"bits": 4}),
    f"{FOUR}, {TRAINED}": Way({"bits": 4}, epochs=EPOCHS),
    "4-bit weights, GPTQ": Way({"bits": 4, "activation_bits": "float"}),
    "3-bit weights, 8-bit activations, GPTQ": Way({"bits": 3}),
    f"3-bit weights, 8-bit activations, {TRAINED}": Way({"bits": 3}, epochs=EPOCHS),
    f"{ZEROS}, {EIGHT}": Way({"bits": 8}, zeros=True),
    f"{ZEROS}, {EIGHT}, {TRAINED}": Way({"bits": 8}, zeros=True, epochs=EPOCHS),
}
# End of the keys of results of files with activations of 16 bits, apart: calls of some take 40 times as long.
SIXTEEN = ", 16 bits"
WIDE = "8-bit weights, 16-bit activations"
# Least accuracy of files of the network for MNIST, and (file, the file beside it, most loss of accuracy) of the others.
LEAST = {EIGHT: 0.9903, f"{FOUR}, GPTQ": 0.989}
LOSSES = (
    (EIGHT, FLOAT, 0.003),
    (f"{EIGHT}, {TRAINED}", LONGER, 0.001),
    (f"{FOUR}, {TRAINED}", LONGER, 0.005),
)
# Most loss with zeros and 8 bits, and the least ratio of bytes after gzip.
SPARSE_LOSS, SMALLER = 0.005, 10.0
PAGE = Path("docs/measured/quantization.md")
HEAD = f"""# Measured: quantization

Accuracy of LiteRT files on the 10,000 test images, their bytes, and LiteRT's processor time (batch 1, one thread, x86)
as a ratio to the float32 file, all files of a network in turns for {SECONDS:g} seconds, medians. The network for MNIST
was trained elsewhere; those for Fashion-MNIST are trained for {fashion.EPOCHS} epochs (Adam, learning rate 0.001,
batches of {fashion.BATCH}, seed 0). Ranges, GPTQ, and the converter's own quantization read {EXAMPLES:,} training
images, drawn with seed 0; test images are used for these accuracies alone. One run each: the standard error of such an
accuracy is 0.001 for MNIST and 0.003 for Fashion-MNIST. The call: `pk.quantize(model, images, bits=8)`;
{SPARSITY:.0%} zeros: `pk.prune(model, {SPARSITY:g}, images, criterion="sparsegpt", allocation="lamp")` first.
"{TRAINED}": trained on integers, `model.fit(..., callbacks=[pk.QuantizationCallback(images, bits=8)])`, with Adam
and a learning rate that falls from {RATE:g} to 0 by half a cosine, batches of {fashion.BATCH}; with zeros,
`pk.KeepZeros()` beside it. The float32 network that is trained as long in the same way is in the table, too.
`scripts/study quantization` makes this page. How to quantize: [quantization](../quantizing.md).
"""
TABLE = """
| network | file | accuracy | bytes | gzip | gzip of float32 / gzip | time |
|---|---|---:|---:|---:|---:|---:|
"""


class Study:
    """Measures the files of one network.

    Args:
        name: A key of `NETWORKS`.
    """

    def __init__(self, name: str):
        self.name = name
        source = mnist if name == "mnist" else fashion
        self.train, self.test = source.images("train"), source.images("t10k")
        drawn = np.sort(np.random.default_rng(0).choice(len(self.train[1]), EXAMPLES, replace=False))
        self.images = self.train[0][drawn]

    def dense(self) -> Any:
        """The trained network."""
        keras.utils.clear_session()
        gc.collect()
        if self.name == "mnist":
            return mnist.network()
        return fashion.trained(keras, self.name, self.train)

    def write(self, chosen: Way, path: Path) -> None:
        """Writes the file of one way."""
        model = self.dense()
        if chosen.converter:
            path.write_bytes(converter_integers(model, self.images))
            return
        if chosen.zeros:
            pk.prune(model, SPARSITY, self.images, criterion="sparsegpt", allocation="lamp")
        callback = None
        if chosen.epochs:
            callback = None if chosen.options is None else pk.QuantizationCallback(self.images, **chosen.options)
            self._train(model, chosen, callback)
        if chosen.options is None:
            path.write_bytes(plain_file(model, self.images[:1]))
            return
        found = pk.quantize(model, self.images, **chosen.options) if callback is None else callback.report
        found.export(path, data=self.images[:64])

    def _train(self, model: Any, way: Way, callback: Any) -> None:
        steps = way.epochs * -(-len(self.train[1]) // fashion.BATCH)
        fashion.compile_falling(keras, model, RATE, steps)
        callbacks = [one for one in (pk.KeepZeros() if way.zeros else None, callback) if one is not None]
        keras.utils.set_random_seed(0)
        model.fit(*self.train, batch_size=fashion.BATCH, epochs=way.epochs, callbacks=callbacks, verbose=2)

    def accuracy(self, path: Path) -> float:
        """Accuracy of a file on the test images."""
        from ai_edge_litert.interpreter import Interpreter

        interpreter = Interpreter(model_path=str(path))
        (given,), (computed,) = interpreter.get_input_details(), interpreter.get_output_details()
        inputs, labels = self.test
        interpreter.resize_tensor_input(given["index"], [BATCH, *inputs.shape[1:]])
        interpreter.allocate_tensors()
        right = 0
        for start in range(0, len(inputs), BATCH):
            interpreter.set_tensor(given["index"], inputs[start : start + BATCH])
            interpreter.invoke()
            found = interpreter.get_tensor(computed["index"]).argmax(-1)
            right += int((found == labels[start : start + BATCH]).sum())
        return right / len(inputs)

    def run(self, ways: dict[str, Way]) -> dict[str, dict[str, Any]]:
        """Returns accuracy, bytes, gzip bytes and the ratio of time of each file; the first one is in float32."""
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / f"{number}.tflite" for number in range(len(ways))]
            for way, path in zip(ways.values(), paths, strict=True):
                self.write(way, path)
            inputs = input_arrays(self.dense(), self.images[:1])
            latencies = measured_latencies(paths, [inputs] * len(paths), SECONDS)
            return {
                way: {
                    "accuracy": self.accuracy(path),
                    "bytes": path.stat().st_size,
                    "gzip": gzip_size([path.read_bytes()]),
                    "ratio": latencies.share(number)[0] if number else 1.0,
                }
                for number, (way, path) in enumerate(zip(ways, paths, strict=True))
            }


def page(results: Results) -> str:
    """Returns the page as Markdown."""
    rows = []
    for name, title in NETWORKS.items():
        found = results.values.get(name, {}) | {
            way: one for way, one in results.values.get(f"{name}{SIXTEEN}", {}).items() if way == WIDE
        }
        for way in (*WAYS, WIDE):
            if way not in found:
                continue
            one, plain = found[way], found[FLOAT]
            rows.append(
                f"| {title} | {way} | {one['accuracy']:.4f} | {one['bytes']:,} | {one['gzip']:,} | "
                f"{plain['gzip'] / one['gzip']:.1f} | {one['ratio']:.2f} |"
            )
    return HEAD + "\n".join(verdicts(results.values)) + "\n" + TABLE + "\n".join(rows) + "\n"


def verdicts(values: dict[str, Any]) -> list[str]:
    """Returns the lines of a table of what was wanted and what was measured.

    Args:
        values: Figures of the files, by network and file.
    """
    lines = ["", "| network | file | wanted | measured | |", "|---|---|---|---|---|"]

    def add(name: str, file: str, wanted: str, measured: str, met: bool) -> None:
        lines.append(f"| {NETWORKS[name]} | {file} | {wanted} | {measured} | {'met' if met else '**not met**'} |")

    for name in NETWORKS:
        if name not in values:
            continue
        found = values[name]
        for file, least in LEAST.items() if name == "mnist" else ():
            value = found[file]["accuracy"]
            add(name, file, f"at least {least:g}", f"{value:.4f}", value >= least)
        for file, other, most in () if name == "mnist" else LOSSES:
            change = round(found[file]["accuracy"] - found[other]["accuracy"], 6)
            add(name, file, f"at most {most:g} below {other}", f"{change:+.4f}", change >= -most)
        file = f"{ZEROS}, {EIGHT}, {TRAINED}"
        change = round(found[file]["accuracy"] - found[LONGER]["accuracy"], 6)
        ratio = found[FLOAT]["gzip"] / found[file]["gzip"]
        wanted = f"at most {SPARSE_LOSS:g} below {LONGER}, more than {SMALLER:g} times smaller after gzip"
        add(name, file, wanted, f"{change:+.4f}, {ratio:.1f} times", change >= -SPARSE_LOSS and ratio > SMALLER)
    return [
        *lines,
        "",
        f"One epoch after {SPARSITY:.0%} zeros at once is too little for the networks for Fashion-MNIST. Zeros that",
        "grow, for the convolutions and ResNet-8: [zeros and integers in one training](sparse-integers.md). The",
        "network of inverted residuals has 46,832 weights in many small kernels: scales, biases and the structure of",
        "the file alone take too many bytes for a tenth.",
    ]


def _measured(name: str) -> dict[str, Any]:
    ways = {FLOAT: WAYS[FLOAT], WIDE: Way({"bits": 8, "activation_bits": 16})} if name.endswith(SIXTEEN) else WAYS
    return Study(name.removesuffix(SIXTEEN)).run(ways)


def main() -> None:
    """Measures what is missing, and writes the page."""
    measure_networks(__doc__, [*NETWORKS, *(f"{name}{SIXTEEN}" for name in NETWORKS)], PAGE, _measured, page)


if __name__ == "__main__":
    main()

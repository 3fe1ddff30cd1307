"""Accuracy and bytes of integer files with 90 % zeros that grow while the network trains."""

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

import prunekit as pk
from prunekit.delivery.litert.gzip_size import gzip_size
from prunekit.delivery.litert.latency import plain_file
from studies import fashion
from studies.quantization import EXAMPLES, NETWORKS, Study
from studies.results import Results, measure_networks

SPARSITY = 0.9
# Epochs until all zeros are there and training on integers begins, and of all; the learning rate at the start.
GROWTH, EPOCHS, RATE = 6, 10, 1e-3
START, LONGER = "float32", f"float32, {EPOCHS} epochs more"
# Bits of the weights by the name of a row.
BITS = {f"{SPARSITY:.0%} zeros, {bits}-bit weights, 8-bit activations": bits for bits in (8, 4)}
PAGE = Path("docs/measured/sparse-integers.md")
HEAD = f"""# Measured: zeros and integers in one training

The networks are those of [quantization](quantization.md). From the trained network, {EPOCHS} epochs more, with Adam
and a learning rate that falls from {RATE:g} to 0 by half a cosine, batches of {fashion.BATCH}: zeros grow in the first
{GROWTH} to {SPARSITY:.0%} of all kernels together (polynomial decay, largest magnitudes of the whole network kept), and
from then on the network trains on integers:

```
schedule = pk.schedules.PolynomialDecay(final_sparsity={SPARSITY:g}, end_step={GROWTH} * steps)
model.fit(..., callbacks=[
    pk.PruningCallback(schedule, allocation="global"),
    pk.QuantizationCallback(images, begin_step={GROWTH} * steps),
])
```

"{LONGER}" is trained as long in the same way, without zeros and in floating point. Ranges read {EXAMPLES:,}
training images, drawn with seed 0. Accuracy of LiteRT files on the 10,000 test images, which nothing else reads. One
run each: the standard error of such an accuracy is 0.001 for MNIST and 0.003 for Fashion-MNIST.
`scripts/study sparse-integers` makes this page.

| network | file | accuracy | beside float32 | beside float32, as long | bytes | gzip | gzip of float32 / gzip |
|---|---|---:|---:|---:|---:|---:|---:|
"""


class SparseIntegers(Study):
    """Measures the files of one network.

    Args:
        name: A key of `NETWORKS`.
    """

    def trained(self, bits: int | None) -> tuple[Any, Any]:
        """The network after all epochs, and its integers; in floating point and without zeros for `bits` None."""
        model = self.dense()
        steps = -(-len(self.train[1]) // fashion.BATCH)
        callbacks: list[Any] = []
        if bits is not None:
            schedule = pk.schedules.PolynomialDecay(final_sparsity=SPARSITY, end_step=GROWTH * steps)
            callbacks = [
                pk.PruningCallback(schedule, allocation="global"),
                pk.QuantizationCallback(self.images, begin_step=GROWTH * steps, bits=bits),
            ]
        rate = keras.optimizers.schedules.CosineDecay(RATE, EPOCHS * steps)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(rate), loss, jit_compile=False)
        keras.utils.set_random_seed(0)
        model.fit(*self.train, batch_size=fashion.BATCH, epochs=EPOCHS, callbacks=callbacks, verbose=2)
        return model, None if bits is None else callbacks[1].report

    def figures(self, path: Path) -> dict[str, Any]:
        """Accuracy, bytes and gzip bytes of a file."""
        content = path.read_bytes()
        return {"accuracy": self.accuracy(path), "bytes": len(content), "gzip": gzip_size([content])}

    def measure(self) -> dict[str, Any]:
        """Returns the figures of all files of the network."""
        found = {}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.tflite"
            for title, model in ((START, self.dense()), (LONGER, self.trained(None)[0])):
                path.write_bytes(plain_file(model, self.images[:1]))
                found[title] = self.figures(path)
            for title, bits in BITS.items():
                model, integers = self.trained(bits)
                zeros = [np.mean(np.asarray(layer.kernel) == 0) for layer in fashion.kernel_layers(model)]
                print(f"{self.name}, {title}: zeros of each kernel {np.round(zeros, 3)}", flush=True)
                integers.export(path, data=self.images[:64])
                found[title] = self.figures(path)
        return found


def page(results: Results) -> str:
    """Returns the page as Markdown."""
    rows = []
    for name, title in NETWORKS.items():
        found = results.values.get(name)
        for file in (START, LONGER, *BITS) if found else ():
            one, start, longer = found[file], found[START], found[LONGER]
            rows.append(
                f"| {title} | {file} | {one['accuracy']:.4f} | {one['accuracy'] - start['accuracy']:+.4f} | "
                f"{one['accuracy'] - longer['accuracy']:+.4f} | {one['bytes']:,} | {one['gzip']:,} | "
                f"{start['gzip'] / one['gzip']:.1f} |"
            )
    return HEAD + "\n".join(rows) + "\n"


def main() -> None:
    """Measures what is missing, and writes the page."""
    measure_networks(__doc__, NETWORKS, PAGE, lambda name: SparseIntegers(name).measure(), page)


if __name__ == "__main__":
    main()

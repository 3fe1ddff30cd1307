"""Records: the smallest packed file of LeNet-300-100 that errs on at most 1.9 % of the test images of MNIST."""

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

import prunekit as pk
from studies import fashion, mnist
from studies.results import Results, measure_networks

NETWORKS = {"lenet-300-100": "LeNet-300-100"}
SEEDS = 3
# Bytes of the dense network in float32, and the error that published records are compared at.
DENSE_BYTES, ERROR = 1_066_440, 0.019
PUBLISHED = "40x at 1.58 % (Deep Compression), 64x at 1.94 % (soft weight sharing), 68x at 1.92 % (sparse VD, weights)"
DENSE_EPOCHS, ZERO_EPOCHS, INTEGER_EPOCHS, BATCH = 20, 30, 15, 128
# Share of zeros -> what is measured; bits of the weights and the price of a bit in training.
ZEROS, BITS, PRICE = (0.975, 0.98, 0.985), 3, 0.02
BIAS_LEVELS = 127
PAGE = Path("docs/measured/records.md")
HEAD = f"""# Measured: records

LeNet-300-100, trained on the 60,000 training images of MNIST, in as few bytes as possible: {DENSE_EPOCHS} epochs dense;
then {ZERO_EPOCHS} epochs in which zeros grow (`pk.PruningCallback`), with the dense network as the teacher
(`pk.DistillationCallback`); then {INTEGER_EPOCHS} epochs on {BITS}-bit weights with a price of {PRICE:g} for a bit
(`pk.QuantizationCallback(bits={BITS}, rate={PRICE:g})`), zeros kept and the same teacher. Adam with a learning rate
that falls by half a cosine, batches of {BATCH}, pixels moved by up to one in each batch. Biases are rounded to 8 bits.
`pk.pack` writes the `.keras` file: its bytes hold weights, biases, scales and configuration; the decoder does not
count. Test images are used for these errors alone. `scripts/study records` makes this page.

Published, of {DENSE_BYTES:,} bytes, estimated from weights or ideal codes: {PUBLISHED}.

| network | zeros | seed | dense error | error | weights left | ideal bytes | bytes | times smaller |
|---|---:|---:|---:|---:|---:|---:|---:|---:|
"""


class Shifted(keras.utils.PyDataset):
    """Training images in random order, each moved by up to a pixel to each side."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, seed: int):
        super().__init__()
        self._images, self._labels = images, labels
        self._generator = np.random.default_rng(seed)
        self._order = self._generator.permutation(len(images))

    def __len__(self) -> int:
        return len(self._images) // BATCH

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self._order[index * BATCH : (index + 1) * BATCH]
        shift = self._generator.integers(-1, 2, 2)
        return np.roll(self._images[rows], shift, axis=(1, 2)), self._labels[rows]

    def on_epoch_end(self) -> None:
        """Draws another order."""
        self._order = self._generator.permutation(len(self._images))


def fitted(model: Any, data: Any, epochs: int, rate: float, *callbacks: Any) -> None:
    """Trains with a learning rate that falls by half a cosine."""
    falling = keras.optimizers.schedules.CosineDecay(rate, epochs * len(data))
    model.compile(keras.optimizers.Adam(falling), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(data, epochs=epochs, verbose=0, callbacks=list(callbacks))


def error(model: Any, test: Any) -> float:
    """Returns the share of images of which the class is wrong."""
    found = np.asarray(model.predict(test[0], batch_size=500, verbose=0))
    return float((found.argmax(-1) != test[1].reshape(-1)).mean())


def round_biases(model: Any) -> None:
    """Puts each bias on a grid of 8 bits."""
    for layer in model.layers:
        if getattr(layer, "bias", None) is not None:
            bias = np.array(layer.bias)
            scale = np.float32(np.abs(bias).max() / BIAS_LEVELS)
            layer.bias.assign(np.rint(bias / scale).astype("float32") * scale)


def measured(zeros: float, seed: int) -> dict[str, Any]:
    """Returns errors and bytes of one run."""
    keras.utils.set_random_seed(seed)
    images, labels = mnist.images("train")
    test = mnist.images("t10k")
    data = Shifted(images, labels, seed)
    model = fashion.mlp(keras)
    fitted(model, data, DENSE_EPOCHS, 2e-3)
    dense = error(model, test)
    teacher = keras.models.clone_model(model)
    teacher.set_weights(model.get_weights())
    fitted(model, data, ZERO_EPOCHS, 2e-3, pk.PruningCallback(zeros), pk.DistillationCallback(teacher))
    pruned = error(model, test)
    grids = pk.QuantizationCallback(bits=BITS, activation_bits="float", rate=PRICE)
    fitted(model, data, INTEGER_EPOCHS, 1e-3, pk.KeepZeros(), grids, pk.DistillationCallback(teacher))
    round_biases(model)
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    with tempfile.TemporaryDirectory() as folder:
        report = pk.pack(plain, Path(folder, "net.pack"), compare=())
    return {
        "dense": dense,
        "pruned": pruned,
        "error": error(model, test),
        "left": int(sum(np.count_nonzero(layer.kernel) for layer in model.layers if hasattr(layer, "kernel"))),
        "ideal": report.ideal_bits / 8,
        "bytes": report.bytes,
    }


def figures(name: str) -> dict[str, Any]:
    """Returns the figures of all runs of a network; those of a run that ended are kept."""
    kept = Results(PAGE.with_suffix(".runs.json"))
    runs = [(zeros, seed) for zeros in ZEROS for seed in range(SEEDS)]
    return {f"{z} {s}": kept.get(f"{name} {z} {s}", lambda z=z, s=s: measured(z, s)) for z, s in runs}


def page(results: Results) -> str:
    """Returns the page."""
    rows = []
    for name, title in NETWORKS.items():
        for key, run in results.values.get(name, {}).items():
            zeros, seed = key.split()
            cells = [
                title,
                f"{float(zeros):.1%}",
                seed,
                f"{run['dense']:.2%}",
                f"{run['error']:.2%}",
                f"{run['left']:,}",
            ]
            cells += [f"{run['ideal']:,.0f}", f"{run['bytes']:,}", f"{DENSE_BYTES / run['bytes']:.0f}"]
            rows.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    measure_networks(__doc__, NETWORKS, PAGE, figures, page)

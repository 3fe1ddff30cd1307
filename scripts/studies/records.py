"""Records: the smallest packed files of the LeNets of which the accuracy on MNIST is that of published records."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers

import prunekit as pk
from studies import fashion, mnist
from studies.results import Results, measure_networks


def lenet5() -> Any:
    """LeNet-5 as Caffe has it: 431,080 parameters."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(20, 5, activation="relu", name="conv_1"),
            layers.MaxPooling2D(),
            layers.Conv2D(50, 5, activation="relu", name="conv_2"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(500, activation="relu", name="hidden"),
            layers.Dense(10, name="logits"),
        ]
    )


@dataclass(frozen=True)
class Network:
    """A network, and share of zeros -> what is left of its parameters before them, when units are removed."""

    title: str
    build: Callable[[], Any]
    bytes: int
    left: Mapping[float, float]


NETWORKS = {
    "lenet-300-100": Network("LeNet-300-100", lambda: fashion.mlp(keras), 1_066_440, {0.93: 0.3, 0.95: 0.3, 0.96: 0.3}),
    "lenet-5": Network("LeNet-5", lenet5, 1_724_320, {0.8: 0.06, 0.9: 0.06, 0.7: 0.04, 0.6: 0.04}),
}
RUNS = [f"{name}, {zeros:.0%}, {seed}" for name, one in NETWORKS.items() for zeros in one.left for seed in range(3)]
DENSE_EPOCHS, SMALL_EPOCHS, ZERO_EPOCHS, INTEGER_EPOCHS, BATCH = 12, 15, 30, 15, 128
# Bits of the weights, and the price of a bit in training.
BITS, PRICE = 3, 0.02
BIAS_LEVELS = 127
PAGE = Path("docs/measured/records.md")
HEAD = f"""# Measured: records

The LeNets, trained on the 60,000 training images of MNIST, in as few bytes as possible:

1. {DENSE_EPOCHS} epochs dense;
2. `pk.shrink(model, parameters=share)`, and {SMALL_EPOCHS} epochs;
3. {ZERO_EPOCHS} epochs in which zeros grow, `pk.PruningCallback(zeros)`;
4. {INTEGER_EPOCHS} epochs on {BITS}-bit weights, `pk.QuantizationCallback(bits={BITS}, rate={PRICE:g})` with
   `pk.KeepZeros()`; then biases are rounded to 8 bits;
5. `pk.pack` of the `.keras` file: its bytes hold weights, biases, scales and configuration; the decoder does not count.

The dense network teaches in 2 to 4 (`pk.DistillationCallback`). Adam with a learning rate that falls by half a cosine,
batches of {BATCH}, each moved by up to one pixel. Test images are used for these errors alone. `scripts/study records`
makes this page.

Published for LeNet-300-100, from weights or ideal codes: 40x at 1.58 % (Deep Compression), 64x at 1.94 % (soft weight
sharing), 68x at 1.92 % (sparse variational dropout). For LeNet-5: 115x (DeepCABAC), 162x at 0.97 % (soft weight
sharing), 555x at 0.69 % and 1,110x at 0.96 % (MIRACLE).

Wanted for LeNet-300-100: 150x at 1.9 %, which three of three seeds reach with 93 % zeros. For LeNet-5: 300x at 0.9 %,
which three of three seeds reach, then 600x, which none does: with fewer channels left, errors are above 0.9 %. Graph,
biases and scales take a fifth of such a file.

"Share": of the parameters, left in 2. Settings of LeNet-5 with 80 % zeros were compared on the last 5,000 training
images of one run.

| network | share | zeros | seed | dense error | error | weights left | ideal bytes | bytes | times smaller |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|
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
    fashion.compile_falling(keras, model, rate, epochs * len(data))
    model.fit(data, epochs=epochs, verbose=0, callbacks=list(callbacks))


def error(model: Any, test: Any) -> float:
    """Returns the share of images of which the class is wrong."""
    found = np.asarray(model.predict(test[0], batch_size=500, verbose=0))
    return float((found.argmax(-1) != test[1].reshape(-1)).mean())


def round_biases(model: Any) -> None:
    """Puts each bias on a grid of 8 bits."""
    for layer in model.layers:
        if getattr(layer, "bias", None) is not None:
            bias = keras.ops.convert_to_numpy(layer.bias)
            scale = np.float32(np.abs(bias).max() / BIAS_LEVELS)
            layer.bias.assign(np.rint(bias / scale).astype("float32") * scale)


def dense(name: str, seed: int, data: Any) -> Any:
    """Returns a dense network of a seed, which is trained once and kept in .study."""
    stored = Path(".study") / f"records-{name}-{seed}.keras"
    if not stored.exists():
        model = NETWORKS[name].build()
        fitted(model, data, DENSE_EPOCHS, 2e-3)
        model.save(stored)
    return keras.models.load_model(stored)


def measured(run: str) -> dict[str, Any]:
    """Returns errors and bytes of one run."""
    name, share, number = run.split(", ")
    network, zeros, seed = NETWORKS[name], float(share[:-1]) / 100, int(number)
    keras.utils.set_random_seed(seed)
    images, labels = mnist.images("train")
    test = mnist.images("t10k")
    data = Shifted(images, labels, seed)
    teacher = dense(name, seed, data)
    model, _ = pk.shrink(dense(name, seed, data), parameters=network.left[zeros], data=images[:2048])
    fitted(model, data, SMALL_EPOCHS, 2e-3, pk.DistillationCallback(teacher))
    if zeros:
        fitted(model, data, ZERO_EPOCHS, 2e-3, pk.PruningCallback(zeros), pk.DistillationCallback(teacher))
    before = error(model, test)
    grids = pk.QuantizationCallback(bits=BITS, activation_bits="float", rate=PRICE)
    kept = [pk.KeepZeros()] if zeros else []
    fitted(model, data, INTEGER_EPOCHS, 1e-3, *kept, grids, pk.DistillationCallback(teacher))
    round_biases(model)
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    with tempfile.TemporaryDirectory() as folder:
        report = pk.pack(plain, Path(folder, "net.pack"), compare=())
    return {
        "dense": error(teacher, test),
        "before": before,
        "error": error(model, test),
        "left": int(sum(np.count_nonzero(layer.kernel) for layer in model.layers if hasattr(layer, "kernel"))),
        "ideal": report.ideal_bits / 8,
        "bytes": report.bytes,
    }


def page(results: Results) -> str:
    """Returns the page."""
    rows = []
    for key in RUNS:
        if key in results.values:
            found, (name, zeros, seed) = results.values[key], key.split(", ")
            network = NETWORKS[name]
            share = network.left[float(zeros[:-1]) / 100]
            errors = (share, zeros, seed, f"{found['dense']:.2%}", f"{found['error']:.2%}", f"{found['left']:,}")
            sizes = (f"{found['ideal']:,.0f}", f"{found['bytes']:,}", f"{network.bytes / found['bytes']:.0f}")
            rows.append(f"| {' | '.join(map(str, (network.title, *errors, *sizes)))} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    measure_networks(__doc__, RUNS, PAGE, measured, page)

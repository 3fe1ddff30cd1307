"""Distillation in the training that compresses: zeros and few bits, with and without a teacher; cost of a step."""

import gc
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import prunekit as pk
from studies import fashion, mnist
from studies.results import Results, measure_networks

NETWORKS = {
    "lenet": "MNIST, perceptron (LeNet-300-100)",
    "mnist": "MNIST, convolutions",
    "mlp": "Fashion-MNIST, perceptron",
    "cnn": "Fashion-MNIST, convolutions",
    "resnet8": "Fashion-MNIST, ResNet-8",
    "mobilenet": "Fashion-MNIST, inverted residuals",
}
IMAGES, EPOCHS, BATCH, RATE, SEEDS = 8_000, 3, 64, 1e-3, 3
SPARSITY, BITS = 0.98, 3
ZEROS, INTEGERS = f"{SPARSITY:.0%} zeros", f"{BITS}-bit weights"
WAYS: dict[str, dict[str, Any] | None] = {
    "without": None,
    "dist, 0.5": {"loss": "dist", "weight": 0.5},
    "dist, 0.9": {"loss": "dist", "weight": 0.9},
    "kl, 0.5": {"loss": "kl", "weight": 0.5},
    "kl, 0.9": {"loss": "kl", "weight": 0.9},
    "dkd, 0.9": {"loss": "dkd", "weight": 0.9},
}
# Ways that only the small network is measured with.
FEW = ("without", "dist, 0.5", "dist, 0.9")
# Turns of the measurement of a step's time; each is an epoch of every way.
TURNS = 7
COSTS = ("plain", "kept outputs", "calculated outputs")
# Epochs of the dense perceptron for MNIST.
DENSE_EPOCHS = 6
PAGE = Path("docs/measured/distillation.md")
HEAD = f"""# Measured: distillation

A trained network is compressed in a training of {EPOCHS} epochs on {IMAGES:,} training images (Adam, learning
rate {RATE:g}, batches of {BATCH}) with and without `pk.DistillationCallback`: {ZEROS} (`pk.PruningCallback`,
polynomial, global, over the first two epochs) and {INTEGERS} (`pk.QuantizationCallback`, activations in floating
point). The teacher is the network before. Accuracies on the 10,000 test images: mean of {SEEDS} seeds, and its standard
error. "dist, 0.5": `loss="dist", weight=0.5`, the default; "–": not measured. `scripts/study distillation` makes this
page; networks that are not listed were not measured.

"""
COST = f"""
## Cost of a step

Processor time of an epoch relative to a plain `fit` of the same network, medians of {TURNS} interleaved turns on two
shared cores, without another callback, from the third epoch on.

| network | kept outputs | calculated outputs |
|---|---:|---:|
"""
REASON = """
At most 1.05 was wanted. The loss of the outputs takes about as long for each network, and a step of a perceptron is
short.
"""


def perceptron() -> Any:
    """The perceptron with 300 and 100 hidden units, trained on MNIST; its weights are kept in .study."""
    path = Path(".study") / "lenet.weights.h5"
    model = fashion.mlp(keras)
    compiled(model)
    if path.exists():
        model.load_weights(path)
    else:
        keras.utils.set_random_seed(0)
        model.fit(*mnist.images("train"), batch_size=128, epochs=DENSE_EPOCHS, verbose=0)
        model.save_weights(path)
    return model


def compiled(model: Any) -> None:
    """Compiles a network with a new optimizer."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(RATE), loss)


class Network:
    """Measures one network.

    Args:
        name: A key of `NETWORKS`.
    """

    def __init__(self, name: str):
        self._name = name
        of_mnist = name in ("lenet", "mnist")
        images = mnist.images if of_mnist else fashion.images
        whole, self.test = images("train"), images("t10k")
        self.train = tuple(part[:IMAGES] for part in whole)
        if name == "lenet":
            self.model = perceptron()
        else:
            self.model = mnist.network() if name == "mnist" else fashion.trained(keras, name, whole)
        self._weights = self.model.get_weights()

    def accuracy(self) -> float:
        """Accuracy on the test images."""
        found = np.asarray(self.model.predict(self.test[0], batch_size=500, verbose=0))
        return float((found.argmax(-1) == self.test[1].reshape(-1)).mean())

    def compressed(self, change: str, options: dict[str, Any] | None, seed: int) -> float:
        """Accuracy after a training that compresses."""
        self.model.set_weights(self._weights)
        compiled(self.model)
        callbacks: list[Any] = [self._pruning() if change == ZEROS else self._quantization()]
        callbacks += [] if options is None else [pk.DistillationCallback(**options)]
        keras.utils.set_random_seed(seed)
        self._fit(callbacks)
        gc.collect()
        return self.accuracy()

    def _fit(self, callbacks: list[Any], epochs: int = EPOCHS) -> None:
        self.model.fit(*self.train, batch_size=BATCH, epochs=epochs, callbacks=callbacks, verbose=0)

    def _pruning(self) -> Any:
        end = 2 * -(-IMAGES // BATCH)
        schedule = pk.schedules.PolynomialDecay(final_sparsity=SPARSITY, begin_step=0, end_step=end, frequency=10)
        return pk.PruningCallback(schedule, allocation="global")

    def _quantization(self) -> Any:
        return pk.QuantizationCallback(self.train[0][:1024], bits=BITS, activation_bits="float")

    def cost(self) -> dict[str, float]:
        """Median time of an epoch by the way, relative to a plain `fit`."""
        self.model.set_weights(self._weights)
        compiled(self.model)
        callbacks = [[], [pk.DistillationCallback()], [pk.DistillationCallback(cache=False)]]
        for given in callbacks:
            self._fit(given, 2)
        seconds: list[list[float]] = [[] for _ in callbacks]
        for _ in range(TURNS):
            for found, given in zip(seconds, callbacks, strict=True):
                clock = Clock()
                self._fit([*given, clock], 1)
                found.append(clock.seconds)
        ratios = np.array(seconds) / np.array(seconds[:1])
        return dict(zip(COSTS, np.median(ratios, axis=1).tolist(), strict=True))

    def run(self) -> dict[str, Any]:
        """All figures of the network."""
        found: dict[str, Any] = {"dense": self.accuracy()}
        for change in (ZEROS, INTEGERS):
            for way in WAYS if self._name == "lenet" else FEW:
                options = WAYS[way]
                found[f"{change}: {way}"] = [self.compressed(change, options, seed) for seed in range(SEEDS)]
                print(change, way, found[f"{change}: {way}"], flush=True)
        return found | {"cost": self.cost()}


class Clock(keras.callbacks.Callback):
    """Seconds of the processor from the second batch of a `fit` to its end: the first may be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self._began = 0.0, 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            self._began = time.process_time()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds = time.process_time() - self._began


def _cell(accuracies: list[float] | None) -> str:
    """Mean of the seeds, and its standard error; "–" for what was not measured."""
    if accuracies is None:
        return "–"
    row = np.array(accuracies)
    return f"{row.mean():.4f} ± {row.std(ddof=1) / len(row) ** 0.5:.4f}"


def page(results: Results) -> str:
    """Returns the page as Markdown."""
    lines = [
        f"| network (dense) | change | {' | '.join(WAYS)} |",
        f"|---|---|{'---:|' * len(WAYS)}",
    ]
    costs = []
    for _, title, found in results.of(NETWORKS):
        for change in (ZEROS, INTEGERS):
            cells = [_cell(found.get(f"{change}: {way}")) for way in WAYS]
            lines.append(f"| {title} ({found['dense']:.4f}) | {change} | {' | '.join(cells)} |")
        cost = found["cost"]
        costs.append(f"| {title} | {cost[COSTS[1]]:.2f} | {cost[COSTS[2]]:.2f} |")
    return HEAD + "\n".join(lines) + "\n" + COST + "\n".join(costs) + "\n" + REASON


if __name__ == "__main__":
    measure_networks(__doc__, NETWORKS, PAGE, lambda name: Network(name).run(), page)

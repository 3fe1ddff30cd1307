"""Fashion CNN with frozen convolutions: training and evaluation of its head from cached activations, and whole.

All three ways run in one process, in turns. `section` needs no TensorFlow.
"""

import tempfile
from statistics import median
from typing import Any

from benchmarks.figures import spread
from benchmarks.machine import numbered, timed, turns
from benchmarks.tables import table
from benchmarks.workers import Workers

WHOLE, MEMORY, FILES = "whole model", "kept in memory", "kept on disk"
TITLES = {
    "fill": "computing the activations",
    "first": "computing the activations, and an epoch",
    "epoch": "an epoch",
    "evaluation": "an evaluation",
}
EPOCHS = 3
WALL, CPU = range(2)


class Contestant:
    """The network with frozen convolutions, trained and evaluated in one of the three ways.

    Args:
        way: Which.
        weights: Those that it starts from.
        folder: For activations on disk.
        batch: Size of the batches.
    """

    def __init__(self, way: str, weights: list[Any], folder: str, batch: int):
        import keras

        import prunekit as pk

        self._options: dict[str, Any] = {"batch_size": batch}
        if way == FILES:
            self._options["directory"] = folder
        self._batch = batch
        self.model = frozen_copy(weights)
        self._prefix = None if way == WHOLE else pk.loops.CachedPrefix(self.model, **self._options)
        self._part = self._prefix.upper if self._prefix else self.model
        loss = "sparse_categorical_crossentropy"
        self._part.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"], jit_compile=False)
        self.result: list[float] = []

    def inputs(self, x: Any) -> Any:
        """What the part that runs is given: looked up each time, with a hash over the data."""
        return self._prefix.activations(x) if self._prefix else x

    def epoch(self, x: Any, y: Any, turn: int) -> None:
        """Some epochs, in an order that is that of the other ways."""
        import keras

        keras.utils.set_random_seed(turn)
        self._part.fit(self.inputs(x), y, batch_size=self._batch, epochs=EPOCHS, verbose=0)

    def evaluation(self, x: Any, y: Any, turn: int) -> None:
        """Loss and accuracy."""
        self.result = self._part.evaluate(self.inputs(x), y, batch_size=self._batch, verbose=0)

    def fill(self, x: Any, y: Any, turn: int) -> None:
        """Computes the activations with a new prefix under a new key, so that none are found in the cache."""
        import prunekit as pk

        if self._prefix:
            pk.loops.CachedPrefix(self.model, **self._options).activations(x, key=f"turn {turn}")


def measure(smoke: bool, repeats: int) -> dict[str, Any]:
    """Measures seconds of epochs, evaluations and filling the cache, in turns, and compares the final weights."""
    train, test, source = images(smoke)
    batch = 16 if smoke else 128
    start = pretrained(train[0][:5000], train[1][:5000])
    seconds: dict[str, dict[str, list[tuple[float, float]]]] = {"fill": {}, "epoch": {}, "evaluation": {}}
    with tempfile.TemporaryDirectory() as folder:
        contestants = {way: Contestant(way, start, folder, batch) for way in (WHOLE, MEMORY, FILES)}
        for turn in numbered(min(repeats, 4)):
            for kind in seconds:
                for way, contestant in contestants.items():
                    examples = test if kind == "evaluation" else train
                    wall, cpu = timed(getattr(contestant, kind), *examples, turn)
                    parts = EPOCHS if kind == "epoch" else 1
                    if turn:
                        seconds[kind].setdefault(way, []).append((wall / parts, cpu / parts))
        size = contestants[MEMORY].inputs(train[0]).nbytes
    whole = contestants[WHOLE].model
    return {
        "data": source, "examples": len(train[0]), "tested": len(test[0]), "batch": batch, "bytes": size,
        "seconds": seconds, "results": {way: contestant.result for way, contestant in contestants.items()},
        "distance": {way: furthest(whole, contestant.model) for way, contestant in contestants.items()},
    }  # fmt: skip


def furthest(one: Any, other: Any) -> float:
    """The largest difference between two models' weights; 0 where they are the same to the bit."""
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return max(float(abs(a - b).max()) for a, b in pairs)


def images(smoke: bool) -> tuple[tuple[Any, Any], tuple[Any, Any], str]:
    """Training and test images of Fashion-MNIST, and what they are; random ones where the files are not there."""
    import numpy as np

    from prunekit.recipe.datasets.data import load_data
    from prunekit.recipe.settings.schema import DataSource
    from prunekit.recipe.text.loader import RecipeError

    train, test = (64, 32) if smoke else (10_000, 5_000)
    try:
        data = load_data(DataSource(builtin="fashion-mnist"), seed=0)
    except RecipeError:
        generator = np.random.default_rng(0)
        x, y = generator.random((train + test, 28, 28, 1), "float32"), generator.integers(0, 10, train + test)
        return (x[:train], y[:train]), (x[train:], y[train:]), "random images"
    (x, y), (test_x, test_y) = data.train, data.test
    return (x[:train], y[:train]), (test_x[:test], test_y[:test]), "Fashion-MNIST"


def pretrained(x: Any, y: Any) -> list[Any]:
    """Weights of the network after an epoch."""
    import keras

    from prunekit.recipe.state.models import fashion_cnn

    keras.utils.set_random_seed(0)
    model = fashion_cnn()
    model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", jit_compile=False)
    model.fit(x, y, batch_size=64, verbose=0)
    return model.get_weights()


def frozen_copy(weights: list[Any]) -> Any:
    """The network with these weights, its convolutions frozen."""
    from prunekit.recipe.state.models import fashion_cnn

    model = fashion_cnn()
    model.set_weights(weights)
    for name in ("conv_1", "conv_2"):
        model.get_layer(name).trainable = False
    return model


def collect(workers: Workers, smoke: bool) -> dict[str, Any]:
    """Figures of a worker process."""
    return workers.call(measure, {"smoke": smoke, "repeats": turns(smoke)})


def section(raw: dict[str, Any]) -> str:
    """The section of the page."""
    seconds = raw["seconds"]
    whole, cached = (median(row[CPU] for row in seconds["epoch"][way]) for way in (WHOLE, MEMORY))
    ten = 10 * whole / (10 * cached + median(row[CPU] for row in seconds["fill"][MEMORY]))
    far = max(raw["distance"].values())
    same = not far and len(set(map(tuple, raw["results"].values()))) == 1
    ends = (
        "The final weights, loss and accuracy of all three ways are identical, bit for bit"
        if same
        else f"The final weights differ by at most {far:.1g}"
    )
    return "\n\n".join(
        [
            "## Cached prefixes",
            f"fashion-cnn with its two convolutions frozen, {raw['data']}, {raw['examples']:,} examples in batches of "
            f"{raw['batch']}, evaluated on {raw['tested']:,}; the activations take {raw['bytes'] / 2**20:.0f} MiB. "
            f"Measured in turns, with `fit` calls of {EPOCHS} epochs. The times of epochs and evaluations include the "
            "lookup of the activations, with a hash of the data.",
            table(["", "s", "CPU s", "times faster than the whole model", "times fewer CPU seconds"], rows_of(seconds)),
            "Training the whole model also computes no gradients of frozen layers, so computing the activations takes "
            "most of the time of one whole epoch: cached activations save time from the second epoch on. The remaining "
            "time of an epoch is spent in the dense layers.",
            f"Ten epochs, including one computation of the activations, take {ten:.1f} times fewer CPU seconds. "
            f"{ends}; test accuracy "
            f"{', '.join(f'{accuracy:.4f}' for _, accuracy in raw['results'].values())}.",
        ]
    )


def rows_of(seconds: dict[str, Any]) -> list[list[str]]:
    """One row per thing that was done and way, beside the whole model, turn by turn."""
    first = {
        way: [[a + b for a, b in zip(*both, strict=True)] for both in zip(seconds["fill"][way], rows, strict=True)]
        for way, rows in seconds["epoch"].items()
        if way != WHOLE
    }
    found = {
        "fill": {way: seconds["fill"][way] for way in first},
        "first": {WHOLE: seconds["epoch"][WHOLE], **first},
        "epoch": seconds["epoch"],
        "evaluation": seconds["evaluation"],
    }
    lines = []
    for kind, ways in found.items():
        for way, rows in ways.items():
            cells = [spread([row[column] for row in rows], digits=2) for column in (WALL, CPU)]
            for column in (WALL, CPU):
                pairs = zip(rows, ways.get(WHOLE, rows), strict=True)
                ratios = [base[column] / row[column] for row, base in pairs]
                cells.append(spread(ratios) if WHOLE in ways and way != WHOLE else "")
            lines.append([f"{TITLES[kind]}: {way}", *cells])
    return lines

"""One mask update with each criterion, on fashion-cnn and on a perceptron of 25 million weights."""

import time
from typing import Any

from benchmarks.figures import spread
from benchmarks.machine import turns
from benchmarks.tables import table
from benchmarks.workers import Workers

EXAMPLES = 256
# Seconds after which an update is not measured again.
LONG = 15
# Criteria, and what they are combined with.
ROWS = {
    "magnitude": "uniform",
    "magnitude, global": "global",
    "l2": "uniform",
    "random": "uniform",
    "snip": "uniform",
    "grasp": "uniform",
    "synflow": "global",
    "taylor": "uniform",
    "fisher": "uniform",
    "optimal_brain_damage": "uniform",
    "wanda": "uniform",
    "output_error": "uniform",
    "sparsegpt": "uniform",
    "magnitude, lamp": "lamp",
    "magnitude, layer_error": "layer_error",
}
UNITS = ("geometric_median", "apoz", "mean_activation")


def _network(large: bool, smoke: bool) -> Any:
    import keras

    from prunekit.recipe.state.models import fashion_cnn

    if large:
        layers = keras.layers
        width = 64 if smoke else 4200
        hidden = [layers.Dense(width, activation="relu", name=f"hidden_{i}") for i in range(2)]
        ends = [layers.Dense(1000), layers.Dense(10)]
        model = keras.Sequential([keras.Input((28, 28, 1)), layers.Flatten(), *hidden, *ends])
    else:
        model = fashion_cnn()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=large))
    return model


def measure(smoke: bool, repeats: int, large: bool) -> dict[str, Any]:
    """Seconds of a second mask update (0.5 to 0.6) with each criterion, statistics included."""
    import numpy as np

    import prunekit as pk
    from prunekit.techniques.pruning.masks.options import PruningOptions
    from prunekit.techniques.pruning.training.pruner_run import PrunerRun

    generator = np.random.default_rng(0)
    count = 16 if smoke else EXAMPLES
    data = generator.normal(size=(count, 28, 28, 1)).astype("float32"), generator.integers(0, 10, count)
    model = _network(large, smoke)
    before = model.get_weights()
    seconds: dict[str, list[float]] = {}
    for title, pattern in [(title, "unstructured") for title in ROWS] + [(title, "channel") for title in UNITS]:
        criterion, allocation = title.split(",")[0], ROWS.get(title, "uniform")
        seconds[title] = []
        while len(seconds[title]) < repeats and sum(seconds[title]) < LONG:
            model.set_weights(before)
            options = {"criterion": criterion, "allocation": allocation, "pattern": pattern}
            reads = criterion not in ("magnitude", "l2", "random", "synflow", "geometric_median")
            schedule = pk.schedules.MultiStep(((0, 0.5), (1, 0.6)))
            pruner = PrunerRun(
                model,
                schedule,
                PruningOptions(**options),
                data=data if reads or allocation == "layer_error" else None,
            )
            with pruner.enforcing():
                pruner.begin()
                start = time.perf_counter()
                pruner.updater.update(1, 0.6)
                seconds[title].append(time.perf_counter() - start)
    return {"weights": int(sum(array.size for array in before)), "seconds": seconds}


def collect(workers: Workers, smoke: bool) -> dict[str, Any]:
    """Figures of a worker process."""
    repeats = max(turns(smoke) // 2, 1)
    return {
        "cnn": workers.call(measure, {"smoke": smoke, "repeats": repeats, "large": False}),
        "large": workers.call(measure, {"smoke": smoke, "repeats": repeats, "large": True}),
    }


def section(found: dict[str, Any]) -> str:
    """The section of the page: milliseconds of an update, for both networks."""
    small, large = found["cnn"], found["large"]
    rows = []
    for title, seconds in small["seconds"].items():
        rows.append([title, spread(seconds, 1e3), spread(large["seconds"][title], 1e3)])
    heads = ["criterion, allocation", f"fashion-cnn ({small['weights']:,}), ms", f"{large['weights']:,} weights, ms"]
    return "\n\n".join(
        [
            "## Mask updates by criterion",
            f"One mask update from sparsity 0.5 to 0.6, the second of its training: statistics of {EXAMPLES} images "
            "where the criterion reads data, importances, selection, and the masks imposed. Uniform allocation where "
            "none is named; criteria of units prune channels. SynFlow takes its hundred rounds.",
            table(heads, rows),
        ]
    )

"""Levenberg-Marquardt steps, dense and pruned, and beside Adam."""

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.figures import spread, turn_ratios
from benchmarks.machine import in_turns, turns
from benchmarks.models import FINAL_SPARSITY
from benchmarks.tables import table
from benchmarks.workers import Workers


def measure(smoke: bool, repeats: int) -> dict[str, Any]:
    """Seconds of a Levenberg-Marquardt step, dense and pruned to 90 %; and beside Adam to the same loss."""
    import keras
    import numpy as np

    import prunekit as pk

    generator = np.random.default_rng(0)
    direction = generator.normal(size=(4, 1))

    def problem(hidden: int, examples: int) -> tuple[Any, Any, Any]:
        keras.utils.set_random_seed(0)
        dense = keras.layers.Dense
        x = generator.normal(size=(examples, 4)).astype("float32")
        model = keras.Sequential([keras.Input((4,)), dense(hidden, "tanh"), dense(hidden, "tanh"), dense(1)])
        return model, x, np.sin(x @ direction).astype("float32")

    large = (4, 20) if smoke else (48, 2000)
    (dense, x, y), (sparse, *_) = problem(*large), problem(*large)
    pruner = pk.Pruner(sparse, pk.schedules.ConstantSparsity(FINAL_SPARSITY))
    trainers = {
        "dense": pk.loops.LevenbergMarquardt(dense),
        "sparsity 0.9": pk.loops.LevenbergMarquardt(sparse, pruner=pruner),
    }
    seconds = in_turns({name: lambda one=one: one.step(x, y) for name, one in trainers.items()}, repeats)
    sizes = {name: trainer.size for name, trainer in trainers.items()}
    small = problem(*((4, 20) if smoke else (12, 400)))
    beside_adam = race(*small, 3, [0.01]) if smoke else race(*small, 100, [0.003, 0.01, 0.03])
    return {"sizes": sizes, "seconds": seconds, "residuals": large[1], "beside_adam": beside_adam}


def race(model: Any, x: Any, y: Any, steps: int, rates: Sequence[float]) -> dict[str, Any]:
    """Measures seconds of second-order steps, and of Adam with the best of several learning rates to the same loss."""
    import keras

    import prunekit as pk

    start, trainer = model.get_weights(), pk.loops.LevenbergMarquardt(model)
    trainer.step(x, y)
    model.set_weights(start)
    trainer.damping = None
    began = time.perf_counter()
    history = trainer.fit(x, y, epochs=steps)["loss"]
    ours = time.perf_counter() - began
    best, limit = None, max(10 * ours, 10.0) if steps > 3 else 0.1
    for rate in rates:
        model.set_weights(start)
        model.compile(keras.optimizers.Adam(rate), "mse", jit_compile=False)
        model.fit(x, y, batch_size=len(x), epochs=1, verbose=0)
        data = [(x, y)] * 50
        began, loss = time.perf_counter(), float("inf")
        while loss > history[-1] and time.perf_counter() - began < (best or limit):
            for batch in data:
                loss = float(model.train_on_batch(*batch)) * len(x) / 2
        if loss <= history[-1]:
            best = time.perf_counter() - began
    sizes = {"weights": trainer.size, "residuals": len(x), "steps": len(history)}
    return {"loss": history[-1], "second_order": ours, "adam": best, "limit": limit, **sizes}


def collect(workers: Workers, smoke: bool) -> dict[str, Any]:
    """Figures of a worker process."""
    return workers.call(measure, {"smoke": smoke, "repeats": turns(smoke)})


def section(found: dict[str, Any]) -> str:
    """The section of the page: Levenberg-Marquardt by sparsity, and beside Adam."""
    dense, race = found["seconds"]["dense"], found["beside_adam"]
    rows = []
    for name, values in found["seconds"].items():
        ratios = spread(turn_ratios(values, dense), digits=2)
        rows.append([name, f"{found['sizes'][name]:,}", spread(values, 1e3), ratios])
    adam = (
        f"not in {race['limit']:.0f} s"
        if race["adam"] is None
        else f"{race['adam']:.1f} s, {race['adam'] / race['second_order']:.1f} times as long"
    )
    return "\n\n".join(
        [
            "## Second-order steps",
            f"`LevenbergMarquardt` on a perceptron 4-48-48-1 with {found['residuals']:,} residuals: time of a step, "
            "measured in turns.",
            table(["", "trained weights", "ms", "ratio to dense"], rows),
            f"On a perceptron 4-12-12-1 ({race['weights']} weights, {race['residuals']} residuals), {race['steps']} "
            f"steps reach half a sum of squares of {race['loss']:.2g} in {race['second_order']:.1f} s. Adam on all "
            f"examples, with the best of three learning rates, from the same initial weights to the same loss: {adam}.",
        ]
    )

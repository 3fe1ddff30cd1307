"""A step and a mask update on each backend of Keras, on the device that it chooses, beside reading the weights once.

`python -m benchmarks.sections.backends` takes a JSON object {"backend", "weights", "steps", "repeats"}, measures one
backend and prints one line of JSON: on a GPU too, and without TensorFlow.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.figures import spread, turn_ratios
from benchmarks.machine import in_turns
from benchmarks.models import FINAL_SPARSITY
from benchmarks.tables import table
from benchmarks.workers import Workers

BACKENDS = ("tensorflow", "jax", "torch")
LAYERS, BATCH = 12, 64


# The worker -----------------------------------------------------------------------------------------------------------


def network(weights: int, layers: int) -> Any:
    """Returns a compiled float32 perceptron of equal square layers without biases with about `weights` weights."""
    import keras

    width = round((weights / layers) ** 0.5)
    keras.utils.set_random_seed(0)
    maps = [keras.layers.Dense(width, use_bias=False, activation="relu", name=f"map{i}") for i in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *maps])
    model.compile(keras.optimizers.Adam(1e-4), "mse")
    return model


def wait_for_weights(model: Any) -> None:
    """Waits until every weight has been computed."""
    import keras

    for variable in model.trainable_variables:
        float(keras.ops.convert_to_numpy(variable.value[0, 0]))


def examples(model: Any, batches: int) -> Any:
    """Random numbers that are input and target at once."""
    import numpy as np

    return np.random.default_rng(0).standard_normal((batches * BATCH, model.input_shape[-1]), "float32")


def fits(weights: int, layers: int, steps: int, repeats: int) -> dict[str, list[float]]:
    """Measures seconds per step of `fit` of two unpruned models and of a pruned model between updates, in turns."""
    import prunekit as pk

    def way(pruned: bool) -> Callable[[], Any]:
        model = network(weights, layers)
        x = examples(model, steps)
        # All masks keep all: what they are makes no difference to the arithmetic of a step.
        schedule = pk.schedules.ConstantSparsity(FINAL_SPARSITY, begin_step=10**6, frequency=10**6)
        callbacks = [pk.PruningCallback(schedule)] if pruned else []

        def run() -> None:
            model.fit(x, x, BATCH, epochs=1, verbose=0, shuffle=False, callbacks=callbacks)
            wait_for_weights(model)

        return run

    ways = {"plain": way(False), "control": way(False), "pruned": way(True)}
    return {name: [each / steps for each in found] for name, found in in_turns(ways, repeats).items()}


def updates(weights: int, layers: int, count: int) -> list[float]:
    """Measures seconds of `pruner.step()` with a mask update; the first two calls are not counted."""
    import prunekit as pk

    model = network(weights, layers)
    x = examples(model, 1)
    found = []
    schedule = pk.schedules.PolynomialDecay(0.0, FINAL_SPARSITY, begin_step=1, end_step=count + 3, frequency=1)
    with pk.Pruner(model, schedule) as pruner:
        for _ in range(count + 2):
            model.train_on_batch(x, x)
            wait_for_weights(model)
            began = time.perf_counter()
            changed = pruner.step()
            wait_for_weights(model)
            if changed:
                found.append(time.perf_counter() - began)
    return found[2:]


def reading(weights: int, repeats: int) -> list[float]:
    """Measures seconds of the faster of a sum and a maximum over `size` float32 numbers on the device."""
    import keras

    numbers = keras.ops.ones((weights,), "float32")
    ways = {
        "sum": lambda: float(keras.ops.convert_to_numpy(keras.ops.sum(numbers))),
        "max": lambda: float(keras.ops.convert_to_numpy(keras.ops.max(numbers))),
    }
    return min(in_turns(ways, repeats).values(), key=median)


def device() -> str:
    """What Keras computes on, in words."""
    import keras

    one = keras.ops.ones(())
    if keras.backend.backend() == "torch":
        import torch

        return torch.cuda.get_device_name() if one.is_cuda else "CPU"
    if keras.backend.backend() == "jax":
        kind = next(iter(one.devices())).device_kind
        return "CPU" if kind == "cpu" else kind
    import tensorflow as tf

    if "GPU" not in one.device:
        return "CPU"
    return tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])["device_name"]


def measure(backend: str, weights: int, steps: int, repeats: int, layers: int = LAYERS) -> dict[str, Any]:
    """Everything about one backend."""
    os.environ["KERAS_BACKEND"] = backend
    return {
        "device": device(),
        "fits": fits(weights, layers, steps, repeats),
        "updates": updates(weights, layers, repeats),
        "reading": reading(weights, 5 * repeats),
    }


def main() -> None:
    """Measures what the argument says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", type=json.loads)
    print(json.dumps(measure(**parser.parse_args().task)))


# The page -------------------------------------------------------------------------------------------------------------


def tasks(smoke: bool) -> list[dict[str, Any]]:
    """One task for each row of the table."""
    if smoke:
        # The backend of the shared worker process.
        backend = os.environ.get("KERAS_BACKEND", "tensorflow")
        return [{"backend": backend, "weights": 3_000, "steps": 2, "repeats": 2, "layers": 2}]
    sizes = ({"weights": 25_000_000, "steps": 10, "repeats": 7}, {"weights": 100_000_000, "steps": 5, "repeats": 5})
    return [{"backend": backend, **size} for size in sizes for backend in BACKENDS]


def collect(workers: Workers, smoke: bool) -> list[dict[str, Any]]:
    """The tasks, each with the figures of a worker process."""
    return [
        {"task": task, "found": workers.call(measure, task, {"KERAS_BACKEND": task["backend"]})}
        for task in tasks(smoke)
    ]


def section(rows: list[dict[str, Any]]) -> str:
    """The section of the page; `rows` are tasks with their figures."""
    body = []
    for row in rows:
        task, found = row["task"], row["found"]
        runs, read = found["fits"], median(found["reading"])
        ratios = {name: turn_ratios(runs[name], runs["plain"]) for name in ("control", "pruned")}
        body.append(
            [
                f"{task['weights'] / 1e6:,.0f} M, {task['backend']}, {found['device']}",
                spread(runs["plain"], 1e3),
                spread(ratios["control"], digits=3),
                spread(ratios["pruned"], digits=3),
                spread(found["updates"], 1e3),
                f"{read * 1e3:.1f}",
                f"{median(found['updates']) / read:.0f}",
            ]
        )
    head = ["weights, backend, device", "step, ms", "second unpruned model, ratio", "pruned, ratio", "mask update, ms"]
    return "\n\n".join(
        [
            "## Backends",
            f"Perceptrons of {LAYERS} equal square layers, batch {BATCH}, Adam, compiled with Keras's "
            "defaults. The first columns compare, in turns, a step of `fit` of an unpruned model, of a second unpruned "
            "model, and of a pruned model between two mask updates. The last columns compare a `pruner.step()` that "
            "chooses new masks with one read of as many float32 numbers (the faster of a sum and a maximum). A small "
            "batch makes the step short, and so the relative overhead large.",
            table([*head, "one read, ms", "ratio of update to read"], body),
            REMARK,
        ]
    )


REMARK = (
    "An update reads weights and importances, finds the threshold of each layer, and writes masks, weights and the "
    "two slots of Adam. TensorFlow and PyTorch find the threshold in two passes, each of which counts digits of 16 "
    "bits. JAX needs 32 passes, one per bit: XLA compiles again for every array length, which takes 1.5 s for the two "
    "passes and 0.2 s for the 32 passes."
)


if __name__ == "__main__":
    main()

"""Gradients of single examples beside a loop over batches of one."""

from collections.abc import Callable
from typing import Any

from benchmarks.figures import spread, turn_ratios
from benchmarks.machine import in_turns, turns
from benchmarks.tables import table
from benchmarks.workers import Workers


def measure(smoke: bool, repeats: int) -> dict[str, Any]:
    """Seconds of per-example gradients and norms of fashion-cnn, and of a loop over batches of one, compiled or not."""
    import keras
    import numpy as np
    import tensorflow as tf

    import prunekit as pk
    from prunekit.recipe.state.models import fashion_cnn

    batch, generator = 4 if smoke else 128, np.random.default_rng(0)
    model, loss = fashion_cnn(), keras.losses.SparseCategoricalCrossentropy()
    x = tf.constant(generator.normal(size=(batch, 28, 28, 1)), "float32")
    y = tf.constant(generator.integers(0, 10, batch))

    def one_by_one(x: Any, y: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            value = loss(y, model(x))
        return tape.gradient(value, model.trainable_variables)

    def loop(single: Callable[[Any, Any], list[Any]]) -> list[Any]:
        rows = [single(x[i : i + 1], y[i : i + 1]) for i in range(batch)]
        return [tf.stack(column) for column in zip(*rows, strict=True)]

    found = {}
    for title, wrapped in (("called eagerly", lambda function: function), ("in a tf.function", tf.function)):
        single = wrapped(one_by_one)
        ways = {"a loop over batches of one": lambda single=single: loop(single)}
        for name in ("per_example", "per_example_norms", "sum_of_squares"):
            function = getattr(pk.gradients, name)
            taken = wrapped(lambda x, y, function=function: function(model, loss, x, y))
            ways[name] = lambda taken=taken: taken(x, y)
        found[title] = in_turns(ways, repeats)
    return {"batch": batch, "seconds": found}


def collect(workers: Workers, smoke: bool) -> dict[str, Any]:
    """Figures of a worker process."""
    return workers.call(measure, {"smoke": smoke, "repeats": turns(smoke)})


def section(found: dict[str, Any]) -> str:
    """The section of the page: gradients of single examples beside a loop, eagerly and compiled."""
    parts = [
        "## Gradients of single examples",
        f"fashion-cnn, batch {found['batch']}; measured in turns. Wanted: 5 times faster than a loop over batches of "
        "one example.",
    ]
    for title, seconds in found["seconds"].items():
        loop = seconds["a loop over batches of one"]
        rows = [[name, spread(values, 1e3), spread(turn_ratios(loop, values))] for name, values in seconds.items()]
        parts.append(table([title, "ms", "times faster"], rows))
    return "\n\n".join(parts)

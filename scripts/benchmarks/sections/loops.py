"""Ways to train: `fit`, TapeLoop and a `tf.function` of the user's, not pruned and pruned."""

from collections.abc import Callable
from typing import Any

from benchmarks.contestants import Library
from benchmarks.machine import in_turns, turns
from benchmarks.models import FINAL_SPARSITY
from benchmarks.tables import rows_beside, table
from benchmarks.workers import Workers


def measure(model: str, smoke: bool, repeats: int) -> dict[str, Any]:
    """Measures seconds per step of `fit`, TapeLoop and a custom `tf.function`, unpruned and pruned, in turns."""
    import keras
    import tensorflow as tf

    import prunekit as pk

    steps = 3 if smoke else 20
    library = Library(model, smoke)
    data = library.data(steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    schedule = pk.schedules.ConstantSparsity(FINAL_SPARSITY, frequency=1_000_000)

    def fresh() -> tuple[Any, Any]:
        name, arguments = library.optimizer
        return library.build(keras, **library.options), getattr(keras.optimizers, name)(**arguments)

    def fit(callbacks: list[Any]) -> Callable[[], Any]:
        network, optimizer = fresh()
        network.compile(optimizer, loss, jit_compile=False)
        return lambda: network.fit(data, epochs=1, verbose=0, callbacks=callbacks)

    def tape_loop(pruned: bool) -> Callable[[], Any]:
        network, optimizer = fresh()
        loop = pk.loops.TapeLoop(network, optimizer, loss, pk.Pruner(network, schedule, optimizer) if pruned else None)
        return lambda: loop.fit(data)

    def own(pruned: bool) -> Callable[[], Any]:
        network, optimizer = fresh()
        pruner = pk.Pruner(network, schedule, optimizer) if pruned else None

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                value = loss(y, network(x, training=True))
            variables = network.trainable_variables
            optimizer.apply(tape.gradient(value, variables), variables)

        def epoch() -> None:
            for x, y in data:
                step(x, y)
                if pruner is not None:
                    pruner.step()

        return epoch

    ways = {
        "model.fit": fit([]),
        "TapeLoop.fit": tape_loop(False),
        "a tf.function and a for loop": own(False),
        "model.fit with PruningCallback": fit([pk.PruningCallback(schedule)]),
        "TapeLoop.fit with a Pruner": tape_loop(True),
        "a tf.function and pruner.step()": own(True),
    }
    seconds = in_turns(ways, repeats)
    return {"seconds": {name: [each / steps for each in values] for name, values in seconds.items()}}


def collect(workers: Workers, smoke: bool) -> dict[str, Any]:
    """Figures of a worker process."""
    return workers.call(measure, {"model": "perceptron", "smoke": smoke, "repeats": turns(smoke)})


def section(found: dict[str, Any]) -> str:
    """The section of the page."""
    return "\n\n".join(
        [
            "## Ways to train the perceptron",
            "Mean time of a step in an epoch of 20 steps without mask updates; pruned models have sparsity 0.9. The "
            "loops run in turns.",
            table(["", "ms", "ratio to model.fit"], rows_beside(found["seconds"], "model.fit", digits=3)),
        ]
    )

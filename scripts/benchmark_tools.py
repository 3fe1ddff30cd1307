"""Single tools of prunekit beside what they are compared to, each run in turns: one process per JSON task.

Answers with one line of JSON, as benchmark_worker.py does.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

from benchmark_worker import FINAL_SPARSITY, Library, answer


def selection(size: int, repeats: int) -> None:
    """Seconds that it takes to find the largest fifth of `size` float32 numbers, by several means, in turns."""
    import numpy as np
    import tensorflow as tf

    from prunekit.core.compilation import compiled
    from prunekit.sparsity.selection import keep_largest

    values = np.abs(np.random.default_rng(0).normal(size=size)).astype("float32")
    tensor, kept = tf.constant(values), size // 5
    compiled_keep = compiled(keep_largest)
    kept_tensor = tf.constant(kept)
    ways: dict[str, Callable[[], Any]] = {
        "prunekit keep_largest": lambda: compiled_keep(tensor, kept_tensor),
        "np.partition": lambda: np.partition(values, size - kept),
        "np.sort": lambda: np.sort(values),
        "tf.sort": lambda: tf.sort(tensor),
        "tf.math.top_k": lambda: tf.math.top_k(tensor, kept),
    }
    threshold = np.partition(values, size - kept)[size - kept]
    if not np.array_equal(compiled_keep(tensor, kept_tensor), values >= threshold):
        raise RuntimeError("keep_largest and np.partition disagree.")
    answer(size=size, seconds=in_turns(ways, repeats))


def loops(model: str, smoke: bool, repeats: int) -> None:
    """Seconds per step of `fit`, of TapeLoop and of a `tf.function` of the user's, unpruned and pruned, in turns."""
    import keras
    import tensorflow as tf

    import prunekit as pk

    steps = 3 if smoke else 20
    library = Library(model, smoke)
    data = library.data(steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    schedule = pk.ConstantSparsity(FINAL_SPARSITY, frequency=1_000_000)

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
    answer(seconds={name: [each / steps for each in values] for name, values in in_turns(ways, repeats).items()})


def least_squares(smoke: bool, repeats: int) -> None:
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
    pruner = pk.Pruner(sparse, pk.ConstantSparsity(FINAL_SPARSITY))
    trainers = {
        "dense": pk.loops.LevenbergMarquardt(dense),
        "sparsity 0.9": pk.loops.LevenbergMarquardt(sparse, pruner=pruner),
    }
    seconds = in_turns({name: lambda one=one: one.step(x, y) for name, one in trainers.items()}, repeats)
    sizes = {name: trainer.size for name, trainer in trainers.items()}
    small = problem(*((4, 20) if smoke else (12, 400)))
    answer(sizes=sizes, seconds=seconds, residuals=large[1], beside_adam=race(*small, steps=3 if smoke else 100))


def race(model: Any, x: Any, y: Any, steps: int) -> dict[str, Any]:
    """Seconds of so many second-order steps, and of Adam at the best of three learning rates to the same loss."""
    import keras

    import prunekit as pk

    start, trainer = model.get_weights(), pk.loops.LevenbergMarquardt(model)
    trainer.step(x, y)
    model.set_weights(start)
    trainer.damping = None
    began = time.perf_counter()
    history = trainer.fit(x, y, epochs=steps)["loss"]
    ours = time.perf_counter() - began
    best, limit = None, max(10 * ours, 10.0) if steps > 3 else 1.0
    for rate in (0.003, 0.01, 0.03):
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


def in_turns(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run of each way, after one that nobody counts."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def gradients(smoke: bool, repeats: int) -> None:
    """Seconds of per-example gradients and norms of fashion-cnn, and of a loop over batches of one, compiled or not."""
    import keras
    import numpy as np
    import tensorflow as tf

    import prunekit as pk
    from prunekit.recipe.models import fashion_cnn

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
    for title, wrapped in (("called at once", lambda function: function), ("in a tf.function", tf.function)):
        single = wrapped(one_by_one)
        ways = {"a loop over batches of one": lambda single=single: loop(single)}
        for name in ("per_example", "per_example_norms", "sum_of_squares"):
            function = getattr(pk.gradients, name)
            taken = wrapped(lambda x, y, function=function: function(model, loss, x, y))
            ways[name] = lambda taken=taken: taken(x, y)
        found[title] = in_turns(ways, repeats)
    answer(batch=batch, seconds=found)


def changes(smoke: bool, repeats: int) -> None:
    """Seconds per step of fashion-cnn in `fit`, as it is, measured, and pruned by magnitude and by movement."""
    import keras
    import numpy as np
    import tensorflow as tf

    import prunekit as pk
    from prunekit.recipe.models import fashion_cnn

    batch, steps = (4, 3) if smoke else (64, 10)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(steps, batch, 28, 28, 1)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, generator.integers(0, 10, (steps, batch))))

    def fit(criterion: str | None = None, measured: bool = False) -> Callable[[], Any]:
        model = fashion_cnn()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(), jit_compile=False)
        schedule = pk.ConstantSparsity(FINAL_SPARSITY, begin_step=1, frequency=1_000_000)
        callbacks = [pk.PruningCallback(schedule, criterion=criterion)] if criterion else []
        if measured:
            # Measured until the process ends.
            pk.loops.WeightChanges(model).__enter__()
        return lambda: model.fit(data, epochs=1, verbose=0, callbacks=callbacks)

    ways = {
        "model.fit": fit(),
        "model.fit, once more": fit(),
        "model.fit within WeightChanges": fit(measured=True),
        "model.fit with PruningCallback, by magnitude": fit("magnitude"),
        "model.fit with PruningCallback, by movement": fit("movement"),
    }
    seconds = {name: [each / steps for each in values] for name, values in in_turns(ways, repeats).items()}
    answer(batch=batch, seconds=seconds)


def main() -> None:
    """Does what one argument, a JSON object, says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", type=json.loads)
    task = parser.parse_args().task
    tools = {
        "selection": selection,
        "loops": loops,
        "least_squares": least_squares,
        "gradients": gradients,
        "changes": changes,
    }
    tools[task.pop("tool")](**task)


if __name__ == "__main__":
    main()

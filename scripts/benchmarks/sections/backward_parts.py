"""Peak memory and time of a training step in one go, in parts, with recomputed blocks, and both.

`section` needs no TensorFlow.
"""

import contextlib
import json
import os
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.figures import spread, turn_ratios
from benchmarks.machine import in_turns, peak_memory, turns
from benchmarks.tables import table
from benchmarks.workers import Workers

WAYS = ("in one go", "in parts", "blocks recomputed", "in parts, blocks recomputed")
TITLES = {
    "wide": "{branches} branches of {depth} dense layers, {width} wide, batch {batch:,}",
    "deep": "a chain of {branches} residual blocks of {depth} dense layers, {width} wide, batch {batch:,}",
}


# What is trained ------------------------------------------------------------------------------------------------------


def block(keras: Any, width: int, depth: int, name: str) -> Any:
    """A model of some dense layers."""
    inputs = keras.Input((width,))
    x = inputs
    for _ in range(depth):
        x = keras.layers.Dense(width, activation="gelu")(x)
    return keras.Model(inputs, x, name=name)


def wide(keras: Any, branches: int, width: int, depth: int) -> tuple[Any, list[str], list[str]]:
    """(model, boundary, blocks): a head that a large number of branches lead into."""
    inputs, ends, blocks = keras.Input((width,)), [], []
    for number in range(branches):
        blocks += [f"branch_{number}_{half}" for half in "ab"]
        x = inputs
        for name in blocks[-2:]:
            x = block(keras, width, depth // 2, name)(x)
        ends.append(keras.layers.Dense(4, name=f"end_{number}")(x))
    joined = keras.layers.Concatenate()(ends)
    return keras.Model(inputs, keras.layers.Dense(10)(joined)), [f"end_{number}" for number in range(branches)], blocks


def deep(keras: Any, branches: int, width: int, depth: int) -> tuple[Any, list[str], list[str]]:
    """(model, boundary, blocks): a chain, cut at every fourth block."""
    names = [f"block_{number}" for number in range(branches)]
    inputs = keras.Input((width,))
    x = inputs
    for name in names:
        joined = keras.layers.Add()([x, block(keras, width, depth, name)(x)])
        x = keras.layers.LayerNormalization(name=name.replace("block", "out"))(joined)
    return keras.Model(inputs, keras.layers.Dense(10)(x)), [f"out_{number}" for number in range(3, branches, 4)], names


class Setting:
    """A network, a batch, and the ways to train a step on it."""

    def __init__(self, network: str, smoke: bool):
        import numpy as np

        self.network = network
        counts = {"branches": 4} if smoke else {"wide": {"branches": 16}, "deep": {"branches": 12}}[network]
        self.sizes = counts | {"width": 8 if smoke else 128, "depth": 2}
        self.batch, generator = 16 if smoke else 4096, np.random.default_rng(0)
        self.x = generator.normal(size=(self.batch, self.sizes["width"])).astype("float32")
        self.y = generator.integers(0, 10, self.batch)

    def step(self, way: str) -> Callable[[int], float]:
        """Function (examples) -> loss, a compiled training step that has been traced."""
        import keras
        import tensorflow as tf

        import prunekit as pk

        keras.utils.set_random_seed(0)
        model, boundary, blocks = {"wide": wide, "deep": deep}[self.network](keras, **self.sizes)
        optimizer, loss = keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer.build(model.trainable_variables)

        def gradients(x: Any, y: Any) -> Any:
            if "parts" in way:
                return pk.gradients.in_parts(model, loss, x, y, boundary, training=True)
            with tf.GradientTape() as tape:
                value = loss(y, model(x, training=True))
            return value, tape.gradient(value, model.trainable_variables)

        signature = [tf.TensorSpec([None, *self.x.shape[1:]]), tf.TensorSpec([None], "int64")]

        @tf.function(autograph=False, input_signature=signature)
        def update(x: Any, y: Any) -> Any:
            value, found = gradients(x, y)
            optimizer.apply(found, model.trainable_variables)
            return value

        x, y = tf.constant(self.x), tf.constant(self.y)
        with pk.gradients.recomputing(model, blocks) if "recomputed" in way else contextlib.nullcontext():
            update(x[:2], y[:2])
        return lambda examples: float(update(x[:examples], y[:examples]))


# Measurements ---------------------------------------------------------------------------------------------------------


def in_a_process_of_its_own(function: Callable[[], Any]) -> Callable[[], Any]:
    """Begins to call the function in a copy of this process, in which TensorFlow has done nothing yet.

    Returns:
        A function that waits for what it returns, which must be JSON-ready.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.write(writer, json.dumps(function()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)

    def result() -> Any:
        with os.fdopen(reader) as pipe:
            found = pipe.read()
        if os.waitpid(child, 0)[1]:
            raise RuntimeError("A measurement of memory ended early.")
        return json.loads(found)

    return result


def added_memory(setting: Setting, step: Callable[[int], float]) -> float:
    """MiB of resident memory that a step on the whole batch has at its peak, above that of a step on two examples."""
    before = peak_memory()
    for _ in range(2):
        step(setting.batch)
    return peak_memory() - before


def measure(network: str, smoke: bool, repeats: int, isolated: bool) -> dict[str, Any]:
    """Measures the peak memory of each way, and seconds of its steps in turns.

    Args:
        network: A name of TITLES.
        smoke: Whether the network is tiny.
        repeats: Twice the number of turns in which steps are measured.
        isolated: Whether memory is measured in processes of their own: only before TensorFlow has done anything.
    """
    import keras  # noqa: F401 - before the process is copied, which saves its copies seconds

    import prunekit as pk

    # Loads the modules, likewise before the process is copied.
    _ = pk.gradients.in_parts, pk.gradients.recomputing
    setting, memory = Setting(network, smoke), {}
    for way in WAYS if isolated else ():
        # Two at a time.
        pair = [in_a_process_of_its_own(lambda way=way: added_memory(setting, setting.step(way))) for _ in range(2)]
        memory[way] = [result() for result in pair]
    steps = {way: setting.step(way) for way in WAYS}
    if not isolated:
        memory = {way: [added_memory(setting, step)] for way, step in steps.items()}
    seconds = in_turns({way: lambda step=step: step(setting.batch) for way, step in steps.items()}, (repeats + 1) // 2)
    return {"memory": memory, "seconds": seconds, "batch": setting.batch, **setting.sizes}


def collect(workers: Workers, smoke: bool) -> dict[str, Any]:
    """Figures of a worker process for each network."""
    options = {"smoke": smoke, "repeats": turns(smoke), "isolated": not workers.shared}
    return {network: workers.call(measure, {"network": network, **options}) for network in TITLES}


# The page -------------------------------------------------------------------------------------------------------------


def section(raw: dict[str, Any]) -> str:
    """The section of the page."""
    parts = [
        "## Backward in parts",
        "A compiled training step with `in_parts` and under `recomputing` (`pk.gradients`), compared "
        "with a plain tape. The peak is the peak of resident memory minus the resident memory after a step on two "
        "examples, each measured in a new process. A chain is cut after every fourth block. Times are of steps in "
        "turns; they increase because of a second forward pass, and with `in_parts` also because the branches do not "
        "run at the same time.",
    ]
    for network, found in raw.items():
        memory, seconds = ({way: found[what][way] for way in WAYS} for what in ("memory", "seconds"))
        base = median(memory[WAYS[0]])
        rows = [
            [
                way,
                spread(memory[way], digits=0),
                f"{median(memory[way]) / base:.2f}" if base else "-",
                spread(seconds[way], 1e3, digits=0),
                spread(turn_ratios(seconds[way], seconds[WAYS[0]]), digits=2),
            ]
            for way in WAYS
        ]
        parts.append(table([TITLES[network].format(**found), "peak, MiB", "ratio", "ms", "ratio of times"], rows))
    return "\n\n".join(parts)

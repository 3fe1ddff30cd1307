"""Measuring in the compiled step what each update changes in each weight."""

import contextlib
from collections.abc import Callable
from typing import Any

from benchmarks.machine import in_turns, turns
from benchmarks.models import FINAL_SPARSITY
from benchmarks.tables import rows_beside, table
from benchmarks.workers import Workers


def measure(smoke: bool, repeats: int) -> dict[str, Any]:
    """Seconds per step of fashion-cnn in `fit`, as it is, measured, and pruned by magnitude and by movement."""
    import keras
    import numpy as np
    import tensorflow as tf

    import prunekit as pk
    from prunekit.recipe.state.models import fashion_cnn

    batch, steps = (4, 3) if smoke else (64, 10)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(steps, batch, 28, 28, 1)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, generator.integers(0, 10, (steps, batch))))

    def fit(criterion: str | None = None, measured: bool = False) -> Callable[[], Any]:
        model = fashion_cnn()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(), jit_compile=False)
        schedule = pk.schedules.ConstantSparsity(FINAL_SPARSITY, begin_step=1, frequency=1_000_000)
        callbacks = [pk.PruningCallback(schedule, criterion=criterion)] if criterion else []
        if measured:
            stack.enter_context(pk.loops.WeightChanges(model))
        return lambda: model.fit(data, epochs=1, verbose=0, callbacks=callbacks)

    with contextlib.ExitStack() as stack:
        ways = {
            "model.fit": fit(),
            "model.fit, second model": fit(),
            "model.fit within WeightChanges": fit(measured=True),
            "model.fit with PruningCallback, by magnitude": fit("magnitude"),
            "model.fit with PruningCallback, by movement": fit("movement"),
        }
        seconds = in_turns(ways, repeats)
    return {
        "batch": batch,
        "seconds": {name: [each / steps for each in values] for name, values in seconds.items()},
    }


def collect(workers: Workers, smoke: bool) -> dict[str, Any]:
    """Figures of a worker process."""
    return workers.call(measure, {"smoke": smoke, "repeats": 1 if smoke else 2 * turns(smoke)})


def section(found: dict[str, Any]) -> str:
    """The section of the page."""
    return "\n\n".join(
        [
            "## Measuring weight changes",
            f"A step of fashion-cnn at batch {found['batch']}, in epochs of ten steps, measured in turns. Wanted: at "
            "most 1.15 times the time of `model.fit` when the compiled step measures the change of each weight.",
            table(["", "ms", "ratio to model.fit"], rows_beside(found["seconds"], "model.fit", digits=3)),
        ]
    )

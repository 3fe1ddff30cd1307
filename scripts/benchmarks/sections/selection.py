"""Finding the k-th largest number: prunekit's selection beside NumPy's and TensorFlow's."""

from collections.abc import Callable
from typing import Any

from benchmarks.machine import in_turns, turns
from benchmarks.tables import rows_beside, table
from benchmarks.workers import Workers


def measure(size: int, repeats: int) -> dict[str, Any]:
    """Measures seconds of several functions that find the largest fifth of `size` float32 numbers, called in turns."""
    import numpy as np
    import tensorflow as tf

    from prunekit.core.runtime.compilation import compiled
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
    return {"size": size, "seconds": in_turns(ways, repeats)}


def collect(workers: Workers, smoke: bool) -> dict[str, Any]:
    """Figures of a worker process."""
    return workers.call(measure, {"size": 20_000 if smoke else 1 << 22, "repeats": turns(smoke)})


def section(found: dict[str, Any]) -> str:
    """The section of the page."""
    return "\n\n".join(
        [
            "## Finding the largest fifth of float32 numbers",
            f"{found['size']:,} numbers; the functions are called in turns. `keep_largest` returns a mask with an "
            "exact count and ties broken by position; the other functions return sorted or partitioned numbers. "
            "Wanted: at most 2 times the time of `np.partition`.",
            table(["", "ms", "ratio to np.partition"], rows_beside(found["seconds"], "np.partition", digits=2)),
        ]
    )

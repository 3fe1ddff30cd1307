"""What enforcement costs in a training step, and what it would cost without masking the weights after the update."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.contestants import Library
from benchmarks.figures import spread, turn_ratios
from benchmarks.machine import numbered, timed, turns
from benchmarks.models import FINAL_SPARSITY
from benchmarks.tables import table
from benchmarks.workers import Workers

PLAIN, CONTROL = "not pruned", "not pruned, second model"
WHOLE = "pruned: gradients and weights are masked"
GRADIENTS = "pruned, gradients only"
CHECKED = "pruned, gradients only, leaks counted in each step"


# The worker -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def masked_after_updates(way: str) -> Iterator[None]:
    """Within it, training steps that are traced mask weights after updates as `way` says."""
    import tensorflow as tf
    from keras import ops

    from prunekit.techniques.pruning.masks.mask_store import MaskStore, leaking

    after_update = MaskStore.after_update

    def gradients_only(store: Any, optimizer: Any, variables: Any) -> None:
        after_update(store, optimizer, [])

    def checked(store: Any, optimizer: Any, variables: Any) -> None:
        leaks = [ops.any(leaking(store.mask(i), target.variable)) for i, target in enumerate(store.targets)]
        with tf.control_dependencies([tf.debugging.Assert(ops.logical_not(ops.any(ops.stack(leaks))), leaks)]):
            after_update(store, optimizer, [])

    MaskStore.after_update = {GRADIENTS: gradients_only, CHECKED: checked}.get(way, after_update)  # type: ignore
    try:
        yield
    finally:
        MaskStore.after_update = after_update  # type: ignore


def measure(model: str, smoke: bool, repeats: int) -> dict[str, Any]:
    """Seconds and CPU seconds per step of epochs without mask updates, of each way in turns."""
    import keras

    import prunekit as pk

    steps = 3 if smoke else 20
    library = Library(model, smoke)
    data, pruners = library.data(steps), []

    def epochs(way: str) -> Callable[[], Any]:
        name, arguments = library.optimizer
        network = library.build(keras, **library.options)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        network.compile(getattr(keras.optimizers, name)(**arguments), loss, jit_compile=False)
        if way not in (PLAIN, CONTROL):
            # Masks are updated once, before the first step.
            pruners.append(pk.Pruner(network, pk.schedules.ConstantSparsity(FINAL_SPARSITY, frequency=1_000_000)))
        with masked_after_updates(way):
            network.fit(data, epochs=1, verbose=0)
        return lambda: network.fit(data, epochs=1, verbose=0)

    ways = {way: epochs(way) for way in (PLAIN, CONTROL, WHOLE, GRADIENTS, CHECKED)}
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for turn in numbered(repeats):
        for way, epoch in ways.items():
            wall, cpu = timed(epoch)
            if turn:
                found[way].append((wall / steps, cpu / steps))
    return {"seconds": found}


# The page -------------------------------------------------------------------------------------------------------------


def collect(workers: Workers, smoke: bool) -> dict[str, Any]:
    """Figures of a worker process."""
    return workers.call(measure, {"model": "perceptron", "smoke": smoke, "repeats": 1 if smoke else 2 * turns(smoke)})


def section(found: dict[str, Any]) -> str:
    """The section of the page."""
    rows = []
    for way, figures in found["seconds"].items():
        wall, cpu = ([row[column] for row in figures] for column in (0, 1))
        base_wall, base_cpu = ([row[column] for row in found["seconds"][PLAIN]] for column in (0, 1))
        ratios = (spread(turn_ratios(*pair), digits=3) for pair in ((wall, base_wall), (cpu, base_cpu)))
        rows.append([way, spread(wall, 1e3), spread(cpu, 1e3), *ratios])
    return "\n\n".join(
        [
            "## Parts of enforcement",
            "Mean time of a training step of the perceptron in `model.fit`, Adam, in epochs of 20 steps without mask "
            f"updates; pruned models have sparsity {FINAL_SPARSITY:g}. The models train in turns. The last two rows "
            "are variants for this comparison, which prunekit does not offer.",
            table(["", "ms", "CPU ms", "ratio of times", "ratio of CPU seconds"], rows),
            "Adam does not change a weight whose gradient and slots are zero, so the variant without masking of the "
            "weights keeps pruned weights at zero too, unless other code writes the weights (a callback, a constraint, "
            "weights that are loaded). With masking of the weights, such a write is zero again after the next update. "
            "Without it, the non-zero weights would stay in the model, and in files that are saved, until the next "
            "check, which is up to 100 steps later. A check inside each step closes this gap, but reads all weights "
            "and masks, and saves little. prunekit therefore masks the weights after every update.",
        ]
    )

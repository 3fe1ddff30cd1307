"""A sensitivity scan beside the evaluations of the whole model that would give the same rows."""

from typing import Any

from benchmarks.figures import spread, turn_ratios
from benchmarks.machine import in_turns
from benchmarks.tables import table
from benchmarks.workers import Workers

SPARSITIES = (0.5, 0.8, 0.9)


def measure(smoke: bool, repeats: int) -> dict[str, Any]:
    """Seconds of scans and of whole evaluations, for fashion-cnn and MobileNetV2."""
    import keras
    import numpy as np

    from prunekit.recipe.state.models import fashion_cnn

    size = 32 if smoke else 96
    networks = {
        "fashion-cnn": (fashion_cnn(), 64 if smoke else 1024),
        f"MobileNetV2, {size} x {size}": (
            keras.applications.MobileNetV2(input_shape=(size, size, 3), weights=None, classes=10),
            8 if smoke else 256,
        ),
    }
    found = {}
    for name, (model, examples) in networks.items():
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
        inputs = np.random.default_rng(0).normal(size=(examples, *model.input_shape[1:])).astype("float32")
        found[name] = _beside_evaluations(model, (inputs, np.arange(examples) % 10), repeats)
    return found


def _beside_evaluations(model: Any, data: tuple[Any, Any], repeats: int) -> dict[str, Any]:
    import prunekit as pk

    report = pk.sensitivity(model, data, sparsity=SPARSITIES)
    count = len(report.rows)

    def evaluations() -> None:
        # A tenth of them, and at least three: their time is proportional.
        for _ in range(max(count // 10, 3)):
            model.evaluate(*data, batch_size=128, verbose=0)

    seconds = in_turns(
        {"evaluations": evaluations, "scan": lambda: pk.sensitivity(model, data, sparsity=SPARSITIES)}, repeats
    )
    factor = count / max(count // 10, 3)
    seconds["evaluations"] = [value * factor for value in seconds["evaluations"]]
    return {"rows": count, "layers": len(model.layers), "seconds": seconds}


def collect(workers: Workers, smoke: bool) -> dict[str, Any]:
    """Figures of a worker process."""
    return workers.call(measure, {"smoke": smoke, "repeats": 1 if smoke else 3})


def section(found: dict[str, Any]) -> str:
    """The section of the page."""
    rows = []
    for name, one in found.items():
        scan, whole = one["seconds"]["scan"], one["seconds"]["evaluations"]
        ratio = spread(turn_ratios(scan, whole))
        rows.append([name, str(one["layers"]), str(one["rows"]), spread(whole), spread(scan), ratio])
    heads = ["model", "layers", "rows", "evaluations, s", "scan, s", "scan / evaluations"]
    return "\n\n".join(
        [
            "## Sensitivity scans",
            f"`pk.sensitivity` at sparsities {', '.join(map(str, SPARSITIES))}, tracing included, beside an `evaluate` "
            "of the whole model for each row (a tenth of them were run). What a model computes before a weight is "
            "computed once, so that the scan of a chain of equal layers takes half.",
            table(heads, rows),
        ]
    )

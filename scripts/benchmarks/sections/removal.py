"""Removal of channels: how long groups and smaller models take, and how fast these are in LiteRT."""

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.figures import spread, turn_ratios
from benchmarks.machine import in_turns
from benchmarks.models import resnet20
from benchmarks.tables import table
from benchmarks.workers import Workers


def deep(keras: Any, layers: int) -> Any:
    """A chain of dense layers with residuals around pairs, of so many layers in all."""
    inputs = keras.Input((64,))
    x = keras.layers.Dense(64, name="stem")(inputs)
    # Each block is two dense layers and an addition.
    for block in range((layers - 3) // 3):
        y = keras.layers.Dense(96, activation="relu", name=f"up_{block}")(x)
        x = keras.layers.Add(name=f"sum_{block}")([x, keras.layers.Dense(64, name=f"down_{block}")(y)])
    return keras.Model(inputs, keras.layers.Dense(10, name="logits")(x))


def measure(smoke: bool, repeats: int) -> dict[str, Any]:
    """Seconds of groups and of smaller models, and of their calls in LiteRT (one thread)."""
    import keras

    import prunekit as pk

    networks = {"500 layers": lambda: deep(keras, 20 if smoke else 500)}
    if not smoke:
        networks["ResNet50, 224 x 224"] = lambda: keras.applications.ResNet50(weights=None)
        networks["NASNetMobile, 224 x 224"] = lambda: keras.applications.NASNetMobile(weights=None)
    found: dict[str, Any] = {}
    for name, build in networks.items():
        model = build()
        ways = {
            "groups": lambda model=model: pk.channel_groups(model),
            "shrink": lambda model=model: pk.shrink(model, channels=0.5),
        }
        found[name] = {"layers": len(model.layers), "seconds": in_turns(ways, repeats)}
    return {"networks": found, "latency": _latencies(keras, pk, smoke, repeats)}


def _latencies(keras: Any, pk: Any, smoke: bool, repeats: int) -> dict[str, Any]:
    models = {"ResNet-20": resnet20(keras, 4 if smoke else 16)}
    if not smoke:
        mobile = keras.applications.MobileNetV2(weights=None, input_shape=(96, 96, 3), classes=10)
        models["MobileNetV2, 96 x 96"] = mobile
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in models.items():
            smaller, report = pk.shrink(model, macs=0.5)
            runs = {title: _run_of(one, Path(folder)) for title, one in (("whole", model), ("half", smaller))}
            found[name] = {"macs": list(report.macs), "seconds": in_turns(runs, 3 if smoke else 20 * repeats)}
    return found


def _run_of(model: Any, folder: Path) -> Any:
    """Returns a function that runs a model ten times in LiteRT, on one thread."""
    import numpy as np
    from ai_edge_litert.interpreter import Interpreter

    path = folder / f"{id(model)}.tflite"
    model.export(path, format="litert", verbose=False)
    interpreter = Interpreter(str(path), num_threads=1)
    interpreter.allocate_tensors()
    entry = interpreter.get_input_details()[0]
    interpreter.set_tensor(entry["index"], np.random.default_rng(0).normal(size=entry["shape"]).astype("float32"))

    def run() -> None:
        for _ in range(10):
            interpreter.invoke()

    return run


def collect(workers: Workers, smoke: bool) -> dict[str, Any]:
    """Figures of a worker process."""
    return workers.call(measure, {"smoke": smoke, "repeats": 1 if smoke else 5})


def section(found: dict[str, Any]) -> str:
    """The section of the page."""
    rows = [
        [name, str(one["layers"]), spread(one["seconds"]["groups"]), spread(one["seconds"]["shrink"])]
        for name, one in found["networks"].items()
    ]
    latencies = []
    for name, one in found["latency"].items():
        whole, half = ([value / 10 * 1000 for value in one["seconds"][title]] for title in ("whole", "half"))
        latencies.append(
            [
                name,
                f"{one['macs'][1] / one['macs'][0]:.3f}",
                spread(whole),
                spread(half),
                spread(turn_ratios(half, whole)),
            ]
        )
    return "\n\n".join(
        [
            "## Removal of channels",
            "`pk.channel_groups`, and `pk.shrink` to half of the channels without data: groups, ranking, new layers, "
            "and the comparison of both models on two inputs. Wanted: groups of 500 layers in 2 s, ResNet50 in 10 s.",
            table(["model", "layers", "groups, s", "shrink, s"], rows),
            "LiteRT (float32, one thread, batch 1) of models and of `pk.shrink(model, macs=0.5)`, uniform; untrained "
            "weights. Wanted: at most 0.6 of the time.",
            table(["model", "MACs left", "whole, ms", "half, ms", "half / whole"], latencies),
        ]
    )

"""Removal of channels: how long groups and smaller models take, and how fast these are in LiteRT."""

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figures import spread
from benchmarks.machine import in_turns
from benchmarks.models import resnet20
from benchmarks.tables import table
from benchmarks.workers import Workers

# Time of a model with half of the multiply-accumulates, as a share of the whole one.
WANTED = 0.6


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
    return {"networks": found, "latency": _latencies(keras, pk, smoke)}


def _latencies(keras: Any, pk: Any, smoke: bool) -> dict[str, Any]:
    import numpy as np

    from prunekit.delivery.litert.latency import input_arrays, measured_latencies, plain_file

    models = {"ResNet-20": resnet20(keras, 4 if smoke else 16)}
    if not smoke:
        mobile = keras.applications.MobileNetV2(weights=None, input_shape=(96, 96, 3), classes=10)
        models["MobileNetV2, 96 x 96"] = mobile
    found = {}
    for name, model in models.items():
        samples = np.random.default_rng(0).normal(size=(8, *model.inputs[0].shape[1:])).astype("float32")
        macs = pk.cost(model).macs
        # As many of the blocks as leave more than half of the arithmetic.
        fewer = pk.remove_blocks(model, 1 if smoke else 3, samples)[0]
        smaller = {
            "channels": pk.shrink(model, macs=0.5, tolerance=None)[0],
            "channels, multiples of 16": pk.shrink(model, macs=0.5, multiple=16, tolerance=None)[0],
            "three blocks": fewer,
            "three blocks and channels, multiples of 16": pk.shrink(
                fewer, macs=min(1.0, 0.5 * macs / pk.cost(fewer).macs), multiple=16, tolerance=None
            )[0],
        }
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / f"{place}.tflite" for place in range(len(smaller) + 1)]
            for file, one in zip(files, (model, *smaller.values()), strict=True):
                file.write_bytes(plain_file(one, samples))
            inputs = [input_arrays(model, samples)] * len(files)
            turns = measured_latencies(files, inputs, 1.0 if smoke else 30.0).turns
        found[name] = {
            "whole": turns[:, 0].tolist(),
            "smaller": {
                title: {"macs": pk.cost(one).macs / macs, "ratios": (turns[:, place] / turns[:, 0]).tolist()}
                for place, (title, one) in enumerate(smaller.items(), start=1)
            },
        }
    return found


def collect(workers: Workers, smoke: bool) -> dict[str, Any]:
    """Figures of a worker process."""
    return workers.call(measure, {"smoke": smoke, "repeats": 1 if smoke else 5})


def section(found: dict[str, Any]) -> str:
    """The section of the page."""
    rows = [
        [name, str(one["layers"]), spread(one["seconds"]["groups"]), spread(one["seconds"]["shrink"])]
        for name, one in found["networks"].items()
    ]
    latencies = [
        [
            f"{name}: {title}",
            f"{way['macs']:.3f}",
            spread([1000 * one for one in model["whole"]]),
            spread(way["ratios"], digits=2),
            "yes" if round(median(way["ratios"]), 2) <= WANTED else "no",
        ]
        for name, model in found["latency"].items()
        for title, way in model["smaller"].items()
    ]
    return "\n\n".join(
        [
            "## Removal of channels",
            "`pk.channel_groups`, and `pk.shrink` to half of the channels without data: groups, ranking, new layers, "
            "and the comparison of both models on two inputs. Wanted: groups of 500 layers in 2 s, ResNet50 in 10 s.",
            table(["model", "layers", "groups, s", "shrink, s"], rows),
            "LiteRT (float32, one thread, batch 1, processor time) of models, and of smaller ones with half of the "
            "multiply-accumulates (`macs=0.5`, uniform; with `multiple=16` the nearest above); untrained weights. "
            f"Kernels compute 16 channels at a time on this processor. Wanted: at most {WANTED} of the time.",
            table(["model: removed", "MACs left", "whole, ms", "smaller / whole", "as wanted"], latencies),
        ]
    )

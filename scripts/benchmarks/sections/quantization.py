"""Quantization: time of calibration, of training on integers and of its start, and LiteRT files of 8 bits."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figures import number, spread, turn_ratios, verdict
from benchmarks.first_steps import fits_of_one_step
from benchmarks.machine import numbered, peak, timed
from benchmarks.models import images_for, network
from benchmarks.tables import table
from benchmarks.trainings import CPU, WALL, Plan, ratios, steps, trainings
from benchmarks.workers import Workers

IMAGES, CLASSES, BATCH = 256, 10, 8
TITLES = {
    "resnet50": "ResNet50, 224x224",
    "resnet20": "ResNet-20, 32x32",
    "mobilenetv2": "MobileNetV2 0.35, 96x96",
}
# (network, options of `pk.quantize`, counted turns) of each calibration.
CALIBRATIONS: list[tuple[str, dict[str, Any], int]] = [
    ("resnet50", {}, 5),
    ("resnet20", {}, 5),
    ("resnet20", {"bits": 4, "method": "gptq"}, 3),
]
# Most time of the calibration of the first of them, in multiples of the fastest `model.predict` on the same images.
WANTED_CALIBRATION = 2.0
TRAINED = ("resnet20", "mobilenetv2")
PLAIN, CONTROL, INTEGERS, FROZEN = "plain", "control", "integers", "frozen"
WAYS = {
    PLAIN: "not quantized",
    CONTROL: "not quantized, second model",
    INTEGERS: "on integers",
    FROZEN: "on integers, batch normalizations frozen",
}
# `freeze_step` of the callback: never, and from the first step.
PLAN: Plan = {"quantization": [(PLAIN, None, 60), (CONTROL, None, 60), (INTEGERS, -1, 60), (FROZEN, 0, 60)]}
STARTS = 2
FLOAT = "float32"
FILE_TITLES = (FLOAT, "int8, the converter's own", "int8, `pk.quantize`")
SECONDS = 20.0


# The worker -----------------------------------------------------------------------------------------------------------


def take_statistics(model: Any, images: Any) -> None:
    """Sets the moving statistics of batch normalizations to those of the images, as after a training.

    With their first values, the outputs of MobileNetV2 are near 1e-10, and its softmax is left in floating point.
    """
    import keras

    norms = [one for one in model._flatten_layers() if isinstance(one, keras.layers.BatchNormalization)]
    former = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    model(images, training=True)
    for norm, momentum in zip(norms, former, strict=True):
        norm.momentum = momentum


def measure_calibration(name: str, options: dict[str, Any], smoke: bool, repeats: int) -> dict[str, Any]:
    """Seconds and CPU seconds of `predict` and of `pk.quantize` on the same images, and the peak memory of the first.

    Both run in turns, on the same weights.
    """
    import prunekit as pk

    model = network(name, smoke)
    images, weights = images_for(model, IMAGES), model.get_weights()
    ways = {
        "predict": lambda: model.predict(images, batch_size=32, verbose=0),
        "quantize": lambda: pk.quantize(model, images, **options),
    }
    found: dict[str, dict[str, Any]] = {way: {"wall": [], "cpu": []} for way in ways}
    for turn in numbered(repeats):
        for way, run in ways.items():
            model.set_weights(weights)
            peak(reset=True)
            wall, cpu = timed(run)
            # TensorFlow keeps memory that it freed, so later peaks contain earlier ones.
            found[way].setdefault("peak", peak())
            if turn:
                found[way]["wall"].append(wall)
                found[way]["cpu"].append(cpu)
    return found


def measure_start(name: str, smoke: bool, quantized: bool) -> dict[str, Any]:
    """Number of layers, and seconds to the end of the first step in two `fit` calls, with new callbacks or without."""
    import prunekit as pk

    model = network(name, smoke)
    images = images_for(model, 8 * BATCH)
    callback = pk.QuantizationCallback
    rows = fits_of_one_step(model, lambda: [callback(images, freeze_step=-1)] if quantized else [], BATCH, CLASSES)
    return {"layers": len(model.layers), "seconds": [row["step"] for row in rows]}


def measure_files(name: str, smoke: bool) -> dict[str, Any]:
    """Bytes, gzip bytes and seconds by turn of the float32 file, of the converter's int8 file and of prunekit's."""
    from studies.converter import converter_integers

    import prunekit as pk
    from prunekit.delivery.litert.gzip_size import gzip_size
    from prunekit.delivery.litert.latency import input_arrays, measured_latencies, plain_file

    model = network(name, smoke)
    images = images_for(model, 64)
    take_statistics(model, images)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{place}.tflite" for place in range(len(FILE_TITLES))]
        files[0].write_bytes(plain_file(model, images))
        files[1].write_bytes(converter_integers(model, images))
        pk.quantize(model, images).export(files[2])
        turns = measured_latencies(files, [input_arrays(model, images)] * len(files), 0.5 if smoke else SECONDS).turns
        contents = [file.read_bytes() for file in files]
    return {
        title: {"bytes": len(content), "gzip": gzip_size([content]), "seconds": turns[:, place].tolist()}
        for place, (title, content) in enumerate(zip(FILE_TITLES, contents, strict=True))
    }


# The page -------------------------------------------------------------------------------------------------------------


def collect(workers: Workers, smoke: bool) -> dict[str, Any]:
    """Figures of calibration, training steps, starts and files; in a smoke test all networks are one tiny model."""
    plan: Plan = {"quantization": [(name, value, 4) for name, value, _ in PLAN["quantization"]]} if smoke else PLAN

    def of_networks(measure: Callable[[str], Any]) -> dict[str, Any]:
        return dict.fromkeys(TRAINED, measure(TRAINED[0])) if smoke else {name: measure(name) for name in TRAINED}

    def start(name: str) -> list[dict[str, Any]]:
        tasks = [{"name": name, "smoke": smoke, "quantized": quantized} for quantized in (False, True)]
        return [workers.call(measure_start, task) for task in tasks]

    calibrations = [
        workers.call(measure_calibration, {"name": name, "options": options, "smoke": smoke, "repeats": repeats})
        for name, options, repeats in ([(*one, 1) for *one, _ in CALIBRATIONS] if smoke else CALIBRATIONS)
    ]
    starts = [of_networks(start) for _ in range(1 if smoke else STARTS)]
    return {
        "calibrations": calibrations,
        "steps": of_networks(
            lambda name: trainings(workers, "perceptron" if smoke else name, plan, smoke)["quantization"]
        ),
        "starts": {name: [turn[name] for turn in starts] for name in TRAINED},
        "files": of_networks(lambda name: workers.call(measure_files, {"name": name, "smoke": smoke})),
    }


def section(found: dict[str, Any]) -> str:
    """The section of the page."""
    # Of the fastest `predict`: on some machines most of its turns use one core, and take twice as long.
    first = found["calibrations"][0]
    ratio = median(first["quantize"]["wall"]) / min(first["predict"]["wall"])
    wanted = [
        f"{TITLES[CALIBRATIONS[0][0]]}: calibration, ratio to the fastest `predict`",
        f"at most {WANTED_CALIBRATION:g}",
        number(ratio),
        verdict(ratio, WANTED_CALIBRATION),
    ]
    return "\n\n".join(
        [
            "## Quantization",
            table(["", "wanted", "measured", "verdict"], [wanted]),
            f"`pk.quantize` on {IMAGES} images, tracing included, beside `model.predict` (batch 32) on the same "
            "images, traced before; untrained weights, in turns. Some turns of `predict` use a single core and take "
            "twice as long, so the verdict compares with the fastest one. Peak resident memory of the process in the "
            "first call of each, TensorFlow and the images included.",
            table(
                [
                    "",
                    "predict, s",
                    "quantize, s",
                    "ratio of times",
                    "ratio of CPU seconds",
                    "peak, GB: predict, quantize",
                ],
                _calibration_rows(found["calibrations"]),
            ),
            "Steps of `fit` with `pk.QuantizationCallback` (8-bit weights and activations) and without, measured as in "
            "the section on ResNet-20; SGD with momentum, batch 32 (ResNet-20) and 16 (MobileNetV2).",
            table(["", "step, ms", "ratio of times", "ratio of CPU seconds"], _step_rows(found["steps"])),
            f"Seconds from the call of `fit` to the end of its first step, batch {BATCH}, Adam, compiled with Keras's "
            f"defaults, in a process that has already trained another model; the callback gets {8 * BATCH} images. The "
            "second `fit` has a new callback on the same model. Keras traces the first step of an optimizer twice, "
            "since the first trace creates the slots; with a callback of prunekit they exist before.",
            table(
                ["", "first, plain", "first, on integers", "ratio", "second, plain", "second, on integers"],
                _start_rows(found["starts"]),
            ),
            "LiteRT files of untrained networks, whose batch normalizations have the statistics of 64 images: bytes, "
            "bytes after gzip, and processor time (one thread, batch 1) in turns. Both quantizations read these "
            "images. Trained networks, with their accuracy: [quantization](measured/quantization.md).",
            table(["", "bytes", "gzip", "ms", "ratio to float32"], _file_rows(found["files"])),
        ]
    )


def _ratios(row: dict[str, dict[str, Any]], clock: str) -> list[float]:
    return turn_ratios(row["quantize"][clock], row["predict"][clock])


def _calibration_rows(measured: list[dict[str, dict[str, Any]]]) -> list[list[str]]:
    rows = []
    for (name, options, _), one in zip(CALIBRATIONS, measured, strict=True):
        bits = f"{options.get('bits', 8)}-bit weights" + (", GPTQ" if options.get("method") == "gptq" else "")
        seconds = [spread(one[way]["wall"], digits=2) for way in ("predict", "quantize")]
        times = [spread(_ratios(one, clock), digits=2) for clock in ("wall", "cpu")]
        memory = ", ".join(f"{one[way]['peak'] / 1e9:.2f}" for way in ("predict", "quantize"))
        rows.append([f"{TITLES[name]}: {bits}", *seconds, *times, memory])
    return rows


def _step_rows(measured: dict[str, dict[str, Any]]) -> list[list[str]]:
    return [
        [
            f"{TITLES[name]}: {WAYS[way]}",
            spread(steps(run, update=False), 1e3),
            *(spread(ratios(run, runs[PLAIN], clock), digits=2) for clock in (WALL, CPU)),
        ]
        for name, runs in measured.items()
        for way, run in runs.items()
    ]


def _start_rows(measured: dict[str, list[list[dict[str, Any]]]]) -> list[list[str]]:
    rows = []
    for name, turns in measured.items():
        # Of `fit` number 0 and 1, without the callback and with it.
        plain, quantized = ([[turn[on]["seconds"][place] for turn in turns] for place in (0, 1)] for on in (0, 1))
        first = [spread(plain[0]), spread(quantized[0]), spread(turn_ratios(quantized[0], plain[0]), digits=2)]
        label = f"{TITLES[name]}, {turns[0][0]['layers']} layers"
        rows.append([label, *first, spread(plain[1], digits=2), spread(quantized[1])])
    return rows


def _file_rows(measured: dict[str, dict[str, dict[str, Any]]]) -> list[list[str]]:
    return [
        [
            f"{TITLES[name]}: {title}",
            f"{file['bytes']:,}",
            f"{file['gzip']:,}",
            spread(file["seconds"], 1e3, digits=2),
            spread(turn_ratios(file["seconds"], files[FLOAT]["seconds"]), digits=2),
        ]
        for name, files in measured.items()
        for title, file in files.items()
    ]

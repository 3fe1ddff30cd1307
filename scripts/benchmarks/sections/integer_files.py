"""Integer files beside those of LiteRT's converter and of ai-edge-quantizer: bytes, time, operations and error."""

import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figures import spread, turn_ratios
from benchmarks.integer_networks import NETWORKS
from benchmarks.tables import table
from benchmarks.workers import Worker, Workers

OURS, FULL, CONVERTER, QUANTIZER = "prunekit", "prunekit, full integer", "converter", "ai-edge-quantizer"
EXAMPLES, SECONDS = 64, 3.0
# Seeds of the weights, statistics and inputs.
SEEDS = (0, 1, 2)
# Networks of a smoke test.
SMOKE = ("plain",)
# Networks of which `full_integer` makes another file.
OTHER_IN_FULL = ("attention encoder", "LSTM and GRU")


# The worker -----------------------------------------------------------------------------------------------------------


def drawn(name: str, seed: int) -> tuple[Any, Any, Any]:
    """A network with drawn weights, biases and statistics, inputs to calibrate on and inputs to compare on."""
    import keras
    import numpy as np

    # Files hold the names of layers, which Keras counts.
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    model, generator = NETWORKS[name](keras), np.random.default_rng(seed)
    for weight in model.weights:
        if weight.path.endswith(("bias", "beta", "moving_mean")):
            weight.assign(generator.normal(size=weight.shape, scale=0.1))
    shape = (2 * EXAMPLES, *model.input_shape[1:])
    inputs = generator.normal(size=shape).astype("float32")
    norms = [one for one in model._flatten_layers() if isinstance(one, keras.layers.BatchNormalization)]
    for norm in norms:
        norm.momentum = 0.0
    model(inputs[:EXAMPLES], training=True)
    return model, inputs[:EXAMPLES], inputs[EXAMPLES:]


def measure(name: str, smoke: bool) -> dict[str, Any]:
    """Figures of each tool's file of one network; a text in the place of those of a file that was not made."""
    import numpy as np

    from prunekit.delivery.litert.latency import measured_latencies

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        ways = [CONVERTER, *([QUANTIZER] if importlib.util.find_spec("ai_edge_quantizer") else []), OURS]
        ways += [FULL] if name in OTHER_IN_FULL else []
        paths = {way: Path(folder) / f"{way}.tflite" for way in ways}
        for way in ways:
            # Some converters end the process.
            with Worker() as worker:
                try:
                    seeds = SEEDS[:1] if smoke else SEEDS
                    found[way] = worker.call(compared, name=name, way=way, path=str(paths[way]), seeds=seeds)
                except SystemExit as error:
                    found[way] = str(error).strip().splitlines()[-1][:200]
        made = [way for way in found if isinstance(found[way], dict)]
        shape = _lengths(paths[made[0]]) if made else ()
        example = np.random.default_rng(0).normal(size=shape).astype("float32")
        arrays = [dict([_given(paths[way], example)]) for way in made]
        turns = measured_latencies([paths[way] for way in made], arrays, 0.5 if smoke else SECONDS).turns
    for place, way in enumerate(made):
        found[way]["seconds"] = turns[:, place].tolist()
    return found


def compared(name: str, way: str, path: str, seeds: Sequence[int]) -> dict[str, Any]:
    """Writes one tool's files of a network; returns bytes and operations of the first one, and the error of each.

    Args:
        name: The network.
        way: The tool.
        path: The file of the first seed; those of the others are not kept.
        seeds: Seeds of the networks and inputs.
    """
    files = [Path(path), *(Path(path).with_suffix(f".{seed}.tflite") for seed in seeds[1:])]
    errors = [_error(name, way, file, seed) for file, seed in zip(files, seeds, strict=True)]
    return {"bytes": files[0].stat().st_size, "errors": errors, **_operations(files[0])}


def _error(name: str, way: str, file: Path, seed: int) -> float:
    """Writes one tool's file of a network; returns its error."""
    import numpy as np

    import prunekit as pk

    model, inputs, others = drawn(name, seed)
    expected = model.predict(others, verbose=0)
    writers: dict[str, Callable[[], Any]] = {
        CONVERTER: lambda: _converted(model, inputs, file),
        QUANTIZER: lambda: _edge_quantized(model, inputs, file),
        OURS: lambda: pk.quantize(model, inputs).export(file),
        FULL: lambda: pk.quantize(model, inputs, full_integer=True).export(file),
    }
    writers[way]()
    return float(np.sqrt(np.mean((_answers(file, others) - expected) ** 2)) / np.ptp(expected))


def _traced(model: Any, inputs: Any, folder: str) -> tuple[Any, str]:
    """A converter of the model with batch size 1, and the name of its input."""
    import tensorflow as tf

    from prunekit.delivery.litert.litert import input_specs, trace

    specs = [replace(one, shape=(1, *one.shape[1:])) for one in input_specs(model, inputs)]
    saved = trace(model, inputs, specs, Path(folder)).saved
    return tf.lite.TFLiteConverter.from_saved_model(str(saved)), specs[0].name


def _converted(model: Any, inputs: Any, path: Path) -> None:
    import tensorflow as tf

    with tempfile.TemporaryDirectory() as folder:
        converter, name = _traced(model, inputs, folder)
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        converter.representative_dataset = lambda: ({name: one[None]} for one in inputs)
        path.write_bytes(converter.convert())


def _edge_quantized(model: Any, inputs: Any, path: Path) -> None:
    from ai_edge_quantizer import quantizer, recipe

    with tempfile.TemporaryDirectory() as folder:
        converter, name = _traced(model, inputs, folder)
        floats = Path(folder) / "floats.tflite"
        floats.write_bytes(converter.convert())
        made = quantizer.Quantizer(str(floats), recipe.static_wi8_ai8())
        ranges = made.calibrate({"serving_default": [{name: one[None]} for one in inputs]})
        path.write_bytes(made.quantize(ranges).quantized_model)


def _lengths(path: Path) -> tuple[int, ...]:
    """The shape of a file's input, with one example."""
    from ai_edge_litert.interpreter import Interpreter

    (place,) = Interpreter(str(path)).get_signature_runner().get_input_details().values()
    return (1, *(int(length) for length in place["shape"][1:]))


def _given(path: Path, inputs: Any) -> tuple[str, Any]:
    """The name of a file's input, and inputs as the file reads them: as floats, or as codes."""
    import numpy as np
    from ai_edge_litert.interpreter import Interpreter

    ((name, place),) = Interpreter(str(path)).get_signature_runner().get_input_details().items()
    scale, zero = place["quantization"]
    if place["dtype"] == np.float32:
        return name, inputs
    ends = np.iinfo(place["dtype"])
    return name, np.clip(np.round(inputs / scale + zero), ends.min, ends.max).astype(place["dtype"])


def _answers(path: Path, inputs: Any) -> Any:
    """Outputs of a file for single examples, as floats."""
    import numpy as np
    from ai_edge_litert.interpreter import Interpreter

    name, given = _given(path, inputs)
    runner = Interpreter(str(path), num_threads=1).get_signature_runner()
    found = np.concatenate([next(iter(runner(**{name: one[None]}).values())) for one in given])
    (place,) = runner.get_output_details().values()
    scale, zero = place["quantization"]
    return found if found.dtype == np.float32 else (found.astype("float32") - zero) * scale


def _operations(path: Path) -> dict[str, int]:
    """Numbers of operations, and of those that compute floats."""
    from prunekit.delivery.litert.litert_graph import LiteRTGraph

    graph = LiteRTGraph(path.read_bytes())
    computing = [one for one in graph.operators if graph.kind(one) not in ("QUANTIZE", "DEQUANTIZE")]
    floats = [one for one in computing if any(graph.is_float(int(index)) for index in one.outputs)]
    return {"operations": len(graph.operators), "floats": len(floats)}


# The page -------------------------------------------------------------------------------------------------------------


def collect(workers: Workers, smoke: bool) -> dict[str, Any]:
    """Figures of all networks, by name."""
    names = SMOKE if smoke else NETWORKS
    return {name: workers.call(measure, {"name": name, "smoke": smoke}) for name in names}


def section(found: dict[str, Any]) -> str:
    """The section of the page."""
    return "\n\n".join(
        [
            "## Integer files",
            "Files of 8 bits of small networks with drawn weights, from the same 64 inputs: those of "
            "`pk.quantize` (with `full_integer=True`, too, where that is another file), of LiteRT's "
            "converter (full-integer quantization after training, batch size 1, where "
            "prunekit's files take any) and of ai-edge-quantizer (`static_wi8_ai8`, from the converter's float32 "
            "file of batch size 1; its files have inputs and outputs of integers, and ranges are moving averages). "
            "Time of one example in one thread, the files in turns; the ratio is that to "
            "the converter's file in the same turn. Operations: all, and those left in floating point. Error: "
            "root of the mean squared difference from the outputs in floating point on 64 other inputs, as a "
            f"fraction of their range: median and range over {len(SEEDS)} draws of weights and inputs. No file: the "
            "tool ends with an error, or LiteRT refuses its file.",
            *([] if _has_quantizer(found) else ["ai-edge-quantizer was not installed, so that its rows are missing."]),
            table(
                ["", "bytes", "µs", "ratio of times", "operations", "in floating point", "error"],
                [row for name, files in found.items() for row in _rows(name, files)],
            ),
        ]
    )


def _has_quantizer(found: dict[str, Any]) -> bool:
    return any(QUANTIZER in files for files in found.values())


def _rows(name: str, files: dict[str, Any]) -> list[list[str]]:
    rows = []
    for way in (OURS, FULL, CONVERTER, QUANTIZER):
        file, base = files.get(way), files.get(CONVERTER)
        if file is None:
            continue
        if isinstance(file, str):
            rows.append([f"{name}: {way}", "no file", *["-"] * 5])
            continue
        ratio = spread(turn_ratios(file["seconds"], base["seconds"]), digits=2) if isinstance(base, dict) else "-"
        low, middle, high = min(file["errors"]), median(file["errors"]), max(file["errors"])
        error = f"{middle:.4f} ({low:.4f} to {high:.4f})"
        figures = [f"{file['operations']}", f"{file['floats']}", error]
        rows.append([f"{name}: {way}", f"{file['bytes']:,}", f"{1e6 * median(file['seconds']):.1f}", ratio, *figures])
    return rows

"""SparseGPT on one large layer beside the products that it needs, Hessians, and whole models beside `predict`."""

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.figures import number, spread, turn_ratios
from benchmarks.machine import in_turns, peak, turns
from benchmarks.models import images_for, network, text_encoder
from benchmarks.tables import table
from benchmarks.workers import Workers


def measure(smoke: bool, repeats: int) -> dict[str, Any]:
    """Seconds of a reconstruction of a square layer, and of Hessians of fashion-cnn, with their lower bounds."""
    import numpy as np

    from prunekit.sparsity.reconstruction import damped_hessian, inverse_factor, reconstruct, refit

    size = 64 if smoke else 2048
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(2 * size, size))
    hessian, matrix = rows.T @ rows, generator.normal(size=(size, size))
    runs = [slice(start, min(start + 128, size)) for start in range(0, size, 128)]

    def select(run: slice, scores: Any) -> Any:
        return scores >= np.partition(scores, scores.size // 2, axis=None)[scores.size // 2]

    def arithmetic() -> None:
        # The factor of H, its triangular inverse (a third of a product), and half a product for the updates.
        np.linalg.cholesky(hessian)
        hessian[: size // 3] @ matrix
        hessian[: size // 2] @ matrix

    found, mask = reconstruct(matrix, inverse_factor(hessian), runs, select)
    damped = damped_hessian(hessian, 0.01)[0]
    layer = in_turns(
        {
            "products and factorization alone": arithmetic,
            "factor and reconstruction": lambda: reconstruct(matrix, inverse_factor(hessian), runs, select),
            "fit of the kept weights": lambda: refit(matrix, mask, damped, start=found),
        },
        repeats,
    )
    return {"size": size, "layer": layer, "hessians": _hessians(smoke, repeats)}


def _hessians(smoke: bool, repeats: int) -> dict[str, list[float]]:
    import keras
    import numpy as np

    from prunekit.anatomy.layers.targets import find_targets
    from prunekit.core.statistics.input_statistics import Hessians
    from prunekit.core.statistics.layer_inputs import transposed_product
    from prunekit.recipe.state.models import fashion_cnn

    model = fashion_cnn()
    images = np.random.default_rng(0).normal(size=(16 if smoke else 512, 28, 28, 1)).astype("float32")
    targets, _ = find_targets(model)
    collector = Hessians(model, targets)
    batches = [keras.ops.convert_to_tensor(images[start : start + 64]) for start in range(0, len(images), 64)]
    whole = _rows(model, targets, batches)

    def alone() -> None:
        for batch in batches:
            model(batch, training=False)
        for each in whole:
            transposed_product(each, each)

    def collect_hessians() -> None:
        collector.reset()
        for batch in batches:
            collector.observe(batch, None)
        for sums in collector.sums:
            assert sums.gram.size

    return in_turns({"forward pass and products alone": alone, "statistic": collect_hessians}, repeats)


def _rows(model: Any, targets: Any, batches: Any) -> list[Any]:
    """The rows that each target multiplies, of all batches."""
    import numpy as np

    from prunekit.core.statistics.layer_inputs import rows_in_parts
    from prunekit.core.statistics.layer_products import product_of

    found: list[list[Any]] = [[] for _ in targets]
    for value in batches:
        for layer in model.layers:
            for rows, target in zip(found, targets, strict=True):
                if target.layer is layer:
                    rows += rows_in_parts(product_of(target), (value,))
            value = layer(value, training=False)
    return [np.concatenate(rows, axis=1) for rows in found]


# Networks whose whole reconstruction is measured: title, and what is wanted.
NETWORKS = {
    "MobileNetV2": (
        "MobileNetV2, 224 x 224, 64 images",
        "at most 60 s and 3 GB on two cores; the export within twice the calibration, which is `pk.quantize` to 8 bits",
    ),
    "BERT": (
        "The encoder of BERT with 8 blocks of width 384, 26 M weights, 64 sequences of 128 tokens",
        "GPTQ and SparseGPT within 30 s on two cores, which is not reached: of GPTQ's processor time the walk through "
        "the blocks, before and after each change, takes half, ranges and damage a quarter (in a quieter hour of this "
        "machine 32 and 45 s, and MobileNetV2 22 and 15 s)",
    ),
}


def measure_model(name: str, smoke: bool) -> dict[str, Any]:
    """Seconds and CPU seconds of operations that read 64 examples, beside `predict`, and the peak memory, one run each.

    A smoke test takes tiny networks.
    """
    import keras
    import numpy as np

    import prunekit as pk

    generator = np.random.default_rng(0)
    if name == "BERT":
        sizes = {"width": 8, "blocks": 1, "words": 50, "length": 4} if smoke else {}
        model = text_encoder(keras, **sizes)
        length, words = model.input_shape[1], model.get_layer("words").input_dim
        examples = generator.integers(0, words, (64, length)).astype("int32")
    else:
        model = network("perceptron", smoke) if smoke else keras.applications.MobileNetV2(weights=None)
        examples = images_for(model, 64)
    weights = model.get_weights()
    made: list[Any] = []

    def quantize(bits: int, method: str) -> None:
        model.set_weights(weights)
        made[:] = [pk.quantize(model, examples, bits=bits, method=method)]

    def export() -> None:
        with tempfile.TemporaryDirectory() as folder:
            made[0].export(Path(folder) / "integers.tflite")

    def prune(sparsity: float, criterion: str, allocation: str = "layer_error") -> None:
        model.set_weights(weights)
        pk.prune(model, sparsity, examples, criterion=criterion, allocation=allocation)

    def shrink(**selection: str) -> None:
        model.set_weights(weights)
        pk.shrink(model, channels=0.5, data=examples, **selection)

    ways: dict[str, Callable[[], Any]] = {
        "`model.predict`, batch 32": lambda: model.predict(examples, batch_size=32, verbose=0),
        "4-bit GPTQ, 8-bit activations": lambda: quantize(4, "gptq"),
        "SparseGPT, sparsity 0.5": lambda: prune(0.5, "sparsegpt"),
        "`pk.prune(model, 0.8, data)`, one allocation": lambda: prune(0.8, "auto"),
    }
    if name == "MobileNetV2":
        ways |= {
            # With "auto", models of up to 5 million parameters are pruned and shrunk in several ways.
            "`pk.prune(model, 0.8, data)`, two allocations tried": lambda: prune(0.8, "auto", "auto"),
            "`pk.shrink(model, channels=0.5, data=data)`, one way": lambda: shrink(
                criterion="l2", allocation="uniform"
            ),
            "`pk.shrink(model, channels=0.5, data=data)`, four tried": shrink,
            "magnitude with repair, sparsity 0.5": lambda: prune(0.5, "magnitude"),
            "8 bits, the nearest codes: calibration": lambda: quantize(8, "nearest"),
            "export of the file of 8 bits": export,
        }
    cpu: dict[str, float] = {}

    def timed(way: str) -> None:
        # The converter and the interpreter have a process of their own, too.
        began = sum(os.times()[:4])
        ways[way]()
        cpu[way] = sum(os.times()[:4]) - began

    # Traced before it is measured.
    model.predict(examples, batch_size=32, verbose=0)
    # Once, without a change of the order: the export writes what the calibration before it has made.
    seconds = in_turns({way: functools.partial(timed, way) for way in ways}, 1)
    return {"seconds": seconds, "cpu": cpu, "peak": peak()}


def collect(workers: Workers, smoke: bool) -> dict[str, Any]:
    """Figures of a worker process."""
    found = workers.call(measure, {"smoke": smoke, "repeats": turns(smoke)})
    return found | {"models": {one: workers.call(measure_model, {"name": one, "smoke": smoke}) for one in NETWORKS}}


def section(found: dict[str, Any]) -> str:
    """The section of the page: a reconstruction and Hessians, each beside its lower bound."""
    parts = [
        "## Pruning without training",
        f"SparseGPT on a layer of {found['size']:,} x {found['size']:,} at sparsity 0.5, float64, and X^T X of the "
        "layers of fashion-cnn for 512 images; measured in turns. Wanted: within 3 times, and within 1.5 times, of the "
        "arithmetic alone. The fit of the kept weights (`repair`) comes on top: up to 32 products with H.",
    ]
    for title, key in (("one layer", "layer"), ("Hessians", "hessians")):
        seconds = found[key]
        bound = next(iter(seconds.values()))
        rows = [[name, spread(values, 1e3), spread(turn_ratios(values, bound))] for name, values in seconds.items()]
        parts.append(table([title, "ms", "times the arithmetic"], rows))
    for name, model in found.get("models", {}).items():
        title, wanted = NETWORKS[name]
        bound = next(iter(model["seconds"].values()))
        rows = [
            [way, spread(values), number(model["cpu"][way]), spread(turn_ratios(values, bound))]
            for way, values in model["seconds"].items()
        ]
        parts.append(
            f"{title}; peak memory of the process {number(model['peak'] / 1e9)} GB. Wanted: {wanted}. One run of each; "
            "CPU seconds are those of all cores, which other programs lengthen less than the seconds."
        )
        parts.append(table([name, "s", "CPU s", "times `predict`"], rows))
    return "\n\n".join(parts)

"""A report of a run that never was, with all that can go wrong in it: hostile names, missing and non-finite figures."""

import io
import math

import numpy as np
from rich.console import Console

from prunekit.anatomy.cost.inspection import Event, SparsityReport, WeightRow
from prunekit.anatomy.records.reports import Skipped
from prunekit.delivery.reports.plot_data import weight_histogram
from prunekit.delivery.reports.rows import StageRow
from prunekit.delivery.reports.run_report import RunReport, compressed_sizes
from prunekit.delivery.reports.terminal_report import render_terminal
from prunekit.operations.export import ExportRow, RuntimeAdvice

HOSTILE = "<script>alert(1)</script>/kernel"
# Speed and size of the models of a run that removed channels and pruned.
STAGES = (
    StageRow("before", "before", {"accuracy": 0.98}, 160_000, 150_000, 40e-6),
    StageRow("after 2. shrink", "step", {"accuracy": 0.95}, 80_000, 72_000, 20e-6),
    StageRow("after 3. prune", "step", {"accuracy": 0.96}, 80_000, 15_000, 20e-6),
    StageRow("litert", "file", {"accuracy": 0.97}, 80_000, 14_000, 20e-6, file="model.tflite"),
    StageRow("litert-sparse", "file", {"accuracy": 0.97}, 16_000, 13_000, 21e-6, file="model-sparse.tflite"),
    StageRow("litert-dynamic-int8", "file", {"accuracy": 0.96}, 25_000, 8_000, 10e-6, file="model-int8.tflite"),
)


def make(weights=3):
    rng = np.random.default_rng(0)
    names = [HOSTILE, *(f"block_{i}/kernel" for i in range(weights - 1))]
    before = {name: rng.normal(size=(20, 10)).astype("float32") for name in names}
    after = {name: np.where(np.abs(array) > 1.6, array, 0) for name, array in before.items()}

    def report(arrays, **more):
        rows = tuple(
            WeightRow(name, name.rsplit("/", 1)[0], "kernel", (20, 10), 200, int((a == 0).sum()), "unstructured",
                      200, int((a != 0).sum()), 800)
            for name, a in arrays.items()
        )  # fmt: skip
        return SparsityReport(model_name="net", weights=rows, **more)

    events = tuple(Event(step, asked, asked - 0.001) for step, asked in ((0, 0.0), (10, 0.7), (20, 0.89)))
    return RunReport(
        title="A <b>run</b> & more",
        recipe={"version": 1, "name": "x", "steps": [{"prune": {"sparsity": 0.5}}]},
        versions={"prunekit": "0.1.0", "keras": "3"},
        seed=7,
        steps=(
            {"kind": "train", "name": "2 epochs", "seconds": 1.5, "accuracy": 0.9, "history": {"loss": [1, math.nan]}},
            {"kind": "export", "name": "keras", "seconds": None, "history": {}, "accuracy": None},
        ),
        before=report(before),
        after=report(
            after,
            targets=tuple(names),
            events=events,
            skipped=(Skipped("a/bias", "a bias"), Skipped("b/bias", "a bias"), Skipped("norm/gamma", "normalisation")),
        ),
        metrics={"accuracy_before": 0.91, "accuracy_after": 0.9, "loss_after": math.inf},
        schedule={"type": "PolynomialDecay", "initial_sparsity": 0.0, "final_sparsity": 0.9, "begin_step": 0,
                  "end_step": 25, "power": 3, "frequency": 10},
        events=events,
        curve=((0, 0.91), (10, math.nan), (20, 0.9)),
        exports=(
            ExportRow("litert", "model.tflite", 2000, 900, "ok", "", 1e-6, 1.0, 0.9),
            ExportRow("litert-sparse", None, None, None, "refused", "wrong on <ARM64>", None, None, None),
        ),
        expectations=(
            {"what": "accuracy", "bound": {"min": 0.95}, "measured": 0.9, "met": False},
            {"what": "sparsity", "bound": {"min": 0.8, "max": 1.0}, "measured": 0.88, "met": True},
        ),
        histograms={name: weight_histogram(before[name], after[name]) for name in names[:3]},
        hashes={"weights": "abc123"},
        notes=("mind the <gap>",),
        advice=(RuntimeAdvice("LiteRT on x86", "nothing", "no sparse convolutions"),),
        compressed=compressed_sizes(before, after),
        changes={name: {"updates": 20, "change": 0.01, "last": 0.01, "largest": 0.02, "norm": 4.0, "relative": 0.0025}
                 for name in names[:-1]},
    )  # fmt: skip


def terminal(report, width=100, is_terminal=False):
    """The report as a terminal of that width shows it."""
    text = io.StringIO()
    render_terminal(report, Console(file=text, width=width, force_terminal=is_terminal, color_system=None))
    return text.getvalue()

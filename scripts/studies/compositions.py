"""Compositions of techniques in one recipe: bytes of the packed integer file beside its accuracy."""

import copy
import tempfile
from pathlib import Path
from typing import Any

import prunekit as pk
from studies.results import Results, measure_networks

SEEDS = 3
PAGE = Path("docs/measured/compositions.md")
START: dict[str, Any] = {
    "version": 1,
    "model": {"builtin": "digits-cnn"},
    "data": {"builtin": "digits"},
    "compile": {"optimizer": {"name": "adam", "learning_rate": 0.001}, "batch_size": 32, "metrics": ["accuracy"]},
}
TRAIN = {"train": {"epochs": 12}}


def zeros(share: float, distill: bool = True) -> dict[str, Any]:
    """Returns the step in which zeros grow."""
    schedule = {"type": "polynomial_decay", "final_sparsity": share}
    return {"prune": {"epochs": 12, "schedule": schedule} | ({"distill": True} if distill else {})}


def integers(bits: int, rate: float = 0.0, distill: bool = True) -> dict[str, Any]:
    """Returns the step that trains on integers."""
    step = {"bits": bits, "epochs": 8, "learning_rate": 0.0005} | ({"rate": rate} if rate else {})
    return {"quantize": step | ({"distill": True} if distill else {})}


def removal(channels: float, distill: bool = True) -> list[dict[str, Any]]:
    """Returns the steps that remove channels."""
    training = {"epochs": 8} | ({"distill": True} if distill else {})
    return [{"shrink": {"channels": channels, "repair": "weights"}}, {"finetune": training}]


LOW_RANK = [{"factorize": {"parameters": 0.4}}, {"finetune": {"epochs": 8}}]
HALF = [*removal(0.5, False), zeros(0.8, False)]
WAYS: dict[str, list[dict[str, Any]]] = {
    "quantize to 8 bits": [{"quantize": {}}],
    "cluster to 8 values, quantize to 8 bits": [{"cluster": {"clusters": 8}}, {"quantize": {}}],
    "prune 90 %, quantize to 8 bits (`packed-digits`)": [zeros(0.9, False), {"quantize": {}}],
    "prune 95 %, train on 4 bits (`four-bits-digits`)": [zeros(0.95, False), integers(4, distill=False)],
    "prune 95 %, train on 4 bits, distil": [zeros(0.95), integers(4)],
    "prune 95 %, train on 3 bits with a price": [zeros(0.95, False), integers(3, 0.02, False)],
    "half of the channels, train on 4 bits": [*removal(0.5, False), integers(4, distill=False)],
    "half of the channels, prune 80 %, train on 4 bits": [*HALF, integers(4, distill=False)],
    "half of the channels, prune 80 %, train on 3 bits with a price (`smallest-digits`)": [
        *HALF,
        integers(3, 0.02, False),
    ],
    "half of the channels, prune 80 %, train on 3 bits with a price, distil": [
        *removal(0.5),
        zeros(0.8),
        integers(3, 0.02),
    ],
    "a quarter of the channels, train on 3 bits with a price": [*removal(0.25, False), integers(3, 0.02, False)],
    "low rank, prune 80 %, train on 4 bits": [*LOW_RANK, zeros(0.8, False), integers(4, distill=False)],
}
RUNS = [f"{way}; {seed}" for way in WAYS for seed in range(SEEDS)]
HEAD = f"""# Measured: compositions

The network of the recipe `digits`, trained for 12 epochs and compressed by several techniques in one recipe: accuracy
of the integer file on the test images, and its bytes after `pack`; means of {SEEDS} seeds. Distil: `distill: true` in
all later trainings. A price: `rate: 0.02`. `scripts/study compositions` makes this page.

| steps | accuracy | bytes of the file | gzip | packed |
|---|---:|---:|---:|---:|
"""


def measured(run: str) -> dict[str, float]:
    """Returns the accuracy of the integer file, and bytes."""
    way, seed = run.rsplit("; ", 1)
    # The steps of several ways are the same objects.
    steps = copy.deepcopy([TRAIN, *WAYS[way], {"pack": {}}])
    recipe = START | {"name": "composition", "seed": int(seed), "steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        result = pk.compress(recipe, output=Path(folder, "run"))
        row = result.report.to_dict()["exports"][-1]
        packed = Path(folder, "run", "exports", f"{row['file']}.pack").stat().st_size
    return {"accuracy": row["accuracy"], "bytes": row["bytes"], "gzip": row["gzip_bytes"], "packed": packed}


def page(results: Results) -> str:
    """Returns the page."""
    rows = []
    for way in WAYS:
        runs = [results.values[key] for key in RUNS if key.startswith(f"{way}; ") and key in results.values]
        if runs:
            means = {key: sum(run[key] for run in runs) / len(runs) for key in runs[0]}
            sizes = " | ".join(f"{means[key]:,.0f}" for key in ("bytes", "gzip", "packed"))
            rows.append(f"| {way} | {means['accuracy']:.4f} | {sizes} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    measure_networks(__doc__, RUNS, PAGE, measured, page)

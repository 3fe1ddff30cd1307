"""Accuracy of a trained MNIST network after `pk.prune`, without training, for criteria, allocations and repairs."""

import argparse
import fnmatch
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import prunekit as pk
from studies.mnist import images, network
from studies.results import Results
from studies.shorthands import made

SPARSITIES = (0.5, 0.8, 0.9, 0.95, 0.98)
CRITERIA = {
    "sparsegpt": "sparsegpt",
    "output_error": "output_error",
    "wanda": "wanda",
    "wanda, whole weight": {"type": "wanda", "per_output": False},
    "magnitude": "magnitude",
    "taylor": "taylor",
    "fisher": "fisher",
    "optimal_brain_damage": "optimal_brain_damage",
    "snip": "snip",
    "synflow": "synflow",
    "random": "random",
}
ALLOCATIONS = {
    "layer_error": "layer_error",
    "layer_error, equal": {"type": "layer_error", "objective": "equal"},
    "global": "global",
    "global, l2": {"type": "global", "normalization": "l2"},
    "lamp": "lamp",
    "erk": "erk",
    "uniform": "uniform",
}
# The fit of all kept weights for each combination; the others for two allocations.
REPAIRS = {"weights": tuple(ALLOCATIONS), "outputs": ("global", "uniform"), "none": ("global", "uniform")}
EXAMPLES = 1024
PAGE = Path("docs/measured/after-training.md")
HEAD = f"""# Measured: pruning after training

Accuracy on the 10,000 test images of MNIST of a convolutional network that was trained elsewhere (421,642 parameters,
dense: DENSE), pruned by `pk.prune` with {EXAMPLES:,} training images and no training. The images are drawn from the
training set with seed 0; test images and their labels are used for nothing but the accuracies below. One run each.
The row of `output_error` with `layer_error` is what `pk.prune(model, s, data)` takes; the other rows of `output_error`
and `layer_error` were measured before `output_error` refitted between rounds and `layer_error` took the product.
`scripts/study after-training` makes this page, and measures what it shows as "–". How to prune this way:
[pruning without training](../after-training.md).
"""


def combinations() -> Iterator[tuple[str, str, str]]:
    """Yields (repair, criterion, allocation)."""
    for repair, allocations in REPAIRS.items():
        for criterion in CRITERIA:
            # In SynFlow's rounds the repair would have to follow each round.
            if criterion == "synflow" and repair != "none":
                continue
            yield from ((repair, criterion, allocation) for allocation in allocations)


def accuracy(test: Any, calibration: Any, sparsity: float, repair: str, criterion: str, allocation: str) -> float:
    """The accuracy of a newly pruned network."""
    from prunekit.sparsity.shorthands import ALLOCATIONS as ALLOCATION_ROWS, CRITERIA as CRITERION_ROWS

    model = network()
    options = {
        "criterion": made(CRITERION_ROWS, CRITERIA[criterion]),
        "allocation": made(ALLOCATION_ROWS, ALLOCATIONS[allocation]),
    }
    data = None if repair == "none" and criterion in ("magnitude", "synflow", "random") else calibration
    with warnings.catch_warnings():
        # At 98 % some combinations leave a single weight in a layer.
        warnings.simplefilter("ignore", UserWarning)
        pk.prune(model, sparsity, data, repair=repair, **options)
    return _accuracy(model, test)


def _accuracy(model: Any, test: Any) -> float:
    inputs, labels = test
    return float(np.mean(model.predict(inputs, batch_size=500, verbose=0).argmax(axis=1) == labels))


def page(results: Results) -> str:
    """Returns the page as Markdown."""
    dense = results.values["dense"]
    parts = [HEAD.replace("DENSE", f"{dense:.4f}")]
    titles = {
        "weights": 'All kept weights fitted: `repair="weights"`, the default',
        "outputs": 'Bias and scale of each output: `repair="outputs"`',
        "none": 'Masks alone: `repair="none"`',
    }
    for repair, title in titles.items():
        heads = " | ".join(f"{sparsity:.0%}" for sparsity in SPARSITIES)
        parts += [
            f"\n## {title}\n",
            f"| criterion | allocation | {heads} |",
            "|---|---" + "|---" * len(SPARSITIES) + "|",
        ]
        rows = [row for row in combinations() if row[0] == repair]
        best = [max(results.values.get(_key(*row, s), 0) for row in rows) for s in SPARSITIES]
        for row in rows:
            found = [results.values.get(_key(*row, sparsity)) for sparsity in SPARSITIES]
            cells = (_cell(value, top) for value, top in zip(found, best, strict=True))
            parts.append(f"| {row[1]} | {row[2]} | {' | '.join(cells)} |")
    return "\n".join(parts) + "\n"


def _cell(value: float | None, best: float) -> str:
    if value is None:
        return "–"
    return f"**{value:.4f}**" if value == best else f"{value:.4f}"


def _key(repair: str, criterion: str, allocation: str, sparsity: float) -> str:
    return f"{repair} / {criterion} / {allocation} / {sparsity}"


def main() -> None:
    """Measures what is missing, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help='Pattern of "repair / criterion / allocation / sparsity".')
    only = parser.parse_args().only
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    results = Results(PAGE.with_suffix(".json"))
    train, test = images("train"), images("t10k")
    drawn = np.sort(np.random.default_rng(0).choice(len(train[1]), EXAMPLES, replace=False))
    calibration = tuple(array[drawn] for array in train)
    results.get("dense", lambda: _accuracy(network(), test))
    for sparsity in SPARSITIES:
        for row in combinations():
            key = _key(*row, sparsity)
            if fnmatch.fnmatch(key, only):
                found = results.get(key, lambda row=row, sparsity=sparsity: accuracy(test, calibration, sparsity, *row))
                print(f"{found:.4f}  {key}", flush=True)
                PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()

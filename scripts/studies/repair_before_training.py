"""Accuracy of a small network without half of its multiply-accumulates, with and without a repair before training."""

import argparse
from pathlib import Path
from typing import Any

import keras
import numpy as np

import prunekit as pk
from prunekit.recipe.datasets.data import load_data
from prunekit.recipe.settings.data_source import DataSource
from prunekit.recipe.settings.sources import ModelSource
from prunekit.recipe.state.models import build_model
from studies.results import Results

SEEDS, EPOCHS, SHARES = range(6), (0, 1, 3), (0.5, 0.25)
REPAIRS = ("none", "weights")
PAGE = Path("docs/measured/repair-before-training.md")
HEAD = f"""# Measured: a repair before training

Accuracy on the 360 test images of the digits of a small convolutional network (`digits-cnn`, trained for 10 epochs),
without one half and three quarters of its multiply-accumulates (`pk.shrink(model, macs=..., data=...)`), and after
further epochs (Adam, learning rate 0.001, the same order of the examples): mean of {len(SEEDS)} seeds, and the mean of
the differences with its standard error. A repair is `repair="weights"` on all training images.
`scripts/study repair-before-training` makes this page. How to remove channels: [shrinking](../shrinking.md).

| macs | epochs | without repair | with repair | difference | seeds better / worse |
|---|---|---|---|---|---|
"""


def measured(seed: int) -> dict[str, float]:
    """Returns "SHARE / REPAIR / EPOCHS" -> accuracy, for one network."""
    data = load_data(DataSource(builtin="digits"), seed)
    (x, y), test = data.train.first(data.train.examples), data.test.first(data.test.examples)
    model = build_model(ModelSource(builtin="digits-cnn"), seed)
    _fit(model, x, y, 10, seed)
    found = {"dense": _accuracy(model, test)}
    for share in SHARES:
        for repair in REPAIRS:
            smaller, _ = pk.shrink(model, macs=share, data=x, repair=repair, tolerance=None)
            done = 0
            for epochs in EPOCHS:
                _fit(smaller, x, y, epochs - done, seed + epochs)
                done = epochs
                found[f"{share} / {repair} / {epochs}"] = _accuracy(smaller, test)
    return found


def _fit(model: Any, x: Any, y: Any, epochs: int, seed: int) -> None:
    keras.utils.set_random_seed(seed)
    model.compile(keras.optimizers.Adam(0.001), "sparse_categorical_crossentropy")
    if epochs:
        model.fit(x, y, batch_size=32, epochs=epochs, verbose=0)


def _accuracy(model: Any, test: Any) -> float:
    inputs, labels = test
    return float(np.mean(model.predict(inputs, batch_size=500, verbose=0).argmax(axis=1) == labels))


def page(results: Results) -> str:
    """Returns the page as Markdown."""
    runs = [results.values[str(seed)] for seed in SEEDS if str(seed) in results.values]
    rows = []
    for share in SHARES:
        for epochs in EPOCHS:
            plain, repaired = (np.array([run[f"{share} / {repair} / {epochs}"] for run in runs]) for repair in REPAIRS)
            gain = repaired - plain
            error = gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else 0.0
            rows.append(
                f"| {share} | {epochs} | {plain.mean():.4f} | {repaired.mean():.4f} | {gain.mean():+.4f} ± {error:.4f} "
                f"| {int((gain > 0).sum())} / {int((gain < 0).sum())} |"
            )
    dense = float(np.mean([run["dense"] for run in runs]))
    return HEAD + "\n".join(rows) + f"\n\nDense: {dense:.4f}.\n"


def main() -> None:
    """Measures what is missing, and writes the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    results = Results(PAGE.with_suffix(".json"))
    for seed in SEEDS:
        results.get(str(seed), lambda seed=seed: measured(seed))
        PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Accuracy of a trained MNIST network without half of its filters, for criteria and repairs, and after one epoch."""

import argparse
from pathlib import Path
from typing import Any

import keras
import numpy as np

import prunekit as pk
from studies.mnist import images, network
from studies.results import Results

CRITERIA = (
    "magnitude",
    "l2",
    "geometric_median",
    "wanda",
    "output_error",
    "taylor",
    "fisher",
    "apoz",
    "mean_activation",
    "random",
)
REPAIRS = ("none", "outputs", "weights")
EXAMPLES = 1024
PAGE = Path("docs/measured/removal.md")
HEAD = f"""# Measured: removing channels

Accuracy on the 10,000 test images of MNIST of a convolutional network that was trained elsewhere (421,642 parameters,
dense: DENSE) without half of the filters of both convolutions: 206,922 parameters, 0.29 of the multiply-accumulates.
`pk.shrink` reads {EXAMPLES:,} training images, drawn with seed 0; test images are used for these accuracies alone. The
last column trains for one epoch afterwards (Adam, learning rate from 0.001 to 0 along a cosine, batches of 128,
seed 0). One run each: the standard error of such an accuracy is 0.001. Wanted: 0.985 without training, reached by
`output_error`, `apoz` and `mean_activation` with a repair of the weights; 0.991 after one epoch, which is more than the
dense network has, and is not reached. The call: `pk.shrink(model, channels=0.5, include=["conv_*"], criterion=...,
data=...)`.
`scripts/study removal` makes this page. How to remove channels: [shrinking](../shrinking.md).

| criterion | repair: none | outputs | weights | weights, then one epoch |
|---|---|---|---|---|
"""


def smaller(criterion: str, repair: str, calibration: Any) -> Any:
    """The network without half of the filters."""
    options = {"criterion": criterion, "repair": repair, "include": ["conv_*"]}
    return pk.shrink(network(), channels=0.5, data=calibration, **options)[0]


def trained(model: Any, train: Any) -> Any:
    """The model after one epoch."""
    keras.utils.set_random_seed(0)
    rate = keras.optimizers.schedules.CosineDecay(0.001, len(train[1]) // 128)
    model.compile(keras.optimizers.Adam(rate), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(*train, batch_size=128, verbose=0)
    return model


def accuracy(model: Any, test: Any) -> float:
    """The accuracy on the test images."""
    inputs, labels = test
    return float(np.mean(model.predict(inputs, batch_size=500, verbose=0).argmax(axis=1) == labels))


def page(results: Results) -> str:
    """Returns the page as Markdown."""
    rows = []
    for criterion in CRITERIA:
        keys = [*(f"{criterion} / {repair}" for repair in REPAIRS), f"{criterion} / trained, falling rate"]
        values = [results.values.get(key) for key in keys]
        cells = " | ".join("–" if value is None else f"{value:.4f}" for value in values)
        rows.append(f"| {criterion} | {cells} |")
    return HEAD.replace("DENSE", f"{results.values['dense']:.4f}") + "\n".join(rows) + "\n"


def main() -> None:
    """Measures what is missing, and writes the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    results = Results(PAGE.with_suffix(".json"))
    train, test = images("train"), images("t10k")
    drawn = np.sort(np.random.default_rng(0).choice(len(train[1]), EXAMPLES, replace=False))
    calibration = tuple(array[drawn] for array in train)
    results.get("dense", lambda: accuracy(network(), test))
    for criterion in CRITERIA:
        for repair in REPAIRS:
            results.get(
                f"{criterion} / {repair}",
                lambda criterion=criterion, repair=repair: accuracy(smaller(criterion, repair, calibration), test),
            )
        results.get(
            f"{criterion} / trained, falling rate",
            lambda criterion=criterion: accuracy(trained(smaller(criterion, "weights", calibration), train), test),
        )
        PAGE.write_text(page(results), encoding="utf-8")
        print(page(results).splitlines()[CRITERIA.index(criterion) - len(CRITERIA)], flush=True)


if __name__ == "__main__":
    main()

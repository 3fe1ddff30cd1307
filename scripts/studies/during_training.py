"""Accuracy on Fashion-MNIST of networks pruned while they train, for criteria, allocations and rules of masks."""

import argparse
import fnmatch
import gc
import json
import statistics
import subprocess
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

import prunekit as pk
from prunekit.sparsity.shorthands import ALLOCATIONS, CRITERIA, POLICIES
from studies import fashion
from studies.results import Results
from studies.shorthands import made

SPARSITIES = (0.8, 0.9, 0.95, 0.98)
SEEDS = (0, 1, 2)
EXAMPLES = 1024
PAGE = Path("docs/measured/during-training.md")
RESULTS = PAGE.with_suffix(".json")
DENSE_WEIGHTS = Path(".study") / "dense"


@dataclass(frozen=True)
class Row:
    """A way to prune.

    Attributes:
        group: The table of the page.
        networks: The networks that it is measured on.
        schedule: "gradual", "before" (one update before the first step), "exchange" (the sparsity from the first step
            on, exchanges until three quarters), "after" (`pk.prune` of the trained dense network), or "none".
        options: Options of the pruning; criterion, allocation and policy as in recipes.
    """

    group: str
    schedule: str = "gradual"
    options: dict[str, Any] = field(default_factory=dict)
    networks: tuple[str, ...] = ("mlp",)


def _rows() -> dict[str, Row]:
    every, two = ("mlp", "cnn", "resnet8"), ("mlp", "cnn")
    rows = {
        "dense": Row("baselines", "none", networks=every),
        "tensorflow-model-optimization": Row("baselines", "tfmot", networks=every),
    }

    def gradual(criterion: Any, allocation: Any, networks: tuple[str, ...] = ("mlp",)) -> None:
        kind = "criteria" if criterion != "magnitude" else "allocations"
        rows[f"{_name(criterion)}, {_name(allocation)}"] = Row(
            kind, options={"criterion": criterion, "allocation": allocation}, networks=networks
        )

    gradual("magnitude", "uniform", every)
    gradual("magnitude", "erk", every)
    gradual("magnitude", "global", every)
    gradual("magnitude", "lamp", every)
    gradual("magnitude", {"type": "global", "normalization": "l2"}, two)
    gradual("magnitude", {"type": "global", "normalization": "mean"})
    gradual("magnitude", "layer_error")
    for criterion in ("output_error", "wanda", "movement", "taylor", "fisher", "snip", "optimal_brain_damage"):
        for allocation in ("uniform", "erk", "global"):
            gradual(criterion, allocation)
    gradual("output_error", "layer_error", two)
    gradual("wanda", "layer_error")
    gradual("sparsegpt", "erk")
    gradual("random", "erk")
    for criterion in ("snip", "synflow", "grasp"):
        options = {"criterion": criterion, "allocation": "global"}
        rows[f"{criterion} before training"] = Row("before", "before", options)
    for criterion in ("magnitude", "random"):
        options = {"criterion": criterion, "allocation": "erk"}
        rows[f"{criterion}, erk, before training"] = Row("before", "before", options)
    for policy in ("rigl", "set"):
        for allocation in ("erk", "uniform"):
            options = {"criterion": "random", "allocation": allocation, "policy": policy}
            rows[f"{policy}, {allocation}"] = Row("moving", "exchange", options)
    for allocation in ("layer_error", "global"):
        options = {"criterion": "output_error", "allocation": allocation}
        rows[f"pk.prune after training: output_error, {allocation}"] = Row("after", "after", options, two)
    return rows


def _name(given: Any) -> str:
    if isinstance(given, str):
        return given
    return " ".join(str(value) for value in given.values())


ROWS = _rows()
TITLES = {
    "baselines": "Baselines",
    "allocations": "Magnitude, gradual: allocations",
    "criteria": "Gradual: other criteria",
    "before": "One mask before training",
    "moving": "Masks that move",
    "after": "Training first, then pruning without training",
}
HEAD = f"""# Measured: pruning during training

Accuracy on the 10,000 test images of Fashion-MNIST after {fashion.EPOCHS} epochs of training: mean of seeds 0, 1 and 2,
± their standard deviation. Weights and batches of a seed are the same in every row, also for
tensorflow-model-optimization, which trains the same networks in tf_keras. Adam with a learning rate of 0.001, batches
of {fashion.BATCH}, inputs in [0, 1]. Gradual schedules are cubic, over epochs 2 to 5, with a mask update every
{fashion.SCHEDULE[2]} steps; the last epoch trains with the final masks. All kernels are pruned, the first and the last
layer, too. Criteria that need data take {EXAMPLES:,} training images. Test images are used for nothing but these
accuracies. `scripts/study during-training` makes this page and measures what it shows as "–"; a number in parentheses
counts the seeds where some are missing.
"""


# Training -------------------------------------------------------------------------------------------------------------


class Study:
    """The data, and the trainings on them."""

    def __init__(self):
        self.train, self.test = fashion.images("train"), fashion.images("t10k")

    def measure(self, network: str, title: str, sparsity: float, seed: int) -> dict[str, float]:
        """Trains a network by a row, and returns its accuracy and sparsity."""
        row = ROWS[title]
        if row.schedule == "tfmot":
            command = [sys.executable, "-m", "studies.fashion_tfmot", network, str(sparsity), str(seed)]
            return json.loads(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
            )
        keras.utils.clear_session()
        gc.collect()
        keras.utils.set_random_seed(seed)
        model = fashion.network(keras, network, seed)
        if row.schedule == "after":
            model.load_weights(DENSE_WEIGHTS / f"{network}-{seed}.weights.h5")
            pk.prune(model, sparsity, self._calibration(seed), **_options(row, seed))
        else:
            callbacks = [] if row.schedule == "none" else [self._callback(row, sparsity, seed)]
            data = fashion.batches(self.train, seed)
            model.fit(data, steps_per_epoch=fashion.STEPS, epochs=fashion.EPOCHS, verbose=0, callbacks=callbacks)
        if row.schedule == "none":
            DENSE_WEIGHTS.mkdir(parents=True, exist_ok=True)
            model.save_weights(DENSE_WEIGHTS / f"{network}-{seed}.weights.h5")
        return fashion.measured(model, self.test)

    def _callback(self, row: Row, sparsity: float, seed: int) -> pk.PruningCallback:
        begin, end, frequency = fashion.SCHEDULE
        schedule = {
            "gradual": lambda: pk.PolynomialDecay(0.0, sparsity, begin, end, frequency=frequency),
            "before": lambda: pk.OneShot(sparsity),
            "exchange": lambda: pk.ConstantSparsity(
                sparsity, 0, end_step=fashion.STEPS * fashion.EPOCHS * 3 // 4, frequency=frequency
            ),
        }[row.schedule]()
        options = _options(row, seed)
        needs = {need for key in ("criterion", "allocation", "policy") if key in options for need in options[key].needs}
        if needs - {"movement", "synflow"}:
            options["data"] = self._calibration(seed)
        return pk.PruningCallback(schedule, **options)

    def _calibration(self, seed: int) -> tuple[Any, Any]:
        drawn = np.sort(np.random.default_rng(seed).choice(len(self.train[1]), EXAMPLES, replace=False))
        return tuple(array[drawn] for array in self.train)


def _options(row: Row, seed: int) -> dict[str, Any]:
    registries = {"criterion": CRITERIA, "allocation": ALLOCATIONS, "policy": POLICIES}
    options = {}
    for name, given in row.options.items():
        if name in registries:
            given = {"type": given} if isinstance(given, str) else given
            if "seed" in registries[name][given["type"]].options:
                given = given | {"seed": seed}
            given = made(registries[name], given)
        options[name] = given
    return options


# The page -------------------------------------------------------------------------------------------------------------


def page(results: Results) -> str:
    """Returns the page as Markdown."""
    parts = [HEAD]
    heads = " | ".join(f"{sparsity:.0%}" for sparsity in SPARSITIES)
    for network in fashion.NETWORKS:
        parts.append(f"\n## {network}\n\n{' '.join((fashion.NETWORKS[network].__doc__ or '').split())}\n")
        for group, heading in TITLES.items():
            titles = [title for title, row in ROWS.items() if row.group == group and network in row.networks]
            if titles:
                parts += [f"\n| {heading} | {heads} |", "|---" + "|---" * len(SPARSITIES) + "|"]
                parts += [f"| {title} | {' | '.join(_cells(results, network, title))} |" for title in titles]
    return "\n".join(parts) + "\n"


def _cells(results: Results, network: str, title: str) -> list[str]:
    found = []
    for sparsity in SPARSITIES:
        keys = [_key(network, title, sparsity, seed) for seed in SEEDS]
        values = [results.values[key]["accuracy"] for key in keys if key in results.values]
        if not values:
            found.append("–")
            continue
        spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
        count = f" ({len(values)})" if len(values) < len(SEEDS) else ""
        found.append(f"{statistics.mean(values):.4f}{spread}{count}")
    return found


def _key(network: str, title: str, sparsity: float, seed: int) -> str:
    # A dense network has one training for all columns.
    return f"{network} / {title} / {0.0 if title == 'dense' else sparsity} / {seed}"


def main() -> None:
    """Measures what is missing, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help='Pattern of "network / way / sparsity / seed".')
    only = parser.parse_args().only
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    results, study = Results(RESULTS), Study()
    for network in fashion.NETWORKS:
        for seed in SEEDS:
            for title, row in ROWS.items():
                for sparsity in SPARSITIES:
                    key = _key(network, title, sparsity, seed)
                    if network not in row.networks or not fnmatch.fnmatch(key, only):
                        continue
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", UserWarning)
                        cell = (network, title, sparsity, seed)
                        found = results.get(key, lambda cell=cell: study.measure(*cell))
                    print(f"{found['accuracy']:.4f}  {found['sparsity']:.4f}  {key}", flush=True)
                    PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()

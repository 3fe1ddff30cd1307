"""Accuracy on Fashion-MNIST of networks pruned while they train, for criteria, allocations and rules of masks."""

import argparse
import fnmatch
import gc
import json
import statistics
import subprocess
import sys
import warnings
from collections.abc import Iterator
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
LATE = ", learning rate a fifth in the last epoch"
DENSE_WEIGHTS = Path(".study") / "dense"


@dataclass(frozen=True)
class Row:
    """A way to prune.

    Attributes:
        group: The table of the page.
        networks: The networks that it is measured on.
        schedule: "gradual", "before" (one update before the first step), "exchange" (the sparsity from the first step
            on, exchanges until three quarters), "phases" (AC/DC: half an epoch each, from epoch 2 to 5), "after"
            (`pk.prune` of the trained dense network), "tfmot", or "none".
        options: Options of the pruning; criterion, allocation and policy as in recipes.
        late: Whether the learning rate falls to a fifth for the last epoch.
        frequency: Steps between mask updates.
    """

    group: str
    schedule: str = "gradual"
    options: dict[str, Any] = field(default_factory=dict)
    networks: tuple[str, ...] = ("mlp",)
    late: bool = False
    frequency: int = fashion.SCHEDULE[2]


EVERY, TWO = ("mlp", "cnn", "resnet8"), ("mlp", "cnn")
SR_STE = {"type": "straight_through", "decay": 2e-4}


def _baselines() -> Iterator[tuple[str, Row]]:
    for late in (False, True):
        suffix = LATE if late else ""
        networks = EVERY if not late else ("mlp",)
        yield f"dense{suffix}", Row("baselines", "none", networks=networks, late=late)
        yield f"tensorflow-model-optimization{suffix}", Row("baselines", "tfmot", networks=networks, late=late)


def _gradual() -> Iterator[tuple[str, Row]]:
    combinations: list[tuple[Any, Any, tuple[str, ...]]] = [
        ("magnitude", "uniform", TWO),
        ("magnitude", "erk", TWO),
        ("magnitude", "global", EVERY),
        ("magnitude", "lamp", TWO),
        ("magnitude", {"type": "global", "normalization": "l2"}, ("mlp",)),
        ("magnitude", {"type": "global", "normalization": "mean"}, ("mlp",)),
        ("magnitude", "layer_error", ("mlp",)),
        ("output_error", "layer_error", ("mlp",)),
        ("wanda", "layer_error", ("mlp",)),
        ("sparsegpt", "erk", ("mlp",)),
        ("random", "erk", ("mlp",)),
    ]
    for criterion in ("output_error", "wanda", "movement", "taylor", "fisher", "snip", "optimal_brain_damage"):
        for allocation in ("uniform", "erk", "global"):
            networks = TWO if (criterion, allocation) == ("output_error", "global") else ("mlp",)
            combinations.append((criterion, allocation, networks))
    for criterion, allocation, networks in combinations:
        group = "allocations" if criterion == "magnitude" else "criteria"
        options = {"criterion": criterion, "allocation": allocation}
        yield f"{_name(criterion)}, {_name(allocation)}", Row(group, options=options, networks=networks)
    for criterion in ("magnitude", "geometric_median", "apoz", "mean_activation"):
        options = {"criterion": criterion, "pattern": "channel", "exclude": ("logits",)}
        yield f"{criterion}, whole units", Row("channels", options=options)
    for criterion in ("magnitude", "output_error"):
        options = {"criterion": criterion, "allocation": "global"}
        yield f"{criterion}, global{LATE}", Row("late", options=options, late=True)


def _before() -> Iterator[tuple[str, Row]]:
    for criterion, allocation in [
        ("snip", "global"),
        ("synflow", "global"),
        ("grasp", "global"),
        ("magnitude", "erk"),
        ("magnitude", "lamp"),
        ("random", "erk"),
    ]:
        options = {"criterion": criterion, "allocation": allocation}
        yield f"{criterion}, {allocation}, before training", Row("before", "before", options)


def _moving() -> Iterator[tuple[str, Row]]:
    for policy in ("rigl", "set"):
        for allocation in ("erk", "uniform"):
            options = {"criterion": "random", "allocation": allocation, "policy": policy}
            yield f"{policy}, {allocation}", Row("moving", "exchange", options)
    for allocation in ("erk", "global"):
        yield f"AC/DC, {allocation}", Row("moving", "phases", {"allocation": allocation, "policy": "ac_dc"})
    yield "SR-STE, global", Row("moving", options={"allocation": "global", "policy": SR_STE})


def _each_step() -> Iterator[tuple[str, Row]]:
    yield "tensorflow-model-optimization, each step", Row("each step", "tfmot", frequency=1)
    for name, policy, allocation, networks in [
        ("magnitude", "gradual", "uniform", ("mlp",)),
        ("magnitude", "gradual", "global", TWO),
        ("straight-through", "straight_through", "global", ("mlp",)),
        ("SR-STE", SR_STE, "erk", ("mlp",)),
        ("SR-STE", SR_STE, "global", TWO),
    ]:
        options = {"allocation": allocation, "policy": policy}
        yield f"{name}, {allocation}, each step", Row("each step", options=options, networks=networks, frequency=1)


def _after() -> Iterator[tuple[str, Row]]:
    for allocation in ("layer_error", "global"):
        options = {"criterion": "output_error", "allocation": allocation}
        yield f"pk.prune after training: output_error, {allocation}", Row("after", "after", options, EVERY)


def _name(given: Any) -> str:
    if isinstance(given, str):
        return given
    return " ".join(str(value) for value in given.values())


ROWS = dict([*_baselines(), *_gradual(), *_before(), *_moving(), *_each_step(), *_after()])
TITLES = {
    "baselines": "Baselines",
    "allocations": "Magnitude, gradual: allocations",
    "criteria": "Gradual: other criteria",
    "late": "Gradual, with a fifth of the learning rate in the last epoch",
    "channels": "Gradual, whole units (not of the last layer)",
    "before": "One mask before training",
    "moving": "Masks that move",
    "each step": "Gradual, with a mask update at each step",
    "after": "Training first, then pruning without training",
}
HEAD = f"""# Measured: pruning during training

Accuracy on the 10,000 test images of Fashion-MNIST after {fashion.EPOCHS} epochs of training: mean of seeds 0, 1 and 2,
± their standard deviation. Weights and batches of a seed are the same in every row, also for
tensorflow-model-optimization, which trains the same networks in tf_keras. Adam with a learning rate of 0.001, batches
of {fashion.BATCH}, inputs in [0, 1]. Gradual schedules are cubic, over epochs 2 to 5, with a mask update every
{fashion.SCHEDULE[2]} steps where the table names no other; the last epoch trains with the final masks. All kernels are
pruned, the first and the last layer, too. Criteria that need data take {EXAMPLES:,} training images. Test images are
used for nothing but these accuracies. `scripts/study during-training` makes this page and measures what it shows as
"–"; a number in parentheses counts the seeds where some are missing.
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
            command += [str(row.frequency), *["late"] * row.late]
            return json.loads(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
            )
        if title == "dense" or row.schedule == "after":
            path = self._dense_weights(network, seed)
            model = self._new(network, seed)
            model.load_weights(path)
            if row.schedule == "after":
                pk.prune(model, sparsity, self._calibration(seed), **_options(row, seed))
        else:
            model = self._new(network, seed)
            self._fit(model, seed, [] if row.schedule == "none" else [self._callback(row, sparsity, seed)], row.late)
        return fashion.measured(model, self.test)

    def _new(self, network: str, seed: int) -> Any:
        keras.utils.clear_session()
        gc.collect()
        keras.utils.set_random_seed(seed)
        return fashion.network(keras, network, seed)

    def _fit(self, model: Any, seed: int, callbacks: list[Any], late: bool = False) -> None:
        callbacks = [*callbacks, *[fashion.slow_last_epoch(keras)] * late]
        data = fashion.batches(self.train, seed)
        model.fit(data, steps_per_epoch=fashion.STEPS, epochs=fashion.EPOCHS, verbose=0, callbacks=callbacks)

    def _dense_weights(self, network: str, seed: int) -> Path:
        """The trained dense network's weights as a file; trains it the first time."""
        path = DENSE_WEIGHTS / f"{network}-{seed}.weights.h5"
        if not path.exists():
            model = self._new(network, seed)
            self._fit(model, seed, [])
            path.parent.mkdir(parents=True, exist_ok=True)
            model.save_weights(path)
        return path

    def _callback(self, row: Row, sparsity: float, seed: int) -> pk.PruningCallback:
        begin, end, frequency = *fashion.SCHEDULE[:2], row.frequency
        schedule = {
            "gradual": lambda: pk.schedules.PolynomialDecay(0.0, sparsity, begin, end, frequency=frequency),
            "before": lambda: pk.schedules.OneShot(sparsity),
            "exchange": lambda: pk.schedules.ConstantSparsity(
                sparsity, 0, end_step=fashion.STEPS * fashion.EPOCHS * 3 // 4, frequency=frequency
            ),
            "phases": lambda: pk.schedules.ConstantSparsity(
                sparsity, begin, end_step=end, frequency=fashion.STEPS // 2
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
    for network in fashion.PRUNED:
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
    return f"{network} / {title} / {0.0 if ROWS[title].schedule == 'none' else sparsity} / {seed}"


def main() -> None:
    """Measures what is missing, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help='Pattern of "network / way / sparsity / seed".')
    only = parser.parse_args().only
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    results, study = Results(RESULTS), Study()
    PAGE.write_text(page(results), encoding="utf-8")
    for network in fashion.PRUNED:
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

"""What scripts/bench writes: raw figures -> one page of Markdown."""

import datetime
import os
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmark_backends import section as backends_section
from benchmark_parts import section as parts_section
from benchmark_prefix import section as prefix_section
from benchmark_scale import section as scale_section

TITLES = {
    "perceptron": "Perceptron 784-2048-2048-10, 5.8 M weights, batch 64, Adam",
    "resnet20": "ResNet-20 with batch normalisation on 32x32x3, 0.27 M weights, batch 32, SGD with momentum",
}
NAMES = {
    ("prunekit", "plain"): "Keras 3, not pruned",
    ("prunekit", "control"): "Keras 3, not pruned, once more",
    ("tfmot", "plain"): "tf_keras, not pruned",
}
# Every page has this section; one that is measured by itself, and new to the page, stands before it.
START_UP = "## Start-up of the command line"
LIBRARIES = {"prunekit": "prunekit", "tfmot": "tensorflow-model-optimization"}
WANTED = {
    "update": 15.0,
    "step": {"perceptron": 1.10, "resnet20": 1.03},
    "whole": {"perceptron": 1.15, "resnet20": 1.04},
}
# Why a bound may not be met, by what was wanted and model.
REASONS = {
    "update": {
        "perceptron": "The update passes over weights, importances, masks and slots many times, if without a sort.",
        "resnet20": "22 small weights: the time goes into starting some forty operations for each, which does not "
        "shrink with the weights, while the sort of tensorflow-model-optimization does.",
    },
    "step": {
        "perceptron": "Gradients and weights are read and written once more in each step, 18 bytes for each weight, "
        "and a step of this model is bound by memory. With Adam the second half could be left out, since its "
        "update moves no weight whose gradient and slots are zero; it stays, so that weights which other code has "
        "written are zero again after the next update.",
        "resnet20": "Masking adds two small operations per weight to each step.",
    },
    "whole": {
        name: "Includes what happens once, whatever the length: the functions that choose masks are traced, and those "
        "that set weights and slots to zero."
        for name in TITLES
    },
    "steady": {name: "Steps between updates and mask updates together." for name in TITLES},
}

ROUND, WALL, CPU, UPDATE = range(4)


# Arithmetic -----------------------------------------------------------------------------------------------------------


def quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4], median(ordered), ordered[(3 * len(ordered)) // 4]


def steps(run: dict[str, Any], column: int = WALL, *, update: bool) -> list[float]:
    """Seconds of the steps with or without a mask update, the first round left out: it traces."""
    return [row[column] for row in run["steps"] if row[ROUND] > 0 and row[UPDATE] is update]


def ratios(run: dict[str, Any], base: dict[str, Any], column: int) -> list[float]:
    """Per round, the median step between updates over that of `base` in the same round."""

    def by_round(one: dict[str, Any]) -> dict[int, float]:
        rounds: dict[int, list[float]] = {}
        for row in one["steps"]:
            if row[ROUND] > 0 and not row[UPDATE]:
                rounds.setdefault(row[ROUND], []).append(row[column])
        return {number: median(values) for number, values in rounds.items()}

    ours, theirs = by_round(run), by_round(base)
    return [ours[number] / theirs[number] for number in ours if number in theirs]


def update_seconds(library: dict[str, Any], column: int = WALL) -> list[float]:
    """What a mask update adds to a step: each step that has one, less the median step between updates."""
    pruned = [run for name, run in library.items() if name.isdigit()]
    between = [value for run in pruned for value in steps(run, column, update=False)]
    updates = [value for run in pruned for value in steps(run, column, update=True)]
    return [value - median(between) for value in updates] if between else []


def whole_ratio(run: dict[str, Any], base: dict[str, Any]) -> float:
    """Seconds of a whole `fit` over those of another, per step."""
    return (run["seconds"] / len(run["steps"])) / (base["seconds"] / len(base["steps"]))


def steady_ratio(run: dict[str, Any], base: dict[str, Any]) -> float | None:
    """Mean step with all mask updates over the mean step of another, over the rounds after the first of both."""
    last = min(run["steps"][-1][ROUND], base["steps"][-1][ROUND])
    ours, theirs = ([row[WALL] for row in one["steps"] if 0 < row[ROUND] <= last] for one in (run, base))
    return fmean(ours) / fmean(theirs) if ours and theirs else None


# Words ----------------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float], unit: float = 1.0, digits: int = 1) -> str:
    """Median and quartiles, as `28.1 (27.9-28.6)`."""
    if not values:
        return "-"
    low, middle, high = (f"{value * unit:.{digits}f}" for value in quantiles(values))
    return f"{middle} ({low} to {high})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are figures."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine() -> str:
    """Processor, cores, memory and versions; nothing that names the machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    packages = ("tensorflow", "keras", "tf_keras", "tensorflow-model-optimization", "numpy", "prunekit")
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    return f"{name}, {cores} cores, {platform.system()}, Python {platform.python_version()}, {versions}"


def training_rows(model: dict[str, Any]) -> list[list[str]]:
    """One row per contestant."""
    rows = []
    for library, runs in model["trainings"].items():
        for name, run in runs.items():
            row = [
                NAMES.get((library, name)) or f"{LIBRARIES[library]}, frequency {name}",
                spread(steps(run, update=False), 1e3),
                spread(steps(run, update=True), 1e3),
            ]
            rows.append([*row, *comparison(run, runs["plain"]), f"{run['seconds']:.1f} s, {len(run['steps'])} steps"])
    return rows


def comparison(run: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """Four cells: a training beside the one that is not pruned."""
    if run is base:
        return ["1"] * 4
    whole = f"{whole_ratio(run, base):.2f}" if comparable(run, base) else "-"
    between = [spread(ratios(run, base, column), digits=3) for column in (WALL, CPU)]
    steady = steady_ratio(run, base)
    return [*between, "-" if steady is None else f"{steady:.2f}", whole]


def comparable(run: dict[str, Any], base: dict[str, Any]) -> bool:
    """Whether two trainings are as long as one another."""
    return len(run["steps"]) == len(base["steps"])


def verdicts(name: str, model: dict[str, Any]) -> list[list[str]]:
    """Rows of (what was wanted, bound, measured, the same of two unpruned models, met or why not)."""
    ours, theirs = model["trainings"]["prunekit"], model["trainings"]["tfmot"]
    title = TITLES[name].split(",")[0].split(" with")[0]
    mine, other = update_seconds(ours), update_seconds(theirs)
    speedup = median(other) / median(mine) if mine and other else None
    met = (
        "not measured"
        if speedup is None
        else "yes"
        if speedup >= WANTED["update"]
        else f"no. {REASONS['update'][name]}"
    )
    rows = [[f"{title}: mask update, times faster", f"{WANTED['update']:g}", number(speedup), "", met]]

    def between(column: int) -> Callable[..., float | None]:
        return lambda run, base: median(ratios(run, base, column)) if ratios(run, base, column) else None

    for key, what, bound, measure in (
        ("step", "step between updates, ratio of times", WANTED["step"][name], between(WALL)),
        ("step", "step between updates, ratio of CPU seconds", WANTED["step"][name], between(CPU)),
        ("whole", "whole training at frequency 100, ratio of times", WANTED["whole"][name], whole_ratio),
        ("steady", "the same without its first five steps", WANTED["whole"][name], steady_ratio),
    ):
        value, control = (measure(ours[one], ours["plain"]) for one in ("100", "control"))
        if value is None or control is None:
            met = "not measured in so few steps"
        elif abs(control - 1) > (bound - 1) / 2:
            met = "undecided: two models that are not pruned differ by as much"
        else:
            met = "yes" if value <= bound else f"no. {REASONS[key][name]}"
        rows.append([f"{title}: {what}", f"{bound:g}", number(value), number(control), met])
    return rows


def number(value: float | None) -> str:
    """Two decimals, or a dash for what was not measured."""
    return "-" if value is None else f"{value:.2f}"


def memory_rows(memories: dict[str, Any]) -> list[list[str]]:
    """One row per configuration, with what pruning adds."""
    rows = []
    for name, row in memories.items():
        library, kind = name.split()
        added = row["peak"] - memories[f"{library} plain"]["peak"]
        label = NAMES[library, "plain"] if kind == "plain" else f"{LIBRARIES[library]}, frequency 2"
        rows.append([label, f"{row['before']:.0f}", f"{row['peak']:.0f}", "" if kind == "plain" else f"{added:+.0f}"])
    return rows


def selection_rows(found: dict[str, Any]) -> list[list[str]]:
    """One row per way, beside np.partition."""
    base = found["seconds"]["np.partition"]
    return [
        [name, spread(values, 1e3), spread([a / b for a, b in zip(values, base, strict=True)], digits=2)]
        for name, values in found["seconds"].items()
    ]


def loop_rows(seconds: dict[str, list[float]]) -> list[list[str]]:
    """One row per way to train, beside plain `fit`, turn by turn."""
    base = seconds["model.fit"]
    return [
        [name, spread(values, 1e3), spread([a / b for a, b in zip(values, base, strict=True)], digits=3)]
        for name, values in seconds.items()
    ]


def second_order(found: dict[str, Any]) -> str:
    """Levenberg-Marquardt by sparsity, and beside Adam."""
    dense, race = found["seconds"]["dense"], found["beside_adam"]
    rows = []
    for name, values in found["seconds"].items():
        ratios = spread([a / b for a, b in zip(values, dense, strict=True)], digits=2)
        rows.append([name, f"{found['sizes'][name]:,}", spread(values, 1e3), ratios])
    adam = (
        f"not in {race['limit']:.0f} s"
        if race["adam"] is None
        else f"{race['adam']:.1f} s, {race['adam'] / race['second_order']:.1f} times as long"
    )
    return "\n\n".join(
        [
            "## Second-order steps",
            f"`LevenbergMarquardt` on a perceptron 4-48-48-1 with {found['residuals']:,} residuals; a step, in turns.",
            table(["", "weights that take part", "ms", "to dense"], rows),
            f"On a perceptron 4-12-12-1 ({race['weights']} weights, {race['residuals']} residuals) {race['steps']} "
            f"steps reach half a sum of squares of {race['loss']:.2g} in {race['second_order']:.1f} s. Adam on all "
            f"examples, at the best of three learning rates, from the same start to the same loss: {adam}.",
        ]
    )


def gradient_tables(found: dict[str, Any]) -> list[str]:
    """Gradients of single examples beside a loop, eagerly and compiled."""
    parts = [
        "## Gradients of single examples",
        f"fashion-cnn, batch {found['batch']}; in turns. Wanted: 5 times faster than a loop over batches of one.",
    ]
    for title, seconds in found["seconds"].items():
        loop = seconds["a loop over batches of one"]
        rows = [
            [name, spread(values, 1e3), spread([b / a for a, b in zip(values, loop, strict=True)])]
            for name, values in seconds.items()
        ]
        parts.append(table([title, "ms", "times faster"], rows))
    return parts


def model_section(name: str, model: dict[str, Any]) -> str:
    """Everything about one model."""
    updates = [
        [LIBRARIES[library], spread(update_seconds(runs), 1e3), spread(update_seconds(runs, CPU), 1e3)]
        for library, runs in model["trainings"].items()
    ]
    head = [
        "", "step between updates, ms", "step with an update, ms", "between, ratio of times",
        "between, ratio of CPU seconds", "mean step, ratio", "whole fit, ratio", "whole fit",
    ]  # fmt: skip
    parts = [
        f"## {TITLES[name]}",
        table(head, training_rows(model)),
        "One mask update: what it adds to the step that it is part of.",
        table(["", "ms", "CPU ms"], updates),
    ]
    if "memories" in model:
        head = ["", "before training, MiB", "peak, MiB", "added by pruning, MiB"]
        parts += ["Peak resident memory, each in a process of its own:", table(head, memory_rows(model["memories"]))]
    return "\n\n".join(parts)


def document(raw: dict[str, Any]) -> str:
    """The page."""
    cores = os.cpu_count() or 1
    busy = max(raw["load_before"], raw["load_after"]) > cores * 1.5
    notes = [
        "# Benchmarks",
        f"Written by `{raw['command']}` in {raw['minutes']:.1f} minutes on {datetime.date.today():%Y-%m-%d}. "
        "Do not edit: run it again.",
        f"Machine: {machine()}. Load average {raw['load_before']:.1f} before and {raw['load_after']:.1f} after"
        + (
            ": **other programs were using the machine**, so that times are longer than on a quiet one, and "
            "ratios of times uncertain by as much as the second unpruned model differs from the first. Seconds of CPU "
            "time suffer less."
            if busy
            else "."
        ),
    ]
    if "--smoke" in raw["command"]:
        notes.append("**Tiny models and a few steps, to see that the program runs: the figures say nothing.**")
    wanted = [row for name, model in raw["models"].items() for row in verdicts(name, model)]
    parts = [
        *notes,
        "Each figure is a median, with the quartiles behind it. Ratios are to the unpruned model of the same library.",
        "## Wanted and measured",
        table(["", "wanted", "measured", "unpruned twice", "met"], wanted),
        *(model_section(name, model) for name, model in raw["models"].items()),
        "## Finding the largest fifth of float32 numbers",
        f"{raw['selection']['size']:,} numbers, in turns. `keep_largest` gives the mask, exact in its count with ties "
        "broken by position; the others give the sorted or partitioned numbers only. Wanted: 2 times `np.partition`.",
        table(["", "ms", "to np.partition"], selection_rows(raw["selection"])),
        "## Ways to train the perceptron",
        "A step between updates of the masks, as part of an epoch of 20; pruned at sparsity 0.9. In turns.",
        table(["", "ms", "to model.fit"], loop_rows(raw["loops"]["seconds"])),
        second_order(raw["least_squares"]),
        *gradient_tables(raw["gradients"]),
        "## Measuring what updates change",
        f"A step of fashion-cnn at batch {raw['changes']['batch']}, as part of an epoch of ten. In turns. Wanted: 1.15 "
        "for measuring, in the compiled step, what each update changes in each weight.",
        table(["", "ms", "to model.fit"], loop_rows(raw["changes"]["seconds"])),
        prefix_section(raw["prefix"]),
        parts_section(raw["parts"]),
        *([scale_section(raw["scale"], raw["picture"])] if "scale" in raw else []),
        *([backends_section(raw["backends"])] if "backends" in raw else []),
        START_UP,
        "Wanted: `--help` in 0.4 s, `check` well under a second.",
        table(["", "s"], [[f"`{name}`", spread(values, digits=2)] for name, values in raw["startup"].items()]),
        "## How it is measured",
        METHOD,
    ]
    return "\n\n".join(parts) + "\n"


def replaced(page: str, sections: Sequence[str], command: str) -> str:
    """The page with sections that were measured by themselves in the place of those of the same heading.

    One that is not there yet stands before the start-up of the command line.
    """
    for section in sections:
        heading, _, text = section.partition("\n\n")
        source = f"Measured by `{command}` on {datetime.date.today():%Y-%m-%d}, apart from the rest: {machine()}."
        before, found, after = page.partition(f"{heading}\n")
        start = after.index("\n## ") + 1 if found else 0
        if not found:
            before, _, after = page.partition(START_UP)
            after = f"{START_UP}{after}"
        page = f"{before}{heading}\n\n{source}\n\n{text}\n\n{after[start:]}"
    return page


METHOD = """\
- Real `fit` calls with callbacks, on batches that are in memory. A step's time runs from the end of the batch before to
  the end of its own last callback, so that it includes the data, the compiled step, the callbacks and mask updates.
- All models of a library are trained side by side in one process, one thread each, of which exactly one runs at a time:
  each gets five steps, then the next one has its turn, and each round another one begins. The two libraries' processes
  take rounds alternately. A ratio compares steps of the same round, so that a machine that slows down slows all.
  The second unpruned model shows what the method makes of no difference at all.
- CPU seconds are those of all cores together, of the process. They show the work that is added, and hardly change where
  other programs take their share of the machine.
- Pruned models follow `PolynomialDecay` from 0 to 0.9 over their whole training, with `PruningCallback` and with
  `prune_low_magnitude` and `UpdatePruningStep`, each with its library's defaults otherwise.
- "Whole fit" runs from the call of `fit` to the end of the last callback, first trace and the making of masks included;
  "mean step" leaves the first five steps out.
- Peak memory is `ru_maxrss` after eight steps with four mask updates."""

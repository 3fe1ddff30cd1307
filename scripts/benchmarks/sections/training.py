"""One section per model: pruned and unpruned trainings with prunekit and tensorflow-model-optimization, in turns."""

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from benchmarks.contestants import memory
from benchmarks.figures import number, spread
from benchmarks.tables import table
from benchmarks.trainings import (
    CPU,
    LIBRARIES,
    WALL,
    Plan,
    ratios,
    steady_ratio,
    steps,
    trainings,
    update_seconds,
    whole_ratio,
)
from benchmarks.workers import Workers

TITLES = {
    "perceptron": "Perceptron 784-2048-2048-10, 5.8 M weights, batch 64, Adam",
    "resnet20": "ResNet-20 with batch normalisation on 32x32x3, 0.27 M weights, batch 32, SGD with momentum",
}
NAMES = {
    ("prunekit", "plain"): "Keras 3, not pruned",
    ("prunekit", "control"): "Keras 3, not pruned, second model",
    ("tfmot", "plain"): "tf_keras, not pruned",
}
WANTED = {
    "update": 15.0,
    "step": {"perceptron": 1.10, "resnet20": 1.03},
    "whole": {"perceptron": 1.15, "resnet20": 1.04},
}
# Reasons why a bound may not be met, by kind of bound and model.
REASONS = {
    "update": {
        "perceptron": "The update does not sort, but reads weights, importances, masks and slots several times.",
        "resnet20": "The model has 22 small weights, whose masks NumPy calculates. Most of the time is the overhead of "
        "about fifteen operations per weight, which read and write masks, weights and slots; it does not depend on the "
        "weight's size.",
    },
    "step": {
        "perceptron": "Each step reads and writes gradients and weights a second time, 18 bytes per weight, and memory "
        "bandwidth limits the steps of this model. The section on the parts of enforcement has the cost of each part, "
        "and why prunekit leaves none out.",
        "resnet20": "Masking adds two small operations per weight to each step.",
    },
    "whole": {
        name: "Includes work that is done once per training, regardless of its length: tracing the training step with "
        "the masks in it."
        for name in TITLES
    },
    "steady": {name: "Steps between updates and mask updates together." for name in TITLES},
}

# (contestant, frequency or None, steps) by thoroughness, model and library. Updates of tensorflow-model-optimization
# take seconds, so that its pruned contestants get fewer steps: what is compared is one step and one update.
PLANS: dict[str, dict[str, Plan]] = {
    "full": {
        "perceptron": {
            "prunekit": [
                ("plain", None, 300),
                ("control", None, 300),
                ("100", 100, 300),
                ("10", 10, 150),
                ("1", 1, 30),
            ],
            "tfmot": [("plain", None, 200), ("100", 100, 200), ("10", 10, 50), ("1", 1, 10)],
        },
        "resnet20": {
            "prunekit": [
                ("plain", None, 200),
                ("control", None, 200),
                ("100", 100, 200),
                ("10", 10, 100),
                ("1", 1, 30),
            ],
            "tfmot": [("plain", None, 100), ("100", 100, 100), ("10", 10, 50), ("1", 1, 20)],
        },
    },
    "quick": {
        "perceptron": {
            "prunekit": [("plain", None, 100), ("control", None, 100), ("100", 100, 100), ("10", 10, 50), ("1", 1, 10)],
            "tfmot": [("plain", None, 50), ("10", 10, 20), ("1", 1, 10)],
        },
        "resnet20": {
            "prunekit": [("plain", None, 25), ("control", None, 25), ("100", 100, 25), ("10", 10, 25), ("1", 1, 10)],
            "tfmot": [("plain", None, 20), ("10", 10, 20), ("1", 1, 10)],
        },
    },
}


def memories(workers: Workers, model: str, smoke: bool) -> dict[str, Any]:
    """configuration -> {"before": training began, "peak": highest}, resident memory in MiB; two at a time."""
    configurations = [(library, name) for library in LIBRARIES for name in ("plain", "pruned")]
    tasks = [
        {
            "library": library, "model": model, "smoke": smoke,
            "contestant": (name, None if name == "plain" else 2, 8),
        }
        for library, name in configurations
    ]  # fmt: skip
    found = workers.map(memory, tasks, at_once=2)
    return {f"{library} {name}": row for (library, name), row in zip(configurations, found, strict=True)}


def plan_of(model: str, quick: bool, smoke: bool) -> Plan:
    """The trainings of a model."""
    plan = PLANS["quick" if quick else "full"][model]
    if smoke:
        return {library: [(n, f, min(steps, 12)) for n, f, steps in rows] for library, rows in plan.items()}
    return plan


def collect(workers: Workers, model: str, quick: bool, smoke: bool) -> Iterator[tuple[str, Any]]:
    """(title, figures) of each thing measured on one model."""
    yield "trainings", trainings(workers, model, plan_of(model, quick, smoke), smoke)
    # Four processes that trace ResNet-20 take a minute: not in a quick run.
    if not quick or model == "perceptron":
        yield "memories", memories(workers, model, smoke)


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
    """Returns four cells that compare a training with the unpruned training."""
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
    """Returns rows of (figure, bound, measured, the same figure of two unpruned models, met or the reason)."""
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
            met = "undecided: the two unpruned models differ by a similar ratio"
        else:
            met = "yes" if value <= bound else f"no. {REASONS[key][name]}"
        rows.append([f"{title}: {what}", f"{bound:g}", number(value), number(control), met])
    return rows


def memory_rows(memories: dict[str, Any]) -> list[list[str]]:
    """One row per configuration, with what pruning adds."""
    rows = []
    for name, row in memories.items():
        library, kind = name.split()
        added = row["peak"] - memories[f"{library} plain"]["peak"]
        label = NAMES[library, "plain"] if kind == "plain" else f"{LIBRARIES[library]}, frequency 2"
        rows.append([label, f"{row['before']:.0f}", f"{row['peak']:.0f}", "" if kind == "plain" else f"{added:+.0f}"])
    return rows


def section(name: str, model: dict[str, Any]) -> str:
    """The section of a model."""
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
        "Time that one mask update adds to its step:",
        table(["", "ms", "CPU ms"], updates),
    ]
    if "memories" in model:
        head = ["", "before training, MiB", "peak, MiB", "added by pruning, MiB"]
        parts += ["Peak resident memory, measured in one process per row:", table(head, memory_rows(model["memories"]))]
    return "\n\n".join(parts)

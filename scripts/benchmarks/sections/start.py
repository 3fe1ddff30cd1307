"""Time before the first step: one-shot pruning, and what callbacks add to a `fit` of one step."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.figures import number, spread, verdict
from benchmarks.first_steps import fits_of_one_step
from benchmarks.models import FINAL_SPARSITY, MODELS, mobilenetv2
from benchmarks.tables import table
from benchmarks.trainings import LIBRARIES, Plan, trainings, update_seconds
from benchmarks.workers import Workers

BATCH = 8
CLASSES = 10
# Number of measurements of each model; each runs in a new process.
ONE_SHOT = {"MobileNetV2": 3, "NASNetMobile": 3}
FITS = {"MobileNetV2": 3, "resnet20": 3}
TITLES = {"MobileNetV2": "MobileNetV2", "NASNetMobile": "NASNetMobile", "resnet20": "ResNet-20"}
# Most seconds of `pk.prune`.
WANTED_ONE_SHOT = {"MobileNetV2": 0.5, "NASNetMobile": 2.0}
# Most seconds that a second callback adds, or a second `pk.prune` takes, on a model that was pruned before.
WANTED_AGAIN = {"MobileNetV2": 1.0}
# Most that the first callback adds, in multiples of the time that the first unpruned `fit` takes to trace.
WANTED_FIRST = 1.3
# Least ratio of the seconds of a mask update by tensorflow-model-optimization to those by prunekit.
WANTED_UPDATE = 1.0
UPDATES: Plan = {library: [("10", 10, 60), ("1", 1, 20)] for library in LIBRARIES}


# The worker -----------------------------------------------------------------------------------------------------------


def network(name: str, smoke: bool) -> Any:
    """A model with weights drawn at random; in a smoke test a tiny perceptron, whatever the name."""
    import keras

    keras.utils.set_random_seed(0)
    if smoke:
        build, *_, width = MODELS["perceptron"]
        return build(keras, width=width)
    if name in MODELS:
        return MODELS[name][0](keras)
    if name == "MobileNetV2":
        return mobilenetv2(keras)
    return keras.applications.NASNetMobile(weights=None, classes=CLASSES)


def sizes(model: Any) -> dict[str, int]:
    """Numbers of weights and of kernels, which are the trainable variables of two axes and more."""
    kernels = [variable for variable in model.trainable_variables if len(variable.shape) > 1]
    return {"weights": model.count_params(), "kernels": len(kernels)}


def seconds_of(function: Callable[..., Any], *arguments: Any, **options: Any) -> float:
    """Seconds of a call."""
    began = time.perf_counter()
    function(*arguments, **options)
    return time.perf_counter() - began


def measure_one_shot(name: str, smoke: bool) -> dict[str, Any]:
    """Seconds of `pk.prune`: first in its process, again on the same model, and on another model of the same kind."""
    import prunekit as pk

    # Import before the time is measured.
    prune, model = pk.prune, network(name, smoke)
    first = seconds_of(prune, model, FINAL_SPARSITY / 2)
    again = seconds_of(prune, model, FINAL_SPARSITY)
    another = seconds_of(prune, network(name, smoke), FINAL_SPARSITY / 2)
    return {**sizes(model), "first": first, "again": again, "another": another}


def measure_fits(name: str, smoke: bool, pruned: bool) -> dict[str, Any]:
    """Seconds of the first and the second `fit` of one step of a model, each with a new callback where it is pruned."""
    import prunekit as pk

    callback, schedule, model = pk.PruningCallback, pk.schedules.ConstantSparsity(FINAL_SPARSITY), network(name, smoke)
    rows = fits_of_one_step(model, lambda: [callback(schedule)] if pruned else [], BATCH, CLASSES)
    return {**sizes(model), "seconds": [row["fit"] for row in rows]}


# The page -------------------------------------------------------------------------------------------------------------


def collect(workers: Workers, smoke: bool) -> dict[str, Any]:
    """Figures by turns: of one-shot pruning, of fits and of mask updates."""
    measured = measure_models(workers, smoke)
    if smoke:
        runs = trainings(workers, "perceptron", {library: [("10", 10, 12)] for library in LIBRARIES}, smoke)
    else:
        runs = trainings(workers, "resnet20", UPDATES, smoke)
    return {**measured, "updates": {library: update_seconds(rows) for library, rows in runs.items()}}


def measure_models(workers: Workers, smoke: bool) -> dict[str, Any]:
    """Figures of one-shot pruning and of fits; in a smoke test all names share the figures of one tiny model."""

    def one_shot(name: str) -> dict[str, Any]:
        return workers.call(measure_one_shot, {"name": name, "smoke": smoke})

    def fits(name: str) -> dict[str, dict[str, Any]]:
        return {
            kind: workers.call(measure_fits, {"name": name, "smoke": smoke, "pruned": kind == "pruned"})
            for kind in ("plain", "pruned")
        }

    if smoke:
        once, both = one_shot("MobileNetV2"), fits("MobileNetV2")
        return {"one_shot": {name: [once] for name in ONE_SHOT}, "fits": {name: [both] for name in FITS}}
    found: dict[str, dict[str, list[Any]]] = {"one_shot": {}, "fits": {}}
    for turn in range(max(*ONE_SHOT.values(), *FITS.values())):
        for kind, measure, turns in (("one_shot", one_shot, ONE_SHOT), ("fits", fits, FITS)):
            for name in (name for name, most in turns.items() if turn < most):
                found[kind].setdefault(name, []).append(measure(name))
    return found


def fit_figures(rows: list[dict[str, dict[str, Any]]]) -> dict[str, list[float]]:
    """Seconds and ratios of each turn: what tracing takes, and what the first and the second callback add.

    Args:
        rows: The figures of `measure_fits` for "plain" and "pruned", in each turn.
    """
    pairs = [(row["plain"]["seconds"], row["pruned"]["seconds"]) for row in rows]
    tracing = [plain[0] - plain[1] for plain, _ in pairs]
    first, second = ([pruned[number] - plain[number] for plain, pruned in pairs] for number in range(2))
    ratios = [added / traced for added, traced in zip(first, tracing, strict=True)]
    return {"tracing": tracing, "first": first, "second": second, "ratio": ratios}


def verdicts(found: dict[str, Any]) -> list[list[str]]:
    """Returns rows of (figure, bound, median, verdict)."""
    rows = []
    for name, most in WANTED_ONE_SHOT.items():
        value = median(row["first"] for row in found["one_shot"][name])
        rows.append([f"{TITLES[name]}: one-shot `pk.prune`, s", most, value])
    for name, most in WANTED_AGAIN.items():
        value = median(row["again"] for row in found["one_shot"][name])
        rows.append([f"{TITLES[name]}: `pk.prune` of a model that was pruned before, s", most, value])
    for name in FITS:
        figures = {key: median(values) for key, values in fit_figures(found["fits"][name]).items()}
        if name in WANTED_AGAIN:
            rows.append([f"{TITLES[name]}: the second callback adds, s", WANTED_AGAIN[name], figures["second"]])
        rows.append([f"{TITLES[name]}: the first callback adds, ratio to tracing", WANTED_FIRST, figures["ratio"]])
    written = [[what, f"at most {most:g}", number(value), verdict(value, most)] for what, most, value in rows]
    speedup = update_speedup(found["updates"])
    met = "not measured" if speedup is None else "met" if speedup >= WANTED_UPDATE else "**not met**"
    what = "ResNet-20: mask update, times as fast as tensorflow-model-optimization's"
    return [*written, [what, f"at least {WANTED_UPDATE:g}", number(speedup), met]]


def update_speedup(updates: dict[str, list[float]]) -> float | None:
    """Median mask update of tensorflow-model-optimization over that of prunekit; None where one was not measured."""
    ours, theirs = updates["prunekit"], updates["tfmot"]
    return median(theirs) / median(ours) if ours and theirs else None


def title(name: str, row: dict[str, Any]) -> str:
    """A model with the numbers of its weights and kernels."""
    return f"{TITLES[name]}, {row['weights'] / 1e6:.2f} M weights, {row['kernels']} kernels"


def section(found: dict[str, Any]) -> str:
    """The section of the page."""
    one_shot = [
        [title(name, rows[0]), *(spread([row[key] for row in rows], digits=2) for key in ("first", "again", "another"))]
        for name, rows in found["one_shot"].items()
    ]
    fits, added = [], []
    for name, rows in found["fits"].items():
        label, figures = title(name, rows[0]["plain"]), fit_figures(rows)
        cells = [[row[kind]["seconds"][number] for row in rows] for kind in ("plain", "pruned") for number in range(2)]
        fits.append([label, *(spread(values, digits=2) for values in cells)])
        added.append([label, *(spread(figures[key], digits=2) for key in ("tracing", "first", "ratio", "second"))])
    updates = [[LIBRARIES[library], spread(values, 1e3)] for library, values in found["updates"].items()]
    return "\n\n".join(
        [
            "## Start: time before the first step",
            table(["", "wanted", "measured", "verdict"], verdicts(found)),
            f"Seconds of one-shot `pk.prune` without imports: the first call in a process, to sparsity "
            f"{FINAL_SPARSITY / 2:g}; a second call on the same model, to {FINAL_SPARSITY:g}; and a call on another "
            f"model of the same kind, to {FINAL_SPARSITY / 2:g}. MobileNetV2 has alpha 0.35 and inputs 96x96x3, "
            "NASNetMobile inputs 224x224x3.",
            table(["", "first", "the same model again", "another model"], one_shot),
            f"Seconds of a `fit` of one step, batch {BATCH}, Adam, compiled with Keras's defaults, in a process that "
            "has already trained another model. The pruned `fit` has a `PruningCallback` that chooses masks "
            f"of sparsity {FINAL_SPARSITY:g} before the step; the second pruned `fit` has a new callback on the "
            "same model.",
            table(["", "first, not pruned", "second, not pruned", "first, pruned", "second, pruned"], fits),
            "Tracing time is the time of the first unpruned `fit` minus the time of the second unpruned `fit`. The "
            "time that a callback adds is the time of a pruned `fit` minus the time of the unpruned `fit` with the "
            "same number in the same turn.",
            table(["", "tracing, s", "first callback adds, s", "ratio to tracing", "second adds, s"], added),
            "Time that one mask update of ResNet-20 adds to its step, measured as in the section on ResNet-20, in a "
            "separate training.",
            table(["", "ms"], updates),
        ]
    )

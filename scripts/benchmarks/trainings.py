"""Runs the trainings of contestants.py in turns, and computes medians and ratios of their steps."""

import contextlib
from statistics import fmean, median
from typing import Any

from benchmarks.contestants import take_turns
from benchmarks.workers import Workers

STEPS_PER_TURN = 5
# (contestant, frequency or None, steps) of each training, by library.
Plan = dict[str, list[tuple[str, int | None, int]]]
LIBRARIES = {"prunekit": "prunekit", "tfmot": "tensorflow-model-optimization"}

ROUND, WALL, CPU, UPDATE = range(4)


def trainings(workers: Workers, model: str, plan: Plan, smoke: bool) -> dict[str, Any]:
    """library -> contestant -> {"seconds": of the whole fit, "steps": rows as in contestants.Contestant}.

    Each library runs in its own process with its own Keras; the rounds alternate between the processes.
    """
    groups = [list(plan)] if workers.shared else [[library] for library in plan]
    found: dict[str, Any] = {library: {} for library in plan}
    with contextlib.ExitStack() as open_workers:
        running = [
            open_workers.enter_context(workers.worker()).items(
                take_turns,
                model=model,
                smoke=smoke,
                contestants=[(library, *row) for library in group for row in plan[library]],
                per_turn=2 if smoke else STEPS_PER_TURN,
            )
            for group in groups
        ]
        while running:
            for items in list(running):
                try:
                    next(items)
                except StopIteration as end:
                    running.remove(items)
                    for row in end.value:
                        found[row.pop("library")][row.pop("name")] = row
    return found


# Arithmetic -----------------------------------------------------------------------------------------------------------


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
    """Returns the ratio of the seconds per step of two whole `fit` calls."""
    return (run["seconds"] / len(run["steps"])) / (base["seconds"] / len(base["steps"]))


def steady_ratio(run: dict[str, Any], base: dict[str, Any]) -> float | None:
    """Mean step with all mask updates over the mean step of another, over the rounds after the first of both."""
    last = min(run["steps"][-1][ROUND], base["steps"][-1][ROUND])
    ours, theirs = ([row[WALL] for row in one["steps"] if 0 < row[ROUND] <= last] for one in (run, base))
    return fmean(ours) / fmean(theirs) if ours and theirs else None

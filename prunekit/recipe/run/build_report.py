"""Builds a run's report, including the facts besides the recipe that its result depends on."""

import dataclasses
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.files.digests import model_digest, weight_arrays
from prunekit.anatomy.records.reports import Skipped
from prunekit.core.runtime import environment
from prunekit.delivery.reports.metrics import Metric
from prunekit.delivery.reports.plot_data import MOST_HISTOGRAMS, weight_histogram
from prunekit.delivery.reports.run_report import RunReport, compressed_sizes
from prunekit.operations.export import runtime_advice
from prunekit.recipe.run.preparation import Prepared
from prunekit.recipe.state.compile_settings import accuracy_name
from prunekit.recipe.state.run_inputs import inspected
from prunekit.recipe.state.run_state import RunState
from prunekit.sparsity.schedules import SCHEDULES


def report_of(
    prepared: Prepared, model: keras.Model, record: RunState, hashes: dict[str, str], metrics: Sequence[Metric]
) -> RunReport:
    """Returns the report of a finished run.

    Args:
        prepared: The run.
        model: The model in its final state.
        record: Results of the steps.
        hashes: Digests of recipe, model and data at the start of the run.
        metrics: The metrics that the run measured, the main one first.
    """
    recipe = prepared.recipe
    found = inspected(model, prepared.data)
    after = dataclasses.replace(
        found,
        targets=tuple(record.targets),
        skipped=_skipped(record),
        events=tuple(record.events),
        notes=(*found.notes, *record.notes),
    )
    now = weight_arrays(model)
    return RunReport(
        title=recipe.name,
        recipe=recipe.model_dump(mode="json", exclude_none=True),
        versions=versions(),
        seed=recipe.seed,
        steps=tuple(record.steps),
        before=record.before,
        after=after,
        metrics=_metrics(metrics, record),
        schedule=_schedule(prepared),
        events=tuple(record.events),
        curve=tuple(record.curve),
        exports=tuple(record.exports),
        expectations=tuple(record.expectations),
        histograms=_histograms(now, record),
        hashes={**hashes, "weights": model_digest(model)},
        notes=tuple(record.notes),
        advice=tuple(runtime_advice(after, model, record.before)),
        compressed=compressed_sizes(record.weights_before, now),
        changes=record.changes,
        measures=tuple(metric for metric in metrics if metric.name in record.metrics),
    )


def _metrics(metrics: Sequence[Metric], record: RunState) -> dict[str, float]:
    """Returns every metric as NAME_before and NAME_after; an accuracy of another name also as accuracy_before ..."""
    found = {f"{name}_before": value for name, value in record.metrics_before.items()}
    found |= {f"{name}_after": value for name, value in record.metrics.items()}
    accuracy = accuracy_name(metrics)
    if accuracy not in (None, "accuracy"):
        pairs = (("before", record.metrics_before), ("after", record.metrics))
        found |= {f"accuracy_{when}": values[accuracy] for when, values in pairs if accuracy in values}
    return found


def _skipped(record: RunState) -> tuple[Skipped, ...]:
    return tuple(item for name, item in record.skipped.items() if name not in record.targets)


def _schedule(prepared: Prepared) -> dict[str, Any] | None:
    """Returns type and fields of the first prune step's schedule, in optimizer updates; None without a schedule."""
    for schedule in (step.schedule for step in prepared.steps):
        if schedule is not None:
            kind = next(name for name, kind in SCHEDULES.items() if kind is type(schedule))
            return {"type": kind, **asdict(schedule)}  # type: ignore[call-overload]
    return None


def _histograms(now: Mapping[str, np.ndarray], record: RunState) -> dict[str, dict[str, Any]]:
    largest = sorted(record.targets, key=lambda name: -now[name].size)[:MOST_HISTOGRAMS]
    chosen = [name for name in now if name in largest and name in record.weights_before]
    return {name: weight_histogram(record.weights_before[name], now[name]) for name in chosen}


def device_notes(record: RunState) -> list[str]:
    """Returns notes on how this machine's devices affect the reproducibility of the run."""
    if not any(step["history"] for step in record.steps) or all(
        device.kind == "CPU" for device in environment.devices()
    ):
        return []
    return [
        "Trained with a visible GPU, which may add numbers in another order each time: the same recipe and seed give "
        "the same bytes of weights on processors only."
    ]


def versions() -> dict[str, str]:
    """Returns the facts that a run's result depends on besides the recipe, such as package versions."""
    packages = environment.versions()
    taking_part = ("python", "prunekit", "keras", "tensorflow", "numpy")
    return {
        **{name: packages[name] or "not installed" for name in taking_part},
        "backend": keras.backend.backend(),
        "platform": platform.platform(),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores{_threads()}",
    }


def _threads() -> str:
    # The number of threads changes the order of summation, and so the rounding.
    asked = os.environ.get("TF_NUM_INTRAOP_THREADS")
    return f", TF_NUM_INTRAOP_THREADS={asked}" if asked else ""

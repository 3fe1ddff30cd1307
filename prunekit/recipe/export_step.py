"""The handler of the step kind export."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from prunekit.delivery.export import export
from prunekit.recipe.compile_settings import OutputMetrics, output_names
from prunekit.recipe.datasets.parts import mapped
from prunekit.recipe.export_samples import SAMPLES, export_samples
from prunekit.recipe.run_inputs import RunInputs
from prunekit.recipe.step_handler import PreparedStep, StepHandler, StepResult, require_backend
from prunekit.recipe.workspace import Workspace


class ExportStep(StepHandler[PreparedStep]):
    """Writes the current model in each format, and compares each file with the model."""

    def prepare(self, settings: Any, run: RunInputs) -> PreparedStep:
        """Returns the step.

        Raises:
            RecipeError: A format needs another backend, or there are no inputs to compare a file on.
        """
        for name in settings.formats:
            if name != "keras":
                require_backend(("tensorflow",), f"the format {name}")
        export_samples(run.model, run.data, run.recipe.seed)
        return PreparedStep(settings)

    def run(self, prepared: PreparedStep, workspace: Workspace) -> StepResult:
        """Writes the files into the exports of the run, and adds a row for each to the state."""
        settings, state = prepared.settings, workspace.state
        samples, labels = export_samples(workspace.model, workspace.run.data, workspace.run.recipe.seed)
        measure = measure_of_files(workspace)
        rows = []
        for number, name in enumerate(settings.formats):
            workspace.report_progress(number / len(settings.formats), f"exporting {name}")
            rows += export(
                workspace.model,
                workspace.exports,
                [name],
                samples,
                labels=labels,
                measure=measure,
                name=settings.name,
                keep_going=False,
            )
        state.exports += rows
        refused = ", ".join(f"{row.format} {row.status}" for row in rows if row.status != "ok")
        return StepResult(text=refused or "all formats written and checked")


def measure_of_files(workspace: Workspace) -> Callable[[list[np.ndarray]], dict[str, float]] | None:
    """Returns the function that measures a file's outputs on the test data; None without data."""
    run, model = workspace.run, workspace.model
    if run.data is None or run.compile is None:
        return None
    outputs = model(run.data.test.example[0], training=False)
    names = output_names(model, outputs)
    # Outputs of a file are in the order in which Keras flattens the model's outputs; mappings are sorted by name.
    order = tuple(sorted(names)) if names is not None and isinstance(outputs, Mapping) else names
    metrics = OutputMetrics(run.compile, order)
    labels = run.data.test.first(SAMPLES)[1]

    def measure(answers: list[np.ndarray]) -> dict[str, float]:
        return metrics(answers, mapped(lambda array: array[: len(answers[0])], labels))

    return measure

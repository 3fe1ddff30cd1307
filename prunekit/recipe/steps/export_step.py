"""The handler of the step kind export."""

from collections.abc import Callable
from typing import Any

import numpy as np

from prunekit.delivery.reports.rows import ExportRow
from prunekit.operations.export import export
from prunekit.recipe.state.export_samples import export_samples, measure_of_outputs
from prunekit.recipe.state.run_inputs import RunInputs
from prunekit.recipe.state.workspace import Workspace
from prunekit.recipe.steps.step_handler import PreparedStep, StepHandler, StepResult, require_backend


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
        rows: list[ExportRow] = []
        for number, name in enumerate(settings.formats):
            workspace.report_progress(number / len(settings.formats), f"exporting {name}")
            rows += export(
                workspace.model,
                workspace.exports,
                samples,
                [name],
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
    return measure_of_outputs(workspace.run, workspace.model)

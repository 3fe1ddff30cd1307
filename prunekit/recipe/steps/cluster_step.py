"""The handler of the step kind cluster."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from prunekit.anatomy.records.sections import Column, Section
from prunekit.operations.cluster import cluster
from prunekit.recipe.state.run_inputs import RunInputs
from prunekit.recipe.state.workspace import Workspace
from prunekit.recipe.steps.distillation import distillation, prepared_teacher
from prunekit.recipe.steps.prune_step import calibration_data
from prunekit.recipe.steps.step_handler import PlannedStep, PreparedStep, StepHandler, StepResult
from prunekit.techniques.cluster.after_training import Clusterable, clusterable
from prunekit.techniques.cluster.cluster_callback import ClusterCallback
from prunekit.techniques.cluster.options import ClusterOptions, ClusterTrainingKeywords


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedClusters(PreparedStep):
    """A cluster step, with the weights that it clusters.

    Attributes:
        options: Options as the recipe has them.
        weights: The weights.
        teacher: The teacher in the file that the step names, or None.
    """

    options: dict[str, Any]
    weights: tuple[Clusterable, ...]
    teacher: Any = None


class ClusterStep(StepHandler[PreparedClusters]):
    """Gives weights few different values."""

    def prepare(self, settings: Any, run: RunInputs) -> PreparedClusters:
        """Returns the step with its weights.

        Raises:
            ValueError: A pattern matches nothing, nothing is left, or a weight is a misfit.
            RecipeError: The teacher does not fit.
        """
        names = [field.name for field in dataclasses.fields(ClusterOptions)]
        options = {name: getattr(settings, name) for name in names}
        chosen = ClusterOptions(**options)
        if chosen.method != "auto":
            chosen.with_data(run.data)
        weights, teacher = tuple(clusterable(run.model, chosen)[0]), prepared_teacher(settings.distill, run)
        return PreparedClusters(settings, options=options, weights=weights, teacher=teacher)

    def planned(self, prepared: PreparedClusters, step: PlannedStep) -> PlannedStep:
        """Returns the entry of the plan, with a table of the weights."""
        columns = (
            Column("Weight", "name"),
            Column("Shape", "shape"),
            Column("Values", "count"),
            Column("Codebooks", "count"),
        )
        rows = [(one.target.name, one.channels.shape, one.clusters, one.channels.count) for one in prepared.weights]
        section = Section("Weights to cluster", columns, tuple(rows))
        return dataclasses.replace(step, sections=(section,))

    def run(self, prepared: PreparedClusters, workspace: Workspace) -> StepResult:
        """Clusters the weights of the workspace's model, and trains the values; zeros stay zero without masks."""
        workspace.remember_before()
        settings, own = prepared.settings, workspace.state.own
        # A resumed training has trained values by now.
        reports: list[Any] = [] if own.get("clustered") else [self._cluster(prepared, workspace)]
        own["clustered"] = True
        history: dict[str, list[float]] = {}
        if settings.epochs is not None:
            callback, taught = _callback(settings), distillation(settings.distill, prepared.teacher, workspace)
            with workspace.holding_masks(), workspace.noting():
                history = workspace.fit(settings.epochs, settings.learning_rate, callback, *taught)
            reports = [callback.report, *(one.report for one in taught)]
        sections = [part for one in reports for part in one.sections()]
        return StepResult(history=history, sections=sections, text=reports[0].verdict())

    def _cluster(self, prepared: PreparedClusters, workspace: Workspace) -> Any:
        """Clusters the weights and returns the report."""
        settings, options = prepared.settings, dict(prepared.options)
        data = calibration_data(workspace.run, settings.examples)
        with workspace.run.replicas.scope(), workspace.noting():
            report = cluster(
                workspace.model,
                options.pop("clusters"),
                data,
                memory=settings.memory,
                progress=workspace.step_progress("{}"),
                **options,
            )
        for note in report.notes:
            workspace.note(f"cluster: {note}")
        return report


def trained_clusters(workspace: Workspace) -> list[ClusterCallback]:
    """Returns the callback that trains the values of an earlier cluster step; [] if there is none."""
    earlier = [step.settings for step in workspace.run.recipe.steps[: workspace.step.index] if step.kind == "cluster"]
    return [_callback(one) for one in earlier[-1:]]


def _callback(settings: Any) -> ClusterCallback:
    names = ClusterTrainingKeywords.__annotations__
    return ClusterCallback(settings.clusters, **{name: getattr(settings, name) for name in names})

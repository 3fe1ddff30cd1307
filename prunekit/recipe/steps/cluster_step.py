"""The handler of the step kind cluster."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from prunekit.anatomy.records.sections import Column, Section
from prunekit.operations.cluster import cluster
from prunekit.recipe.state.run_inputs import RunInputs
from prunekit.recipe.state.workspace import Workspace
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
    """

    options: dict[str, Any]
    weights: tuple[Clusterable, ...]


class ClusterStep(StepHandler[PreparedClusters]):
    """Gives weights few different values."""

    def prepare(self, settings: Any, run: RunInputs) -> PreparedClusters:
        """Returns the step with its weights.

        Raises:
            ValueError: A pattern matches nothing, nothing is left, or a weight is a misfit.
        """
        names = [field.name for field in dataclasses.fields(ClusterOptions)]
        options = {name: getattr(settings, name) for name in names}
        chosen = ClusterOptions(**options)
        if chosen.method != "auto":
            chosen.with_data(run.data)
        return PreparedClusters(settings, options=options, weights=tuple(clusterable(run.model, chosen)[0]))

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
        """Clusters the weights of the workspace's model; masks hold by themselves, since zeros stay zero."""
        workspace.remember_before()
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
        return StepResult(sections=report.sections(), text=report.verdict())


def trained_clusters(workspace: Workspace) -> list[ClusterCallback]:
    """Returns the callback that trains the values of an earlier cluster step; [] if there is none."""
    earlier = [step.settings for step in workspace.run.recipe.steps[: workspace.step.index] if step.kind == "cluster"]
    names = ClusterTrainingKeywords.__annotations__
    return [ClusterCallback(one.clusters, **{name: getattr(one, name) for name in names}) for one in earlier[-1:]]

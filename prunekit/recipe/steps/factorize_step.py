"""The handler of the step kind factorize."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prunekit.operations.factorize import factorize
from prunekit.recipe.state.run_inputs import RunInputs
from prunekit.recipe.state.workspace import Workspace
from prunekit.recipe.steps.prune_step import calibration_data
from prunekit.recipe.steps.step_handler import PreparedStep, StepHandler, StepResult
from prunekit.techniques.factorize.factorizing import factorize_model
from prunekit.techniques.factorize.fitting import NO_INPUTS
from prunekit.techniques.factorize.options import FactorizeOptions, RankTarget

_OPTIONS = ("form", "correct_biases", "include", "exclude")


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedFactorize(PreparedStep):
    """A factorize step, with the ranks that the present weights alone would get."""

    ranks: tuple[str, ...]


class FactorizeStep(StepHandler[PreparedFactorize]):
    """Replaces layers by several of low rank."""

    def prepare(self, settings: Any, run: RunInputs) -> PreparedFactorize:
        """Returns the step with a stand-in: the model with the ranks that follow from its present weights alone.

        Raises:
            ValueError: A pattern matches nothing, no layer becomes smaller, or the target cannot be reached.
        """
        name, value = settings.target
        measure = {"bytes": "parameters", "latency": "macs"}.get(name, name)
        options = FactorizeOptions(**{one: getattr(settings, one) for one in _OPTIONS}, tolerance=None)
        found = factorize_model(run.model, RankTarget(measure, value), options, NO_INPUTS)
        ranks = tuple(f"{one.name} {' and '.join(map(str, one.ranks))}" for one in found.report.layers)
        return PreparedFactorize(settings, model=found.model, ranks=ranks)

    def plan_notes(self, prepared: PreparedFactorize) -> Sequence[str]:
        """Returns the ranks that the present weights alone would get."""
        if prepared.settings.rank is not None:
            return ()
        listed = ", ".join(prepared.ranks[:_LISTED]) + (" ..." if len(prepared.ranks) > _LISTED else "")
        return (f"factorize: the present weights alone, without data, would get the ranks {listed}.",)

    def run(self, prepared: PreparedFactorize, workspace: Workspace) -> StepResult:
        """Factorizes the model; the optimizer's state of the other weights is kept."""
        workspace.remember_before()
        settings = prepared.settings
        name, value = settings.target
        data = calibration_data(workspace.run, settings.examples)
        with workspace.run.replicas.scope(), workspace.noting():
            model, report = factorize(
                workspace.model,
                data=data,
                memory=settings.memory,
                progress=workspace.step_progress("{}"),
                **{name: value},
                **{one: getattr(settings, one) for one in _OPTIONS},
            )
        for note in report.notes:
            workspace.note(f"factorize: {note}")
        return StepResult(model=model, sections=report.sections(), text=report.verdict())


# Most weights whose ranks a note of the plan has.
_LISTED = 12

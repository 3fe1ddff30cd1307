"""The handlers of the step kinds remove_blocks and simplify, which return a model with fewer layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prunekit.delivery.reports.formatting import names
from prunekit.operations.remove_blocks import remove_blocks
from prunekit.operations.simplify import simplify
from prunekit.recipe.state.run_inputs import RunInputs
from prunekit.recipe.state.workspace import Workspace
from prunekit.recipe.steps.prune_step import calibration_data
from prunekit.recipe.steps.step_handler import PreparedStep, StepHandler, StepResult
from prunekit.techniques.shrink.graph.simplify_report import SimplifyReport
from prunekit.techniques.shrink.layers.block_report import BlocksReport

# Most blocks that a note of the plan names.
_LISTED_BLOCKS = 12


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedBlocks(PreparedStep):
    """A step that removes blocks, with those that it would remove from the model as it is now."""

    removed: tuple[str, ...]


class RemoveBlocksStep(StepHandler[PreparedBlocks]):
    """Removes the blocks that change the outputs least."""

    def prepare(self, settings: Any, run: RunInputs) -> PreparedBlocks:
        """Returns the step with a stand-in: the model without the blocks that its present weights select.

        Raises:
            ValueError: The model has no graph of layers or fewer blocks, or a pattern matches none.
        """
        model, report = _without_blocks(run.model, settings, run)
        return PreparedBlocks(settings, model=model, removed=report.removed)

    def plan_notes(self, prepared: PreparedBlocks) -> Sequence[str]:
        """Returns the blocks that would be removed now."""
        return [
            f"remove_blocks: which blocks change the outputs least follows from the weights at that time. Those of the "
            f"weights that the model has now: {names(prepared.removed, _LISTED_BLOCKS)}. Later steps are planned "
            "without them."
        ]

    def run(self, prepared: PreparedBlocks, workspace: Workspace) -> StepResult:
        """Removes the blocks, and goes on with the optimizer's state of the layers that stay."""
        workspace.remember_before()
        progress = workspace.step_progress("without {}")
        with workspace.run.replicas.scope(), workspace.noting():
            found = _without_blocks(workspace.model, prepared.settings, workspace.run, progress)
        return _result("remove_blocks", *found, workspace)


class SimplifyStep(StepHandler[PreparedStep]):
    """Removes what inference does not need."""

    def prepare(self, settings: Any, run: RunInputs) -> PreparedStep:
        """Returns the step with a stand-in: the simplified model.

        Raises:
            ValueError: The model's calls cannot be followed.
        """
        return PreparedStep(settings, model=simplify(run.model)[0])

    def run(self, prepared: PreparedStep, workspace: Workspace) -> StepResult:
        """Simplifies the model; its optimizer starts anew."""
        workspace.remember_before()
        with workspace.run.replicas.scope(), workspace.noting():
            found = simplify(workspace.model)
        return _result("simplify", *found, workspace)


def _without_blocks(model: Any, settings: Any, run: RunInputs, progress: Any = None) -> tuple[Any, BlocksReport]:
    data = calibration_data(run, settings.examples)
    return remove_blocks(
        model, settings.blocks, data, include=settings.include, exclude=settings.exclude, progress=progress
    )


def _result(kind: str, model: Any, report: BlocksReport | SimplifyReport, workspace: Workspace) -> StepResult:
    for note in report.notes:
        workspace.note(f"{kind}: {note}")
    return StepResult(model=model, sections=report.sections(), text=report.verdict())

"""Runs the steps of a prepared recipe in order, and records their results for the report."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras

from prunekit.anatomy.layers.model_weights import weights_in
from prunekit.anatomy.layers.targets import find_targets
from prunekit.core.runtime.model_copies import copy_assets
from prunekit.delivery.reports.rows import StageRow
from prunekit.recipe.datasets.parts import naming_damaged_file
from prunekit.recipe.run.preparation import Prepared
from prunekit.recipe.settings.schema import Step, described
from prunekit.recipe.state.checkpoint import Checkpoints, CheckpointState
from prunekit.recipe.state.compile_settings import accuracy_name
from prunekit.recipe.state.directory import KEPT, STAGES
from prunekit.recipe.state.models import rebuilt_model
from prunekit.recipe.state.progress import Listener, Progress, metric_texts
from prunekit.recipe.state.run_log import CurrentStep
from prunekit.recipe.state.run_state import RunState
from prunekit.recipe.state.stages import StageFiles
from prunekit.recipe.state.workspace import Workspace
from prunekit.recipe.steps.step_handler import StepResult, handler_of
from prunekit.techniques.pruning.training.held_masks import masks_of_zeros


class Execution:
    """One run of a recipe's steps on its model.

    Args:
        prepared: The prepared run.
        exports: Folder that export steps write into.
        listener: Function that receives the progress.
        only: Indices of the steps to run; None runs all. The selection does not change how a step runs.
        checkpoints: Checkpoints of the run; an existing checkpoint resumes the run.
        kept: Folder for what is kept until the run ends, such as files that are timed then; None keeps and times none.

    Attributes:
        workspace: What the steps work on.
    """

    def __init__(
        self,
        prepared: Prepared,
        exports: Path,
        listener: Listener | None = None,
        only: Sequence[int] | None = None,
        checkpoints: Checkpoints | None = None,
        kept: Path | None = None,
    ):
        self._prepared = prepared
        self._only = range(len(prepared.recipe.steps)) if only is None else only
        self._listener = listener
        self._checkpoints = checkpoints
        every = 0 if checkpoints is None else checkpoints.every
        stages, steps = (None if kept is None else kept / name for name in (STAGES, KEPT))
        self._stages = StageFiles(prepared, stages, self._only)
        self.workspace = Workspace(prepared, exports, listener, self._save, every, self._stages, steps)

    @property
    def model(self) -> keras.Model:
        """The model; after the run, the model that the steps returned."""
        return self.workspace.model

    def run(self) -> RunState:
        """Runs the steps in order; stops after the first expectation that is not met.

        Raises:
            RecipeError: The compile settings do not fit the model; no weight has changed. Or a file of the data cannot
                be read; the checkpoints are kept.
        """
        steps = self._prepared.recipe.steps
        data = self._prepared.data
        with naming_damaged_file(() if data is None else data.parts.values()), self.workspace.opened():
            position = self._resumed()
            for index in self._only[position.step :]:
                self._run_step(index, steps[index], position)
                position = CheckpointState(step=index + 1)
                if self.workspace.state.failures:
                    break
                if steps[index].settings.checkpointed:
                    self._save(position)
        if self._listener is not None:
            self._listener(Progress(len(steps), len(steps), steps[-1].kind, 1.0, "done", finished=True))
        return self.workspace.state

    def measured_stages(self) -> tuple[list[StageRow], list[str]]:
        """Returns speed and size of the run's models, and notes on how they were measured."""
        return self._stages.measured(self.model, self.workspace.state, self.workspace.exports)

    def _run_step(self, index: int, step: Step, position: CheckpointState) -> None:
        workspace, seed = self.workspace, (self._prepared.recipe.seed + 1 + index) % 2**32
        started = time.monotonic() - position.seconds
        workspace.step = CurrentStep(index, step.kind, seed, position, started)
        workspace.report_progress(0.0, described(step))
        # Seed each step separately, so that an added export step does not change the random numbers of later steps.
        keras.utils.set_random_seed(seed)
        result = handler_of(step.kind).run(self._prepared.steps[index], workspace)
        workspace.state.own, workspace.state.own_arrays = {}, {}
        self._adopt(result)
        if result.metrics is not None:
            workspace.state.metrics = result.metrics
        elif step.settings.changes_weights:
            workspace.state.metrics = workspace.evaluate()
        row: dict[str, Any] = {
            "kind": step.kind,
            "name": described(step),
            "seconds": round(time.monotonic() - started, 3),
            "history": result.history,
            "metrics": dict(workspace.state.metrics),
            "accuracy": workspace.state.metrics.get(accuracy_name(workspace.metrics) or ""),
        }
        if result.sections:
            row["sections"] = [section.to_dict() for section in result.sections]
        workspace.state.steps.append(row)
        if step.settings.changes_weights:
            self._stages.keep_after(index, workspace.model, workspace.state)
        workspace.report_progress(1.0, result.text or self._summary(step))

    def _adopt(self, result: StepResult) -> None:
        if result.model is not None and result.model is not self.workspace.model:
            self.workspace.replace_model(result.model, result.masks)
        elif result.masks is not None:
            self.workspace.replace_masks(result.masks)

    def _summary(self, step: Step) -> str:
        state = self.workspace.state
        parts = metric_texts(self.workspace.metrics, state.metrics)
        if state.targets:
            parts.append(f"sparsity {self.workspace.sparsity_of_targets()[0]:.4f}")
        return ", ".join(parts) or described(step)

    # ---- interruptions -----------------------------------------------------------------------------------------------

    def _save(self, position: CheckpointState) -> None:
        if self._checkpoints is not None:
            self.workspace.note_changes()
            self._checkpoints.write(self.workspace.model, replace(position, run=self.workspace.state))

    def _resumed(self) -> CheckpointState:
        """Returns the position of the newest checkpoint, after restoring it, or the start of the run."""
        found = None if self._checkpoints is None else self._checkpoints.restore(self._model_of)
        if found is None or found.run is None:
            self.workspace.state.masks.original = masks_the_model_came_with(self._prepared)
            return CheckpointState()
        self.workspace.state = found.run
        return found

    def _model_of(self, state: RunState) -> keras.Model:
        """Returns the model of a checkpoint: the recipe's model, or the model that a step returned."""
        if state.architecture is not None:
            with self._prepared.replicas.scope():
                model = rebuilt_model(state.architecture, self._prepared.models)
                copy_assets(self._prepared.model, model)
            self.workspace.adopt_model(model)
        return self.workspace.model


def masks_the_model_came_with(prepared: Prepared) -> dict[str, Any]:
    """Returns the masks of the zeros of the recipe's model in weights that are pruned by default; {} without training.

    A weight that is zero throughout is untrained, and has no mask.
    """
    if not any(step.settings.trains for step in prepared.recipe.steps):
        return {}
    if not any(weight.spec.prunable for weight in weights_in(prepared.model)):
        return {}
    try:
        targets, _ = find_targets(prepared.model)
    except ValueError:
        # No weight can be pruned, for example because all layers are quantized.
        return {}
    return masks_of_zeros(targets)

"""Workspace: what the steps of a run work on, what outlives a step, and the operations that steps share."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import keras
import numpy as np

from prunekit.anatomy.files.digests import weight_arrays
from prunekit.core.training import distribution
from prunekit.recipe.state.checkpoint import CheckpointState
from prunekit.recipe.state.models import model_description
from prunekit.recipe.state.progress import Listener
from prunekit.recipe.state.run_inputs import RunInputs, inspected
from prunekit.recipe.state.run_state import RunMasks
from prunekit.recipe.state.stages import StageFiles
from prunekit.recipe.state.training import Training
from prunekit.techniques.pruning.training.held_masks import holding
from prunekit.training_tools.loops.weight_changes import WeightChanges

_CAME_WITH = "The model came with"
# Fraction of zeros from which a weight counts as pruned earlier; fewer zeros may be chance.
_PRUNED_BEFORE = 0.01


class Workspace(Training):
    """What the steps of a run work on: the model, which they may replace, and the masks.

    Args:
        run: Model, data and settings of the run.
        exports: Folder that export steps write into.
        listener: Function that receives the progress.
        save: Function that writes a checkpoint inside a step.
        save_every: Epochs between checkpoints inside a step; 0 writes none.
        stages: Keeps the files of the run's models that are timed at its end; None keeps none.
        kept: Folder for what a step goes on with after an interruption; None = `exports`.

    Attributes:
        exports: Folder that export steps write into. An interrupted run loses what was written since its checkpoint.
        kept: Folder that stays as it is until the run ends.
    """

    def __init__(
        self,
        run: RunInputs,
        exports: Path,
        listener: Listener | None = None,
        save: Callable[[CheckpointState], None] | None = None,
        save_every: int = 0,
        stages: StageFiles | None = None,
        kept: Path | None = None,
    ):
        super().__init__(run, listener, save, save_every)
        self.exports, self.kept = exports, exports if kept is None else kept
        self._stages = stages

    def replace_model(self, model: keras.Model, masks: Mapping[str, np.ndarray] | None = None) -> None:
        """Goes on with another model; compiles it by the recipe's settings if it is not compiled.

        Args:
            model: The model; if it is compiled, its optimizer is kept, slots included.
            masks: As for `replace_masks`. None keeps the masks of those weights that the model still has under the same
                name and in the same shape.

        Raises:
            ValueError: A mask does not fit; the model does not describe its architecture.
            RecipeError: The compile settings do not fit the model.
        """
        self.adopt_model(model)
        weights = weight_arrays(model)
        if masks is not None:
            self.replace_masks(masks)
        self.state.masks.keep_fitting(weights)
        self.state.targets = [name for name in self.state.targets if name in weights]
        self.state.architecture = model_description(model)

    def adopt_model(self, model: keras.Model) -> None:
        """Goes on with another model, and leaves masks, targets and description as they are."""
        former, self.model = self.model, model
        self._patched.enter_context(distribution.across_replicas(model))
        if not model.compiled:
            self._compile(model)
        elif self.run.data is not None:
            # On PyTorch the first call builds the metrics, and draws random numbers for it: never inside a training,
            # which a resumed run begins with a model that was not called yet.
            self._measured_on_few(model, self.run.data)
        self.state.change_figures = _carried(self.state.change_figures, former, model)
        self._changes = None

    def replace_masks(self, masks: Mapping[str, np.ndarray]) -> None:
        """Replaces the masks of all earlier steps and of the original zeros: weight name -> array, True = kept.

        Raises:
            ValueError: The model has no weight of a mask's name and shape.
        """
        _check_masks(masks, weight_arrays(self.model))
        self.state.masks = RunMasks(pruned=dict(masks))

    @contextlib.contextmanager
    def holding_masks(self, except_for: Collection[str] = ()) -> Iterator[None]:
        """Context manager in which the masks of earlier steps and of the model's original zeros are enforced.

        Args:
            except_for: Names of weights that the step enforces itself.
        """
        masks = {name: mask for name, mask in self.state.masks.all.items() if name not in except_for}
        if not masks:
            yield
            return
        self._note_original_zeros()
        with self.noting(), holding(self.model, masks):
            yield

    def _note_original_zeros(self) -> None:
        if any(note.startswith(_CAME_WITH) for note in self.state.notes):
            return
        found = self.state.masks.original
        # A weight of a dense model may have a few zeros by chance, which need no note.
        if any(1 - np.mean(mask) >= _PRUNED_BEFORE for mask in found.values()):
            zeros = sum(mask.size - int(np.count_nonzero(mask)) for mask in found.values())
            self.note(
                f"{_CAME_WITH} {zeros:,} zeros in {len(found)} of its weights, and training kept them at zero. "
                "Write keep_zeros: false in the first train or finetune step to let them grow back."
            )

    def remember_before(self) -> None:
        """Records model and metrics as those before the first prune step; later calls do nothing."""
        state = self.state
        if state.pruning_since is not None:
            return
        state.before = inspected(self.model, self.run.data)
        state.weights_before = weight_arrays(self.model)
        state.metrics_before = dict(state.metrics)
        state.pruning_since = state.updates
        if self._stages is not None:
            self._stages.keep_before(self.model, state)
        if self.metrics and self.metrics[0].name in state.metrics:
            state.curve.append((0, state.metrics[self.metrics[0].name]))

    def sparsity_of_targets(self) -> tuple[float, float]:
        """Returns the sparsity over all targets so far, and its rounding tolerance of half a weight per target."""
        weights = weight_arrays(self.model)
        targets = [weights[name] for name in self.state.targets]
        size = sum(weight.size for weight in targets)
        zeros = sum(weight.size - int(np.count_nonzero(weight)) for weight in targets)
        return (zeros / size, 0.5 * len(targets) / size) if size else (0.0, 0.0)


def _check_masks(masks: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray]) -> None:
    for name, mask in masks.items():
        shape = weights[name].shape if name in weights else None
        if mask.shape != shape:
            there = "no such weight" if shape is None else f"a weight of shape {shape}"
            raise ValueError(f"A mask has the name and shape of a weight. Received: {name!r} of {mask.shape}, {there}.")


def _carried(figures: list[list[float]] | None, former: keras.Model, model: keras.Model) -> list[list[float]] | None:
    """Returns the sums of the weight changes for the weights of `model`; zeros for weights that `former` did not have.

    A weight is the same if its name and shape are the same.
    """
    if figures is None:
        return None
    rows = np.array(figures)
    columns = {key: rows[:, i] for i, key in enumerate(WeightChanges.keys_of(former))}
    nothing = np.zeros(len(rows))
    return np.stack([columns.get(key, nothing) for key in WeightChanges.keys_of(model)], axis=1).tolist()

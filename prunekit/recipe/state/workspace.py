"""Workspace: what the steps of a run work on, what outlives a step, and the operations that steps share."""

import contextlib
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.files.digests import weight_arrays
from prunekit.core.runtime import backend, jax_state
from prunekit.core.runtime.optimizers import optimizers_of
from prunekit.core.runtime.random_state import random_state
from prunekit.core.training import distribution
from prunekit.delivery.reports.metrics import Metric
from prunekit.recipe.datasets.batches import Order
from prunekit.recipe.datasets.data import Data
from prunekit.recipe.datasets.parts import Part
from prunekit.recipe.state.checkpoint import CheckpointState, EpochCheckpoints, ResumableCallback
from prunekit.recipe.state.compile_settings import (
    as_floats,
    compile_arguments,
    measured_metrics,
    optimizer_from,
    output_names,
    reason_of,
)
from prunekit.recipe.state.interruption import ctrl_c_held_back
from prunekit.recipe.state.models import model_description
from prunekit.recipe.state.progress import EpochProgress, Listener, Progress, TimeLeft
from prunekit.recipe.state.run_inputs import RunInputs, inspected
from prunekit.recipe.state.run_state import RunMasks, RunState
from prunekit.recipe.state.stages import StageFiles
from prunekit.recipe.text.loader import RecipeError
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.pruning.training.held_masks import holding
from prunekit.training_tools.loops.weight_changes import WeightChanges

_EVALUATION_BATCH = 256
_CAME_WITH = "The model came with"
# Fraction of zeros from which a weight counts as pruned earlier; fewer zeros may be chance.
_PRUNED_BEFORE = 0.01
# Fraction of a step after its last layer; 1 is the end of the step.
_NEARLY_DONE = 0.99


@dataclass
class CurrentStep:
    """The step that runs.

    Attributes:
        index: Index of the step in the recipe.
        kind: Name of the step's kind.
        seed: Random seed of the step.
        resumed: Checkpoint from which the step resumes, or the start of the step.
        started: Time at which the step began, minus its duration before a resumption, by `time.monotonic`.
    """

    index: int = 0
    kind: str = ""
    seed: int = 0
    resumed: CheckpointState = field(default_factory=CheckpointState)
    started: float = 0.0


class Workspace:
    """What the steps of a run work on: model, data, settings, and the state of the run.

    Args:
        run: Model, data and settings of the run.
        exports: Folder that export steps write into.
        listener: Function that receives the progress.
        save: Function that writes a checkpoint inside a step.
        save_every: Epochs between checkpoints inside a step; 0 writes none.
        stages: Keeps the files of the run's models that are timed at its end; None keeps none.

    Attributes:
        run: Model, data and settings at the start of the run; `run.model` is the recipe's model.
        model: The model, which an earlier step may have replaced.
        state: Results of earlier steps, and the masks that outlive a step.
        step: The step that runs.
        exports: Folder that export steps write into.
        metrics: The metrics that `evaluate` measures, the main one first; () without data.
    """

    def __init__(
        self,
        run: RunInputs,
        exports: Path,
        listener: Listener | None = None,
        save: Callable[[CheckpointState], None] | None = None,
        save_every: int = 0,
        stages: StageFiles | None = None,
    ):
        self.run = run
        self.model = run.model
        self.exports = exports
        self.state = RunState(before=inspected(self.model, run.data), weights_before=weight_arrays(self.model))
        self.step = CurrentStep()
        self._listener = listener
        self._save, self._save_every = save, save_every
        self._stages = stages
        self.metrics: tuple[Metric, ...] = run.metrics
        self._evaluation_batch = _EVALUATION_BATCH // run.replicas.count * run.replicas.count
        self._learning_rate = 0.0
        self._changes: WeightChanges | None = None
        self._patched = contextlib.ExitStack()

    @property
    def optimizer(self) -> keras.optimizers.Optimizer | None:
        """The optimizer of the model, with its slots; None if the model is not compiled."""
        return getattr(self.model, "optimizer", None)

    @property
    def seed(self) -> int:
        """Random seed of the step."""
        return self.step.seed

    # ---- the model ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Context manager in which the model can be trained and evaluated; compiles it by the recipe's settings.

        Raises:
            RecipeError: The compile settings do not fit the model; no weight has changed.
        """
        with self._patched:
            self._patched.enter_context(distribution.across_replicas(self.model))
            self._compile(self.model)
            self.state.metrics = self.evaluate()
            self.state.metrics_before = dict(self.state.metrics)
            yield

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

    def _compile(self, model: keras.Model) -> None:
        settings, data = self.run.compile, self.run.data
        if settings is None or data is None:
            return
        with self.run.replicas.scope():
            optimizer = optimizer_from(settings)
            self._learning_rate = float(array_of(optimizer.learning_rate))
            model.compile(optimizer=optimizer, **compile_arguments(settings, self._outputs(model)))
        try:
            measured = self._measured_on_few(model, data)
        except Exception as error:
            # Catch every exception: each backend has its own exception types.
            raise RecipeError(
                f"compile: loss and metrics do not fit the outputs of {model.name!r}: {reason_of(error)}."
            ) from error
        self.metrics = measured_metrics(self.run.metrics, as_floats(measured), model)

    def _measured_on_few(self, model: keras.Model, data: Data) -> Mapping[str, Any]:
        """Returns the loss and the metrics on the first training examples."""
        few = 2 * self.run.replicas.count
        with ctrl_c_held_back():
            found: Mapping[str, Any] = model.evaluate(*data.train.first(few), verbose=0, return_dict=True)
        return found

    def _outputs(self, model: keras.Model) -> tuple[str, ...] | None:
        data = self.run.data
        return None if data is None else output_names(model, model(data.train.example[0], training=False))

    # ---- training and evaluation -------------------------------------------------------------------------------------

    def fit(
        self,
        epochs: int,
        learning_rate: float | None = None,
        *callbacks: keras.callbacks.Callback,
        begin: int = 0,
    ) -> dict[str, list[float]]:
        """Trains the model, with checkpoints; returns the history, metric -> value per epoch.

        A resumed step goes on after its last checkpoint.

        Args:
            epochs: Number of epochs of the step; with `begin`, its last epoch in this call.
            learning_rate: Learning rate; None means that of the recipe's compile settings.
            *callbacks: Callbacks of the training. Checkpoints have the state of those that are a `ResumableCallback`.
            begin: Epochs of the step before this call, for a step that trains in several calls.
        """
        data, settings, optimizer = self.run.data, self.run.compile, self.optimizer
        if data is None or settings is None or optimizer is None:
            raise RecipeError("a step that trains needs data and compile settings.")
        optimizer.learning_rate = self._learning_rate if learning_rate is None else learning_rate
        resumed = self.step.resumed
        for callback, saved in zip(callbacks, resumed.callbacks, strict=False):
            if saved is not None and isinstance(callback, ResumableCallback):
                callback.resume(saved)
        order = Order(data.train.examples, self.seed)
        progress = EpochProgress(self.report_progress, self.metrics, *self._epochs_of_steps())
        saving = EpochCheckpoints(
            order, resumed, self._save_every, lambda epoch, history: self.save_epoch(epoch, history, callbacks)
        )
        with self._measured(), ctrl_c_held_back() as interruptible:
            self.model.fit(
                data.train.training_batches(order, settings.batch_size, self.run.replicas.means),
                epochs=epochs,
                initial_epoch=resumed.epoch,
                validation_data=_one_or_pair(data.validation.evaluation_data(self._evaluation_batch)),
                validation_batch_size=self._evaluation_batch,
                callbacks=[interruptible, *callbacks, saving, progress],
                shuffle=False,
                verbose=0,
            )
        jax_state.unshare_ema_arrays(optimizers_of(self.model))
        if self.metrics:
            self._add_to_curve(saving.history.get(f"val_{self.metrics[0].name}", [])[begin:])
        self.state.updates += (epochs - begin) * (self.run.steps_per_epoch or 0)
        return saving.history

    def _epochs_of_steps(self) -> tuple[int, int]:
        """Returns the number of epochs of the steps after the present one, and of this step, 0 if it names none."""
        steps = self.run.recipe.steps[self.step.index :]
        present, *later = [(getattr(step.settings, "epochs", None) or 0) * step.settings.trains for step in steps]
        return sum(later), present

    def save_epoch(
        self,
        epoch: int,
        history: dict[str, list[float]],
        callbacks: Sequence[keras.callbacks.Callback] = (),
    ) -> None:
        """Writes a checkpoint inside the current step, after `epoch` epochs."""
        if self._save is not None:
            self._save(
                CheckpointState(
                    step=self.step.index,
                    epoch=epoch,
                    seconds=time.monotonic() - self.step.started,
                    history=history,
                    callbacks=[one.snapshot() if isinstance(one, ResumableCallback) else None for one in callbacks],
                    random=random_state(self.model),
                )
            )

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        """Records the weight changes of updates inside the block, for the report."""
        if not backend.on_tensorflow() or not self.model.trainable_variables:
            yield
            return
        if self._changes is None:
            self._changes = WeightChanges(self.model)
            if self.state.change_figures is not None:
                self._changes.restore(np.array(self.state.change_figures))
        with self._changes:
            yield
        self.state.changes = {row.pop("name"): row for row in self._changes.report().to_dict()["weights"]}
        self.note_changes()

    def note_changes(self) -> None:
        """Writes the sums of the weight changes so far into the state, for a checkpoint."""
        if self._changes is not None:
            self.state.change_figures = self._changes.figures.tolist()

    def _add_to_curve(self, values: Sequence[float]) -> None:
        if self.state.pruning_since is None:
            return
        start = self.state.updates - self.state.pruning_since
        for epoch, value in enumerate(values, start=1):
            self.state.curve.append((start + epoch * (self.run.steps_per_epoch or 0), value))

    def evaluate(self) -> dict[str, float]:
        """Returns the metrics and the loss on the test data, by name; {} without data."""
        return {} if self.run.data is None else self._evaluated(self.run.data.test)

    def validate(self) -> dict[str, float]:
        """Returns the metrics and the loss on the validation data, by name; {} without data."""
        return {} if self.run.data is None else self._evaluated(self.run.data.validation)

    def _evaluated(self, part: Part) -> dict[str, float]:
        with ctrl_c_held_back() as interruptible:
            results = self.model.evaluate(
                *part.evaluation_data(self._evaluation_batch),
                batch_size=self._evaluation_batch,
                callbacks=[interruptible],
                verbose=0,
                return_dict=True,
            )
        return as_floats(results)

    # ---- masks -------------------------------------------------------------------------------------------------------

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

    # ---- notes and progress ------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Adds a note to the report; a note that is there already is not repeated."""
        if text not in self.state.notes:
            self.state.notes.append(text)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Context manager that records prunekit's own warnings as notes of the report."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            yield
        for warning in caught:
            if issubclass(warning.category, UserWarning):
                self.note(str(warning.message))

    def report_progress(
        self, fraction: float, text: str, epoch: int | None = None, seconds_left: float | None = None
    ) -> None:
        """Reports the completed fraction of the step, in [0, 1], and its status in one line."""
        if self._listener is not None:
            index, steps = self.step.index + 1, len(self.run.recipe.steps)
            self._listener(
                Progress(index, steps, self.step.kind, fraction, text, epoch=epoch, seconds_left=seconds_left)
            )

    def step_progress(self, text: str, start: float = 0.0, end: float = 1.0) -> Callable[[int, int, str], None]:
        """Returns the progress function of an operation that goes from layer to layer.

        Args:
            text: What is done, with {} for the name.
            start: Completed fraction of the step at the operation's begin.
            end: At its end.
        """
        left = TimeLeft()

        def progress(done: int, total: int, name: str) -> None:
            fraction = min(start + (end - start) * done / total, _NEARLY_DONE)
            status = f"{text.format(name)}, {done} of {total}"
            self.report_progress(fraction, status, seconds_left=left.after(done, total))

        return progress


def _one_or_pair(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values


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

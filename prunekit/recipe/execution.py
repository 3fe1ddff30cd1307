"""Runs the steps of a prepared recipe in order, and records their results for the report."""

import contextlib
import dataclasses
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.inspection import Event, Report, inspect
from prunekit.anatomy.targets import Skipped, weights_in
from prunekit.core import backend, distribution, jax_state
from prunekit.core.optimizers import optimizers_of
from prunekit.core.random_state import random_state
from prunekit.delivery.export import ExportRow, export
from prunekit.loops.weight_changes import WeightChanges
from prunekit.recipe.checkpoint import Checkpoints, CheckpointState, EpochCheckpoints, from_plain, plain_fields
from prunekit.recipe.data import Order, batches
from prunekit.recipe.expectations import checked, failure_text
from prunekit.recipe.interruption import ctrl_c_held_back
from prunekit.recipe.loader import RecipeError
from prunekit.recipe.models import weight_arrays
from prunekit.recipe.plan import described
from prunekit.recipe.preparation import (
    Prepared,
    Pruning,
    accuracy_metric,
    export_samples,
    loss_from,
    optimizer_from,
    reason_of,
)
from prunekit.recipe.progress import EpochProgress, Listener, Progress
from prunekit.recipe.schema import Expect, Export, Prune, Step, Train
from prunekit.sparsity.schedules import OneShot
from prunekit.techniques.pruning.callbacks import PruningCallback
from prunekit.techniques.pruning.options import PruningOptions
from prunekit.techniques.pruning.pruner import Pruner

_EVALUATION_BATCH = 256
_CAME_WITH = "The model came with"
# Fraction of zeros from which a weight counts as pruned earlier; fewer zeros may be chance.
_PRUNED_BEFORE = 0.01


@dataclass
class RunState:
    """Results of the executed steps.

    Attributes:
        before: Report of the model just before the first prune step, or at the start without a prune step.
        weights_before: Weights at the time of `before`, by name.
        accuracy_before: Accuracy at the time of `before`; None if not measured.
        accuracy: Accuracy after the last step that changed weights.
        pruning_since: Optimizer updates before the first prune step; events and curve count from this update.
        targets: Names of the weights that were pruned.
        skipped: Weights that no prune step pruned, with reasons.
        changes: Changes of each weight by the updates of all training steps, by weight name.
        expectations: Expected and measured values.
    """

    before: Report
    weights_before: dict[str, np.ndarray] = field(metadata={"arrays": True})
    accuracy_before: float | None = None
    accuracy: float | None = None
    pruning_since: int | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    skipped: dict[str, Skipped] = field(default_factory=dict)
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    exports: list[ExportRow] = field(default_factory=list)
    expectations: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The expectations that were not met."""
        return [row for row in self.expectations if not row["met"]]


class Execution:
    """One run of a recipe's steps on its model.

    Args:
        prepared: The prepared run.
        exports: Folder that export steps write into.
        listener: Function that receives the progress.
        only: Indices of the steps to run; None runs all. The selection does not change how a step runs.
        checkpoints: Checkpoints of the run; an existing checkpoint resumes the run.
    """

    def __init__(
        self,
        prepared: Prepared,
        exports: Path,
        listener: Listener | None = None,
        only: Sequence[int] | None = None,
        checkpoints: Checkpoints | None = None,
    ):
        self.prepared = prepared
        self.model = prepared.model
        self.record = RunState(before=inspect(self.model), weights_before=weight_arrays(self.model))
        self._exports = exports
        self._only = range(len(prepared.recipe.steps)) if only is None else only
        self._listener = listener
        self._accuracy = accuracy_metric(prepared.compile)
        self._checkpoints = checkpoints
        self._standing = CheckpointState()
        self._evaluation_batch = _EVALUATION_BATCH // prepared.replicas.count * prepared.replicas.count
        self._updates = 0
        self._changes: WeightChanges | None = None
        # Masks of all prune steps so far, by weight name, True = kept. Not derived from current zeros: a weight that is
        # entirely zero may be pruned or may not have learned yet.
        self._masks: dict[str, np.ndarray] = {}
        # Masks of the model's original zeros, in weights that no prune step has pruned since.
        self._found: dict[str, np.ndarray] = {}

    def run(self) -> RunState:
        """Runs the steps in order; stops after the first expectation that is not met.

        Raises:
            RecipeError: The compile settings do not fit the model; no weight has changed.
        """
        steps = self.prepared.recipe.steps
        with distribution.across_replicas(self.model):
            self._compile()
            self._resume()
            for index in self._only[self._standing.step :]:
                self._run_step(index, steps[index])
                self._standing = CheckpointState(step=index + 1)
                if self.record.failures:
                    break
                if steps[index].expect is None:
                    self._save(self._standing)
        self._tell(Progress(len(steps), len(steps), steps[-1].kind, 1.0, "done", finished=True))
        return self.record

    def _run_step(self, index: int, step: Step) -> None:
        self._at = (index, step)
        self._report_progress(0.0, described(step))
        # Seed each step separately, so that an added export step does not change the random numbers of later steps.
        keras.utils.set_random_seed(self._seed)
        self._started = time.monotonic() - self._standing.seconds
        row: dict[str, Any] = {"kind": step.kind, "name": described(step), "seconds": 0.0, "history": {}}
        if step.prune is not None:
            row["history"] = self._prune(step.prune, self.prepared.pruning[index])
        elif isinstance(step.settings, Train):
            row["history"] = self._train(step.settings)
        elif step.export is not None:
            self._export(step.export)
        elif step.expect is not None:
            self._expect(step.expect)
        if step.trains or step.prune is not None:
            self.record.accuracy = self._evaluate()
        row["accuracy"] = self.record.accuracy
        row["seconds"] = round(time.monotonic() - self._started, 3)
        self.record.steps.append(row)
        self._report_progress(1.0, self._result_of(step))

    @property
    def _seed(self) -> int:
        return (self.prepared.recipe.seed + 1 + self._at[0]) % 2**32

    # ---- training ----------------------------------------------------------------------------------------------------

    def _compile(self) -> None:
        settings, data = self.prepared.compile, self.prepared.data
        if settings is None or data is None:
            return
        with self.prepared.replicas.scope():
            optimizer = optimizer_from(settings)
            self._learning_rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
            self.model.compile(optimizer=optimizer, loss=loss_from(settings), metrics=list(settings.metrics))
        try:
            few = slice(2 * self.prepared.replicas.count)
            with ctrl_c_held_back():
                self.model.evaluate(data.train[0][few], data.train[1][few], verbose=0)
        except Exception as error:
            # Catch every exception: each backend has its own exception types.
            raise RecipeError(
                f"compile: loss and metrics do not fit the outputs of {self.model.name!r}: {reason_of(error)}."
            ) from error
        self.record.accuracy_before = self.record.accuracy = self._evaluate()

    def _fit(
        self, epochs: int, learning_rate: float | None, callback: PruningCallback | None = None
    ) -> dict[str, list[float]]:
        data, settings = self.prepared.data, self.prepared.compile
        if data is None or settings is None:
            raise RecipeError("a step that trains needs data and compile settings.")
        self.model.optimizer.learning_rate = self._learning_rate if learning_rate is None else learning_rate
        order = Order(len(data.train[1]), self._seed)
        progress = EpochProgress(self._report_progress, self._accuracy)
        saving = EpochCheckpoints(
            order,
            self._standing,
            0 if self._checkpoints is None else self._checkpoints.every,
            lambda epoch, history: self._save_inside(epoch, history, callback),
        )
        with self._measured(), ctrl_c_held_back() as interruptible:
            self.model.fit(
                batches(data.train, settings.batch_size, order, self.prepared.replicas.means),
                epochs=epochs,
                initial_epoch=self._standing.epoch,
                validation_data=data.validation,
                validation_batch_size=self._evaluation_batch,
                callbacks=[interruptible, *([] if callback is None else [callback]), saving, progress],
                shuffle=False,
                verbose=0,
            )
        jax_state.unshare_ema_arrays(optimizers_of(self.model))
        found = saving.history
        self._add_to_curve(found.get(f"val_{self._accuracy}", []))
        self._updates += epochs * (self.prepared.steps_per_epoch or 0)
        return found

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        """Records the weight changes of updates inside the block, for the report."""
        if not backend.on_tensorflow() or not self.model.trainable_variables:
            yield
            return
        self._changes = self._changes or WeightChanges(self.model)
        with self._changes:
            yield
        self.record.changes = {row.pop("name"): row for row in self._changes.report().to_dict()["weights"]}

    def _add_to_curve(self, accuracies: Sequence[float]) -> None:
        if self.record.pruning_since is None:
            return
        start = self._updates - self.record.pruning_since
        for epoch, accuracy in enumerate(accuracies, start=1):
            self.record.curve.append((start + epoch * (self.prepared.steps_per_epoch or 0), accuracy))

    def _train(self, settings: Train) -> dict[str, list[float]]:
        if not settings.keep_zeros:
            self._found = {}
        with self._held():
            return self._fit(settings.epochs, settings.learning_rate)

    def _prune(self, settings: Prune, pruning: Pruning) -> dict[str, list[float]]:
        if self.record.pruning_since is None:
            self._remember_before()
        start = self._updates - (self.record.pruning_since or 0)
        # This step's masks replace the masks of original zeros in its targets.
        targets = {target.name for target in pruning.targets}
        self._found = {name: mask for name, mask in self._found.items() if name not in targets}
        if settings.one_shot or settings.epochs is None:
            options = PruningOptions(**pruning.options)
            pruner = Pruner.detached(self.model, pruning.schedule, options, training=False)
            with self._held(), self._noted():
                pruner.begin()
                pruner.finish()
            history: dict[str, list[float]] = {}
        else:
            callback = PruningCallback(pruning.schedule, **pruning.options)
            callback.resumption.state = self._standing.pruner
            with self._held(), self._noted():
                history = self._fit(settings.epochs, settings.learning_rate, callback)
            if callback.pruner is None:
                raise RuntimeError("PruningCallback did not take part in fit.")
            pruner = callback.pruner
        self.record.events += [dataclasses.replace(event, step=event.step + start) for event in pruner.events]
        self._take_over(pruner)
        return history

    def _remember_before(self) -> None:
        self.record.before = inspect(self.model)
        self.record.weights_before = weight_arrays(self.model)
        self.record.accuracy_before = self.record.accuracy
        self.record.pruning_since = self._updates
        if self.record.accuracy is not None:
            self.record.curve.append((0, self.record.accuracy))

    def _take_over(self, pruner: Pruner) -> None:
        for name, mask in pruner.masks.items():
            self._masks[name] = np.logical_and(mask, self._masks.get(name, True))
        self.record.targets += [name for name in pruner.masks if name not in self.record.targets]
        self.record.skipped |= {item.name: item for item in pruner.skipped}

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Enforces the masks of earlier prune steps and of the model's original zeros inside the block."""
        masks = self._found | self._masks
        if not masks:
            yield
            return
        self._tell_of_found_zeros()
        # Use regular expressions, because a name may contain glob characters.
        include = [f"re:{re.escape(name)}" for name in masks]
        with self._noted(), Pruner(self.model, OneShot(sparsity=0.0), include=include, keep_zeros=False) as pruner:
            pruner.store.replace([masks[target.name] for target in pruner.targets], pruner.optimizers)
            yield

    def _tell_of_found_zeros(self) -> None:
        if any(note.startswith(_CAME_WITH) for note in self.record.notes):
            return
        # A weight of a dense model may have a few zeros by chance, which need no note.
        if any(1 - np.mean(mask) >= _PRUNED_BEFORE for mask in self._found.values()):
            zeros = sum(mask.size - int(np.count_nonzero(mask)) for mask in self._found.values())
            self.record.notes.append(
                f"{_CAME_WITH} {zeros:,} zeros in {len(self._found)} of its weights, and training kept them at zero. "
                "Write keep_zeros: false in the first train or finetune step to let them grow back."
            )

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Records prunekit's own warnings as notes of the report."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            yield
        for warning in caught:
            text = str(warning.message)
            if issubclass(warning.category, UserWarning) and text not in self.record.notes:
                self.record.notes.append(text)

    def _evaluate(self) -> float | None:
        data = self.prepared.data
        if data is None or self._accuracy is None:
            return None
        with ctrl_c_held_back() as interruptible:
            results = self.model.evaluate(
                *data.test,
                batch_size=self._evaluation_batch,
                callbacks=[interruptible],
                verbose=0,
                return_dict=True,
            )
        return float(results[self._accuracy])

    # ---- interruptions -----------------------------------------------------------------------------------------------

    def _save_inside(self, epoch: int, history: dict[str, list[float]], callback: PruningCallback | None) -> None:
        """Writes a checkpoint inside the current step, after `epoch` epochs."""
        self._save(
            CheckpointState(
                step=self._at[0],
                epoch=epoch,
                seconds=time.monotonic() - self._started,
                history=history,
                pruner=None if callback is None else callback.pruner.state().to_snapshot(),
                random=random_state(self.model),
            )
        )

    def _save(self, standing: CheckpointState) -> None:
        if self._checkpoints is None:
            return
        standing.record, standing.weights_before = plain_fields(self.record), self.record.weights_before
        standing.updates, standing.masks, standing.found = self._updates, self._masks, self._found
        standing.changes = None if self._changes is None else self._changes.figures
        self._checkpoints.write(self.model, standing)

    def _resume(self) -> None:
        found = None if self._checkpoints is None else self._checkpoints.restore(self.model)
        if found is None:
            self._found = self._zeros_it_came_with()
            return
        self._standing = found
        self.record = from_plain(RunState, found.record, weights_before=found.weights_before)
        self._updates, self._masks, self._found = found.updates, found.masks, found.found
        if found.changes is not None:
            self._changes = WeightChanges(self.model)
            self._changes.restore(found.changes)

    def _zeros_it_came_with(self) -> dict[str, np.ndarray]:
        """Returns the masks from `Pruner.adopt_zeros` of all weights that contain zeros."""
        prunable = {weight.name for weight in weights_in(self.model) if weight.spec.prunable}
        trains = any(step.trains for step in self.prepared.recipe.steps)
        if not trains or not any(row.zeros for row in self.record.before.weights if row.name in prunable):
            return {}
        try:
            pruner = Pruner.detached(self.model, OneShot(sparsity=0.0), PruningOptions(), training=False)
        except ValueError:
            # The model has no prunable weights, for example because all its layers are quantized.
            return {}
        pruner.adopt_zeros()
        return {name: mask for name, mask in pruner.masks.items() if not mask.all()}

    # ---- exporting and expecting -------------------------------------------------------------------------------------

    def _export(self, settings: Export) -> None:
        samples, labels = export_samples(self.model, self.prepared.data, self.prepared.recipe.seed)
        for number, name in enumerate(settings.formats):
            self._report_progress(number / len(settings.formats), f"exporting {name}")
            self.record.exports += export(
                self.model, self._exports, [name], samples, labels=labels, name=settings.name, keep_going=False
            )

    def _expect(self, settings: Expect) -> None:
        record, drop = self.record, None
        if record.accuracy is not None and record.accuracy_before is not None:
            drop = record.accuracy_before - record.accuracy
        record.expectations += checked(settings, record.accuracy, drop, self._sparsity(), record.exports)

    def _sparsity(self) -> tuple[float, float]:
        """Returns the sparsity over all targets so far, and its rounding tolerance of half a weight per target."""
        weights = weight_arrays(self.model)
        size = sum(weights[name].size for name in self.record.targets)
        zeros = sum(weights[name].size - int(np.count_nonzero(weights[name])) for name in self.record.targets)
        return (zeros / size, 0.5 * len(self.record.targets) / size) if size else (0.0, 0.0)

    # ---- progress ----------------------------------------------------------------------------------------------------

    def _tell(self, progress: Progress) -> None:
        if self._listener is not None:
            self._listener(progress)

    def _report_progress(self, fraction: float, text: str, epoch: int | None = None) -> None:
        index, step = self._at
        self._tell(Progress(index + 1, len(self.prepared.recipe.steps), step.kind, fraction, text, epoch))

    def _result_of(self, step: Step) -> str:
        if step.expect is not None:
            return "; ".join(map(failure_text, self.record.failures)) or "all met"
        if step.export is not None:
            refused = [row for row in self.record.exports[-len(step.export.formats) :] if row.status != "ok"]
            return ", ".join(f"{row.format} {row.status}" for row in refused) or "all formats written and checked"
        parts = [] if self.record.accuracy is None else [f"accuracy {self.record.accuracy:.4f}"]
        if self.record.targets:
            parts.append(f"sparsity {self._sparsity()[0]:.4f}")
        return ", ".join(parts) or described(step)

"""Training: compiles, trains and evaluates the model of a run."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from prunekit.core.runtime import backend, jax_state
from prunekit.core.runtime.optimizers import optimizers_of
from prunekit.core.runtime.random_state import random_state
from prunekit.core.training import distribution
from prunekit.core.training.backup_sync import ResumableCallback
from prunekit.delivery.reports.metrics import Metric
from prunekit.recipe.datasets.batches import Order
from prunekit.recipe.datasets.data import Data
from prunekit.recipe.datasets.parts import Part
from prunekit.recipe.state.checkpoint import CheckpointState, EpochCheckpoints
from prunekit.recipe.state.compile_settings import (
    as_floats,
    compile_arguments,
    measured_metrics,
    optimizer_from,
    output_names,
    reason_of,
)
from prunekit.recipe.state.interruption import ctrl_c_held_back
from prunekit.recipe.state.progress import EpochProgress, Listener
from prunekit.recipe.state.run_inputs import RunInputs
from prunekit.recipe.state.run_log import RunLog
from prunekit.recipe.text.loader import RecipeError
from prunekit.sparsity.array_ops import array_of
from prunekit.training_tools.loops.weight_changes import WeightChanges

_EVALUATION_BATCH = 256


class Training(RunLog):
    """Trains and evaluates the model of a run, with checkpoints.

    Args:
        run: Model, data and settings of the run.
        listener: Function that receives the progress.
        save: Function that writes a checkpoint inside a step.
        save_every: Epochs between checkpoints inside a step; 0 writes none.

    Attributes:
        model: The model, which an earlier step may have replaced.
        metrics: The metrics that `evaluate` measures, the main one first; () without data.
    """

    def __init__(
        self,
        run: RunInputs,
        listener: Listener | None = None,
        save: Callable[[CheckpointState], None] | None = None,
        save_every: int = 0,
    ):
        super().__init__(run, listener)
        self.model = run.model
        self.metrics: tuple[Metric, ...] = run.metrics
        self._save, self._save_every = save, save_every
        self._evaluation_batch = _EVALUATION_BATCH // run.replicas.count * run.replicas.count
        self._learning_rate = 0.0
        self._changes: WeightChanges | None = None
        self._patched = contextlib.ExitStack()

    @property
    def optimizer(self) -> keras.optimizers.Optimizer | None:
        """The optimizer of the model, with its slots; None if the model is not compiled."""
        return getattr(self.model, "optimizer", None)

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
        order = Order(data.train.examples, self.step.seed)
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
        self.state.changes = {row.pop("name"): row for row in self._changes.report.to_dict()["weights"]}
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


def _one_or_pair(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values

"""QuantizationCallback: quantization-aware training in `fit`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Unpack

import keras
import numpy as np

from prunekit.core.data.model_building import build_from_data, waits_for_data
from prunekit.core.runtime import jax_state
from prunekit.core.runtime.optimizers import updates_in
from prunekit.core.runtime.snapshot import Snapshot, lacking
from prunekit.core.training import distribution
from prunekit.core.training.backup_sync import Resumption
from prunekit.core.training.last_callback import LastCallback
from prunekit.core.training.step_counter import StepCounter
from prunekit.core.training.train_function import callback_list_above
from prunekit.keyword_options import keyword_options
from prunekit.operations.quantization_training import QuantizationRun, training_options
from prunekit.operations.quantize import QuantizationResult
from prunekit.sparsity.arguments import whole
from prunekit.techniques.quantize.options import FORMER, QuantizationOptions, TrainingKeywords
from prunekit.techniques.quantize.training.training import StepFunctions, learning_rate

# Share of a training of known length after which batch normalizations use their moving statistics.
_FREEZE_AT = 0.8
_NEVER = -1


@dataclass(eq=False)
class _Fit:
    """One `fit` of a callback.

    Attributes:
        run: The quantization. Its `model` is read, not the callback's: on JAX, Keras writes its state back whenever a
            callback reads that.
        counter: The steps.
        freezes_at: Optimizer update from which batch normalizations are frozen; None = never.
        functions: The compiled steps; None before the first step on integers.
        best: (epoch, ranges) of the epoch whose weights EarlyStopping keeps.
    """

    run: QuantizationRun
    counter: StepCounter
    freezes_at: int | None
    functions: StepFunctions | None = None
    best: tuple[int, list[np.ndarray]] | None = None
    begun: bool = False
    ended: bool = False

    @property
    def steps(self) -> StepFunctions:
        """The compiled steps, made at the first use."""
        if self.functions is None:
            self.functions = StepFunctions(self.run.work)
        return self.functions

    @property
    def is_on_integers(self) -> bool:
        """Whether validation computes on integers."""
        return not self.ended and self.run.work.begun

    def next_change(self, begin_step: int) -> float:
        """Returns the next update at which quantization begins or batch normalizations are frozen."""
        changes = [begin_step] if not self.run.work.begun else []
        if self.freezes_at is not None and not self.run.work.frozen:
            changes.append(self.freezes_at)
        return min(changes, default=float("inf"))


class QuantizationCallback(keras.callbacks.Callback):
    """Trains the model in `fit` as its integer file will compute (quantization-aware training).

    In every training step, weights and the tensors between layers are rounded as the integer file rounds them, batch
    normalizations are folded where it folds them, and the scales of the grids are trained with the weights. Validation
    in `fit` measures the model on integers. At the end the weights are put on their grids, in place, and `report`
    says what was quantized, simulates the integers, and writes their file.

    The model, its optimizer and its compiled functions are modified only while a batch runs: other callbacks save,
    restore and predict with the unmodified model in floating point. A file that ModelCheckpoint saves has these
    weights; `pk.quantize` puts them on grids. If the list contains a `BackupAndRestore`, ranges are saved and restored
    with the weights. With a `PruningCallback` in the same `fit`, pruned weights are exactly zero in every step.

    Args:
        data: Calibration data, from which the ranges at the start are chosen, as `pk.quantize` takes them; None only
            with activation_bits="float".
        begin_step: Optimizer update at which quantization begins; the training before it is in floating point.
        freeze_step: Optimizer update from which batch normalizations compute with their moving statistics, as in the
            file. None = after four fifths of the training; -1 = never.
        range_learning_rate: Learning rate of the ranges, about the largest relative change of a scale in one update.
        **options: `bits` (8), `activation_bits` (8, 16 or "float"), `group_size`, `weight_ranges`,
            `activation_ranges`, `include`, `exclude`, `misfits`, `full_integer`: see
            `pk.QuantizationOptions`.

    Raises:
        ValueError: An option has a wrong value; in `fit`, before the first update: the model is not built, its layers
            cannot be followed, or all its weights are frozen; calibration data are missing or not finite; the list has
            two such callbacks.
        TypeError: An option is unknown, or the model is not a Keras 3 model.

    Source: Jacob et al. 2018, arXiv:1712.05877 (training with simulated quantization); Esser et al. 2020,
        arXiv:1902.08153 (LSQ, trained scales).
    """

    @keyword_options(QuantizationOptions, TrainingKeywords, FORMER)
    def __init__(
        self,
        data: Any = None,
        *,
        begin_step: int = 0,
        freeze_step: int | None = None,
        range_learning_rate: float = 1e-3,
        **options: Unpack[TrainingKeywords],
    ):
        super().__init__()
        self.options = training_options(options)
        self.options.with_data(data)
        self._data = data
        self.begin_step = whole("begin_step", begin_step, 0)
        self.freeze_step = None if freeze_step is None else whole("freeze_step", freeze_step, _NEVER)
        if self.freeze_step is not None and _NEVER < self.freeze_step < self.begin_step:
            raise ValueError(
                "Batch normalizations are frozen while the model trains on integers, so `freeze_step` is at least "
                f"`begin_step`. Received: begin_step={self.begin_step}, freeze_step={self.freeze_step}."
            )
        self._learning_rate = learning_rate("range_learning_rate", range_learning_rate)
        self.resumption = Resumption()
        self.notes: list[str] = []
        self._run: QuantizationRun | None = None
        self._report: QuantizationResult | None = None
        self._fit: _Fit | None = None
        self._list: keras.callbacks.CallbackList | None = None
        self._last: LastCallback | None = None

    @property
    def report(self) -> QuantizationResult:
        """The result of the last `fit`, with `.simulating()` and `.export(path)`; RuntimeError before its end."""
        if self._report is None:
            raise RuntimeError("`report` exists once `fit` has ended with this callback.")
        return self._report

    # ---- events of `fit` ---------------------------------------------------------------------------------------------

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        found = callback_list_above()
        self._list = found
        listed = [] if found is None else [one for one in found.callbacks if isinstance(one, QuantizationCallback)]
        if len(listed) > 1:
            raise ValueError(
                f"A list of callbacks may contain one QuantizationCallback. Received: {len(listed)}. A model is "
                "quantized as a whole; `include` and `exclude` select the layers."
            )
        self._last = None if found is None else LastCallback.placed_after_all(found, self)
        self.resumption.find_backup(self, found)
        if self._run is None or self._run.model is not model:
            if self._data is not None and waits_for_data(model):
                # Keras would build it in the first step, after the ranges are chosen.
                build_from_data(model, self._data)
            self._run = QuantizationRun(model, self._data, self.options, self._learning_rate)
        if not model.trainable_variables:
            raise ValueError(
                f"All weights of {model.name!r} are frozen, so `fit` updates none of them. Quantize the model with "
                "pk.quantize, or make layers trainable before compile()."
            )

    def on_train_begin(self, logs: Any = None) -> None:
        run, former = self._run, self._fit
        if run is None:
            raise RuntimeError("Keras calls `set_model` before anything else.")
        if former is not None and former.run is run:
            counter = former.counter
            counter.resume(run.work.optimizers)
        else:
            counter = StepCounter(run.model, run.work.optimizers)
        self.notes, self._report, run.work.frozen = [], None, False
        self._fit = _Fit(run, counter, self._planned_freeze(counter))

    def _planned_freeze(self, counter: StepCounter) -> int | None:
        if self.freeze_step is not None:
            return None if self.freeze_step == _NEVER else self.freeze_step
        steps, epochs = (self.params or {}).get("steps"), (self.params or {}).get("epochs")
        if not (steps and epochs):
            return None
        start = max(counter.now, self.begin_step)
        end = counter.now + updates_in(steps * epochs, counter.optimizers)
        return start + int(_FREEZE_AT * max(end - start, 0))

    # Weights are loaded by callbacks that are listed later, in `on_train_begin`.
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if not self._now.begun:
            self._now.begun = True
            self.resumption.begin(self)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._last is None:
            self.begin_batch()

    def begin_batch(self) -> None:
        """Prepares one training batch; called after all other callbacks' `on_train_batch_begin`."""
        fit = self._now
        work, done = fit.run.work, fit.counter.done
        if not work.begun:
            if done < self.begin_step:
                return
            fit.run.begin()
        freezes = fit.freezes_at is not None and done >= fit.freezes_at
        work.frozen = work.frozen or freezes
        fit.steps.training().arm()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        fit = self._now
        if fit.functions is not None:
            fit.functions.training().disarm()
        fit.counter.unseen += fit.run.model.steps_per_execution or 1
        # On JAX, reading the number of updates waits for the device.
        if not jax_state.steps_are_pure() or fit.counter.done + fit.counter.unseen >= fit.next_change(self.begin_step):
            fit.counter.mark_all_seen()

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._fit is not None and self._fit.is_on_integers:
            self._fit.steps.testing().arm()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._fit is not None and self._fit.is_on_integers:
            self._fit.steps.testing().disarm()

    def end_of_list(self) -> None:
        """Keeps the ranges of the epoch whose weights EarlyStopping keeps; called after all other callbacks."""
        fit, best = self._now, self._best_epoch()
        if best is not None and (fit.best is None or fit.best[0] != best):
            jax_state.sync_model_state(fit.run.model)
            fit.best = best, fit.run.work.values()

    def _best_epoch(self) -> int | None:
        listed = [] if self._list is None else self._list.callbacks
        kept = [one for one in listed if getattr(one, "restore_best_weights", False)]
        return next((one.best_epoch for one in kept if getattr(one, "best_weights", None) is not None), None)

    def on_train_end(self, logs: Any = None) -> None:
        if self._last is None:
            self.end()

    def end(self) -> None:
        """Puts the weights on their grids after all other callbacks' `on_train_end`."""
        fit = self._now
        fit.ended = True
        # If the backup is of the last epoch, `fit` begins no epoch, so the state is restored here.
        self.resumption.restore_pending(self)
        fit.counter.mark_all_seen()
        if not fit.run.work.begun:
            self.notes.append(
                f"The training ended after {fit.counter.now:,} updates, and quantization begins at update "
                f"{self.begin_step:,}: the weights were rounded without training."
            )
            if distribution.speaks_for(fit.run.model):
                warnings.warn(self.notes[-1], stacklevel=2)
        elif fit.best is not None and fit.best[1]:
            fit.run.work.assign(fit.best[1])
        if fit.functions is not None:
            fit.functions.keep()
            fit.functions = None
        self._report = fit.run.finish(self.notes)

    # ---- what an interrupted `fit` goes on from ----------------------------------------------------------------------

    def start(self) -> None:
        """Begins a training that resumes none."""

    def snapshot(self) -> Snapshot:
        """Returns the number of updates, the ranges and the state of their training."""
        fit = self._now
        state = fit.run.work.snapshot()
        return Snapshot({**state.values, "origin": fit.counter.origin, "freezes_at": fit.freezes_at}, state.arrays)

    def resume(self, snapshot: Snapshot) -> None:
        """Lets the next `fit` go on from a state that `snapshot` returned."""
        self.resumption.state = snapshot

    def restore(self, snapshot: Snapshot) -> None:
        """Takes up a state; weights and optimizer must already be restored.

        Raises:
            ValueError: The state is of another quantization, or incomplete.
        """
        wrong = lacking(snapshot.values, {"origin": int, "freezes_at": int | None})
        if wrong is not None:
            raise ValueError(f"The saved state of a quantization lacks {wrong}, or another version wrote it.")
        fit = self._now
        fit.run.work.restore(snapshot)
        fit.counter.origin, fit.freezes_at = snapshot.values["origin"], snapshot.values["freezes_at"]
        fit.counter.mark_all_seen()

    @property
    def _now(self) -> _Fit:
        if self._fit is None:
            raise RuntimeError("Keras calls `on_train_begin` before any batch.")
        return self._fit

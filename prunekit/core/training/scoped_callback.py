"""ScopedCallback: trains and validates a model in `fit` inside a scope that changes what it computes."""

from __future__ import annotations

import contextlib
import warnings
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

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
from prunekit.core.training.train_function import ScopedFunction, callback_list_above, kept
from prunekit.sparsity.arguments import whole


class ScopedTraining(Protocol):
    """What a model computes while it trains, and the state of this.

    Attributes:
        model: The model.
        optimizers: The optimizers whose updates train the weights.
        begun: True once the scopes may be entered.
        variant: Name of what a trace of a training step contains now; another name needs another trace.
        variants: All these names.
        kind: What the state is of, for error messages, such as "quantization".
    """

    model: Any
    optimizers: list[Any]
    begun: bool
    variant: str
    variants: tuple[str, ...]
    kind: ClassVar[str]

    def updating(self) -> contextlib.AbstractContextManager[None]:
        """Returns the scope of a training step."""

    def testing(self) -> contextlib.AbstractContextManager[None]:
        """Returns the scope of a test step."""

    def in_traces(self) -> Any:
        """Returns what a trace of a step contains beside the model."""

    def take_over(self, traced: Any) -> bool:
        """Trains the variables that a former trace contains, from the present values; False if it does not fit."""

    def values(self) -> list[np.ndarray]:
        """Returns what is trained beside the weights, as `assign` takes it."""

    def assign(self, values: list[np.ndarray]) -> None:
        """Sets what is trained beside the weights."""

    def snapshot(self) -> Snapshot:
        """Returns everything besides weights and optimizer that `restore` continues from."""

    def restore(self, snapshot: Snapshot) -> None:
        """Takes up a state; weights and optimizer must already be restored."""


class StepFunctions:
    """The train and test functions of one training inside scopes.

    Only what is certainly the same is traced once: see `ScopedFunction.keep`.

    Args:
        work: The training, begun. Functions that a former training left are taken over with the variables that they
            contain.
    """

    def __init__(self, work: ScopedTraining):
        self._work = work
        self._functions: dict[tuple[str, str], ScopedFunction] = {}
        for kind, variant in [*(("train", one) for one in work.variants), ("test", work.variants[0])]:
            function, traced = kept(work.model, variant, kind)
            if function is not None and work.take_over(traced):
                function.use(work.updating if kind == "train" else work.testing)
                self._functions[kind, variant] = function
        self._traced = work.in_traces()

    def training(self) -> ScopedFunction:
        """Returns the train function of the present variant."""
        key = ("train", self._work.variant)
        if key not in self._functions:
            self._functions[key] = ScopedFunction(self._work.model, self._work.updating)
        return self._functions[key]

    def testing(self) -> ScopedFunction:
        """Returns the test function."""
        key = ("test", self._work.variants[0])
        if key not in self._functions:
            self._functions[key] = ScopedFunction(self._work.model, self._work.testing, "test")
        return self._functions[key]

    def contain(self, traced: Any) -> bool:
        """Returns True if the functions were made for a training that contained just this (`in_traces`)."""
        return self._traced is traced

    def keep(self) -> None:
        """Keeps the functions with the model's own for the next training, after the last batch of this one."""
        for (_, variant), function in self._functions.items():
            function.keep(contextlib.nullcontext, self._traced, variant)


@dataclass(eq=False)
class ScopedFit:
    """One `fit` of a callback.

    Attributes:
        work: The training. Its `model` is read, not the callback's: on JAX, Keras writes its state back whenever a
            callback reads that.
        counter: The steps.
        starts_at: First step inside the scope.
        ends_at: Step at which this `fit` ends; None if its length is unknown.
        functions: The compiled steps; None before the first step inside a scope.
        best: (epoch, values) of the epoch whose weights EarlyStopping keeps.
    """

    work: Any
    counter: StepCounter
    starts_at: int
    ends_at: int | None
    functions: StepFunctions | None = None
    best: tuple[int, list[np.ndarray]] | None = None
    begun: bool = False
    ended: bool = False

    @property
    def steps(self) -> StepFunctions:
        """The compiled steps, made at the first use."""
        if self.functions is None:
            self.functions = StepFunctions(self.work)
        return self.functions

    @property
    def is_inside(self) -> bool:
        """Whether validation computes inside the scope."""
        return not self.ended and self.work.begun


class ScopedCallback(keras.callbacks.Callback):
    """Trains a model in `fit` inside a scope, from an optimizer update on, and ends with other weights.

    The model, its optimizer and its compiled functions are modified only while a batch runs. If the list contains a
    `BackupAndRestore`, the state of the work is saved and restored with the weights. Subclasses say what is done.

    Args:
        begin_step: Optimizer update at which the scope is entered first; the training before it is as always.
        data: Calibration data, or None; a model that is not built yet is built from them.

    Attributes:
        rank: Place of the class among the callbacks of this package: of two, the one of the higher rank prepares a
            batch later, so that its scope lies around the other's, and ends later.
        verb: What happens to the model, for error messages, such as "quantized".
        alternative: What to call for a model that `fit` does not train, as the start of a sentence.
    """

    rank: ClassVar[int]
    verb: ClassVar[str]
    alternative: ClassVar[str]

    def __init__(self, begin_step: int = 0, data: Any = None):
        super().__init__()
        self._data = data
        self.begin_step = whole("begin_step", begin_step, 0)
        self.resumption = Resumption()
        self.notes: list[str] = []
        self._report: Any = None
        self._fit: ScopedFit | None = None
        self._work: Any = None
        self._list: keras.callbacks.CallbackList | None = None
        self._last: LastCallback | None = None

    # ---- what subclasses say -----------------------------------------------------------------------------------------

    @abstractmethod
    def _work_on(self, model: Any) -> Any:
        """Returns the training of a model; called once for each model."""

    @abstractmethod
    def _begin_work(self) -> None:
        """Begins the work, before the first update inside the scope."""

    @abstractmethod
    def _finish(self) -> Any:
        """Gives the weights their final values, and returns the report."""

    def _prepare_fit(self, fit: ScopedFit) -> None:
        """Prepares a `fit`, before any batch."""

    def _prepare_batch(self, fit: ScopedFit) -> None:
        """Prepares a batch inside the scope."""

    def _next_change(self, fit: ScopedFit) -> float:
        """Returns the next update at which `_prepare_batch` does something else."""
        return float("inf")

    def _without_training(self) -> str:
        """Returns what `_finish` does if the training ended before the work began, for a note."""
        return f"the weights were {self.verb} without training"

    @property
    def report(self) -> Any:
        """The result of the last `fit`; RuntimeError before its end."""
        if self._report is None:
            raise RuntimeError("`report` exists once `fit` has ended with this callback.")
        return self._report

    # ---- events of `fit` ---------------------------------------------------------------------------------------------

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        found = callback_list_above()
        self._list = found
        listed = self._listed(type(self))
        if len(listed) > 1:
            raise ValueError(
                f"A list of callbacks may contain one {type(self).__name__}. Received: {len(listed)}. A model is "
                f"{self.verb} as a whole; `include` and `exclude` select the layers."
            )
        self._last = None if found is None else LastCallback.placed_after_all(found, self)
        self.resumption.find_backup(self, found)
        if self._work is None or self._work.model is not model:
            if self._data is not None and waits_for_data(model):
                # Keras would build it in the first step, after the work has begun.
                build_from_data(model, self._data)
            self._work = self._work_on(model)
        if not model.trainable_variables:
            raise ValueError(
                f"All weights of {model.name!r} are frozen, so `fit` updates none of them. {self.alternative}, or make "
                "layers trainable before compile()."
            )

    def _listed(self, kind: type) -> list[Any]:
        """Returns the callbacks of the list of a class, in order."""
        return [] if self._list is None else [one for one in self._list.callbacks if isinstance(one, kind)]

    def on_train_begin(self, logs: Any = None) -> None:
        work, former = self._work, self._fit
        if work is None:
            raise RuntimeError("Keras calls `set_model` before anything else.")
        if former is not None and former.work is work:
            counter = former.counter
            counter.resume(work.optimizers)
        else:
            counter = StepCounter(work.model, work.optimizers)
        self.notes, self._report = [], None
        self._fit = ScopedFit(work, counter, max(counter.now, self.begin_step), self._planned_end(counter))
        self._prepare_fit(self._fit)

    def _planned_end(self, counter: StepCounter) -> int | None:
        steps, epochs = (self.params or {}).get("steps"), (self.params or {}).get("epochs")
        return counter.now + updates_in(steps * epochs, counter.optimizers) if steps and epochs else None

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
        if not fit.work.begun:
            if fit.counter.done < self.begin_step:
                return
            self._begin_work()
        self._prepare_batch(fit)
        fit.steps.training().arm()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        fit = self._now
        if fit.functions is not None:
            fit.functions.training().disarm()
        fit.counter.unseen += fit.work.model.steps_per_execution or 1
        # On JAX, reading the number of updates waits for the device.
        change = self._next_change(fit) if fit.work.begun else min(self._next_change(fit), self.begin_step)
        if not jax_state.steps_are_pure() or fit.counter.done + fit.counter.unseen >= change:
            fit.counter.mark_all_seen()

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._last is None:
            self.begin_test_batch()

    def begin_test_batch(self) -> None:
        """Prepares one batch of the validation; called after all other callbacks' `on_test_batch_begin`."""
        if self._fit is not None and self._fit.is_inside:
            self._fit.steps.testing().arm()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._fit is not None and self._fit.is_inside:
            self._fit.steps.testing().disarm()

    def end_of_list(self) -> None:
        """Keeps the values of the epoch whose weights EarlyStopping keeps; called after all other callbacks."""
        fit, best = self._now, self._best_epoch()
        if best is not None and (fit.best is None or fit.best[0] != best):
            jax_state.sync_model_state(fit.work.model)
            fit.best = best, fit.work.values()

    def _best_epoch(self) -> int | None:
        kept = [one for one in self._listed(keras.callbacks.Callback) if getattr(one, "restore_best_weights", False)]
        return next((one.best_epoch for one in kept if getattr(one, "best_weights", None) is not None), None)

    def on_train_end(self, logs: Any = None) -> None:
        if self._last is None:
            self.end()

    def end(self) -> None:
        """Gives the weights their final values after all other callbacks' `on_train_end`."""
        fit = self._now
        fit.ended = True
        # If the backup is of the last epoch, `fit` begins no epoch, so the state is restored here.
        self.resumption.restore_pending(self)
        fit.counter.mark_all_seen()
        if not fit.work.begun:
            self._announce(
                f"The training ended after {fit.counter.now:,} updates, and {self._work.kind} begins at update "
                f"{self.begin_step:,}: {self._without_training()}."
            )
        elif fit.best is not None and fit.best[1]:
            fit.work.assign(fit.best[1])
        if fit.functions is not None:
            fit.functions.keep()
            fit.functions = None
        self._report = self._finish()

    def _announce(self, note: str) -> None:
        self.notes.append(note)
        if distribution.speaks_for(self._work.model):
            warnings.warn(note, stacklevel=2)

    # ---- what an interrupted `fit` goes on from ----------------------------------------------------------------------

    def start(self) -> None:
        """Begins a training that resumes none."""

    def snapshot(self) -> Snapshot:
        """Returns the number of updates, and the state of the work."""
        fit = self._now
        state = fit.work.snapshot()
        own = {"origin": fit.counter.origin, "starts_at": fit.starts_at, "ends_at": fit.ends_at}
        return Snapshot({**state.values, **own}, state.arrays)

    def resume(self, snapshot: Snapshot) -> None:
        """Lets the next `fit` go on from a state that `snapshot` returned."""
        self.resumption.state = snapshot

    def restore(self, snapshot: Snapshot) -> None:
        """Takes up a state; weights and optimizer must already be restored.

        Raises:
            ValueError: The state is of another work, or incomplete.
        """
        wrong = lacking(snapshot.values, {"origin": int, "starts_at": int, "ends_at": int | None})
        if wrong is not None:
            raise ValueError(f"The saved state of a {self._work.kind} lacks {wrong}, or another version wrote it.")
        fit = self._now
        fit.work.restore(snapshot)
        fit.counter.origin = snapshot.values["origin"]
        fit.starts_at, fit.ends_at = snapshot.values["starts_at"], snapshot.values["ends_at"]
        fit.counter.mark_all_seen()

    @property
    def _now(self) -> ScopedFit:
        if self._fit is None:
            raise RuntimeError("Keras calls `on_train_begin` before any batch.")
        return self._fit

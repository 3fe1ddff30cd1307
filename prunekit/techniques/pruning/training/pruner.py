"""Pruner: updates masks on a schedule after optimizer updates, in any training loop."""

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from prunekit.anatomy.cost.inspection import Event, SparsityReport, inspect, inspect_again
from prunekit.core.runtime import backend
from prunekit.core.training import distribution, train_function
from prunekit.keyword_options import keyword_options
from prunekit.sparsity.schedules import Schedule
from prunekit.techniques.pruning.masks.options import FORMER, PruningKeywords, PruningOptions
from prunekit.techniques.pruning.training import attached_pruners, pruning_notes
from prunekit.techniques.pruning.training.pruner_run import PrunerRun


class Pruner:
    """Prunes a model while any loop trains it: call `step()` after each optimizer update.

    From construction to `finish()`, every optimizer update masks the gradients first and the weights last, inside the
    compiled step. Build the Pruner before the loop's `tf.function` runs for the first time.

    Args:
        model: A built Keras model; only its weights are changed, in place.
        schedule: A `Schedule` (step -> sparsity) with an end, or a schedule of tensorflow-model-optimization.
        optimizer: Keras optimizer of the loop, or a list of optimizers. None uses the compiled model's optimizer.
            Without any optimizer, `step()` counts its own calls as steps and re-imposes the masks at each call; the
            loop then passes its gradients through `mask_gradients` before using them.
        data: Calibration data, for a criterion or policy that needs them: inputs, a pair (inputs, labels), or a
            dataset or list of such batches. They are read at each mask update.
        **options: `criterion`, `pattern`, `allocation`, `include`, `exclude`, `keep_zeros`, `keep_one`, `origin`,
            `overrides`, `bounds`, `policy`, `misfits`: see `pk.PruningOptions`.

    Attributes:
        model: The model.
        targets: The pruned weights.
        run: The state of the pruning, with its options, schedule and skipped weights.

    Raises:
        ValueError: No weight to prune; a name pattern that matches no weight; a sparsity pattern that does not fit a
            weight; an invalid option value; the criterion needs data, and there are none; another Pruner that is not
            finished prunes one of the weights.
        TypeError: `schedule` is not a schedule, `optimizer` is not a Keras optimizer, or an option is unknown.
    """

    @keyword_options(PruningOptions, PruningKeywords, FORMER)
    def __init__(
        self, model, schedule: Schedule, optimizer=None, *, data: Any = None, **options: Unpack[PruningKeywords]
    ):
        run = PrunerRun(model, schedule, PruningOptions(**options), optimizer, training=None, data=data)
        with contextlib.ExitStack() as undo:
            run.fit_schedule(None)
            undo.enter_context(train_function.fresh_train_function(model))
            undo.enter_context(run.enforcing())
            run.begin()
            self._follow(run, undo.pop_all())
        run.store.owner = self
        attached_pruners.note_attached(self)

    @classmethod
    def following(cls, run: PrunerRun) -> "Pruner":
        """Returns the Pruner of a run that a callback or `pk.prune` drives; it is attached to no optimizer."""
        pruner = cls.__new__(cls)
        pruner._follow(run, contextlib.ExitStack())
        return pruner

    def _follow(self, run: PrunerRun, attached: contextlib.ExitStack) -> None:
        self.run, self.model, self.targets = run, run.model, run.targets
        self._attached, self._finished = attached, False
        self._notes: list[str] = []

    def step(self) -> bool:
        """Follows the schedule by one step, after an optimizer update; returns True if masks changed.

        With policy="tfmot", a step is a forward pass in training: call `step()` before each such pass.

        Raises:
            LeakError: Pruned weights became non-zero, or no update passed through the optimizer since the last call.
            RuntimeError: Called inside a `tf.function`, or after `finish()`.
        """
        if backend.inside_graph():
            raise RuntimeError(
                "Pruner.step() was called while a tf.function is traced, so it would run only during tracing. "
                "Call it in Python, after the compiled training step returns."
            )
        if self._finished:
            raise RuntimeError("Pruner.step() was called after finish(). Build a new Pruner to prune further.")
        return self.run.step()

    def mask_gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns `gradients`, aligned with `model.trainable_variables`, set to zero at pruned positions.

        None stays None, and `tf.IndexedSlices` stay sparse.

        Raises:
            TypeError: `gradients` is not a list or tuple.
            ValueError: The number of gradients differs from that of the variables, or the shape of a gradient from
                that of its variable.
        """
        return self.run.store.mask_gradients(gradients, self.model.trainable_variables)

    def enforce(self) -> None:
        """Sets weights and optimizer slots to zero at pruned positions, immediately."""
        self.run.enforce()

    def audit(self) -> dict[str, int]:
        """Returns {weight name: number of pruned positions that are not exactly zero}."""
        return self.run.audit()

    def check(self) -> None:
        """Checks all targets for leaks immediately; reads every target and its mask once.

        Raises:
            LeakError: Pruned weights are non-zero; the masks were re-imposed.
        """
        self.run.check.check()

    def finish(self) -> SparsityReport:
        """Re-imposes the masks, detaches from model and optimizers, and returns the report; the zeros stay. Idempotent.

        Warns if the schedule did not end, or if `step()` was never called although the loop trained.
        """
        self._finish()
        return self.report

    def _finish(self) -> None:
        try:
            if not self._finished:
                self._finished = True
                forgotten = self._step_was_forgotten()
                notes = self.run.end_training(forgotten=forgotten)
                if forgotten:
                    passes = self.run.policy.counts_forward_passes
                    when = "before each forward pass in training" if passes else "after each optimizer update"
                    notes.append(pruning_notes.step_never_called(self.run.schedule, self.sparsity, when))
                self._warn(notes)
        finally:
            attached_pruners.note_detached(self)
            self._attached.close()

    def _warn(self, notes: Sequence[str]) -> None:
        self._notes += notes
        for note in notes:
            if distribution.speaks_for(self.model):
                warnings.warn(note, stacklevel=4)

    def _step_was_forgotten(self) -> bool:
        # Without an optimizer, calls are the steps: no training and forgotten calls cannot be told apart.
        trained = self.step_count > 0 or not self.optimizers
        return trained and not self.run.counter.calls and self.run.updater.last_update < self.run.schedule.final_step

    def __enter__(self) -> "Pruner":
        return self

    def __exit__(self, kind, *exception) -> None:
        if kind is None:
            self._finish()
            return
        # The loop raised: no check here may hide its exception, and weights may be NaN.
        self._finished = True
        attached_pruners.note_detached(self)
        with self._attached:
            self.enforce()

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers whose updates count as steps."""
        return self.run.counter.optimizers

    @property
    def events(self) -> list[Event]:
        """Every mask update so far."""
        return self.run.updater.events

    @property
    def masks(self) -> dict[str, np.ndarray]:
        """Masks as {weight name: boolean array, True = kept}."""
        return self.run.masks

    @property
    def sparsity(self) -> float:
        """Fraction of the targets' entries that are currently pruned."""
        return self.run.updater.sparsity

    @property
    def step_count(self) -> int:
        """Optimizer updates since the origin."""
        return self.run.counter.now

    @property
    def report(self) -> SparsityReport:
        """The `SparsityReport`: weights, mask updates, skipped weights with reasons, and notes; made at each access."""
        return self.report_since()

    def report_since(
        self, *, before: SparsityReport | None = None, notes: Sequence[str] = (), only_pruned: bool = False
    ) -> SparsityReport:
        """Returns the report with what was before.

        Args:
            before: Report on the model before pruning.
            notes: Messages to add.
            only_pruned: Whether nothing but the pruned weights changed since `before`.
        """
        after = inspect_again(before, self.targets) if before is not None and only_pruned else inspect(self.model)
        return SparsityReport(
            model_name=after.model_name,
            weights=after.weights,
            skipped=tuple(self.run.skipped),
            events=tuple(self.events),
            notes=(*after.notes, *self._notes, *notes),
            before=before,
            targets=tuple(target.name for target in self.targets),
            choices=self.run.options.choices,
        )


def check_loop_steps_after_updates(pruner: Pruner, loop: str) -> None:
    """Checks that a loop that steps its pruner after each update can use this pruner.

    Raises:
        ValueError: The pruner's policy counts forward passes.
    """
    if pruner.run.policy.counts_forward_passes:
        raise ValueError(
            f"{loop} steps its pruner after each update, and the pruner's policy prunes before each forward pass. "
            f"Received: a pruner with policy={pruner.run.policy}. Leave it out, or train with `fit` or a loop of your "
            "own."
        )

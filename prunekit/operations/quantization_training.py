"""Quantization during training in loops of your own: `Quantizer`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from prunekit.anatomy.layers.model_weights import check_built
from prunekit.core.data.calibration import CheckedData
from prunekit.core.outputs.baseline import Baseline
from prunekit.core.runtime.snapshot import Snapshot
from prunekit.core.training import distribution
from prunekit.core.training.train_function import fresh_forward_functions, fresh_functions
from prunekit.delivery.integers.integer_writing import KnownOutputs
from prunekit.keyword_options import keyword_options
from prunekit.operations.quantize import QuantizationResult, first_examples, outputs_of
from prunekit.techniques.quantize.options import FORMER, QuantizationOptions, TrainingKeywords
from prunekit.techniques.quantize.training.training import QuantizationTraining

# Entry of a state: batch normalizations are frozen.
_FROZEN = "frozen"


def training_options(options: TrainingKeywords) -> QuantizationOptions:
    """Returns the options of a quantization in training.

    Raises:
        TypeError, ValueError: An option has a wrong value.
    """
    return QuantizationOptions(method="nearest", **options)


class QuantizationRun:
    """A quantization in training, and what its result is compared with."""

    def __init__(self, model: Any, data: Any, options: QuantizationOptions, **training: Any):
        check_built(model)
        self.model = model
        self.work = QuantizationTraining(model, options, data, **training)
        self._data = None if data is None else CheckedData(model, data)
        self._samples = None if data is None else first_examples(self.work.inputs())
        self._before: list[np.ndarray] | None = None

    def begin(self) -> None:
        """Chooses the ranges at the start, and keeps what the model computes in floating point."""
        self.work.begin()
        if distribution.speaks_for(self.model):
            for problem in self.work.data_problems:
                warnings.warn(problem, stacklevel=2)
        self._keep_outputs()

    def _keep_outputs(self) -> None:
        self._before = None if self._samples is None else outputs_of(self.model, self._samples)

    def finish(self, notes: Sequence[str] = ()) -> QuantizationResult:
        """Puts the weights on their grids."""
        if not self.work.begun:
            self._keep_outputs()
        # Of the trained weights: those from before the training say nothing about what rounding costs.
        baseline = None if self._data is None else Baseline(self.model, self._data)
        found = self.work.finish(notes)
        known = KnownOutputs(self._before)
        return QuantizationResult(found if baseline is None else found.with_damage(baseline), self._samples, known)


class Quantizer:
    """Trains a model as its integer file will compute, in loops of your own; see `QuantizationCallback`.

    From its creation to `finish`, the model computes on integers, in every call. The scales of the grids are the first
    of `model.trainable_variables`, one variable: take the gradients of these as always, and give them to the optimizer,
    which updates the weights; the scales are updated beside it. A function that was traced before has to be traced
    again.

    Example:
        with pk.Quantizer(model, data) as quantizer:
            for x, y in batches:
                train_step(x, y)
        quantizer.finish().export("model.tflite")

    Args:
        model: A built Keras model.
        data: Calibration data, as `pk.quantize` takes them; None only with activation_bits="float".
        optimizer: The Keras optimizer of the loop, or a list of optimizers. None uses those of the model.
        range_learning_rate: As for `QuantizationCallback`.
        rate: As for `QuantizationCallback`; add `model.losses` to the loss of your loop.
        **options: As for `QuantizationCallback`.

    Raises:
        ValueError: An option has a wrong value; the model is not built, or its layers cannot be followed; calibration
            data are missing or not finite; there is no optimizer.
        TypeError: An option is unknown, or `model` is not a Keras 3 model.
    """

    @keyword_options(QuantizationOptions, TrainingKeywords, FORMER)
    def __init__(
        self,
        model: Any,
        data: Any = None,
        optimizer: Any = None,
        *,
        range_learning_rate: float = 1e-3,
        rate: float = 0.0,
        **options: Unpack[TrainingKeywords],
    ):
        chosen = training_options(options)
        chosen.with_data(data)
        self._run = QuantizationRun(
            model, data, chosen, optimizer=optimizer, range_learning_rate=range_learning_rate, rate=rate
        )
        self.model = model
        if not self._run.work.optimizers:
            raise ValueError(
                "The scales are updated whenever an optimizer updates the weights. Received: a model without an "
                "optimizer. Compile the model, or pass the Keras optimizer of your loop as `optimizer`."
            )
        self._quantized: QuantizationResult | None = None
        self._run.begin()
        self._attached = contextlib.ExitStack()
        self._attach()

    def _attach(self) -> None:
        with contextlib.ExitStack() as undo:
            undo.enter_context(fresh_functions(self.model))
            undo.enter_context(fresh_forward_functions(self.model))
            undo.enter_context(self._run.work.updating())
            self._attached = undo.pop_all()

    def freeze_normalizations(self) -> None:
        """From here on, batch normalizations compute with their moving statistics, as in the file.

        Call it for the last part of a training. A function of your own has to be traced again.

        Raises:
            RuntimeError: Called after `finish`.
        """
        self._check_running("freeze_normalizations")
        self._run.work.frozen = True
        self._attached.close()
        self._attach()

    def state(self) -> dict[str, np.ndarray]:
        """Returns everything besides weights and optimizer that `restore` continues from, as named arrays.

        These are the scales, the state of their training, and whether batch normalizations are frozen; `np.savez` saves
        them.

        Raises:
            RuntimeError: Called after `finish`.
        """
        self._check_running("state")
        saved = self._run.work.snapshot()
        return {**saved.arrays, _FROZEN: np.array(saved.values["frozen"])}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from a saved state; the loop then ends as one that was never interrupted.

        Call it before the first step. The weights and the optimizer must already be restored. A function of your own
        has to be traced again.

        Args:
            state: What `state` returned, for the same model and options.

        Raises:
            ValueError: The state is of another model or of other options, or incomplete.
            RuntimeError: Called after `finish`.
        """
        self._check_running("restore")
        arrays = dict(state)
        if _FROZEN not in arrays:
            raise ValueError(f"A state is what Quantizer.state() returned. Received: arrays without {_FROZEN!r}.")
        values = {"begun": True, "frozen": bool(arrays.pop(_FROZEN))}
        self._attached.close()
        try:
            self._run.work.restore(Snapshot(values, arrays))
        finally:
            self._attach()

    def _check_running(self, method: str) -> None:
        if self._quantized is not None:
            raise RuntimeError(f"Quantizer.{method}() was called after finish().")

    def finish(self) -> QuantizationResult:
        """Puts the weights on their grids, in place, and gives the model back as it was; idempotent."""
        if self._quantized is None:
            self._attached.close()
            self._quantized = self._run.finish()
        return self._quantized

    @property
    def report(self) -> QuantizationResult:
        """What `finish` returned; RuntimeError before."""
        if self._quantized is None:
            raise RuntimeError("`report` exists once the Quantizer has finished.")
        return self._quantized

    def __enter__(self) -> Quantizer:
        if self._quantized is not None:
            raise RuntimeError("The Quantizer has finished: the model computes in floating point. Make a new one.")
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        if kind is None:
            self.finish()
        else:
            # The loop raised: the weights stay as they are, and may be NaN.
            self._attached.close()

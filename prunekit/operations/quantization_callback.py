"""QuantizationCallback: quantization-aware training in `fit`."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

from prunekit.core.training.scoped_callback import ScopedCallback, ScopedFit
from prunekit.keyword_options import keyword_options
from prunekit.operations.quantization_training import QuantizationRun, training_options
from prunekit.operations.quantize import QuantizationResult
from prunekit.sparsity.arguments import whole
from prunekit.techniques.quantize.options import FORMER, QuantizationOptions, TrainingKeywords, price_of_bits
from prunekit.techniques.quantize.training.training import QuantizationTraining, learning_rate

# Share of a training of known length after which batch normalizations use their moving statistics.
_FREEZE_AT = 0.8
_NEVER = -1


class QuantizationCallback(ScopedCallback):
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
        rate: Price of a bit, for files that are entropy-coded (gzip), such as 0.01: the loss contains it
            times the mean bits of a weight, the entropy of the codes.
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

    rank: ClassVar[int] = 2
    verb: ClassVar[str] = "quantized"
    alternative: ClassVar[str] = "Quantize the model with pk.quantize"

    @keyword_options(QuantizationOptions, TrainingKeywords, FORMER)
    def __init__(
        self,
        data: Any = None,
        *,
        begin_step: int = 0,
        freeze_step: int | None = None,
        range_learning_rate: float = 1e-3,
        rate: float = 0.0,
        **options: Unpack[TrainingKeywords],
    ):
        super().__init__(begin_step, data)
        self.options = training_options(options)
        self.options.with_data(data)
        self.freeze_step = None if freeze_step is None else whole("freeze_step", freeze_step, _NEVER)
        if self.freeze_step is not None and _NEVER < self.freeze_step < self.begin_step:
            raise ValueError(
                "Batch normalizations are frozen while the model trains on integers, so `freeze_step` is at least "
                f"`begin_step`. Received: begin_step={self.begin_step}, freeze_step={self.freeze_step}."
            )
        self._training = {
            "range_learning_rate": learning_rate("range_learning_rate", range_learning_rate),
            "rate": price_of_bits(rate),
        }
        self._run: QuantizationRun | None = None

    @property
    def report(self) -> QuantizationResult:
        """The result of the last `fit`, with `.simulating()` and `.export(path)`; RuntimeError before its end."""
        return super().report

    def _work_on(self, model: Any) -> QuantizationTraining:
        self._run = QuantizationRun(model, self._data, self.options, **self._training)
        return self._run.work

    def _begin_work(self) -> None:
        self._known_run.begin()

    def _prepare_fit(self, fit: ScopedFit) -> None:
        fit.work.frozen = False

    def _prepare_batch(self, fit: ScopedFit) -> None:
        freezes_at = self._freezes_at(fit)
        fit.work.frozen = fit.work.frozen or (freezes_at is not None and fit.counter.done >= freezes_at)

    def _next_change(self, fit: ScopedFit) -> float:
        freezes_at = None if fit.work.frozen else self._freezes_at(fit)
        return float("inf") if freezes_at is None else freezes_at

    def _freezes_at(self, fit: ScopedFit) -> int | None:
        """Returns the update from which batch normalizations are frozen; None = never."""
        if self.freeze_step is not None:
            return None if self.freeze_step == _NEVER else self.freeze_step
        return None if fit.ends_at is None else fit.starts_at + int(_FREEZE_AT * max(fit.ends_at - fit.starts_at, 0))

    def _finish(self) -> QuantizationResult:
        return self._known_run.finish(self.notes)

    @property
    def _known_run(self) -> QuantizationRun:
        if self._run is None:
            raise RuntimeError("Keras calls `set_model` before anything else.")
        return self._run

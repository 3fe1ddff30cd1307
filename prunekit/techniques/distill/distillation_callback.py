"""DistillationCallback: distillation in `fit`."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

from prunekit.core.training.scoped_callback import ScopedCallback
from prunekit.keyword_options import keyword_options
from prunekit.techniques.distill.distill_report import DistillReport
from prunekit.techniques.distill.options import DistillationKeywords, DistillationOptions
from prunekit.techniques.distill.training import DistillationTraining


class DistillationCallback(ScopedCallback):
    """Trains a model in `fit` on the outputs of a teacher, beside the labels (knowledge distillation).

    The loss of a training step is (1 - weight) * compiled loss + weight * distillation loss + regularization losses.
    Weights of examples and classes, metrics, validation and `evaluate` are those of a plain `fit`; `val_loss` is the
    compiled loss. The teacher computes in inference mode, is never changed, and is not saved with the model. Its
    outputs are kept from the first epoch on (float16 for classes) where the same examples come back; augmented ones
    are computed anew.

    Use it with a `PruningCallback`, `QuantizationCallback`, `ClusterCallback` or a penalty in the same `fit`, in any
    order: the student is what they make of the model. If the list contains a `BackupAndRestore`, the kept outputs are
    saved and restored with the weights.

    Args:
        teacher: A built Keras model with outputs of the same shapes. None = a copy of the model at the first `fit`: the
            model before its compression.
        begin_step: Optimizer update at which distillation begins.
        **options: `loss`, `weight`, `temperature`, `features`, `feature_weight`, `cache`, `memory`: see
            `pk.DistillationOptions`.

    Raises:
        ValueError: An option has a wrong value; in `fit`, before the first update: the model is not built, or cannot be
            copied; the teacher shares weights with it, or has other outputs; a layer of `features` does not exist.
        TypeError: An option is unknown, or the teacher is not a Keras 3 model.
        RuntimeError: The training step of the model never calls `compute_loss`.

    Source: Hinton et al. 2015, arXiv:1503.02531 ("kl"); Huang et al. 2022, arXiv:2205.10536 ("dist"); Zhao et al. 2022,
        arXiv:2203.08679 ("dkd"); Zagoruyko & Komodakis 2017, arXiv:1612.03928 (normalised maps).
    """

    rank: ClassVar[int] = 3
    verb: ClassVar[str] = "distilled"
    alternative: ClassVar[str] = "Distillation trains weights"

    @keyword_options(DistillationOptions, DistillationKeywords)
    def __init__(self, teacher: Any = None, *, begin_step: int = 0, **options: Unpack[DistillationKeywords]):
        super().__init__(begin_step)
        self.options = DistillationOptions(**options)
        self._teacher = teacher
        self._batch, self._began_late = 0, False

    @property
    def report(self) -> DistillReport:
        """The `DistillReport` of the last `fit`; RuntimeError before its end."""
        return super().report

    def _work_on(self, model: Any) -> DistillationTraining:
        return DistillationTraining(model, self._teacher, self.options)

    def _begin_work(self) -> None:
        self._began_late = self._batch > 0
        self._work.begin()

    def _without_training(self) -> str:
        return "nothing was distilled"

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        if self._work.begun:
            # A second `fit`: the teacher may have been trained since.
            self._work.begin()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._batch = batch
        super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        work = self._now.work
        if work.begun:
            self._check_applied()
            work.after_batch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._now.work.begun:
            fit = self._now
            fit.work.after_epoch(whole=not self._began_late)
            if fit.functions is not None and not fit.functions.contain(fit.work.in_traces()):
                # Traces read the variables of the epoch before.
                fit.functions = None
        self._began_late = False

    # Validation measures the model as it is.
    def begin_test_batch(self) -> None:
        """Changes nothing."""

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Changes nothing."""

    def _check_applied(self) -> None:
        if not self._now.work.applied:
            raise RuntimeError(
                "The distillation loss is part of `compute_loss`. Received: the model "
                f"{self._now.work.model.name!r}, whose own training step never calls it. Call self.compute_loss(x, y, "
                "y_pred, sample_weight) in it."
            )

    def _finish(self) -> DistillReport:
        return self._work.finish(self.notes)

"""ClusterCallback: training of weights on centroids in `fit`."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

from prunekit.core.data.calibration import CheckedData
from prunekit.core.training.scoped_callback import ScopedCallback, ScopedFit
from prunekit.keyword_options import keyword_options
from prunekit.sparsity.shorthands import Assignment, CentroidGradients
from prunekit.techniques.cluster.cluster_report import ClusterReport
from prunekit.techniques.cluster.options import (
    ClusterOptions,
    Clusters,
    ClusterTrainingKeywords,
    ClusterTrainingOptions,
)
from prunekit.techniques.cluster.training import ClusterTraining, of_pruner
from prunekit.techniques.pruning.training.attached_pruners import attached_to_model
from prunekit.techniques.pruning.training.callbacks import PruningCallback
from prunekit.techniques.pruning.training.keep_zeros import KeepZeros


class ClusterCallback(ScopedCallback):
    """Trains the model in `fit` with few different values for each weight (cluster-aware training).

    In every training step each entry of a weight has the value of its nearest centroid, and both are trained: the
    entry, which may change its centroid, and the centroid. Validation in `fit` measures the model on centroids. At the
    end the weights are put on them, in place, and `report` says what was clustered. Zeros stay zero, and no other entry
    becomes zero.

    The training begins with the weights of `pk.cluster` on `data`; without, with k-means, from which two or three
    values may not recover. An optimizer of the kind of the model's, with its learning rate, trains the centroids. With
    a `PruningCallback` in the same `fit`, pruned weights are exactly zero in every step; with a `QuantizationCallback`,
    what is rounded are the centroids. The order of the list does not matter. If the list contains a
    `BackupAndRestore`, centroids are saved and restored with the weights.

    Args:
        clusters: As for `pk.cluster`.
        data: Calibration data, as `pk.cluster` takes them, or None.
        begin_step: Optimizer update at which clustering begins.
        assignment: "nearest": each entry has the value of its nearest centroid. "soft": a value between its nearest
            two, which moves to the nearest as the training goes on; for a `fit` of known length.
        gradients: What a centroid receives of the gradients of its entries: their "average", or their "sum", as in
            tensorflow-model-optimization.
        **options: `granularity`, `centroids`, `include`, `exclude`, `misfits`: see `pk.ClusterOptions`.

    Raises:
        ValueError: An option has a wrong value; in `fit`, before the first update: the model is not built, or all its
            weights are frozen; a pattern matches nothing; a weight is not finite, or zero throughout; the list has two
            such callbacks; the length of a soft assignment's training is unknown.
        TypeError: An option is unknown, or the model is not a Keras 3 model.

    Source: tensorflow-model-optimization, "clustering_comprehensive_guide" (centroids and weights trained together);
        Cho et al. 2022, arXiv:2108.12659 (DKM, soft assignment).
    """

    rank: ClassVar[int] = 1
    verb: ClassVar[str] = "clustered"
    alternative: ClassVar[str] = "Cluster the model with pk.cluster"

    @keyword_options(ClusterOptions, ClusterTrainingKeywords)
    def __init__(
        self,
        clusters: Clusters = 16,
        data: Any = None,
        *,
        begin_step: int = 0,
        assignment: Assignment = "nearest",
        gradients: CentroidGradients = "average",
        **options: Unpack[ClusterTrainingKeywords],
    ):
        super().__init__(begin_step, data)
        self.options = ClusterOptions(clusters, **options)
        self._training = ClusterTrainingOptions(assignment, gradients)

    @property
    def report(self) -> ClusterReport:
        """The `ClusterReport` of the last `fit`; RuntimeError before its end."""
        return super().report

    def _work_on(self, model: Any) -> ClusterTraining:
        data = None if self._data is None else CheckedData(model, self._data)
        return ClusterTraining(model, self.options, self._training, data)

    def _prepare_fit(self, fit: ScopedFit) -> None:
        if self._training.assignment == "soft" and fit.ends_at is None:
            raise ValueError(
                'assignment="soft" follows the length of the training. Received: a `fit` of unknown length. Pass '
                'steps_per_epoch to `fit`, or take assignment="nearest".'
            )

    def _begin_work(self) -> None:
        work = self._work
        # Zeros that only stay need no room.
        pruning = [one for one in self._listed(PruningCallback) if not isinstance(one, KeepZeros)]
        pruners = [*attached_to_model(work.model), *(one.pruner for one in pruning)]
        work.held = of_pruner(work.weights, [target for pruner in pruners for target in pruner.targets])
        work.begin()

    def _prepare_batch(self, fit: ScopedFit) -> None:
        if self._training.assignment == "soft" and fit.ends_at is not None:
            length = max(fit.ends_at - fit.starts_at, 1)
            fit.work.cool(min(max(fit.counter.done - fit.starts_at, 0) / length, 1.0))

    def _next_change(self, fit: ScopedFit) -> float:
        # The temperature falls with each update.
        return fit.counter.done if self._training.assignment == "soft" else float("inf")

    def _finish(self) -> ClusterReport:
        return self._work.finish(self.notes)

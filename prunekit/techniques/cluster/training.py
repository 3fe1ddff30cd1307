"""Trains a model whose weights are centroids (cluster-aware training)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prunekit.anatomy.layers.targets import check_finite
from prunekit.core.runtime import backend, jax_state
from prunekit.core.runtime.kept_grids import check_off_grids
from prunekit.core.runtime.optimizers import optimizers_of
from prunekit.core.runtime.snapshot import Snapshot, arrays_under, lacking
from prunekit.core.runtime.substituted_values import substituted
from prunekit.core.runtime.variable_values import assigned
from prunekit.core.training.joined_variables import joined, trainer_like
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.cluster.after_training import (
    Clusterable,
    cluster_model,
    clusterable,
    relative_change,
    row_of,
)
from prunekit.techniques.cluster.cluster_report import ClusterReport
from prunekit.techniques.cluster.codebooks import Codebooks
from prunekit.techniques.cluster.learned_centroids import LearnedCentroids
from prunekit.techniques.cluster.options import ClusterOptions, ClusterTrainingOptions
from prunekit.techniques.pruning.masks.mask_store import MaskStore
from prunekit.techniques.pruning.training.held_masks import masks_of_zeros


@dataclass(frozen=True, eq=False)
class TracedCentroids:
    """What a trace of a step on centroids contains beside the model.

    Attributes:
        work: The training that the trace was made in.
        variables: Its variables then.
        masks: The masks that it enforced, or None.
    """

    work: ClusterTraining
    variables: tuple[Any, ...]
    masks: MaskStore | None


class ClusterTraining:
    """Trains weights and centroids so that the model keeps its quality on few values.

    In a training step, each entry has the value of a centroid of its codebook. Its gradient goes to the entry, which
    may change its centroid so, and to the centroid. Zeros stay zero, and belong to no centroid.

    Args:
        model: A built model.
        options: Which weights, how many clusters, how centroids begin.
        training: How they are trained.
        data: Calibration data on which the weights are clustered first, or None.

    Attributes:
        held: Names of weights that something else prunes, and whose zeros it holds.

    Raises:
        TypeError, ValueError: As for `pk.cluster`.
    """

    kind = "clustering"
    variants = ("centroids", "soft centroids")

    def __init__(self, model: Any, options: ClusterOptions, training: ClusterTrainingOptions, data: Any = None):
        self.model, self._options, self._training, self._data = model, options, training, data
        self.weights, self.skipped = clusterable(model, options)
        check_off_grids(model, "Clustering", "Cluster first, then quantize.")
        self.held: frozenset[str] = frozenset()
        self._centroids: LearnedCentroids | None = None
        self._masks: MaskStore | None = None

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers whose updates train the weights."""
        return optimizers_of(self.model)

    @property
    def begun(self) -> bool:
        """True once the model is trained on centroids."""
        return self._centroids is not None

    @property
    def variant(self) -> str:
        """Name of what a trace of a training step contains now."""
        return self.variants[self._centroids is not None and self._centroids.temperature > 0]

    def begin(self) -> None:
        """Finds the centroids at the start.

        Raises:
            ValueError: A weight is not finite.
        """
        jax_state.sync_model_state(self.model)
        check_finite([one.target for one in self.weights])
        empty = [one.target.name for one in self.weights if not array_of(one.target.variable).any()]
        if empty:
            raise ValueError(
                "A weight that trains on centroids has values to begin with. Received: "
                f"{', '.join(empty[:5])}, zero throughout. Train the model first, or leave the weight out by `exclude`."
            )
        if self._data is not None:
            cluster_model(self.model, self._options, self._data)
        self._train(
            [
                Codebooks.fitted(
                    array_of(one.target.variable).astype("float32"),
                    one.channels,
                    one.clusters,
                    start=self._options.centroids,
                    reserve_zero=one.target.name in self.held,
                )
                for one in self.weights
            ]
        )

    def _train(self, codebooks: Sequence[Codebooks]) -> None:
        variables = [one.target.variable for one in self.weights]
        masks = masks_of_zeros([one.target for one in self.weights if one.target.name not in self.held])
        with backend.variable_scope(self.model):
            self._centroids = LearnedCentroids(variables, codebooks, averages=self._training.gradients == "average")
            self._centroids.trainer = trainer_like(self.optimizers, self._centroids.variables)
        if masks:
            self._masks = MaskStore([one.target for one in self.weights if one.target.name in masks], self.model)
            self._masks.replace([masks[target.name] for target in self._masks.targets], self.optimizers)

    def cool(self, share: float) -> None:
        """Sets the temperature for a share of the training that is done, 0 to 1."""
        self._known().warm(self._training.temperature_at(share))

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Inside the scope, the model computes on centroids, and training steps train weights and centroids."""
        known = self._known()
        with contextlib.ExitStack() as stack:
            if self._masks is not None:
                stack.enter_context(self._masks.enforcing(self.optimizers))
            stack.enter_context(joined(self.model, self.optimizers, known.variables, known.trainer))
            stack.enter_context(self._computing(known))
            yield

    @contextlib.contextmanager
    def testing(self) -> Iterator[None]:
        """Inside the scope, the model computes on centroids."""
        known = self._known()
        temperature, known.temperature = known.temperature, 0.0
        try:
            with joined(self.model, (), known.variables, known.trainer), self._computing(known):
                yield
        finally:
            known.temperature = temperature

    def _computing(self, known: LearnedCentroids) -> contextlib.AbstractContextManager[None]:
        layers = {id(one.target.variable): one.target.layer for one in self.weights}
        return substituted(self.model, layers, known.for_pass)

    def in_traces(self) -> TracedCentroids:
        """Returns what a trace of a step contains beside the model."""
        return TracedCentroids(self, tuple(self._known().variables), self._masks)

    def take_over(self, traced: TracedCentroids) -> bool:
        """Trains the variables that a former trace contains, from the present values; False if it does not fit.

        A training that used the variables before goes on with others, of the same values.
        """
        former = traced.work
        if not self._is_traced_in(traced) and former._is_traced_in(traced) and self._is_like(former):
            self._known().exchange_variables(former._known())
            if self._masks is not None and former._masks is not None:
                mine, its = list(self._masks.masks.values()), list(former._masks.masks.values())
                self._masks.assign(its)
                former._masks.assign(mine)
                self._masks, former._masks = former._masks, self._masks
        return self._is_traced_in(traced)

    def _is_traced_in(self, traced: TracedCentroids) -> bool:
        same = all(one is two for one, two in zip(self._known().variables, traced.variables, strict=True))
        return same and self._masks is traced.masks

    def _is_like(self, other: ClusterTraining) -> bool:
        """Returns True if a trace of one training serves the other, given its variables and masks."""
        masked = [() if one._masks is None else tuple(t.name for t in one._masks.targets) for one in (self, other)]
        return masked[0] == masked[1] and self._known().serves(other._known())

    def _known(self) -> LearnedCentroids:
        if self._centroids is None:
            raise RuntimeError("`begin` comes before the first training step.")
        return self._centroids

    def finish(self, notes: Sequence[str] = ()) -> ClusterReport:
        """Puts the weights on their centroids, in place, and returns the report.

        Args:
            notes: Remarks for the report.

        Raises:
            ValueError: A weight is NaN or infinite; nothing is changed.
        """
        jax_state.sync_model_state(self.model)
        check_finite([one.target for one in self.weights])
        if not self.begun:
            self.begin()
        values, rows = [], []
        for one, books in zip(self.weights, self._known().codebooks(), strict=True):
            weight = array_of(one.target.variable).astype("float32")
            new = books.nearest(weight)
            values.append((one.target.variable, new))
            rows.append(row_of(one, new, books, relative_change(weight, new)))
        with assigned(values):
            return ClusterReport(
                self.model.name, "training", tuple(rows), tuple(self.skipped), self.model.count_params(), tuple(notes)
            )

    # ---- what an interrupted training goes on from -------------------------------------------------------------------

    def values(self) -> list[np.ndarray]:
        """Returns the centroids, as `assign` takes them."""
        return [] if self._centroids is None else [np.array(array_of(self._centroids.variables[0]))]

    def assign(self, values: list[np.ndarray]) -> None:
        """Sets the centroids."""
        self._known().variables[0].assign(values[0])

    def snapshot(self) -> Snapshot:
        """Returns everything besides weights and optimizer that `restore` continues from."""
        arrays: dict[str, np.ndarray] = {}
        if self._centroids is not None:
            arrays = {f"start/{index}": one.table for index, one in enumerate(self._centroids.starts)}
            arrays["centroids"] = self.values()[0]
            arrays |= {
                f"trainer/{i}": np.array(array_of(one)) for i, one in enumerate(self._centroids.trainer.variables)
            }
        return Snapshot({"begun": self.begun}, arrays)

    def restore(self, snapshot: Snapshot) -> None:
        """Takes up a state, instead of `begin`; weights and optimizer must already be restored.

        Raises:
            ValueError: The state is of another model or of other options, or incomplete.
        """
        wrong = lacking(snapshot.values, {"begun": bool})
        if wrong is not None:
            raise ValueError(f"The saved state of a clustering lacks {wrong}, or another version wrote it.")
        if not snapshot.values["begun"]:
            return
        tables, slots = arrays_under(snapshot.arrays, "start/"), arrays_under(snapshot.arrays, "trainer/")
        wanted = [(one.channels.count, one.clusters) for one in self.weights]
        found = [tables[str(index)].shape for index in range(len(tables)) if str(index) in tables]
        fits = len(found) == len(wanted) and all(
            books == count and centroids <= clusters
            for (books, centroids), (count, clusters) in zip(found, wanted, strict=True)
        )
        if not fits or "centroids" not in snapshot.arrays:
            raise ValueError(
                "A resumed training must cluster the same weights as before. Received: the state of another "
                "clustering. Use the model and the options of the first run, or begin in another folder."
            )
        rows = zip(self.weights, range(len(found)), strict=True)
        self._train([Codebooks(one.channels, np.array(tables[str(index)])) for one, index in rows])
        known = self._known()
        self.assign([snapshot.arrays["centroids"]])
        for index, variable in enumerate(known.trainer.variables):
            variable.assign(slots[str(index)])


def of_pruner(weights: Sequence[Clusterable], targets: Sequence[Any]) -> frozenset[str]:
    """Returns the names of the weights that are among the targets of a pruner."""
    pruned = {id(backend.native(target.variable)) for target in targets}
    return frozenset(one.target.name for one in weights if id(backend.native(one.target.variable)) in pruned)

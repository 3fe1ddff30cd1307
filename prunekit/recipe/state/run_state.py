"""RunState: everything of a run, besides the model and its optimizer, that is saved and restored whole."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prunekit.anatomy.cost.inspection import Event, SparsityReport
from prunekit.anatomy.records.reports import Skipped
from prunekit.delivery.reports.rows import StageRow
from prunekit.operations.export import ExportRow


@dataclass
class RunMasks:
    """The masks that outlive a step, by weight name, True = kept.

    Attributes:
        pruned: Masks of all finished prune steps. Not derived from current zeros: a weight that is entirely zero may be
            pruned or may not have learned yet.
        original: Masks of the zeros that the model came with, in weights that no prune step has pruned since.
    """

    pruned: dict[str, np.ndarray] = field(default_factory=dict)
    original: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def all(self) -> dict[str, np.ndarray]:
        """The masks to enforce while a step trains."""
        return self.original | self.pruned

    def add_pruned(self, masks: Mapping[str, np.ndarray]) -> None:
        """Adds the masks of a prune step; what an earlier step pruned stays pruned."""
        for name, mask in masks.items():
            self.pruned[name] = np.logical_and(mask, self.pruned.get(name, True))

    def replace_pruned(self, masks: Mapping[str, np.ndarray]) -> None:
        """Replaces the masks of these weights, whatever earlier steps pruned."""
        self.pruned |= masks

    def release_original(self, names: Collection[str] | None = None) -> None:
        """Stops the enforcement of the original zeros of the weights `names`; None means all weights."""
        self.original = {n: mask for n, mask in self.original.items() if names is not None and n not in names}

    def keep_fitting(self, weights: Mapping[str, np.ndarray]) -> None:
        """Removes the masks of weights that are gone or have another shape, for a new model with these weights."""

        def fitting(masks: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {name: m for name, m in masks.items() if name in weights and weights[name].shape == m.shape}

        self.pruned, self.original = fitting(self.pruned), fitting(self.original)


@dataclass
class RunState:
    """Results of the executed steps, and what later steps need of earlier ones.

    Attributes:
        before: Report of the model just before the first prune step, or at the start without a prune step.
        weights_before: Weights at the time of `before`, by name.
        metrics_before: Metrics and loss at the time of `before`, by name; empty if not measured.
        metrics: Metrics and loss after the last step that changed weights.
        pruning_since: Optimizer updates before the first prune step; events and curve count from this update.
        updates: Optimizer updates of all finished steps.
        targets: Names of the weights that were pruned.
        skipped: Weights that no prune step pruned, with reasons.
        changes: Changes of each weight by the updates of all training steps, by weight name.
        change_figures: Sums from which `changes` goes on; None before the first training.
        expectations: Expected and measured values.
        architecture: Description of the model that replaced the recipe's model; None without such a model.
        masks: Masks that outlive a step.
        stages: LiteRT files of the model before the first prune step and after later steps, without latencies.
        own: JSON values that the present step keeps for its next training, by names of its own; a resumed step finds
            them again, and the next step finds none.
        own_arrays: Arrays that it keeps, likewise.
    """

    before: SparsityReport
    weights_before: dict[str, np.ndarray] = field(metadata={"arrays": True})
    metrics_before: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    pruning_since: int | None = None
    updates: int = 0
    steps: list[dict[str, Any]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    skipped: dict[str, Skipped] = field(default_factory=dict)
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    change_figures: list[list[float]] | None = None
    exports: list[ExportRow] = field(default_factory=list)
    expectations: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    architecture: dict[str, Any] | None = None
    stages: list[StageRow] = field(default_factory=list)
    own: dict[str, Any] = field(default_factory=dict)
    masks: RunMasks = field(default_factory=RunMasks, metadata={"arrays": True})
    own_arrays: dict[str, np.ndarray] = field(default_factory=dict, metadata={"arrays": True})

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The expectations that were not met."""
        return [row for row in self.expectations if not row["met"]]

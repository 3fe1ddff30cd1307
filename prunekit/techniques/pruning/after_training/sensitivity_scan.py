"""Measures what the pruning of one weight at a time does to a model, at several sparsities."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from keras import ops

from prunekit.anatomy.layers.targets import Target
from prunekit.anatomy.records.reports import Skipped
from prunekit.core.outputs.output_metrics import Batch
from prunekit.core.outputs.weight_scan import Measured, WeightScan
from prunekit.core.runtime import backend
from prunekit.core.statistics.statistics import Collectors
from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.schedules import OneShot
from prunekit.sparsity.scores import Criterion, get_criterion
from prunekit.sparsity.shorthands import sources_of
from prunekit.techniques.pruning.masks.mask_calculator import MaskCalculator
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.training.targeting import resolved_targets

_SELECTED = "The criterion selected the weights; the kept weights did not make up for the pruned ones."


class SensitivityScan:
    """Prunes one weight at a time, measures, and restores the weight.

    Args:
        model: A built Keras model.
        batches: The data. Without labels, or with a model that is not compiled, only output errors are measured.
        options: Criterion, pattern and selection of the weights.
        levels: The sparsities.
        memory: Largest number of bytes of activations to keep; see `SuffixRuns`.

    Attributes:
        model: The model.
        targets: The weights, in the order in which the model calls them.
        skipped: The weights that are left out, with reasons.
        scan: Measures the model.
        notes: Remarks on the scan.

    Raises:
        ValueError: The criterion needs a training, or the pattern does not fit a weight or a sparsity.

    Memory: the data, the kept activations, the model's outputs, and one bit per entry and sparsity for the masks.
    """

    def __init__(
        self, model: Any, batches: Sequence[Batch], options: PruningOptions, levels: Sequence[float], memory: float
    ):
        criterion = get_criterion(options.criterion)
        _check(criterion, options)
        self.model = model
        self.notes = (_SELECTED,) if criterion.reconstructs else ()
        self._batches, self.levels = list(batches), tuple(levels)
        found = resolved_targets(model, OneShot(sparsity=max(levels)), options, training=False)
        self.scan = WeightScan(model, self._batches, [target.variable for target in found.targets], memory)
        unread = [target for target in found.targets if self.scan.runs.position(target.variable) is None]
        self.skipped = (*found.skipped, *(Skipped(target.name, "no call in inference reads it") for target in unread))
        self._masks = _Masks(model, found.targets, options, levels, self._batches)
        called = [target for target in found.targets if target not in unread]
        self.targets = tuple(sorted(called, key=lambda target: self.scan.runs.position(target.variable) or 0))

    def measure(self, target: Target) -> list[Measured]:
        """Returns what each sparsity of a weight does; weights are taken in the order of `targets`.

        The weight has its own value again when this returns or raises.
        """
        masks = [self._masks.mask(target, level) for level in self.levels]

        def pruned(value: Any) -> Iterator[Any]:
            return (backend.select(ops.convert_to_tensor(mask), value) for mask in masks)

        effects = self.scan.measure(target.variable, pruned)
        return [
            Measured(level, mask.size - int(np.count_nonzero(mask)), effect)
            for level, mask, effect in zip(self.levels, masks, effects, strict=True)
        ]


class _Masks:
    """The mask of each weight at each sparsity, one bit per entry."""

    def __init__(
        self,
        model: Any,
        targets: Sequence[Target],
        options: PruningOptions,
        levels: Sequence[float],
        batches: Sequence[Batch],
    ):
        statistics = Collectors(options.needs, model, targets, list(batches)).values()
        everything = [ops.ones(target.shape, "bool") for target in targets]
        self._bits: dict[tuple[str, float], np.ndarray] = {}
        for level in levels:
            calculator = MaskCalculator(targets, options, level)
            calculator.once = True
            update = calculator.choose(level, everything, statistics)
            if np.any(update.nans):
                at = int(np.argmax(update.nans))
                raise ValueError(
                    f"Importances are numbers. Received: NaN from {options.criterion} for {targets[at].name}. Check "
                    "the weights and the data for NaN."
                )
            for target, mask in zip(targets, update.masks, strict=True):
                self._bits[target.name, level] = np.packbits(array_of(mask))

    def mask(self, target: Target, level: float) -> np.ndarray:
        """Returns the mask, True = kept."""
        return np.unpackbits(self._bits[target.name, level], count=target.size).astype(bool).reshape(target.shape)


def _check(criterion: Criterion, options: PruningOptions) -> None:
    if "training" in sources_of(options.needs):
        raise ValueError(
            f"A scan reads a trained model and data. Received: the criterion {criterion}, which needs a training. "
            "Choose another criterion, such as magnitude."
        )
    if criterion.rounds > 1:
        raise ValueError(
            f"A scan selects the weights to prune once. Received: the criterion {criterion}, which selects in "
            f"{criterion.rounds} rounds. Choose another criterion, such as magnitude."
        )

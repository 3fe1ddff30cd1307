"""policy="tfmot": the rules of tensorflow-model-optimization 0.8, leaks included.

tensorflow-model-optimization wraps layers: each forward pass in training counts as a step, updates the masks from the
current weights if the schedule has an update due, and multiplies the weights by the masks; optimizer updates are not
masked. These rules do the same before each batch.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.layers.targets import Target
from prunekit.core.runtime import backend
from prunekit.interop.tfmot.arithmetic import ForwardPassSchedule, SamePoolingBlock, TailedNM, kept_count
from prunekit.sparsity.allocation import Uniform
from prunekit.sparsity.patterns import NM, Block, Pattern, Unstructured
from prunekit.sparsity.schedules import Schedule
from prunekit.sparsity.scores import Magnitude
from prunekit.sparsity.selection import count_true
from prunekit.techniques.pruning.masks.mask_calculator import MaskCalculator
from prunekit.techniques.pruning.masks.mask_maker import largest
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.masks.policy import MaskPolicy, MaskRequest, MaskUpdate

_NAME = "tensorflow-model-optimization"
_L = keras.layers
# Looked up by exact type, because tensorflow-model-optimization refuses subclasses. It prunes the weights of these
# layers that prunekit classifies as kernels or embeddings.
_WRAPPED = frozenset(
    (_L.Dense, _L.Conv1D, _L.Conv2D, _L.Conv3D, _L.Conv2DTranspose, _L.Conv3DTranspose, _L.SeparableConv1D)
    + (_L.SeparableConv2D, _L.Embedding, _L.MultiHeadAttention)
)
_RECURRENT = frozenset((_L.RNN, _L.LSTM, _L.GRU, _L.SimpleRNN))
_CELLS = frozenset((_L.LSTMCell, _L.GRUCell, _L.SimpleRNNCell))
_ROLES = ("kernel", "recurrent_kernel", "embedding")


@dataclass(frozen=True)
class TfmotPolicy(MaskPolicy):
    """The rules of tensorflow-model-optimization 0.8.1, as its compiled training step follows them."""

    keeps_zeros: ClassVar[bool] = False
    counts_forward_passes: ClassVar[bool] = True

    def check(self, schedule: Schedule, options: PruningOptions) -> ForwardPassSchedule:
        """Returns the schedule counted in forward passes.

        Raises:
            ValueError: tensorflow-model-optimization does not have the schedule, criterion, allocation, pattern,
                `keep_one` or `keep_zeros`.
        """
        followed = ForwardPassSchedule(schedule, once=isinstance(options.pattern, NM))
        _pattern(options)
        for name, known in (("criterion", Magnitude()), ("allocation", Uniform())):
            value = getattr(options, name)
            if value != known:
                raise ValueError(
                    f'{_NAME} supports only the {name} {known}. Received: {name}={value} with policy="tfmot". Leave '
                    "one of them out."
                )
        if not options.keep_one:
            raise ValueError(
                f'{_NAME} always keeps the largest weight. Received: keep_one=False with policy="tfmot". Leave one of '
                "them out."
            )
        for name in ("overrides", "bounds"):
            if getattr(options, name):
                raise ValueError(
                    f'{_NAME} prunes all weights to one sparsity. Received: {name} with policy="tfmot". Leave one of '
                    "them out."
                )
        if options.keep_zeros:
            raise ValueError(
                f'{_NAME} lets existing zeros grow back. Received: keep_zeros=True with policy="tfmot". Leave one of '
                "them out."
            )
        return followed

    def calculator(
        self, model: Any, targets: Sequence[Target], options: PruningOptions, final_sparsity: float
    ) -> MaskCalculator:
        """Returns a calculator that chooses masks by threshold.

        Raises:
            ValueError: tensorflow-model-optimization does not prune one of the targets, or does not wrap its layer.
        """
        _check_targets(model, targets)
        return ThresholdCalculator(targets, replace(options, pattern=_pattern(options)), final_sparsity)

    def due(self, schedule: Schedule, step: int, last: int) -> int | None:
        """Returns `step` if it is an update step; a step that was missed is not made up for."""
        return step if schedule.latest_update(step) == step else None

    def update(self, request: MaskRequest) -> MaskUpdate:
        """Returns masks of the current weights, whether these were pruned before or not."""
        return request.calculator.choose(request.sparsity, request.masks, request.statistics)

    def scope(self, store: Any, optimizers: Sequence[Any]) -> contextlib.AbstractContextManager:
        """Returns an empty context: gradients and updates stay dense."""
        return contextlib.nullcontext()

    def end_training(self, run: Any) -> list[str]:
        """Returns a message if pruned weights are not zero; like strip_pruning, does not mask them."""
        leaks = sum(run.audit().values())
        if not leaks:
            return []
        return [
            f'{leaks:,} weights that the masks prune are not zero: with policy="tfmot", as in {_NAME}, they are masked '
            "before each forward pass and at each epoch's end, and not when pruning finishes. For a sparse model call "
            "pruner.enforce() before finish()."
        ]


def _check_targets(model: Any, targets: Sequence[Target]) -> None:
    """Raises for targets that tensorflow-model-optimization does not prune, or whose layer it does not wrap.

    Raises:
        ValueError: A target is such a weight.
    """
    wrapped = {id(backend.native(variable)) for variable in _variables(model)}
    others = [
        f"{target.name} ({type(target.layer).__name__})"
        for target in targets
        if id(backend.native(target.variable)) not in wrapped or target.role not in _ROLES
    ]
    if others:
        raise ValueError(
            f'With policy="tfmot" prunekit prunes only the weights that {_NAME} prunes. Received: '
            f"{', '.join(others)}, which it does not prune. Leave them out with `exclude`."
        )


def _pattern(options: PruningOptions) -> Pattern:
    """Returns the pattern as tensorflow-model-optimization implements it.

    Raises:
        ValueError: tensorflow-model-optimization has no such pattern.
    """
    pattern = options.pattern
    if pattern in (Unstructured(), Block(1, 1), Block(1, 1, "max")):
        return Unstructured()
    if isinstance(pattern, Block):
        return SamePoolingBlock(pattern.inputs, pattern.outputs, pattern.pooling)
    if isinstance(pattern, NM):
        return TailedNM(pattern.n, pattern.m)
    raise ValueError(
        f"{_NAME} supports the patterns unstructured, blocks and m by n. Received: pattern={pattern} with "
        'policy="tfmot". Leave one of them out.'
    )


def _variables(model: Any) -> Iterator[Any]:
    """Yields the variables of the layers that tensorflow-model-optimization wraps, nested models included."""
    for layer in getattr(model, "layers", [model]):
        if isinstance(layer, keras.Model):
            yield from _variables(layer)
        elif type(layer) in _WRAPPED or (type(layer) in _RECURRENT and _knows_cells(layer)):
            yield from layer.variables


def _knows_cells(layer: Any) -> bool:
    cells = layer.cell.cells if isinstance(layer.cell, _L.StackedRNNCells) else [layer.cell]
    return all(type(cell) in _CELLS for cell in cells)


class _ThresholdMaker:
    """Calculates the mask of weights of one shape and layout."""

    def __init__(self, pattern: Pattern, shape, in_axes, out_axes):
        self.units = pattern.units(shape, in_axes, out_axes)
        self._pattern = pattern
        self._layout = tuple(shape), in_axes, out_axes

    def choose(self, weight, importance, mask, kept):
        """Returns (mask, counts of NaN, leaks and kept); leaks are 0, because weights are dense between steps."""
        shape, *axes = self._layout
        pooled = self._pattern.pool(importance, *axes)
        chosen = pooled if isinstance(self._pattern, TailedNM) else _at_threshold(pooled, kept)
        new = self._pattern.expand(chosen, shape, *axes)
        counts = count_true(ops.isnan(importance)), ops.zeros((), "int32"), count_true(new, expect_any=True)
        return new, ops.stack(counts)


class ThresholdCalculator(MaskCalculator):
    """Keeps all units whose importance reaches the threshold, whether they were pruned before or not."""

    _maker = _ThresholdMaker

    def choose(self, sparsity: float, masks: Sequence[Any], statistics: Sequence[Any] | None = None) -> MaskUpdate:
        """Returns the masks for a sparsity, independent of the current masks, which only determine `changed`."""
        choice = super().choose(sparsity, masks, statistics)
        pairs = zip(masks, choice.masks, strict=True)
        changed = any(bool(ops.any(ops.not_equal(former, new))) for former, new in pairs)
        return replace(choice, changed=changed)

    def only_kept_by_keep_one(self, sparsity: float, kept: np.ndarray) -> np.ndarray:
        """Returns all False: the largest unit always reaches the threshold."""
        return np.zeros(len(kept), bool)

    def units_pruned(self, sparsity: float) -> list[int]:
        """Returns the number of units below the threshold; ties at the threshold reduce the number removed."""
        return [maker.units - kept_count(sparsity, maker.units) for maker in self._makers]

    def _counts(self, sparsity: float, masks, scores: Sequence[Any] | None, statistics: Sequence[Any]) -> np.ndarray:
        """Returns k of each target: its k-th largest importance is the threshold."""
        return np.array([kept_count(sparsity, maker.units) for maker in self._makers], "int32")


def _at_threshold(units, kept):
    """Returns True for units at least as large as the kept-th largest unit, ties included."""
    highest = ops.cast(float("inf"), units.dtype)
    threshold = ops.min(ops.where(largest(units, kept), units, highest))
    return ops.greater_equal(units, threshold)

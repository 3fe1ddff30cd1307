"""compat="tfmot": the rules of tensorflow-model-optimization 0.8, leaks included.

tensorflow-model-optimization wraps layers: each forward pass in training counts as a step, updates the masks from the
current weights if the schedule has an update due, and multiplies the weights by the masks; optimizer updates are not
masked. These rules do the same before each batch.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.targets import Target
from prunekit.core import backend, jax_state
from prunekit.sparsity.allocation import Uniform
from prunekit.sparsity.patterns import NM, Block, Pattern, Unstructured
from prunekit.sparsity.schedules import Schedule
from prunekit.sparsity.scores import Magnitude
from prunekit.sparsity.selection import count_true
from prunekit.sparsity.tfmot import ForwardPassSchedule, SamePoolingBlock, TailedNM, kept_count
from prunekit.techniques.pruning.mask_calculator import MaskCalculator, MaskUpdate, largest
from prunekit.techniques.pruning.options import PruningOptions
from prunekit.techniques.pruning.policy import Rules

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


class TfmotRules(Rules):
    """The rules of tensorflow-model-optimization 0.8.1, as its compiled training step follows them."""

    grace = 0
    stepped = "before each forward pass in training"
    leaves_frozen = False

    def check(self, schedule: Schedule, options: PruningOptions) -> None:
        """Raises for options that tensorflow-model-optimization does not have.

        Raises:
            ValueError: The schedule, criterion, allocation, pattern, `keep_one` or `keep_zeros` is not available there.
        """
        self.schedule(schedule, options)
        _pattern(options)
        for name, known in (("criterion", Magnitude()), ("allocation", Uniform())):
            value = getattr(options, name)
            if value != known:
                raise ValueError(
                    f'{_NAME} knows the {name} {known} only. Received: {name}={value} with compat="tfmot". Leave one '
                    "of them out."
                )
        if not options.keep_one:
            raise ValueError(
                f'{_NAME} always keeps the largest weight. Received: keep_one=False with compat="tfmot". Leave one of '
                "them out."
            )
        if options.keep_zeros:
            raise ValueError(
                f'{_NAME} lets existing zeros grow back. Received: keep_zeros=True with compat="tfmot". Leave one of '
                "them out."
            )

    def check_targets(self, model: Any, targets: Sequence[Target]) -> None:
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
                f'With compat="tfmot" those weights are pruned that {_NAME} prunes. Received: '
                f"{', '.join(others)}, which it leaves alone or refuses. Leave them out with `exclude`."
            )

    def schedule(self, schedule: Schedule, options: PruningOptions) -> ForwardPassSchedule:
        """Returns the schedule counted in forward passes."""
        return ForwardPassSchedule(schedule, once=isinstance(options.pattern, NM))

    def calculator(self, targets: Sequence[Target], options: PruningOptions, final_sparsity: float) -> MaskCalculator:
        """Returns a calculator that chooses masks by threshold."""
        return ThresholdCalculator(targets, replace(options, pattern=_pattern(options)), final_sparsity)

    def pruned(self, sparsity: float, units: int, *, keep_one: bool = True) -> int:
        """Returns the number of units below the threshold; ties at the threshold reduce the number removed."""
        return units - kept_count(sparsity, units)

    def counted(self, optimizers: list[Any]) -> list[Any]:
        """Returns []: forward passes count as steps, not optimizer updates."""
        return []

    def check_loop(self, name: str) -> None:
        """Raises for prunekit's own loops, which step after each update.

        Raises:
            ValueError: Always, as these rules step before each forward pass.
        """
        raise ValueError(
            f"{name} steps its pruner after each update, and the rules of {_NAME} prune before each forward pass. "
            'Received: a pruner with compat="tfmot". Leave compat out, or train with `fit` or a loop of your own.'
        )

    def scope(self, pruner: Any) -> contextlib.AbstractContextManager:
        """Returns an empty context: gradients and updates stay dense."""
        return contextlib.nullcontext()

    def begin(self, pruner: Any) -> None:
        """Applies the schedule at step 0, for `pk.prune`; in a resumed training, adopts the zeros as masks.

        In training, the first step is the first forward pass.
        """
        step = pruner.step_count
        if step == 0:
            pruner.follow_schedule()
        elif not pruner.events and pruner.schedule.latest_update(step) is not None:
            pruner.adopt_zeros()

    def before_batch(self, pruner: Any) -> None:
        """Steps the pruner before the batch's forward pass.

        Raises:
            ValueError: The model was compiled with `steps_per_execution` other than 1.
        """
        together = getattr(pruner.model, "steps_per_execution", 1)
        if together != 1:
            raise ValueError(
                f'compat="tfmot" prunes before each batch, so it needs one batch at a time. Received: a model compiled '
                f"with steps_per_execution={together}. Compile it with steps_per_execution=1."
            )
        pruner.step()

    def after_batch(self, pruner: Any) -> None:
        """Does nothing: weights are dense between an update and the next forward pass."""

    def before_evaluation(self, pruner: Any) -> None:
        """Enforces the masks, as forward passes in evaluation do in tensorflow-model-optimization."""
        pruner.enforce()

    def after_epoch(self, pruner: Any) -> None:
        """Enforces the masks, as the callback UpdatePruningStep does at each epoch's end."""
        pruner.enforce()

    def step(self, pruner: Any) -> bool:
        """Updates the masks if due, then masks the weights, as one forward pass in training; True if masks changed."""
        jax_state.sync_model_state(pruner.model)
        step = pruner.step_count
        due = pruner.schedule.latest_update(step) == step
        changed = due and pruner.follow_schedule()
        pruner.enforce()
        return changed

    def end_training(self, pruner: Any) -> list[str]:
        """Returns a message if pruned weights are not zero; like strip_pruning, does not mask them."""
        leaks = sum(pruner.audit().values())
        notes = []
        if leaks:
            notes.append(
                f'{leaks:,} weights that the masks prune are not zero: with compat="tfmot", as in {_NAME}, they are '
                "masked before each forward pass and at each epoch's end, and not when pruning finishes. For a sparse "
                "model call pruner.enforce() before finish()."
            )
        return notes


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
        f'{_NAME} prunes single weights, blocks and m by n. Received: pattern={pattern} with compat="tfmot". Leave one '
        "of them out."
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


@dataclass(frozen=True)
class RenewedMaskUpdate(MaskUpdate):
    """Masks calculated without regard to the former masks."""

    changed: bool

    def changes(self, kept: np.ndarray) -> bool:
        """Returns True if any mask differs from its former mask; counts may be equal although positions changed."""
        return self.changed


class ThresholdCalculator(MaskCalculator):
    """Keeps all units whose importance reaches the threshold, whether they were pruned before or not."""

    @property
    def _maker(self) -> Callable[..., Any]:
        return _ThresholdMaker

    def choose(self, sparsity: float, masks: Sequence[Any], statistics: Sequence[Any] | None = None) -> MaskUpdate:
        """Returns the masks for a sparsity, independent of the current masks, which only determine `changed`."""
        choice = super().choose(sparsity, masks, statistics)
        pairs = zip(masks, choice.masks, strict=True)
        changed = any(bool(ops.any(ops.not_equal(former, new))) for former, new in pairs)
        return RenewedMaskUpdate(choice.masks, choice.nans, choice.leaks, choice.kept, changed)

    def spared(self, sparsity: float, kept: np.ndarray) -> np.ndarray:
        """Returns all False: the largest unit always reaches the threshold."""
        return np.zeros(len(kept), bool)

    def _counts(self, sparsity: float) -> np.ndarray:
        """Returns k of each target: its k-th largest importance is the threshold."""
        return np.array([kept_count(sparsity, maker.units) for maker in self._makers], "int32")


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


def _at_threshold(units, kept):
    """Returns True for units at least as large as the kept-th largest unit, ties included."""
    highest = ops.cast(float("inf"), units.dtype)
    threshold = ops.min(ops.where(largest(units, kept), units, highest))
    return ops.greater_equal(units, threshold)


# Rules by the value of the option `compat`.
RULES: dict[str | None, Rules] = {None: Rules(), "tfmot": TfmotRules()}


def rules_of(schedule: Schedule, options: PruningOptions) -> Rules:
    """Returns the rules that `options.compat` selects.

    Raises:
        ValueError: The rules do not support the schedule or an option.
    """
    rules = RULES[options.compat]
    rules.check(schedule, options)
    return rules

"""Calculates masks for a sparsity: importance -> pooled units -> exact selection -> masks, compiled once per shape."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import ops

from prunekit.anatomy.targets import Target
from prunekit.core import backend, compilation
from prunekit.sparsity.allocation import get_allocation
from prunekit.sparsity.patterns import Pattern, get_pattern
from prunekit.sparsity.scores import get_criterion
from prunekit.sparsity.selection import ReadingPlan, count_true, keep_largest, pruned_count, reading_plan, removed_count
from prunekit.techniques.pruning.mask_store import leaking
from prunekit.techniques.pruning.options import PruningOptions

# Weights that are chosen for at once have at most so many entries together, unless it is one: what choosing needs on
# the way is several times their size, and TensorFlow starts whatever is ready in a graph.
_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class MaskUpdate:
    """New masks, one tensor per target, and three counts per target as arrays of shape (targets,)."""

    masks: list[Any]
    nans: np.ndarray
    leaks: np.ndarray
    kept: np.ndarray

    def changes(self, kept: np.ndarray) -> bool:
        """Whether these masks differ from those before them, which kept so many: masks only ever shrink."""
        return bool(np.any(self.kept != kept))


class MaskCalculator:
    """Calculates the masks of targets for a given sparsity; knows no schedule and changes no variable.

    Args:
        targets: What is pruned.
        options: How.
        final_sparsity: What the pattern must be able to reach.

    Raises:
        ValueError: The pattern does not fit a target or cannot reach the sparsity.
    """

    def __init__(self, targets: Sequence[Target], options: PruningOptions, final_sparsity: float):
        self.targets = tuple(targets)
        self.criterion = get_criterion(options.criterion)
        self.allocation = get_allocation(options.allocation)
        self.keep_one = options.keep_one
        pattern = get_pattern(options.pattern)
        for target, fraction in zip(self.targets, self.fractions(final_sparsity), strict=True):
            pattern.check(target.shape, target.in_axes, target.out_axes, fraction, target.name)
        # One maker per layout: its functions are traced once per shape.
        make = functools.cache(functools.partial(self._maker, pattern))
        self._makers = [make(target.shape, target.in_axes, target.out_axes) for target in self.targets]
        groups = [range(len(self.targets))] if self.allocation.joint else list(_groups(self.targets))
        choose = self._jointly if self.allocation.joint else self._one_by_one
        self._groups = [(group, compilation.compiled(functools.partial(choose, group))) for group in groups]
        if self.allocation.joint:
            # Compiled when it is first called, which few models ever need.
            sparing = compilation.compiled(functools.partial(self._jointly, groups[0], spare=True))
            self._sparing = [(groups[0], sparing)]

    @property
    def _maker(self) -> Callable[..., Any]:
        return MaskMaker

    def fractions(self, sparsity: float) -> list[float]:
        """The sparsity of each target where all of them together have `sparsity`."""
        if self.allocation.joint:
            return [sparsity] * len(self.targets)
        axes = [target.in_axes for target in self.targets], [target.out_axes for target in self.targets]
        return self.allocation.sparsities(sparsity, [target.shape for target in self.targets], *axes)

    def choose(self, sparsity: float, masks: Sequence[Any], statistics: Sequence[Any] | None = None) -> MaskUpdate:
        """The masks for an overall sparsity, each inside the mask that its target has now.

        Args:
            sparsity: Fraction of the targets' weights that is removed, in [0, 1).
            masks: One boolean tensor per target, True = kept.
            statistics: What the criterion needs of each target; None where it needs nothing.

        Raises:
            ValueError: The criterion returned another shape than the weight's.
        """
        weights = [backend.value_now(target.variable) for target in self.targets]
        statistics = list(statistics) if statistics is not None else [None] * len(self.targets)
        arguments = weights, list(masks), self._counts(sparsity), statistics
        choice = self._chosen(self._groups, *arguments)
        if self.allocation.joint and self.keep_one and not choice.kept.all():
            # Only here a look at the importances tells which weights would be emptied: so they are ranked once more.
            choice = self._chosen(self._sparing, *arguments)
        return choice

    def _chosen(self, groups, weights, masks, pruned, statistics) -> MaskUpdate:
        new, figures = [], []
        for group, choose in groups:
            of = slice(group.start, group.stop)
            chosen, counts = choose(weights[of], masks[of], pruned if pruned.ndim == 0 else pruned[of], statistics[of])
            new += chosen
            figures.append(ops.convert_to_numpy(counts))
        return MaskUpdate(new, *np.concatenate(figures, axis=1))

    def _counts(self, sparsity: float) -> np.ndarray:
        """How many units go: of each target, or of all together where they compete."""
        units = [maker.units for maker in self._makers]
        if self.allocation.joint:
            count, total = pruned_count(sparsity, sum(units)), sum(units)
            return np.array(min(count, total - len(units)) if self.keep_one else count, "int32")
        counts = zip(self.fractions(sparsity), units, strict=True)
        return np.array([removed_count(f, n, keep_one=self.keep_one) for f, n in counts], "int32")

    def spared(self, sparsity: float, kept: np.ndarray) -> np.ndarray:
        """Which targets, of which so many weights are kept at a sparsity, have one unit left for `keep_one` alone."""
        units = np.array([maker.units for maker in self._makers])
        # A unit that is cut off at the edge is smaller than the others, by less than half of the mean.
        one_left = (kept > 0) & (kept * units < 2 * np.array([target.size for target in self.targets])) & (units > 1)
        if self.keep_one and not self.allocation.joint:
            asked = [pruned_count(f, n) for f, n in zip(self.fractions(sparsity), units.tolist(), strict=True)]
            return one_left & (np.array(asked) >= units)
        return one_left & self.keep_one

    # Both are compiled whole, around functions that are traced once per layout: the cost of starting an operation
    # from Python, fifty times for each weight, would be most of the time where weights are small.
    def _one_by_one(self, group: range, weights, masks, pruned, statistics):
        rows = [
            self._makers[i].choose(weight, self._importance(i, weight, statistics[at]), mask, pruned[at])
            for at, (i, weight, mask) in enumerate(zip(group, weights, masks, strict=True))
        ]
        return _columns(rows)

    def _jointly(self, _, weights, masks, pruned, statistics, *, spare=False):
        """One selection over the units of all targets: what is removed is the least important anywhere.

        With `spare` the most important unit of each target comes before all others.
        """
        importances = [self._importance(i, weight, statistics[i]) for i, weight in enumerate(weights)]
        pooled = [maker.pool(*one) for maker, *one in zip(self._makers, importances, masks, strict=True)]
        units = [ops.reshape(ops.cast(part, "float32"), (-1,)) for part in pooled]
        units = ops.concatenate([_best_first(part) for part in units] if spare else units)
        chosen = largest(units, units.shape[0] - pruned)
        ends = np.cumsum([maker.units for maker in self._makers])[:-1].tolist()
        # TensorFlow and PyTorch refuse to split at no place at all.
        parts = ops.split(chosen, ends) if ends else [chosen]
        rows = [
            maker.finish(weight, part, mask, ops.reshape(one, part.shape))
            for maker, weight, part, mask, one in zip(self._makers, weights, pooled, masks, parts, strict=True)
        ]
        return _columns(rows)

    def _importance(self, index: int, weight, statistics):
        importance = ops.convert_to_tensor(self.criterion(weight, seed_offset=index, statistics=statistics))
        if tuple(importance.shape) != self.targets[index].shape:
            raise ValueError(
                f"The criterion gives one importance per weight. Received: shape {tuple(importance.shape)} for "
                f"{self.targets[index].name} of shape {self.targets[index].shape}."
            )
        return importance


def _groups(targets: Sequence[Target]) -> Iterator[range]:
    start, size = 0, 0
    for i, target in enumerate(targets):
        if i > start and size + target.size > _AT_ONCE:
            yield range(start, i)
            start, size = i, 0
        size += target.size
    yield range(start, len(targets))


class MaskMaker:
    """The compiled functions that make a mask for weights of one shape and layout."""

    def __init__(self, pattern: Pattern, shape, in_axes, out_axes):
        self.units = pattern.units(shape, in_axes, out_axes)

        def pool(importance, mask):
            # What is pruned already ranks lowest, so that masks only ever shrink.
            lowest = ops.cast(-float("inf"), importance.dtype)
            return pattern.pool(ops.where(mask, importance, lowest), in_axes, out_axes)

        def finish(weight, pooled, mask, chosen):
            new = ops.logical_and(mask, pattern.expand(chosen, shape, in_axes, out_axes))
            return (
                new,
                count_true(ops.isnan(pooled)),
                count_true(leaking(mask, weight)),
                count_true(new, expect_any=True),
            )

        self.pool, self.finish = compilation.compiled(pool), compilation.compiled(finish)

    def choose(self, weight, importance, mask, pruned):
        pooled = self.pool(importance, mask)
        return self.finish(weight, pooled, mask, largest(pooled, self.units - pruned))


def _best_first(units):
    """The importances with the largest of them ranked before those of other weights; -inf, already pruned, stays."""
    best = ops.equal(ops.arange(units.shape[0], dtype="int32"), ops.cast(ops.argmax(units), "int32"))
    infinity, largest_number = (
        ops.cast(value, units.dtype) for value in (float("inf"), float(np.finfo("float32").max))
    )
    # Importances that are infinite themselves would tie with it.
    others = ops.minimum(units, largest_number)
    return ops.where(ops.logical_and(best, ops.greater(units, -infinity)), infinity, others)


def _columns(rows):
    """Masks, and figures of shape (3, targets), from one row (mask, nans, leaks, kept) per target."""
    return [row[0] for row in rows], ops.stack([ops.stack([row[i] for row in rows]) for i in (1, 2, 3)])


@functools.cache
def _selection(how: ReadingPlan):
    """`keep_largest` of flat arrays, whatever their length: traced once for all weights of all models."""
    return compilation.compiled(functools.partial(keep_largest, how=how), open_shapes=True)


def largest(units, kept):
    """`keep_largest` of units of any shape."""
    size = int(np.prod(units.shape))
    return ops.reshape(_selection(reading_plan(size))(ops.reshape(units, (-1,)), kept), tuple(units.shape))

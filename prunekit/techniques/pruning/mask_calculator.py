"""Calculates masks for a sparsity: importance -> pooled units -> exact selection -> masks; compiled once per shape."""

import functools
from collections.abc import Callable, Iterator, Sequence
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
from prunekit.techniques.pruning.policy import MaskUpdate

# Maximum number of entries of a group of weights processed in one graph (a larger weight is its own group). Temporary
# memory is several times the group's size, because TensorFlow runs all ready operations of a graph at once.
_AT_ONCE = 1 << 22


class MaskCalculator:
    """Calculates the masks of targets for a given sparsity; changes no variable.

    Args:
        targets: The weights to prune.
        options: Pruning options.
        final_sparsity: Final sparsity of the schedule, which the pattern must be able to reach.

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
        # One MaskMaker per layout, so that its functions are traced once per shape.
        make = functools.cache(functools.partial(self._maker, pattern))
        self._makers = [make(target.shape, target.in_axes, target.out_axes) for target in self.targets]
        groups = [range(len(self.targets))] if self.allocation.joint else list(_groups(self.targets))
        choose = self._jointly if self.allocation.joint else self._one_by_one
        self._groups = [(group, compilation.compiled(functools.partial(choose, group))) for group in groups]
        if self.allocation.joint:
            # Compiled at its first call; few models need it.
            sparing = compilation.compiled(functools.partial(self._jointly, groups[0], spare=True))
            self._sparing = [(groups[0], sparing)]

    @property
    def _maker(self) -> Callable[..., Any]:
        return MaskMaker

    @property
    def shares_known(self) -> bool:
        """False if the sparsity of each target follows from importances, so that `fractions` gives an even share."""
        return not (self.allocation.joint or self.allocation.needs_scores)

    def fractions(self, sparsity: float, scores: Sequence[Any] | None = None) -> list[float]:
        """Returns the sparsity of each target for an overall `sparsity`.

        Args:
            sparsity: Overall fraction removed, in [0, 1).
            scores: Importances of each target, for an allocation that reads them; None = an even share.
        """
        if self.allocation.joint or (self.allocation.needs_scores and scores is None):
            return [sparsity] * len(self.targets)
        return self.allocation.sparsities(sparsity, self.targets, scores)

    def units_pruned(self, sparsity: float) -> list[int]:
        """Returns the number of units of each target that masks of this sparsity remove; an even share of `joint`."""
        units = [maker.units for maker in self._makers]
        pairs = zip(self.fractions(sparsity), units, strict=True)
        return [removed_count(fraction, n, keep_one=self.keep_one) for fraction, n in pairs]

    def choose(self, sparsity: float, masks: Sequence[Any], statistics: Sequence[Any] | None = None) -> MaskUpdate:
        """Returns the masks for an overall sparsity; positions pruned in `masks` stay pruned.

        Args:
            sparsity: Fraction of the targets' entries to remove, in [0, 1).
            masks: Current masks, one boolean tensor per target, True = kept.
            statistics: Statistics that the criterion needs, one entry per target; None if it needs none.

        Raises:
            ValueError: The criterion returned an importance whose shape differs from the weight's.
        """
        weights = [backend.value_now(target.variable) for target in self.targets]
        statistics = list(statistics) if statistics is not None else [None] * len(self.targets)
        scores = self.importances(statistics) if self.allocation.needs_scores else None
        arguments = weights, list(masks), self._counts(sparsity, scores), statistics
        choice = self._chosen(self._groups, *arguments)
        if self.allocation.joint and self.keep_one and not choice.kept.all():
            # A joint selection shows only afterwards which weights it empties, so it is repeated with `spare`.
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

    def importances(self, statistics: Sequence[Any] | None = None) -> list[Any]:
        """Returns the importance of each entry of each target, tensors of the targets' shapes."""
        rows = [None] * len(self.targets) if statistics is None else statistics
        weights = [backend.value_now(target.variable) for target in self.targets]
        return [self._importance(i, weight, rows[i]) for i, weight in enumerate(weights)]

    def _counts(self, sparsity: float, scores: Sequence[Any] | None = None) -> np.ndarray:
        """Returns the number of units to remove: one per target, or a scalar for a joint allocation."""
        units = [maker.units for maker in self._makers]
        if self.allocation.joint:
            count, total = pruned_count(sparsity, sum(units)), sum(units)
            return np.array(min(count, total - len(units)) if self.keep_one else count, "int32")
        counts = zip(self.fractions(sparsity, scores), units, strict=True)
        return np.array([removed_count(f, n, keep_one=self.keep_one) for f, n in counts], "int32")

    def spared(self, sparsity: float, kept: np.ndarray) -> np.ndarray:
        """Returns a boolean per target: only `keep_one` saves its last unit at this sparsity.

        Args:
            sparsity: Overall sparsity of the masks.
            kept: Number of kept entries, shape (targets,).
        """
        units = np.array([maker.units for maker in self._makers])
        # A unit that is cut off at the edge is smaller than the mean, and kept units may be larger: by less than twice.
        one_left = (kept > 0) & (kept * units < 2 * np.array([target.size for target in self.targets])) & (units > 1)
        if self.keep_one and self.shares_known:
            asked = [pruned_count(f, n) for f, n in zip(self.fractions(sparsity), units.tolist(), strict=True)]
            return one_left & (np.array(asked) >= units)
        return one_left & self.keep_one

    # Both methods are compiled as a whole, around functions that are traced once per layout: for small weights,
    # dispatching about fifty operations per weight from Python would dominate the run time.
    def _one_by_one(self, group: range, weights, masks, pruned, statistics):
        rows = [
            self._makers[i].choose(weight, self._importance(i, weight, statistics[at]), mask, pruned[at])
            for at, (i, weight, mask) in enumerate(zip(group, weights, masks, strict=True))
        ]
        return _columns(rows)

    def _jointly(self, _, weights, masks, pruned, statistics, *, spare=False):
        """Removes the least important units over all targets together.

        With `spare`, the most important unit of each target ranks above all other units.
        """
        importances = [self._importance(i, weight, statistics[i]) for i, weight in enumerate(weights)]
        pooled = [maker.pool(*one) for maker, *one in zip(self._makers, importances, masks, strict=True)]
        units = [ops.reshape(ops.cast(part, "float32"), (-1,)) for part in pooled]
        units = ops.concatenate([_best_first(part) for part in units] if spare else units)
        chosen = largest(units, units.shape[0] - pruned)
        ends = np.cumsum([maker.units for maker in self._makers])[:-1].tolist()
        # TensorFlow and PyTorch raise an error for an empty list of split positions.
        parts = ops.split(chosen, ends) if ends else [chosen]
        rows = [
            maker.finish(weight, part, mask, ops.reshape(one, part.shape))
            for maker, weight, part, mask, one in zip(self._makers, weights, pooled, masks, parts, strict=True)
        ]
        return _columns(rows)

    def _scored(self, index: int, weight, statistics):
        return self.criterion(weight, target=self.targets[index], seed_offset=index, statistics=statistics)

    def _importance(self, index: int, weight, statistics):
        importance = ops.convert_to_tensor(self._scored(index, weight, statistics))
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
    """Compiled functions that calculate the mask of weights of one shape and layout."""

    def __init__(self, pattern: Pattern, shape, in_axes, out_axes):
        self.units = pattern.units(shape, in_axes, out_axes)

        def pool(importance, mask):
            # Pruned positions rank lowest, so that masks only ever shrink.
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
    """Returns the importances with the largest set to infinity; -inf (already pruned) stays."""
    best = ops.equal(ops.arange(units.shape[0], dtype="int32"), ops.cast(ops.argmax(units), "int32"))
    infinity, largest_number = (
        ops.cast(value, units.dtype) for value in (float("inf"), float(np.finfo("float32").max))
    )
    # Clipped, because infinite importances would tie with the largest.
    others = ops.minimum(units, largest_number)
    return ops.where(ops.logical_and(best, ops.greater(units, -infinity)), infinity, others)


def _columns(rows):
    """Returns (masks, counts of shape (3, targets)) from one row (mask, nans, leaks, kept) per target."""
    return [row[0] for row in rows], ops.stack([ops.stack([row[i] for row in rows]) for i in (1, 2, 3)])


@functools.cache
def _selection(how: ReadingPlan):
    """Returns `keep_largest` compiled for flat arrays of any length: traced once for all weights of all models."""
    return compilation.compiled(functools.partial(keep_largest, how=how), open_shapes=True)


def largest(units, kept):
    """Applies `keep_largest` to units of any shape."""
    size = int(np.prod(units.shape))
    return ops.reshape(_selection(reading_plan(size))(ops.reshape(units, (-1,)), kept), tuple(units.shape))

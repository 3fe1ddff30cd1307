"""Calculates masks for a sparsity: importance -> pooled units -> exact selection -> masks.

prunekit's own patterns need no trace of their own. Small weights are processed by NumPy, which starts an operation in a
microsecond; large weights by single operations of the backend around one compiled selection for all shapes. Whatever
else runs (patterns of users, all of JAX in training) is compiled once per shape. All three ways stay, because without
single operations a `Pruner` of MobileNetV2 takes 3 to 8 times as long to begin, and a mask update 1.4 to 1.6 times.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.layers.targets import Target
from prunekit.core.runtime import backend, compilation, jax_state
from prunekit.sparsity.allocation import Global, Uniform, get_allocation
from prunekit.sparsity.array_ops import SMALL, array_of, ops_for
from prunekit.sparsity.bounds import Bounds, check_total, shares_within
from prunekit.sparsity.channel_scores import REPEATED
from prunekit.sparsity.gradient_scores import PRODUCTS
from prunekit.sparsity.patterns import NM, Block, Channel, Unstructured, get_pattern
from prunekit.sparsity.scores import L2, Criterion, Custom, Magnitude, Movement, Random, get_criterion
from prunekit.sparsity.selection import keep_largest_of_array, pruned_count, removed_count
from prunekit.techniques.pruning.masks.mask_maker import ArrayMaskMaker, MaskMaker
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.masks.policy import MaskUpdate

# Maximum number of entries of a group of weights processed in one graph (a larger weight is its own group). Temporary
# memory is several times the group's size, because TensorFlow runs all ready operations of a graph at once.
_AT_ONCE = 1 << 22
# Most entries of a weight for which NumPy on one core is as fast as the backend: where the weight is copied to the
# memory of the CPU first, and where masks are calculated once, so that compiling would take longer. A joint allocation
# counts the entries of all weights, and has four times as many.
_SMALL_ELSEWHERE = 1 << 16
_SMALL_ONCE = 1 << 22
# Criteria and patterns with the same results, to the bit, in single operations, in compiled functions and in NumPy.
_EXACT_CRITERIA = frozenset((Magnitude, L2, Movement, Random, *PRODUCTS, *REPEATED))
_EXACT_PATTERNS = frozenset((Unstructured, Block, NM, Channel))


class MaskCalculator:
    """Calculates the masks of targets for a given sparsity; changes no variable.

    Args:
        targets: The weights to prune.
        options: Pruning options; the keys of `overrides` and `bounds` are exact names of targets.
        final_sparsity: Final sparsity of the schedule, which the pattern must be able to reach.

    Attributes:
        targets: The weights.
        scored: The weights that the criterion ranks: all.
        pattern: The sparsity pattern.
        once: True if masks are calculated once, so that no compilation pays; `pk.prune` sets it.

    Raises:
        ValueError: The pattern does not fit a target, or it, overrides or bounds do not allow the sparsity.
    """

    once = False
    _maker: Callable[..., Any] = MaskMaker

    def __init__(self, targets: Sequence[Target], options: PruningOptions, final_sparsity: float):
        self.targets = tuple(targets)
        self.scored = self.targets
        self.criterion = get_criterion(options.criterion)
        self.allocation = get_allocation(options.allocation)
        self.keep_one = options.keep_one
        self._final_sparsity = final_sparsity
        numbers = {target.name: i for i, target in enumerate(self.targets)}
        self._overrides = {numbers[name]: share for name, share in options.overrides.items() if name in numbers}
        self._bounds = {numbers[name]: bounds for name, bounds in options.bounds.items() if name in numbers}
        self._is_bounded = bool(self._overrides or self._bounds)
        # Bounds of single weights turn a joint selection into counts of each weight.
        self._joint = self.allocation.joint and not self._is_bounded
        if self._is_bounded:
            fixed = {i: Bounds(share, share) for i, share in self._overrides.items()}
            bounds = [fixed.get(i, self._bounds.get(i, Bounds())) for i in range(len(self.targets))]
            check_total(bounds, [target.size for target in self.targets], final_sparsity)
        self.pattern = pattern = get_pattern(options.pattern)
        for target, fraction in zip(self.targets, self.fractions(final_sparsity), strict=True):
            pattern.check(target.shape, target.in_axes, target.out_axes, fraction, target.name)
        # One MaskMaker per layout, so that its functions are traced once per shape.
        make = functools.cache(functools.partial(self._maker, pattern))
        self._makers = [make(target.shape, target.in_axes, target.out_axes) for target in self.targets]
        self._importance_of = _importance_functions(self.criterion, self.targets)
        # Norms of importances are sums, which NumPy and the backends round differently.
        normalizes = isinstance(self.allocation, Global) and self.allocation.normalization != "none"
        self._exact_everywhere = self._maker is MaskMaker and type(pattern) in _EXACT_PATTERNS and not normalizes

    @functools.cached_property
    def _groups(self) -> list[tuple[range, Callable[..., Any]]]:
        """The groups of targets that one compiled function processes, each with its function."""
        if self._joint:
            whole = range(len(self.targets))
            return [(whole, compilation.compiled(functools.partial(self._jointly, whole)))]
        chosen = functools.partial(functools.partial, self._one_by_one)
        return [(group, compilation.compiled(chosen(group))) for group in _groups(self.targets)]

    @functools.cached_property
    def _sparing(self) -> list[tuple[range, Callable[..., Any]]]:
        # Compiled at its first call; few models need it.
        whole = range(len(self.targets))
        return [(whole, compilation.compiled(functools.partial(self._jointly, whole, spare=True)))]

    @property
    def shares_known(self) -> bool:
        """False if the sparsity of each target follows from importances, so that `fractions` gives an even share."""
        return not (self.allocation.joint or self.allocation.needs_scores or self.allocation.needs)

    def fractions(
        self,
        sparsity: float,
        scores: Sequence[Any] | None = None,
        statistics: Sequence[Any] | None = None,
        pruned: Sequence[int] | None = None,
    ) -> list[float]:
        """Returns the sparsity of each target for an overall `sparsity`.

        Args:
            sparsity: Overall fraction removed, in [0, 1).
            scores: Importances of each target, for an allocation that reads them; None = an even share.
            statistics: {name: value} of each target, for an allocation that reads them; None = an even share.
            pruned: Number of entries of each target that stay pruned, so that the others share what is left of the
                overall sparsity; None = none.
        """
        lacking = (self.allocation.needs_scores and scores is None) or (self.allocation.needs and statistics is None)
        even = self.allocation.joint or lacking
        allocation = Uniform() if even else self.allocation

        def find(fixed: Mapping[int, float]) -> list[float]:
            return allocation.shares(sparsity, self.targets, scores, fixed, statistics)

        if not self._is_bounded and pruned is None:
            return [sparsity] * len(self.targets) if even else find({})
        sizes = [target.size for target in self.targets]
        rows = zip(self._limits(sparsity, sizes), pruned or [0] * len(sizes), strict=True)
        limits = [(max(least, count), max(most, count)) for (least, most), count in rows]
        return shares_within(find, sizes, limits, pruned_count(sparsity, sum(sizes)))

    def _limits(self, sparsity: float, entries: Sequence[int]) -> list[tuple[int, int]]:
        """Returns the least and the greatest number of pruned entries (or units) of each target."""
        # Of whole entries: where a step removes no further entry of all, no minimum rises either.
        removed, final = (pruned_count(share, sum(entries)) for share in (sparsity, self._final_sparsity))
        progress = min(removed / final, 1.0) if final else 0.0
        limits = []
        for i, n in enumerate(entries):
            # An override or a minimum near 1 is rounded to all entries of a small weight.
            largest = n - 1 if self.keep_one else n
            if i in self._overrides:
                least = most = pruned_count(self._overrides[i] * progress, n)
            else:
                least, most = self._bounds.get(i, Bounds()).at(progress, n)
            limits.append((min(least, largest), min(most, largest)))
        return limits

    def units_pruned(self, sparsity: float) -> list[int]:
        """Returns the number of units of each target that masks of this sparsity remove; an even share of `joint`."""
        units = [maker.units for maker in self._makers]
        return self._whole(sparsity, self.fractions(sparsity), units)

    def _whole(self, sparsity: float, fractions: Sequence[float], units: Sequence[int]) -> list[int]:
        """Returns the number of units to remove from each target, within its limits."""
        if not self._is_bounded:
            return [removed_count(f, n, keep_one=self.keep_one) for f, n in zip(fractions, units, strict=True)]
        rows = zip(fractions, units, self._limits(sparsity, units), strict=True)
        # A threshold may remove a whole weight, which is a fraction of 1.
        return [min(max(round(f * n), least), most) for f, n, (least, most) in rows]

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
        # The importances of all weights are freed before masks are made.
        counts = self._counts(
            sparsity, masks, self.importances(statistics) if self.allocation.needs_scores else None, statistics
        )
        arguments = weights, list(masks), counts, statistics
        choice = self._chosen(*arguments)
        if self._joint and self.keep_one and not choice.kept.all():
            # A joint selection shows only afterwards which weights it empties, so it is repeated with `spare`.
            choice = self._chosen(*arguments, spare=True)
        return choice

    def _chosen(self, weights, masks, pruned, statistics, *, spare=False) -> MaskUpdate:
        if self._is_compiled:
            return self._by_groups(self._sparing if spare else self._groups, weights, masks, pruned, statistics)
        for maker in self._makers:
            maker.once = self.once
        # One after another, so that only a joint allocation holds the importances of all weights.
        rows = (
            self._arrays(*row) if small else (self._makers[row[0]], row[1], self._importance(row[0], *row[1:3]), row[3])
            for small, *row in zip(self._small(weights), range(len(weights)), weights, statistics, masks, strict=True)
        )
        with np.errstate(all="ignore"):
            if self._joint:
                chosen = self._joint_rows(list(rows), pruned, spare=spare)
            else:
                chosen = [maker.choose(*row, pruned[i]) for i, (maker, *row) in enumerate(rows)]
        counts = np.array([array_of(counts) for _, counts in chosen]).T
        return MaskUpdate([mask for mask, _ in chosen], *counts)

    def _arrays(self, index: int, weight, statistics, mask):
        """Returns what calculates a small target's mask in NumPy, and its weight, importance and mask as arrays."""
        array = array_of(weight)
        # On JAX each operation is compiled for each shape.
        plain = type(self.criterion) is Magnitude
        importance = np.abs(array) if plain else array_of(self._importance(index, weight, statistics))
        return self._makers[index].on_arrays, array, importance, array_of(mask)

    @property
    def _is_compiled(self) -> bool:
        """True if masks come from functions that are compiled per shape, False if from operations run one by one."""
        return not self._exact_everywhere or (jax_state.steps_are_pure() and not self.once)

    def _small(self, weights: Sequence[Any]) -> list[bool]:
        """Returns, for each weight, True if NumPy calculates its mask faster than the backend."""
        if keras.backend.backend() == "torch":
            return [False] * len(weights)
        on_cpu = all(map(backend.is_on_cpu, weights))
        most = (_SMALL_ONCE if self.once else SMALL) if on_cpu else _SMALL_ELSEWHERE
        if self._joint:
            return [sum(target.size for target in self.targets) <= 4 * most] * len(weights)
        return [target.size <= most for target in self.targets]

    def _by_groups(self, groups, weights, masks, pruned, statistics) -> MaskUpdate:
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
        return [ops.stop_gradient(self._importance(i, weight, rows[i])) for i, weight in enumerate(weights)]

    def array_maker(self, index: int) -> ArrayMaskMaker:
        """Returns the object that pools, selects and expands the units of target `index` with NumPy."""
        return self._makers[index].on_arrays

    def _counts(self, sparsity: float, masks, scores: Sequence[Any] | None, statistics: Sequence[Any]) -> np.ndarray:
        """Returns the number of units to remove: one per target, or a scalar for a joint selection."""
        units = [maker.units for maker in self._makers]
        if self._joint:
            count, total = pruned_count(sparsity, sum(units)), sum(units)
            return np.array(min(count, total - len(units)) if self.keep_one else count, "int32")
        if self.allocation.joint:
            fractions = self._joint_fractions(sparsity, units, masks, statistics)
        else:
            fractions = self.fractions(sparsity, scores, statistics)
            # A target may have more pruned entries than it would get: zeros that were adopted, or, by importances, a
            # kept entry that returned at zero and ties with pruned ones. The others then get fewer.
            if type(self.allocation) is not Uniform:
                pruned = [int(mask.size - np.count_nonzero(mask)) for mask in map(array_of, masks)]
                rows = zip(fractions, self.targets, pruned, strict=True)
                if any(round(fraction * target.size) < count for fraction, target, count in rows):
                    fractions = self.fractions(sparsity, scores, statistics, pruned)
        return np.array(self._whole(sparsity, fractions, units), "int32")

    def _joint_fractions(self, sparsity: float, units: Sequence[int], masks, statistics) -> list[float]:
        """Returns the sparsity of each target under a joint allocation with bounds."""
        scores = zip(self.importances(statistics), masks, strict=True)
        with np.errstate(all="ignore"):
            pooled = [
                self.array_maker(i).pool(array_of(self.allocation.normalized(score)), array_of(mask))
                for i, (score, mask) in enumerate(scores)
            ]
        flat = [np.asarray(part, "float32").reshape(-1) for part in pooled]

        def find(fixed: Mapping[int, float]) -> list[float]:
            free = [i for i in range(len(units)) if i not in fixed]
            shares = dict(fixed)
            if free:
                joined = np.concatenate([flat[i] for i in free])
                removed = pruned_count(sparsity, sum(units)) - sum(round(s * units[i]) for i, s in fixed.items())
                kept = keep_largest_of_array(joined, len(joined) - max(removed, 0))
                ends = np.cumsum([units[i] for i in free])[:-1]
                parts = np.split(kept, ends)
                shares |= {i: 1 - np.count_nonzero(part) / units[i] for i, part in zip(free, parts, strict=True)}
            return [float(shares[i]) for i in range(len(units))]

        return shares_within(find, units, self._limits(sparsity, units), pruned_count(sparsity, sum(units)))

    def only_kept_by_keep_one(self, sparsity: float, kept: np.ndarray) -> np.ndarray:
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
        raw = (self._importance(i, weight, statistics[i]) for i, weight in enumerate(weights))
        rows = list(zip(self._makers, weights, map(self.allocation.normalized, raw), masks, strict=True))
        return _columns(self._joint_rows(rows, pruned, spare=spare))

    def _joint_rows(self, rows, pruned, *, spare):
        """Removes the least important units over all targets together; returns (mask, counts) per target.

        With `spare`, the most important unit of each target ranks above all other units.
        """
        pooled = [maker.pool(importance, mask) for maker, _, importance, mask in rows]
        ops = ops_for(pooled[0])
        units = [ops.reshape(ops.cast(part, "float32"), (-1,)) for part in pooled]
        units = ops.concatenate([_best_first(part) for part in units] if spare else units)
        chosen = rows[0][0].largest(units, units.shape[0] - pruned)
        ends = np.cumsum([maker.units for maker in self._makers])[:-1].tolist()
        # TensorFlow and PyTorch raise an error for an empty list of split positions.
        parts = ops.split(chosen, ends) if ends else [chosen]
        return [
            maker.finish(weight, part, mask, ops.reshape(one, part.shape))
            for (maker, weight, _, mask), part, one in zip(rows, pooled, parts, strict=True)
        ]

    def _importance(self, index: int, weight, statistics):
        importance = ops.convert_to_tensor(self._importance_of[index](weight, statistics=statistics))
        if tuple(importance.shape) != self.targets[index].shape:
            raise ValueError(
                f"The criterion must return one importance per entry of a weight. Received: shape "
                f"{tuple(importance.shape)} for {self.targets[index].name} of shape {self.targets[index].shape}."
            )
        return importance


def _importance_functions(criterion: Criterion, targets: Sequence[Target]) -> list[Callable[..., Any]]:
    """Returns the criterion's function for each target.

    Functions of users are compiled, because single operations may round differently than compiled ones.
    """
    calls: list[Callable[..., Any]] = [
        functools.partial(criterion, target=target, seed_offset=i) for i, target in enumerate(targets)
    ]
    if type(criterion) in _EXACT_CRITERIA:
        return calls
    if isinstance(criterion, Custom) and not criterion.keywords:
        # Independent of the offset, so that weights of one shape share a trace.
        return [compilation.compiled(criterion)] * len(targets)
    return [compilation.compiled(call) for call in calls]


def _groups(targets: Sequence[Target]) -> Iterator[range]:
    start, size = 0, 0
    for i, target in enumerate(targets):
        if i > start and size + target.size > _AT_ONCE:
            yield range(start, i)
            start, size = i, 0
        size += target.size
    yield range(start, len(targets))


def _best_first(units):
    """Returns the importances with the largest set to infinity; -inf (already pruned) stays."""
    ops = ops_for(units)
    best = ops.equal(ops.arange(units.shape[0], dtype="int32"), ops.cast(ops.argmax(units), "int32"))
    infinity, largest_number = (
        ops.cast(value, units.dtype) for value in (float("inf"), float(np.finfo("float32").max))
    )
    # Clipped, because infinite importances would tie with the largest.
    others = ops.minimum(units, largest_number)
    return ops.where(ops.logical_and(best, ops.greater(units, -infinity)), infinity, others)


def _columns(rows):
    """Returns (masks, counts of shape (3, targets)) from one row (mask, counts) per target."""
    return [mask for mask, _ in rows], ops.stack([counts for _, counts in rows], axis=1)

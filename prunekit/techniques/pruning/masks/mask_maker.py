"""Masks of weights of one shape and layout: importance -> pooled units -> exact selection -> mask."""

import functools
import math

import numpy as np
from keras import ops

from prunekit.core.runtime import backend, compilation, jax_state
from prunekit.sparsity.array_ops import SMALL
from prunekit.sparsity.patterns import Pattern
from prunekit.sparsity.selection import ReadingPlan, count_true, keep_largest, keep_largest_of_array, reading_plan
from prunekit.techniques.pruning.masks.mask_store import leaking


class MaskMaker:
    """Calculates the mask of weights of one shape and layout from tensors.

    Attributes:
        on_arrays: Does the same with NumPy arrays.
        once: True if masks are calculated once, so that no compilation pays.
    """

    once = False

    def __init__(self, pattern: Pattern, shape, in_axes, out_axes):
        self.units = pattern.units(shape, in_axes, out_axes)
        self._is_large = math.prod(shape) > SMALL
        self.on_arrays = ArrayMaskMaker(pattern, shape, in_axes, out_axes)

        def pool(importance, mask):
            # Pruned positions rank lowest, so that masks only ever shrink.
            lowest = ops.cast(-float("inf"), importance.dtype)
            return pattern.pool(ops.where(mask, importance, lowest), in_axes, out_axes)

        def finish(weight, pooled, mask, chosen):
            new = ops.logical_and(mask, pattern.expand(chosen, shape, in_axes, out_axes))
            nans, leaks = count_true(ops.isnan(pooled)), count_true(leaking(mask, weight))
            return new, ops.stack([nans, leaks, count_true(new, expect_any=True)])

        # Compiled only as part of a compiled function, where each shape is then traced once.
        self._pool, self._finish = pool, finish
        self._compiled = functools.cache(lambda: (compilation.compiled(pool), compilation.compiled(finish)))

    def pool(self, importance, mask):
        """Returns the importance of each unit, -inf for units that are already pruned."""
        return self._functions()[0](importance, mask)

    def finish(self, weight, pooled, mask, chosen):
        """Returns (new mask, counts of NaN, leaks and kept entries) from the chosen units."""
        return self._functions()[1](weight, pooled, mask, chosen)

    def _functions(self):
        # A large weight takes a tenth longer by single operations than compiled.
        pays = self._is_large and not self.once
        traced = backend.inside_graph() or jax_state.steps_are_pure() or pays
        return self._compiled() if traced else (self._pool, self._finish)

    def largest(self, units, kept):
        """Returns a mask of the `kept` most important units."""
        return largest(units, kept)

    def choose(self, weight, importance, mask, pruned):
        """Returns (new mask, counts of NaN, leaks and kept entries)."""
        pooled = self.pool(importance, mask)
        return self.finish(weight, pooled, mask, largest(pooled, self.units - pruned))


class ArrayMaskMaker:
    """The methods of `MaskMaker` on NumPy arrays; the caller silences NumPy's warnings about NaN and infinity."""

    def __init__(self, pattern: Pattern, shape, in_axes, out_axes):
        self.units = pattern.units(shape, in_axes, out_axes)
        self._pattern, self._shape, self._axes = pattern, shape, (in_axes, out_axes)

    def pool(self, importance: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Returns the importance of each unit, -inf for units that are already pruned."""
        lowest = np.asarray(-math.inf).astype(importance.dtype)
        return np.asarray(self._pattern.pool(np.where(mask, importance, lowest), *self._axes))

    def finish(self, weight, pooled, mask, chosen):
        """Returns (new mask, counts of NaN, leaks and kept entries) from the chosen units."""
        new = np.logical_and(mask, self._pattern.expand(chosen, self._shape, *self._axes))
        leaks = np.logical_and(np.logical_not(mask), weight != 0)
        return new, np.array([np.count_nonzero(true) for true in (np.isnan(pooled), leaks, new)], "int32")

    def expanded(self, units: np.ndarray) -> np.ndarray:
        """Returns the mask, of the weight's shape, of the chosen units."""
        return np.asarray(self._pattern.expand(units, self._shape, *self._axes))

    def largest(self, units, kept):
        """Returns a mask of the `kept` most important units."""
        return keep_largest_of_array(units, kept)

    def choose(self, weight, importance, mask, pruned):
        """Returns (new mask, counts of NaN, leaks and kept entries)."""
        pooled = self.pool(importance, mask)
        return self.finish(weight, pooled, mask, keep_largest_of_array(pooled, self.units - pruned))

    def kept_units(self, mask: np.ndarray) -> int:
        """Returns the number of units that a mask keeps: of entries, blocks or channels."""
        with np.errstate(all="ignore"):
            units = self.pool(np.where(mask, 1.0, -math.inf), mask)
            return int(np.count_nonzero(mask) if units.size == mask.size else np.count_nonzero(units > -math.inf))

    def mask_of(self, importance: np.ndarray, mask: np.ndarray, kept: int) -> np.ndarray:
        """Returns a mask of the most important units.

        Args:
            importance: Importance of each entry, the weight's shape.
            mask: Entries that may be kept.
            kept: Number of units to keep.
        """
        with np.errstate(all="ignore"):
            return self.choose(importance, importance, mask, self.units - kept)[0]

    def exchanged(self, mask: np.ndarray, kept_first: np.ndarray, grown_first: np.ndarray, share: float) -> np.ndarray:
        """Returns a mask with as many kept units as `mask`, some of them others.

        Args:
            mask: Current mask.
            kept_first: Importance of each entry; kept units with the smallest are dropped.
            grown_first: Score of each entry; pruned units with the largest are kept in their place.
            share: Fraction of the kept units to exchange.
        """
        everywhere = np.ones_like(mask)
        importance, score = (
            self.pool(np.asarray(values, "float32"), everywhere) for values in (kept_first, grown_first)
        )
        kept = self.pool(np.where(mask, 1.0, -math.inf).astype("float32"), mask) > -math.inf
        count = min(int(share * np.count_nonzero(kept)), int(np.count_nonzero(~kept)))
        dropped = keep_largest_of_array(np.where(kept, -importance, -np.inf), count)
        grown = keep_largest_of_array(np.where(kept, -np.inf, score), count)
        return self.expanded((kept & ~dropped) | grown)


@functools.cache
def _selection(how: ReadingPlan):
    """Returns `keep_largest` compiled for flat arrays of any length: traced once for all weights of all models."""
    return compilation.compiled(functools.partial(keep_largest, how=how), open_shapes=True)


def largest(units, kept):
    """Applies `keep_largest` to units of any shape."""
    size = int(np.prod(units.shape))
    return ops.reshape(_selection(reading_plan(size))(ops.reshape(units, (-1,)), kept), tuple(units.shape))

"""Selection of the entries to keep: exact counts from an importance array, without a full sort.

The k-th largest value is found by radix selection on the bit pattern of the floating-point numbers: one histogram per
digit, most significant first (two digits of 16 bits for float32, four for float64; three and six of 12 bits for small
arrays, where counting through 65,536 buckets would be most of the work). The array is read a fixed number of times, on
its own device, independently of its values.
"""

import functools
import math
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

_SMALL = 1 << 18
_PIECE = 1 << 22


def pruned_count(sparsity: float, n: int) -> int:
    """Returns round(sparsity * n), the number of entries to remove out of n; halves round to the even count.

    Raises:
        ValueError: The sparsity is outside [0, 1).
    """
    if not 0.0 <= sparsity < 1.0:
        raise ValueError(f"Sparsity is the fraction removed, in [0, 1). Received: sparsity={sparsity}.")
    return round(sparsity * n)


def removed_count(sparsity: float, units: int, *, keep_one: bool) -> int:
    """Returns `pruned_count(sparsity, units)`, or one unit less if that is all units and `keep_one` is True.

    Raises:
        ValueError: The sparsity is outside [0, 1).
    """
    count = pruned_count(sparsity, units)
    return min(count, max(units - 1, 0)) if keep_one else count


def count_true(mask, *, expect_any: bool = False):
    """Returns the number of True entries as a scalar int32 tensor.

    Args:
        mask: Boolean tensor.
        expect_any: True: counts at once. False: tests `any(mask)` first, which is cheaper where no entry is True.
    """

    count = functools.partial(_sum_true, mask)
    return count() if expect_any else ops.cond(ops.any(mask), count, lambda: ops.zeros((), "int32"))


def _sum_true(mask):
    size = math.prod(length or 0 for length in mask.shape)
    if size <= _PIECE or keras.backend.backend() == "jax":
        # XLA sums without storing the cast array.
        return ops.sum(ops.cast(mask, "int32"))
    flat = ops.reshape(mask, (-1,))
    return _over_pieces(lambda piece: ops.sum(ops.cast(piece, "int32")), flat, ops.zeros((), "int32"))


class ReadingPlan(NamedTuple):
    """Digit width in bits with which `keep_largest` reads an array, and whether it reads the array in pieces."""

    width: int
    in_pieces: bool


def reading_plan(size: int) -> ReadingPlan:
    """Returns the reading plan for an array of `size` entries."""
    # 12 bits at least, for sign and exponent: a narrower top digit of -inf could equal that of a finite number.
    return ReadingPlan(12 if size < _SMALL else 16, size > _PIECE)


def keep_largest(importance, kept, *, how: ReadingPlan | None = None):
    """Returns a boolean mask, True for the `kept` largest entries; among equals the lower flat index is kept.

    Args:
        importance: Floating-point array of any shape, without NaN. -inf marks an entry that is already pruned: it is
            never kept, even if fewer than `kept` entries remain.
        kept: Number of True entries, an int or a scalar int32 tensor in [0, importance.size].
        how: `reading_plan` of the size; None derives it from the array. Required if a trace leaves the size open.

    Returns:
        Boolean tensor, the shape of `importance`.
    """
    flat = ops.reshape(importance, (-1,))
    key, least = _ordered_bits(flat)
    kept = ops.cast(kept, "int32")
    if keras.backend.backend() == "jax":
        # JAX compiles again for each length: 1.5 s for the histograms, 0.2 s for the counting loop.
        threshold, wanted, tied = _kth_largest_by_counting(key, least, kept)
    else:
        threshold, wanted, tied = _kth_largest(key, least, kept, how or reading_plan(flat.shape[0]))

    def some_of_the_tied():
        ties = ops.equal(key, threshold)
        if keras.backend.backend() == "jax":
            # On JAX no array's shape may depend on the positions of the tied entries.
            first = ops.cumsum(ops.cast(ties, "int32")) <= wanted
            return ops.logical_or(ops.greater(key, threshold), ops.logical_and(ties, first))
        (places,) = ops.nonzero(ties)
        end = ops.where(wanted > 0, places[ops.maximum(wanted - 1, 0)] + 1, 0)
        return ops.concatenate([key[:end] >= threshold, key[end:] > threshold])

    mask = ops.cond(ops.equal(tied, wanted), lambda: ops.greater_equal(key, threshold), some_of_the_tied)
    return mask if len(importance.shape) == 1 else ops.reshape(mask, tuple(importance.shape))


def keep_largest_of_array(importance: np.ndarray, kept: int) -> np.ndarray:
    """Returns the mask that `keep_largest` returns, for a NumPy array and without any compilation.

    Slower than `keep_largest` for large arrays, because NumPy uses one core. NumPy's `partition` takes ten times as
    long where many entries are equal, such as entries that are already pruned.
    """
    flat = importance.reshape(-1)
    key, least = _ordered_bits_of_array(flat if flat.dtype in (np.float32, np.float64) else flat.astype(np.float32))
    # One digit narrows the search to entries of nearly equal importance, few or equal ones: they are quickly sorted.
    digits = np.right_shift(key, 8 * key.itemsize - _plan_of_array(key.size))
    lowest = int(digits.min(initial=0))
    histogram = np.bincount(digits - lowest)
    gone = (least >> (8 * key.itemsize - _plan_of_array(key.size))) - lowest
    if 0 <= gone < histogram.size:
        histogram[gone] = 0
    up_to = np.cumsum(histogram)
    kept = min(int(kept), int(up_to[-1]))
    if not kept:
        return np.zeros(importance.shape, bool)
    place = up_to[-1] - kept
    found = int(np.searchsorted(up_to, place, side="right"))
    members = np.sort(key[digits == found + lowest])
    threshold = members[place - (up_to[found] - histogram[found])]
    mask = key >= threshold
    if np.count_nonzero(mask) != kept:
        mask = key > threshold
        tied = np.flatnonzero(key == threshold)
        mask[tied[: kept - np.count_nonzero(mask)]] = True
    return mask.reshape(importance.shape)


def _plan_of_array(size: int) -> int:
    """Returns the width in bits of the digit by which an array of `size` entries is searched."""
    return 12 if size < 1 << 16 else 16


def _ordered_bits_of_array(x: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns what `_ordered_bits` returns, for a flat NumPy array of float32 or float64."""
    bits = 8 * x.itemsize
    pattern = np.ascontiguousarray(x).view(f"int{bits}")
    infinite, others = -(1 << {32: 23, 64: 52}[bits]), (1 << (bits - 1)) - 1
    if pattern.min(initial=0) >= infinite:
        return pattern, infinite
    key = np.bitwise_xor(pattern, np.bitwise_and(np.right_shift(pattern, bits - 1), others))
    key[key == -1] = 0
    return key, infinite ^ others


def _ordered_bits(x):
    """Returns integers in the order of the floating-point values, -0 equal to 0, and the integer of -inf."""
    dtype = keras.backend.standardize_dtype(x.dtype)
    if dtype in ("float16", "bfloat16"):
        x, dtype = ops.cast(x, "float32"), "float32"
    bits = {"float32": 32, "float64": 64}[dtype]
    # As a column: Keras needs a static length of the last axis, and a trace may leave the array's length open.
    pattern = ops.reshape(ops.view(ops.reshape(x, (-1, 1)), dtype=f"int{bits}"), (-1,))
    sign, others, infinite = (
        ops.cast(n, pattern.dtype) for n in (bits - 1, (1 << (bits - 1)) - 1, -(1 << {32: 23, 64: 52}[bits]))
    )

    def flipped():
        # The bit patterns of negative floats have the reverse order: flip all bits but the sign. -0 then becomes the
        # integer -1.
        key = ops.bitwise_xor(pattern, ops.bitwise_and(ops.right_shift(pattern, sign), others))
        return ops.where(ops.equal(key, -1), ops.zeros_like(key), key), ops.bitwise_xor(infinite, others)

    # Importances are rarely negative; the patterns of non-negative values and of -inf are already in order.
    return ops.cond(ops.min(pattern) >= infinite, lambda: (pattern, infinite), flipped)


def _kth_largest(key, least, k, how: ReadingPlan):
    """Returns the k-th largest integer, how many equal integers are among the k largest, and how many exist.

    Searches one digit at a time from the top; requires 0 <= k <= key.size. Integers equal to `least` are not counted;
    no other integer may have their top digit. For k = 0 the returned integer is above all others.
    """
    unknown = 64 if keras.backend.standardize_dtype(key.dtype) == "int64" else 32
    prefix, settled = None, unknown
    while unknown:
        width = min(how.width, unknown)
        settled, unknown, buckets = unknown, unknown - width, 1 << width
        digit_of = functools.partial(_digit, prefix, settled, unknown, buckets)
        histogram = _histogram(key, digit_of, buckets, how.in_pieces)
        up_to = ops.cumsum(histogram)
        if prefix is None:
            lowest = ops.cast(_down(least, unknown) + buckets // 2, "int32")
            k = ops.minimum(k, up_to[-1] - ops.take(up_to, lowest))
        found = ops.maximum(count_true(up_to[-1] - up_to + histogram >= k, expect_any=True) - 1, 0)
        k = k - (up_to[-1] - ops.take(up_to, found))
        tied, found = ops.take(histogram, found), ops.cast(found, key.dtype)
        prefix = found - buckets // 2 if prefix is None else ops.left_shift(prefix, ops.cast(width, key.dtype)) + found
    return prefix, k, tied


def _digit(prefix, settled: int, unknown: int, buckets: int, key):
    """Returns each key's digit above its `unknown` lowest bits; `buckets` if its bits from `settled` on differ."""
    rest = _down(key, unknown)
    if prefix is None:
        # The top digit contains the sign: shift it so that buckets start at 0.
        return ops.cast(rest + buckets // 2, "int32")
    # Only keys that start with the digits found so far are counted.
    inside = ops.cast(ops.bitwise_and(rest, ops.cast(buckets - 1, key.dtype)), "int32")
    return ops.where(ops.equal(_down(key, settled), prefix), inside, buckets)


def _kth_largest_by_counting(key, least, k):
    """Returns the same as `_kth_largest`, by a loop that sets a bit if at least `k` keys reach the result with it."""
    bits = 64 if keras.backend.standardize_dtype(key.dtype) == "int64" else 32
    sign = ops.left_shift(ops.ones((), key.dtype), ops.cast(bits - 1, key.dtype))
    k = ops.minimum(k, count_true(key > least))

    def settle(i, pattern):
        bit = ops.left_shift(ops.ones((), key.dtype), ops.cast(bits - 1 - i, key.dtype))
        # `pattern` is unsigned; with the sign bit flipped, patterns have the order of the keys.
        candidate = ops.bitwise_or(pattern, bit)
        reached = ops.sum(ops.cast(key >= ops.bitwise_xor(candidate, sign), "int32"))
        return ops.where(reached >= k, candidate, pattern)

    threshold = ops.bitwise_xor(ops.fori_loop(0, bits, settle, ops.zeros((), key.dtype)), sign)
    return threshold, k - count_true(key > threshold), count_true(ops.equal(key, threshold))


def _histogram(key, digit_of, buckets: int, in_pieces: bool):
    """Returns the count of each integer in [0, buckets) among `digit_of(key)`; larger integers are not counted.

    Intermediate arrays are several times as large as the keys, so long arrays are processed in pieces.
    """
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        def counted(part):
            # Most digits equal `buckets`: counting them serially in one extra bucket would take half of the time.
            return tf.math.bincount(digit_of(part), minlength=buckets, maxlength=buckets)

    else:

        def counted(part):
            return ops.bincount(digit_of(part), minlength=buckets + 1)[:buckets]

    return _over_pieces(counted, key, ops.zeros((buckets,), "int32")) if in_pieces else counted(key)


def _over_pieces(function, flat, total):
    """Returns `total` plus the sum of `function` over the pieces of a long array, processed one after another."""
    if keras.backend.backend() != "tensorflow":
        return total + sum(function(flat[start : start + _PIECE]) for start in range(0, flat.shape[0], _PIECE))
    import tensorflow as tf

    def add_piece(start, total):
        return start + _PIECE, total + function(flat[start : start + _PIECE])

    size = tf.size(flat)
    return tf.while_loop(lambda at, _: at < size, add_piece, (0, total), parallel_iterations=1)[1]


def _down(key, bits: int):
    return ops.right_shift(key, ops.cast(bits, key.dtype)) if bits else key

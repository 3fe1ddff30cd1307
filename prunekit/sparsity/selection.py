"""Which entries stay: exact counts from an importance array, without a full sort.

The k-th largest value is found by radix selection on the bit pattern of the floating-point numbers: one histogram per
digit, most significant first (two digits of 16 bits for float32, four for float64; three of 11 bits for small
arrays, where counting through 65,536 buckets would be most of the work). It reads the array a fixed number of times on
the device that holds it, whatever the values are.
"""

import keras
from keras import ops

_SMALL = 1 << 18


def pruned_count(sparsity: float, n: int) -> int:
    """round(sparsity * n): how many of n entries are removed, halves to the even count.

    Raises:
        ValueError: The sparsity is outside [0, 1).
    """
    if not 0.0 <= sparsity < 1.0:
        raise ValueError(f"Sparsity is the fraction removed, in [0, 1). Received: sparsity={sparsity}.")
    return round(sparsity * n)


def count_nan(importance):
    """Number of NaN entries, as a scalar int32 tensor; a NaN has no rank, so it must not reach `keep_largest`."""
    return ops.sum(ops.cast(ops.isnan(importance), "int32"))


def keep_largest(importance, kept):
    """A boolean mask, True for exactly `kept` entries: the largest ones; among equals the lower flat index stays.

    Args:
        importance: Floating-point array of any shape, without NaN. -inf ranks lowest (already pruned), +inf highest.
        kept: How many entries are True, an int or a scalar int32 tensor in [0, importance.size].

    Returns:
        Boolean tensor, the shape of `importance`.
    """
    key = _ordered_bits(ops.reshape(importance, (-1,)))
    threshold, wanted, tied = _kth_largest(key, ops.cast(kept, "int32"))

    def some_of_the_tied():
        ties = ops.equal(key, threshold)
        first = ops.cumsum(ops.cast(ties, "int32")) <= wanted
        return ops.logical_or(ops.greater(key, threshold), ops.logical_and(ties, first))

    # Ties are rare in trained weights, and a running count costs more than all of the selection: only where needed.
    mask = ops.cond(ops.equal(tied, wanted), lambda: ops.greater_equal(key, threshold), some_of_the_tied)
    return ops.reshape(mask, tuple(importance.shape))


def _count(mask):
    return ops.sum(ops.cast(mask, "int32"))


def _ordered_bits(x):
    """Integers, at least 32 bits wide, ordered as the floating-point values are; -0 and 0 are one value."""
    dtype = keras.backend.standardize_dtype(x.dtype)
    bits = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}[dtype]
    key = ops.view(x, dtype=f"int{bits}")
    if bits == 16:
        key = ops.cast(key, "int32")
    sign, others = (ops.cast(n, key.dtype) for n in (bits - 1, (1 << (bits - 1)) - 1))
    # Negative floats order backwards in their bit pattern: flip all bits but the sign. That makes -0 the integer below
    # 0: one up for all negative numbers. Shifting a sign down gives -1 or 0, cheaper than comparing and selecting.
    key = ops.bitwise_xor(key, ops.bitwise_and(ops.right_shift(key, sign), others))
    return key - ops.right_shift(key, sign)


def _kth_largest(key, k):
    """The k-th largest integer, how many of those equal to it are among the k largest, and how many there are.

    Found one digit at a time from the top; needs 0 <= k <= key.size. For k = 0 the integer is above all there are.
    """
    unknown = 64 if keras.backend.standardize_dtype(key.dtype) == "int64" else 32
    digit_bits = 11 if key.shape[0] < _SMALL else 16
    prefix, known = None, None
    while unknown:
        width = min(digit_bits, unknown)
        unknown, buckets = unknown - width, 1 << width
        rest = ops.right_shift(key, ops.cast(unknown, key.dtype)) if unknown else key
        if prefix is None:
            # The top digit carries the sign: shifted so that buckets count from 0.
            digit = ops.cast(rest + buckets // 2, "int32")
        else:
            # Only keys that share the digits found so far compete; the others go to one bucket past the end.
            digit = ops.where(
                ops.equal(known, prefix),
                ops.cast(ops.bitwise_and(rest, ops.cast(buckets - 1, key.dtype)), "int32"),
                buckets,
            )
        histogram = ops.bincount(digit, minlength=buckets + 1)[:buckets]
        up_to = ops.cumsum(histogram)
        found = ops.maximum(_count(up_to[-1] - up_to + histogram >= k) - 1, 0)
        k = k - (up_to[-1] - ops.take(up_to, found))
        tied, found = ops.take(histogram, found), ops.cast(found, key.dtype)
        prefix = found - buckets // 2 if prefix is None else ops.left_shift(prefix, ops.cast(width, key.dtype)) + found
        known = rest
    return prefix, k, tied

"""Which entries stay: exact counts from an importance array, without a full sort.

The k-th largest value is found by radix selection on the bit pattern of the floating-point numbers: one histogram per
digit, most significant first (two digits of 16 bits for float32, four for float64; twice as many of 8 bits for small
arrays, where counting through 65,536 buckets would be most of the work). It reads the array a fixed number of times on
the device that holds it, whatever the values are.
"""

import keras
from keras import ops

_SMALL = 1 << 17


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
    shape = tuple(importance.shape)
    key = _ordered_bits(ops.reshape(importance, (-1,)))
    kept = ops.cast(kept, "int32")
    threshold = _kth_largest_key(key, kept)
    above, tied = ops.greater(key, threshold), ops.equal(key, threshold)
    wanted = kept - _count(above)
    # Ties are rare in trained weights, and a running count costs more than all of the selection: only where needed.
    mask = ops.cond(
        ops.equal(_count(tied), wanted),
        lambda: ops.logical_or(above, tied),
        lambda: ops.logical_or(above, ops.logical_and(tied, ops.cumsum(ops.cast(tied, "int32")) <= wanted)),
    )
    return ops.reshape(mask, shape)


def _count(mask):
    return ops.sum(ops.cast(mask, "int32"))


def _ordered_bits(x):
    """Integers of the width of x's type, ordered as the floating-point values are; -0 and 0 are one value."""
    dtype = keras.backend.standardize_dtype(x.dtype)
    bits = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}[dtype]
    x = ops.where(ops.equal(x, 0), ops.zeros_like(x), x)
    signed = ops.view(x, dtype=f"int{bits}")
    if bits == 16:
        signed = ops.cast(signed, "int32")
    # Negative floats order backwards in their bit pattern: flip all bits but the sign.
    flip = (1 << (bits - 1)) - 1
    return ops.where(signed >= 0, signed, ops.bitwise_xor(signed, ops.cast(flip, signed.dtype)))


def _kth_largest_key(key, k):
    """The k-th largest integer of `key`, found one digit at a time from the top; needs 1 <= k <= key.size.

    With k = 0 the result is the largest key there is; with it, the caller's mask comes out empty, as it should.
    """
    bits = 64 if keras.backend.standardize_dtype(key.dtype) == "int64" else 32
    digit_bits = 8 if key.shape[0] < _SMALL else 16
    buckets = 1 << digit_bits
    prefix = ops.zeros((), dtype=key.dtype)
    for shift in range(bits - digit_bits, -1, -digit_bits):
        rest = ops.right_shift(key, ops.cast(shift, key.dtype))
        first = shift == bits - digit_bits
        # The top digit carries the sign: shifted so that buckets count from 0. Below it, only keys that share the
        # digits found so far compete; the others go to one bucket past the end.
        if first:
            digit = ops.cast(rest + buckets // 2, "int32")
        else:
            digit = ops.where(
                ops.equal(ops.right_shift(rest, ops.cast(digit_bits, key.dtype)), prefix),
                ops.cast(ops.bitwise_and(rest, ops.cast(buckets - 1, key.dtype)), "int32"),
                buckets,
            )
        histogram = ops.bincount(digit, minlength=buckets + 1)[:buckets]
        at_least = ops.flip(ops.cumsum(ops.flip(histogram)))
        found = ops.maximum(_count(at_least >= k) - 1, 0)
        k = k - (ops.take(at_least, found) - ops.take(histogram, found))
        found = ops.cast(found, key.dtype)
        prefix = found - buckets // 2 if first else ops.left_shift(prefix, ops.cast(digit_bits, key.dtype)) + found
    return prefix

"""Sums that are equal to the bit on every backend, on every device and with every number of threads."""

from prunekit.sparsity.array_ops import ops_for


def sum_in_order(x, axis: int):
    """Returns the sum along one axis by pairwise halving; its rounding error grows with the logarithm of the length.

    `ops.sum` adds in an order that depends on the backend, so units of equal or nearly equal importance would be ranked
    differently on another backend.

    Args:
        x: Tensor with static shape, or NumPy array.
        axis: The axis to sum over, not negative; the result does not have it.
    """

    ops = ops_for(x)

    def part(start, stop):
        return x[(slice(None),) * axis + (slice(start, stop),)]

    length = x.shape[axis]
    if length == 0:
        return ops.sum(x, axis=axis)
    while length > 1:
        half, rest = length // 2, length % 2
        added = part(0, half) + part(half, 2 * half)
        x = ops.concatenate([added, part(2 * half, length)], axis=axis) if rest else added
        length = half + rest
    return ops.squeeze(x, axis=axis)

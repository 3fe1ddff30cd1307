"""Sums that are the same to the bit on every backend, device and number of threads."""

from keras import ops


def sum_in_order(x, axis: int):
    """Sum along one axis, halves added to halves; the rounding error grows with the logarithm of the length.

    `ops.sum` adds in an order of the backend's own, so that units of equal or nearly equal importance would be ranked
    differently on another one.

    Args:
        x: Tensor with static shape.
        axis: Not negative; gone from the result.
    """

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

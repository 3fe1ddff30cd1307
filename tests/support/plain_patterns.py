"""Every pattern, and a plain version of each, with loops."""

import itertools

import numpy as np
from keras import ops

from prunekit.sparsity.patterns import NM, Block, Channel, Unstructured

INF = float("inf")
LENGTH = 2040  # a multiple of every m of the family
FAMILY = [
    Unstructured(),
    Block(4, 1),
    Block(1, 4),
    Block(2, 3),
    Block(3, 2, pooling="max"),
    Block(1, 1),
    Block(16, 16, pooling="max"),
    Block(16, 16),
    NM(2, 4),
    NM(1, 4),
    NM(1, 2),
    NM(3, 8),
    NM(1, 3),
    NM(9, 17),
    NM(1, 20),
    Channel(),
]


def pool(pattern, importance, in_axes, out_axes) -> np.ndarray:
    pooled = pattern.pool(ops.convert_to_tensor(importance), in_axes, out_axes)
    return ops.convert_to_numpy(pooled)


def expand(pattern, unit_mask, shape, in_axes, out_axes) -> np.ndarray:
    return ops.convert_to_numpy(pattern.expand(ops.convert_to_tensor(unit_mask), shape, in_axes, out_axes))


def entries(shape, in_axes, out_axes):
    """(index, position, input, output) of every weight; several axes of a side count as digits of one number."""
    ins, outs = ([axis % len(shape) for axis in axes] for axes in (in_axes, out_axes))
    rest = [axis for axis in range(len(shape)) if axis not in ins + outs]

    def number(index, axes):
        value = 0
        for axis in axes:
            value = value * shape[axis] + index[axis]
        return value

    for index in itertools.product(*(range(length) for length in shape)):
        yield index, number(index, rest), number(index, ins), number(index, outs)


def unit_keys(pattern, shape, in_axes, out_axes) -> dict:
    """{unit: indices of its weights}, units in the order in which `pool` returns them."""
    units: dict = {}
    for index, position, i, o in entries(shape, in_axes, out_axes):
        if isinstance(pattern, Block):
            key = (position, i // pattern.inputs, o // pattern.outputs)
        elif isinstance(pattern, Channel):
            key = (o,)
        else:
            key = index
        units.setdefault(key, []).append(index)
    return dict(sorted(units.items()))


def groups_of_m(pattern, shape, in_axes, out_axes) -> list:
    groups: dict = {}
    for index, position, i, o in entries(shape, in_axes, out_axes):
        groups.setdefault((position, i // pattern.m, o), []).append((i, index))
    return [[index for _, index in sorted(group)] for group in groups.values()]


def loop_pool(pattern, importance, in_axes, out_axes) -> np.ndarray:
    if isinstance(pattern, NM):
        pooled = importance.copy()
        for group in groups_of_m(pattern, importance.shape, in_axes, out_axes):
            # sorted() is stable, so among equals the one with the lower index comes first.
            first = sorted(group, key=lambda index: -importance[index])
            for index in first[: pattern.n]:
                pooled[index] = INF
            for index in first[pattern.n :]:
                # An infinite weight that loses counts as the largest finite one.
                pooled[index] = min(pooled[index], np.finfo(importance.dtype).max)
        return pooled.ravel()
    pooled = []
    for indices in unit_keys(pattern, importance.shape, in_axes, out_axes).values():
        values = [float(importance[index]) for index in indices]
        if all(value == -INF for value in values):
            pooled.append(-INF)
        elif isinstance(pattern, Unstructured) or getattr(pattern, "pooling", None) == "max":
            pooled.append(max(values))
        else:
            pooled.append(sum(0.0 if value == -INF else value for value in values) / len(values))
    return np.array(pooled)


def loop_expand(pattern, unit_mask, shape, in_axes, out_axes) -> np.ndarray:
    mask = np.zeros(shape, bool)
    for kept, indices in zip(unit_mask, unit_keys(pattern, shape, in_axes, out_axes).values(), strict=True):
        for index in indices:
            mask[index] = kept
    return mask

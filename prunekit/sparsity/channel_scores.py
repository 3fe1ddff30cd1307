"""Pruning criteria that rank output units: batch-normalisation scale, geometric median, statistics of activations.

All entries of a unit have the same importance, so the criteria suit the pattern "channel"; with other patterns the ties
inside a unit are broken by position.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from keras import ops

from prunekit.sparsity.scores import Criterion, wide


@dataclass(frozen=True)
class BatchNormalizationScale(Criterion):
    """|gamma| of the batch normalisation that follows the weight's layer, for each output unit.

    Needs no data. The layer's output must pass into one BatchNormalization, directly or through layers without weights
    that keep its shape.

    Source: Liu et al. 2017, "Network slimming", arXiv:1708.06519, section 3. Training with an L1 penalty on gamma, as
        the paper does, separates the units.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"batch_normalization_scale"})

    def __call__(self, weight, *, target: Any = None, seed_offset: int = 0, statistics: Any = None):
        """|statistics["batch_normalization_scale"]|, repeated for all entries of a unit."""
        return _of_units(ops.abs(ops.convert_to_tensor(statistics["batch_normalization_scale"])), weight, target)


@dataclass(frozen=True)
class GeometricMedian(Criterion):
    """The sum of a unit's Euclidean distances to all other units of the weight.

    Units near the geometric median of all units can be replaced by the others, and are pruned first. Needs no data.
    Distances below about a thousandth of the units' norms count as 0: inner products in float32 cannot resolve them.

    Source: He et al. 2019, "Filter pruning via geometric median", arXiv:1811.00250, section 3.3.
    """

    def __call__(self, weight, *, target: Any = None, seed_offset: int = 0, statistics: Any = None):
        """The sum of distances, repeated for all entries of a unit; without a target, units lie on the last axis."""
        values = wide(weight)
        out = _out_axes(weight, target)
        others = [axis for axis in range(len(values.shape)) if axis not in out]
        units = math.prod(values.shape[axis] for axis in out)
        entries = math.prod(values.shape[axis] for axis in others)
        rows = ops.reshape(ops.transpose(values, (*out, *others)), (units, entries))
        sums = [_distances(rows, slice(at, at + _BLOCK)) for at in range(0, units, _BLOCK)]
        return _of_units(ops.concatenate(sums) if sums else ops.zeros((0,), values.dtype), weight, target)


@dataclass(frozen=True)
class APoZ(Criterion):
    """Minus the average percentage of zeros (APoZ): minus the share of zeros among a unit's activations.

    Counts zeros after the activation function, on inputs without labels. Units that are often active are kept.

    Source: Hu et al. 2016, "Network trimming", arXiv:1607.03250, eq. 1.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"zero_share"})

    def __call__(self, weight, *, target: Any = None, seed_offset: int = 0, statistics: Any = None):
        """-statistics["zero_share"], repeated for all entries of a unit."""
        return _of_units(-ops.convert_to_tensor(statistics["zero_share"]), weight, target)


@dataclass(frozen=True)
class MeanActivation(Criterion):
    """The mean of a unit's activations after the activation function, on inputs without labels.

    Suits activation functions without negative values, such as ReLU.

    Source: Molchanov et al. 2017, arXiv:1611.06440, section 2.2 ("activation", the mean).
    """

    needs: ClassVar[frozenset[str]] = frozenset({"mean_activation"})

    def __call__(self, weight, *, target: Any = None, seed_offset: int = 0, statistics: Any = None):
        """statistics["mean_activation"], repeated for all entries of a unit."""
        return _of_units(ops.convert_to_tensor(statistics["mean_activation"]), weight, target)


# Units whose distances to all units are in memory at a time.
_BLOCK = 512


def _distances(rows, part: slice):
    """Returns, for the rows in `part`, the sum of their distances to all rows; shape (rows in part,)."""
    # Distances do not depend on the origin, and at the mean the rounding error of the inner products is smallest.
    rows = rows - ops.mean(rows, axis=0, keepdims=True) if rows.shape[1] else rows
    norms = ops.sum(ops.square(rows), axis=1)
    sums = norms[part, None] + norms[None, :]
    squares = sums - 2 * ops.matmul(rows[part], ops.transpose(rows))
    # Written so that NaN, which compares false with every number, stays.
    return ops.sum(ops.where(squares <= 1e-6 * sums, 0, ops.sqrt(squares)), axis=1)


def _out_axes(weight, target: Any) -> tuple[int, ...]:
    """Returns the axes of the output units: those of the target, or the last one without a target."""
    rank = len(weight.shape)
    axes = (rank - 1,) if target is None else target.out_axes
    if not axes:
        raise ValueError(
            f"The criterion ranks output units. Received: {target.name}, of shape {tuple(weight.shape)}, which has no "
            "axis of output units. Leave it out with `exclude`, or choose another criterion."
        )
    return tuple(sorted(axes))


def _of_units(values, weight, target: Any):
    """Returns `values`, one per output unit in the order of the output axes, repeated for all entries of a unit."""
    out = _out_axes(weight, target)
    shape = [size if axis in out else 1 for axis, size in enumerate(weight.shape)]
    # The output axes are in ascending order, so that a reshape puts each unit in its place.
    return ops.broadcast_to(ops.reshape(values, shape), tuple(weight.shape))


# Repeat values without arithmetic: the same bits in single operations and in compiled functions.
REPEATED = (BatchNormalizationScale, APoZ, MeanActivation)

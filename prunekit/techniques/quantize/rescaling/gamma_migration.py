"""Moves factors and offsets of normalizations into the layers that read them, which saves a rounding.

The file then has no operation for them, and the normalized values are rounded without the spread of the factors.

Source: Wei et al. 2022, arXiv:2209.13325, section 4.1 (gamma migration), here with the offsets, which the biases of the
layers behind take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.layers.targets import Target
from prunekit.core.statistics.layer_products import product_of
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.quantize.placement.form_operations import ChannelAffine, GateProducts
from prunekit.techniques.quantize.placement.placement import Placement
from prunekit.techniques.quantize.placement.units import RoundedWeight
from prunekit.techniques.quantize.rescaling.channel_scaling import ChannelScaling, storable, wide_value
from prunekit.techniques.quantize.rescaling.rescaling import rescalable


@dataclass(frozen=True, eq=False)
class Migration:
    """A normalization whose factors and offsets its readers can take.

    Attributes:
        gamma: The factors.
        beta: The offsets; None without.
        values: Pairs (variable, new values): factors of 1, offsets of 0, kernels and biases; [] if nothing changes.
    """

    gamma: Any
    beta: Any
    values: list[tuple[Any, np.ndarray]]

    @property
    def changed(self) -> list[str]:
        """Names of factors other than 1 and offsets other than 0, without which a file would compute something else."""
        pairs = [(self.gamma, 1.0), *([] if self.beta is None else [(self.beta, 0.0)])]
        return [variable.path for variable, number in pairs if (array_of(variable) != number).any()]


def migrations(
    placement: Placement, targets: Mapping[int, Target], may_change: Callable[[RoundedWeight], bool]
) -> list[Migration]:
    """Returns the normalizations of which all readers are products that can take factors and offsets.

    The model stays unchanged until the values are assigned; then its outputs are the same up to float32.

    Args:
        placement: The model's calls in units, with normalizations as operations.
        targets: id of a variable -> the weight.
        may_change: Returns False for a kernel that keeps its values.
    """
    found = []
    for scaling in rescalable(placement):
        values = _values(scaling, targets, may_change)
        if values is not None:
            affine = scaling.producer.first.operation
            found.append(Migration(affine.gamma, affine.beta, values))
    return found


def _values(
    scaling: ChannelScaling, targets: Mapping[int, Target], may_change: Callable[[RoundedWeight], bool]
) -> list[tuple[Any, np.ndarray]] | None:
    """Returns the new values; None if factors and offsets must stay where they are."""
    affine, (tensor,) = scaling.producer.first.operation, scaling.producer.outputs
    if not isinstance(affine, ChannelAffine) or len(scaling.producer.calls) > 1 or scaling.is_half:
        return None
    if any(unit.first.input is not tensor or not _is_product(unit.first.operation) for unit in scaling.readers):
        return None
    gamma = wide_value(affine.gamma)
    beta = np.zeros_like(gamma) if affine.beta is None else wide_value(affine.beta)
    if (gamma == 1.0).all() and not beta.any():
        return []
    kernels = {id(one.variable) for one in scaling.kernels}
    rounded = [one for unit in scaling.readers for one in unit.weights if id(one.variable) in kernels]
    if not all(map(may_change, rounded)):
        return None
    found = [(affine.gamma, np.ones_like(gamma))]
    found += [] if affine.beta is None else [(affine.beta, np.zeros_like(beta))]
    for unit, kernel in zip(scaling.readers, scaling.kernels, strict=True):
        value, layer = wide_value(kernel.variable), unit.first.operation
        found.append((kernel.variable, value * kernel.spread(gamma)))
        if beta.any():
            product = product_of(targets[id(kernel.variable)])
            added = product.matrix(value * kernel.spread(beta)).sum(axis=1)
            bias = product.bias(added) if layer.bias is not None and np.size(layer.bias) == added.size else None
            if bias is None or layer.bias.constraint is not None:
                return None
            found.append((layer.bias, wide_value(layer.bias) + bias))
    return storable(found)


def _is_product(layer: Any) -> bool:
    """Returns True for a layer whose outputs are products of each row of its inputs, without padding."""
    return isinstance(layer, keras.layers.Dense | keras.layers.EinsumDense) and not isinstance(layer, GateProducts)

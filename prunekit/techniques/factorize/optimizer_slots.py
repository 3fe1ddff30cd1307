"""The optimizer's state of factors, from that of the weight that they replace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prunekit.core.runtime.optimizers import parts_of, state_of
from prunekit.core.statistics.layer_products import LayerProduct
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.factorize.forms import Factors

# Parts of the names of slots: sums of gradients, and sums of their squares.
_GRADIENTS, _SQUARES = ("momentum",), ("velocit", "accumulator")


@dataclass(frozen=True, eq=False)
class Replaced:
    """A weight, and those that replace it.

    Attributes:
        product: The product that the weight takes part in.
        factors: The arrays that replace it.
        variables: Their variables in the new model, in the order of the arrays.
    """

    product: LayerProduct
    factors: Factors
    variables: tuple[Any, ...]


def carry_slots(former: Any, optimizer: Any, replaced: Sequence[Replaced]) -> None:
    """Gives the factors the state that the chain rule gives them: such as dL/dA = dL/dW B^T with W = A B.

    Averages of gradients follow in the same way; averages of squares as if the gradients of a weight's entries were
    independent. Other state starts anew.

    Args:
        former: The optimizer of the model.
        optimizer: That of the new model, built.
        replaced: The weights.
    """
    old = {index: one.product.target.variable for index, one in enumerate(replaced)}
    new = {
        (index, place): variable for index, one in enumerate(replaced) for place, variable in enumerate(one.variables)
    }
    for part, other in zip(parts_of(former), parts_of(optimizer), strict=True):
        slots = {(key, name): slot for key, name, slot in state_of(other, new)}
        for index, name, slot in state_of(part, old):
            one = replaced[index]
            squares = any(word in name for word in _SQUARES)
            if tuple(slot.shape) != tuple(old[index].shape) or not (
                squares or any(word in name for word in _GRADIENTS)
            ):
                continue
            value = one.product.matrix(array_of(slot).astype("float32")).astype("float64")[0]
            for place, found in enumerate(one.factors.chained(value, squared=squares)):
                target = slots.get(((index, place), name))
                if target is not None and found.size == int(np.prod(target.shape)):
                    target.assign(found.reshape(target.shape).astype("float32"))

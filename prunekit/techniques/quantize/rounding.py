"""What is done with the tensors and weights of a model while its units run."""

from __future__ import annotations

from typing import Any, Protocol

import keras
from keras import ops

from prunekit.techniques.quantize.rules import activation_name
from prunekit.techniques.quantize.units import Range, RoundedWeight

# Inside silu, x * sigmoid(x), kernels round the sigmoid.
_SIGMOID = Range("the sigmoid of silu", signed=False)


class Rounding(Protocol):
    """Rounds the tensors and weights that a placement names, or observes them, or writes them to a graph."""

    def tensor(self, value: Any, place: Range) -> Any:
        """Returns a tensor, which a unit computed, on the grid of a range, in its dtype."""

    def argument(self, value: Any, place: Range) -> Any:
        """Returns a tensor, which a unit reads on another grid than it was computed on, on the grid of a range."""

    def constant(self, value: Any) -> Any:
        """Returns a tensor that is a constant of the graph on its grid."""

    def weight(self, value: Any, weight: RoundedWeight) -> Any:
        """Returns a weight on its grid."""


class Unchanged:
    """Rounds nothing."""

    def tensor(self, value: Any, place: Range) -> Any:
        """Returns the tensor."""
        return value

    def argument(self, value: Any, place: Range) -> Any:
        """Returns the tensor."""
        return self.tensor(value, place)

    def constant(self, value: Any) -> Any:
        """Returns the constant."""
        return value

    def weight(self, value: Any, weight: RoundedWeight) -> Any:
        """Returns the weight."""
        return value


def activated(function: Any, value: Any, rounding: Rounding) -> Any:
    """Returns an activation function, layer or operation of a tensor."""
    if activation_name(function) == "silu":
        return value * rounding.tensor(ops.sigmoid(value), _SIGMOID)
    return function(value)


def is_constant(leaf: Any) -> bool:
    """Returns True for an argument of a call that is an array or tensor of floating-point values."""
    is_array = not isinstance(leaf, keras.Variable) and (ops.is_tensor(leaf) or hasattr(leaf, "__array__"))
    return is_array and "float" in str(getattr(leaf, "dtype", ""))

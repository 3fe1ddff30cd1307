"""What is done with the tensors and weights of a model while its units run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from keras import ops

from prunekit.techniques.quantize.placement.rules import activation_name
from prunekit.techniques.quantize.placement.units import RoundedWeight, SharedGrid, Unit

# Inside silu, x * sigmoid(x), kernels round the sigmoid; inside hard_sigmoid, relu6(x + 3) / 6, the ReLU.
_SIGMOID = SharedGrid("the sigmoid of silu", signed=False)
_RELU6 = SharedGrid("the relu6 of hard_sigmoid", signed=False, highest=6.0)


class Rounding(Protocol):
    """Rounds the tensors and weights that a placement names, or observes them, or writes them to a graph."""

    def running(self, unit: Unit) -> AbstractContextManager[Any]:
        """Returns the scope in which a unit runs, before its results are rounded."""

    def tensor(self, value: Any, place: SharedGrid) -> Any:
        """Returns a tensor, which a unit computed, on the grid of a range, in its dtype."""

    def argument(self, value: Any, place: SharedGrid) -> Any:
        """Returns a tensor, which a unit reads on another grid than it was computed on, on the grid of a range."""

    def inside(self, value: Any, place: SharedGrid) -> Any:
        """Returns a tensor inside of a kernel on the grid of a range; prescribed ones have 16 bits there."""

    def constant(self, value: Any) -> Any:
        """Returns a tensor that is a constant of the graph on its grid."""

    def weight(self, value: Any, weight: RoundedWeight) -> Any:
        """Returns a weight on its grid."""

    def reciprocal_root(self, value: Any) -> Any:
        """Returns 1 / sqrt(value); for 0, whose code kernels give the highest result, at least that one."""

    def product(self, layer: Any, inputs: Any, kernel: Any, bias: Any) -> Any:
        """Returns a linear layer's outputs before its activation; None = as the layer computes them.

        Args:
            layer: The layer.
            inputs: What it reads.
            kernel: Its kernel on its grid, times the factor of a folded batch normalization.
            bias: Its bias, in a shape that broadcasts against the outputs; None without one.
        """

    def all_steps(self, operation: Any, inputs: Any) -> Any:
        """Returns the outputs of a `FusedLstm`; None = those of one step after the other."""


class NoRounding:
    """Rounds nothing."""

    def running(self, unit: Unit) -> AbstractContextManager[Any]:
        """Returns a scope without effect."""
        return nullcontext()

    def tensor(self, value: Any, place: SharedGrid) -> Any:
        """Returns the tensor."""
        return value

    def argument(self, value: Any, place: SharedGrid) -> Any:
        """Returns the tensor."""
        return self.tensor(value, place)

    def inside(self, value: Any, place: SharedGrid) -> Any:
        """Returns the tensor."""
        return value

    def constant(self, value: Any) -> Any:
        """Returns the constant."""
        return value

    def weight(self, value: Any, weight: RoundedWeight) -> Any:
        """Returns the weight."""
        return value

    def reciprocal_root(self, value: Any) -> Any:
        """Returns 1 / sqrt(value)."""
        return ops.rsqrt(value)

    def product(self, layer: Any, inputs: Any, kernel: Any, bias: Any) -> Any:
        """Returns None."""
        return None

    def all_steps(self, operation: Any, inputs: Any) -> Any:
        """Returns None."""
        return None


def activated(function: Any, value: Any, rounding: Rounding) -> Any:
    """Returns an activation function, layer or operation of a tensor."""
    name = activation_name(function)
    if name == "silu":
        return value * rounding.tensor(ops.sigmoid(value), _SIGMOID)
    if name == "hard_sigmoid":
        return rounding.tensor(ops.relu6(value + 3.0), _RELU6) * (1 / 6)
    return function(value)


def rounds_inside(function: Any) -> bool:
    """Returns True for an activation that several kernels compute, with roundings between."""
    return activation_name(function) in ("silu", "hard_sigmoid")

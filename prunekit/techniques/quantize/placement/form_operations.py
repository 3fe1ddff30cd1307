"""Operations of integer forms that Keras does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from prunekit.core.runtime.variable_values import full_value


class NoIntegerForm(Exception):
    """A call cannot be computed with integers; the text says why."""


class DerivedWeight:
    """A value that is calculated from a weight wherever it is read.

    Args:
        variable: The weight.
        function: Returns the value, for one of the weight.
        shape: Shape of the value.
    """

    def __init__(self, variable: Any, function: Callable[[Any], Any], shape: tuple[int, ...]):
        self._variable, self._function, self.shape = variable, function, shape

    @property
    def value(self) -> Any:
        """The value, as that of a variable."""
        return self._function(self._variable.value)


class ChannelAffine(keras.Operation):
    """Multiplies the last axis by the factors of a normalization, and adds its offsets.

    Args:
        name: Name of the operation.
        gamma: The factors, a weight of shape (channels,); None without.
        beta: The offsets, likewise.
    """

    def __init__(self, name: str, gamma: Any, beta: Any):
        super().__init__(name=name)
        self.gamma, self.beta = gamma, beta

    def call(self, x: Any) -> Any:
        """Returns the products and sums."""
        if self.gamma is not None:
            x = x * ops.cast(full_value(self.gamma), x.dtype)
        return x if self.beta is None else x + ops.cast(full_value(self.beta), x.dtype)

    def compute_output_spec(self, x: Any) -> Any:
        """Returns a symbolic tensor of the shape of `x`."""
        return keras.KerasTensor(x.shape, dtype=x.dtype)


class FusedLstm(keras.Operation):
    """All steps of an LSTM with the usual activations, which one kernel computes.

    Args:
        name: Name of the operation.
        cell: The cell.
    """

    def __init__(self, name: str, cell: Any):
        super().__init__(name=name)
        self.cell = cell

    def compute_output_spec(self, x: Any) -> Any:
        """Returns a symbolic tensor for the outputs of all steps."""
        return keras.KerasTensor((*x.shape[:-1], self.cell.units), dtype=x.dtype)


class GateProducts(keras.layers.Dense):
    """A Dense layer with the kernel of a recurrent cell, or with some of its columns.

    Args:
        name: Name of the layer.
        kernel: The kernel, a weight of the cell of shape (inputs, outputs).
        bias: Weight or `DerivedWeight` of shape (columns,) that is added to the products; None without one.
        columns: First column and the one behind the last; None = all.
        dtype: Type that the cell computes in.
    """

    def __init__(self, name: str, kernel: Any, bias: Any = None, columns: tuple[int, int] | None = None, *, dtype: str):
        start, stop = columns or (0, kernel.shape[-1])
        super().__init__(stop - start, use_bias=bias is not None, name=name, dtype=dtype, autocast=False)
        self._kernel, self._columns, self.built = kernel, columns, True
        # Keras would track the bias as a weight of the layer, and refuse a derived one.
        self.__dict__["bias"] = bias

    def part(self, kernel: Any) -> Any:
        """Returns the columns of a value of the kernel."""
        return kernel if self._columns is None else kernel[:, slice(*self._columns)]

    def products(self, inputs: Any, kernel: Any, bias: Any) -> Any:
        """Returns the outputs for a value of the columns and of the bias, in the type of the inputs."""
        found = ops.matmul(inputs, ops.cast(kernel, inputs.dtype))
        return found if bias is None else found + ops.cast(bias, inputs.dtype)

"""Recurrent layers as operations that each have an integer kernel: one for all steps, or some for each step.

The steps share their operations and their weights, which a file stores once, and the results of one operation share a
grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops
from keras.src.ops.core import Unstack
from keras.src.ops.nn import HardSigmoid, Relu, Sigmoid
from keras.src.ops.numpy import Add, Concatenate, Flip, GetItem, Multiply, Split, Stack, Subtract, Tanh

from prunekit.anatomy.layers.linear_kinds import RECURRENT
from prunekit.techniques.quantize.placement.form_operations import (
    ChannelAffine,
    DerivedWeight,
    FusedLstm,
    GateProducts,
    NoIntegerForm,
)

L = keras.layers
OPEN_LENGTH = (
    "recurrent layers have an integer form for sequences of a known length: build the model on "
    "keras.Input((LENGTH, FEATURES))"
)
_ACTIVATIONS = {
    keras.activations.tanh: Tanh,
    keras.activations.sigmoid: Sigmoid,
    keras.activations.hard_sigmoid: HardSigmoid,
    keras.activations.relu: Relu,
}


def recurrent(  # noqa: PLR0913
    layer: Any,
    sequences: Any,
    initial_state: Any = None,
    mask: Any = None,
    training: bool | None = False,
    *,
    fused: bool = False,
    prefix: str = "",
) -> Any:
    """Returns the results of a recurrent layer as those of operations.

    Args:
        layer: A layer with one cell of Keras's own.
        sequences: Symbolic tensor of shape (examples, length, features).
        initial_state: The states before the first step; None = zeros.
        mask: None.
        training: Not used: dropout inside the layer is left out.
        fused: True: one operation computes all steps of an LSTM where its kernel has the options for it.
        prefix: Beginning of the operations' names.

    Raises:
        NoIntegerForm: The layer has another cell, activation or option, or the length is open.
    """
    cell, kind = layer.cell, _CELLS.get(type(layer.cell))
    if type(layer) not in RECURRENT:
        # A subclass may compute something else than its `call` tells.
        raise NoIntegerForm(f"{type(layer).__name__} has no integer form")
    if kind is None:
        raise NoIntegerForm(f"the cell {type(cell).__name__} has no integer form")
    if layer.stateful:
        raise NoIntegerForm("it keeps its state between calls: build it with stateful=False")
    if mask is not None:
        raise NoIntegerForm("its mask has no integer kernel")
    if None in sequences.shape[1:]:
        raise NoIntegerForm(OPEN_LENGTH)
    if fused and kind is _Lstm and initial_state is None and _has_kernel(layer):
        return _fused(layer, sequences, prefix)
    steps = kind(cell, prefix)
    products = GateProducts(f"{prefix}inputs", cell.kernel, steps.bias, dtype=cell.compute_dtype)(sequences)
    inputs = Unstack(sequences.shape[1], 1, name=f"{prefix}steps")(products)
    states = None if initial_state is None else keras.tree.flatten(initial_state)
    outputs = []
    for one in reversed(inputs) if layer.go_backwards else inputs:
        states = steps.step(one, states)
        outputs.append(states[0])
    result = Stack(1, name=f"{prefix}outputs")(outputs) if layer.return_sequences else outputs[-1]
    return (result, *states) if layer.return_state and states is not None else result


def bidirectional(  # noqa: PLR0913
    layer: Any,
    sequences: Any,
    initial_state: Any = None,
    mask: Any = None,
    training: bool | None = None,
    *,
    fused: bool = False,
) -> Any:
    """Returns the results of a Bidirectional layer as those of operations; see `recurrent`.

    Raises:
        NoIntegerForm: As for `recurrent`, or the layers inside are others.
    """
    directions = (layer.forward_layer, "forward_"), (layer.backward_layer, "backward_")
    other = next((one for one, _ in directions if type(one) not in RECURRENT), None)
    if other is not None:
        raise NoIntegerForm(f"{type(other).__name__} has no integer form")
    given = [] if initial_state is None else keras.tree.flatten(initial_state)
    states = (None, None) if initial_state is None else (given[: len(given) // 2], given[len(given) // 2 :])
    results = [
        recurrent(one, sequences, state, mask, fused=fused, prefix=prefix)
        for (one, prefix), state in zip(directions, states, strict=True)
    ]
    last: list[Any] = []
    if layer.return_state:
        last = [state for _, *found in results for state in found]
        results = [found[0] for found in results]
    if layer.return_sequences:
        results[1] = Flip(1, name="backward_in_order")(results[1])
    merged = _merged(layer.merge_mode, *results)
    return (*merged, *last) if layer.merge_mode is None else (merged, *last) if layer.return_state else merged


def _merged(mode: str | None, forward: Any, backward: Any) -> Any:
    if mode is None:
        return forward, backward
    if mode == "concat":
        return Concatenate(-1, name="both")([forward, backward])
    if mode == "mul":
        return Multiply(name="both")(forward, backward)
    found = Add(name="both")(forward, backward)
    return Multiply(name="mean")(found, ops.convert_to_tensor(0.5, found.dtype)) if mode == "ave" else found


def _has_kernel(layer: Any) -> bool:
    """Returns True for an LSTM that LiteRT's kernel computes: with the usual activations, and outputs alone."""
    usual = keras.activations.tanh, keras.activations.sigmoid
    return (layer.cell.activation, layer.cell.recurrent_activation) == usual and not layer.return_state


def _fused(layer: Any, sequences: Any, prefix: str) -> Any:
    given = Flip(1, name=f"{prefix}reversed")(sequences) if layer.go_backwards else sequences
    found = FusedLstm(f"{prefix}outputs", layer.cell)(given)
    return found if layer.return_sequences else GetItem(name=f"{prefix}last")(found, (slice(None), -1))


def _activation(function: Any, name: str) -> Any:
    """Returns an operation that computes an activation function."""
    if function is keras.activations.linear:
        return lambda value: value
    if function not in _ACTIVATIONS:
        shown = getattr(function, "__name__", type(function).__name__)
        raise NoIntegerForm(f"the activation {shown} has no integer form inside recurrent layers")
    return _ACTIVATIONS[function](name=name)


class _Simple:
    """The operations of a SimpleRNN; see `_Lstm`."""

    def __init__(self, cell: Any, prefix: str):
        self.bias = cell.bias
        self._recurrent = GateProducts(f"{prefix}recurrent", cell.recurrent_kernel, dtype=cell.compute_dtype)
        self._sum, self._activation = Add(name=f"{prefix}sum"), _activation(cell.activation, f"{prefix}state")

    def step(self, inputs: Any, states: Sequence[Any] | None) -> list[Any]:
        """See `_Lstm`."""
        return [self._activation(inputs if states is None else self._sum(inputs, self._recurrent(states[0])))]


class _Lstm:
    """The operations of an LSTM.

    Args:
        cell: The cell.
        prefix: Beginning of the operations' names.

    Attributes:
        bias: What is added to the products of the inputs; None without.
    """

    def __init__(self, cell: Any, prefix: str):
        self.bias = cell.bias
        self._recurrent = GateProducts(f"{prefix}recurrent", cell.recurrent_kernel, dtype=cell.compute_dtype)
        self._sum, self._split = Add(name=f"{prefix}sum"), Split(4, -1, name=f"{prefix}parts")
        self._gate = _activation(cell.recurrent_activation, f"{prefix}gates")
        self._candidate = _activation(cell.activation, f"{prefix}candidate")
        self._update, self._kept, self._cell = (
            Multiply(name=f"{prefix}update"),
            Multiply(name=f"{prefix}kept"),
            Add(name=f"{prefix}cell"),
        )
        self._activation, self._state = (
            _activation(cell.activation, f"{prefix}of_cell"),
            Multiply(name=f"{prefix}state"),
        )

    def step(self, inputs: Any, states: Sequence[Any] | None) -> list[Any]:
        """Returns the states after a step, the output first.

        Args:
            inputs: Products of the inputs of this step, with the bias.
            states: The states before; None for zeros.
        """
        given = inputs if states is None else self._sum(inputs, self._recurrent(states[0]))
        entered, kept, candidate, shown = self._split(given)
        cell = self._update(self._gate(entered), self._candidate(candidate))
        if states is not None:
            cell = self._cell(self._kept(self._gate(kept), states[1]), cell)
        return [self._state(self._gate(shown), self._activation(cell)), cell]


class _Gru:
    """The operations of a GRU; see `_Lstm`."""

    def __init__(self, cell: Any, prefix: str):
        units, kernel, dtype = cell.units, cell.recurrent_kernel, cell.compute_dtype
        self.bias, bias, self._reset_first = cell.bias, None, None
        self._reset_after = cell.reset_after
        if cell.reset_after and cell.bias is not None:
            self.bias, bias, part = _biases(cell.bias, units)
            self._reset_first = ChannelAffine(f"{prefix}first_reset", part, None)
        columns = None if cell.reset_after else (0, 2 * units)
        self._recurrent = GateProducts(f"{prefix}recurrent", kernel, bias, columns, dtype=dtype)
        self._of_reset = GateProducts(f"{prefix}of_reset", kernel, columns=(2 * units, 3 * units), dtype=dtype)
        # Parts of equal lengths: XNNPACK computes no others.
        self._parts, self._pair = Split(3, -1, name=f"{prefix}parts"), Split(2, -1, name=f"{prefix}pair")
        self._sum, self._reset = Add(name=f"{prefix}sum"), Multiply(name=f"{prefix}reset")
        self._gate = _activation(cell.recurrent_activation, f"{prefix}gates")
        self._sum_of_candidate = Add(name=f"{prefix}sum_of_candidate")
        self._candidate = _activation(cell.activation, f"{prefix}candidate")
        self._rest, self._update = Subtract(name=f"{prefix}rest"), Multiply(name=f"{prefix}update")
        # Not the operation of later updates, which would be on the grid of the states where these are stacked.
        self._first = Multiply(name=f"{prefix}first_state")
        self._kept, self._state = Multiply(name=f"{prefix}kept"), Add(name=f"{prefix}state")

    def step(self, inputs: Any, states: Sequence[Any] | None) -> list[Any]:
        """See `_Lstm`."""
        update, reset, candidate = self._parts(inputs)
        state = recurrent = None
        if states is not None:
            state, products = states[0], self._recurrent(states[0])
            parts = self._parts(products) if self._reset_after else (*self._pair(products), None)
            update, reset, recurrent = self._sum(update, parts[0]), self._sum(reset, parts[1]), parts[2]
        update, reset = self._gate(update), self._gate(reset)
        if recurrent is not None:
            recurrent = self._reset(reset, recurrent)
        elif state is not None:
            recurrent = self._of_reset(self._reset(reset, state))
        elif self._reset_first is not None:
            recurrent = self._reset_first(reset)
        if recurrent is not None:
            candidate = self._sum_of_candidate(candidate, recurrent)
        rest = self._rest(ops.convert_to_tensor(1.0, update.dtype), update)
        if state is None:
            return [self._first(rest, self._candidate(candidate))]
        return [self._state(self._kept(update, state), self._update(rest, self._candidate(candidate)))]


def _biases(bias: Any, units: int) -> tuple[DerivedWeight, DerivedWeight, DerivedWeight]:
    """Returns the biases of a GRU: of the products of the inputs, of those of the state, and of the reset part alone.

    What is added to the products of the state is added to those of the inputs, except for the part that the reset gate
    multiplies.

    Args:
        bias: The weight of the cell, of shape (2, 3 units).
        units: Length of the state.
    """

    def of_inputs(value: Any) -> Any:
        return value[0] + ops.concatenate([value[1][: 2 * units], ops.zeros_like(value[1][2 * units :])])

    def of_state(value: Any) -> Any:
        return ops.concatenate([ops.zeros_like(value[1][: 2 * units]), value[1][2 * units :]])

    return (
        DerivedWeight(bias, of_inputs, (3 * units,)),
        DerivedWeight(bias, of_state, (3 * units,)),
        DerivedWeight(bias, lambda value: value[1][2 * units :], (units,)),
    )


_CELLS: dict[type, Any] = {L.SimpleRNNCell: _Simple, L.LSTMCell: _Lstm, L.GRUCell: _Gru}

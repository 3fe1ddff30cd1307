"""Runs an LSTM as its integer kernel computes it, one step after the other."""

from __future__ import annotations

from typing import Any

from keras import ops

from prunekit.core.runtime.variable_values import full_value
from prunekit.techniques.quantize.placement.units import SharedGrid, Unit
from prunekit.techniques.quantize.rounding.rounding import Rounding

# Grids of 16 bits that the kernel prescribes: for the sums of the gates, and for what activations compute.
_SUMS = SharedGrid("the sums of the gates", signed=True, highest=8.0)
_ACTIVATED = SharedGrid("the gates", signed=True)


def lstm_results(unit: Unit, rounding: Rounding, inputs: Any, outputs: SharedGrid) -> Any:
    """Returns the outputs of all steps, of shape (examples, length, units).

    Args:
        unit: A unit of a `FusedLstm`.
        rounding: What is done with tensors and weights.
        inputs: The sequences, of shape (examples, length, features).
        outputs: Range of the outputs, on whose grid the next step reads them.

    Source: the kernel of LiteRT with tensors of 8 bits and a cell state of 16, lstm_eval.cc.
    """
    found = rounding.all_steps(unit.first.operation, inputs)
    if found is not None:
        return found
    cell, place = unit.first.operation.cell, unit.cell
    kernel, recurrent = (ops.cast(rounding.weight(full_value(one.variable), one), inputs.dtype) for one in unit.weights)
    sums = ops.matmul(inputs, kernel)
    sums = sums if cell.bias is None else sums + ops.cast(full_value(cell.bias), inputs.dtype)
    state = memory = None
    states = []
    for given in ops.unstack(rounding.inside(sums, _SUMS), inputs.shape[1], axis=1):
        if state is not None:
            given = rounding.inside(given + ops.matmul(state, recurrent), _SUMS)
        entered, kept, candidate, shown = ops.split(given, 4, axis=-1)
        entered, kept, shown = (rounding.inside(ops.sigmoid(one), _ACTIVATED) for one in (entered, kept, shown))
        update = _in_cell(rounding, entered * rounding.inside(ops.tanh(candidate), _ACTIVATED), place)
        if memory is not None:
            update = _in_cell(rounding, update + _in_cell(rounding, kept * memory, place), place)
        memory = update
        state = rounding.inside(shown * rounding.inside(ops.tanh(memory), _ACTIVATED), outputs)
        states.append(state)
    return ops.stack(states, axis=1)


def _in_cell(rounding: Rounding, value: Any, place: SharedGrid | None) -> Any:
    return value if place is None else rounding.inside(value, place)

"""Turns a LiteRT file that rounds between float operations into one that computes with integers.

The converter is given fake-quantization operations and no order to quantize. It folds and fuses what lies between them,
and writes them as pairs of QUANTIZE and DEQUANTIZE. An operation between such pairs that has an integer kernel is given
the integers themselves here, with scales, zero points and codes of our own. The converter can do this too, but not with
a scale for each output of a Dense layer, with 4 bits, or with weights alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prunekit.anatomy.records.reports import Skipped
from prunekit.delivery.integers.integer_constants import IntegerConstants
from prunekit.delivery.integers.integer_io import with_integer_io
from prunekit.delivery.integers.integer_kernels import (
    LSTM_STEPS,
    MOVES,
    ON_INPUT_GRID,
    PRESCRIBED,
    Kernels,
    kernels_for,
)
from prunekit.delivery.integers.integer_lstm import LstmWriter
from prunekit.delivery.integers.integer_tensors import IntegerTensors
from prunekit.delivery.integers.integer_units import FileUnits
from prunekit.delivery.integers.integer_weights import store_weights
from prunekit.delivery.litert.litert_folding import (
    LINEAR,
    NO_ACTIVATION,
    RELU,
    RELU6,
    fold_activations,
    fold_biases,
    fold_normalizations,
    merge_constants,
    split_results,
)
from prunekit.delivery.litert.litert_graph import LiteRTGraph
from prunekit.delivery.litert.litert_reshapes import fix_shapes, merge_reshapes, move_blocks_by_axes
from prunekit.techniques.quantize.grids.grids import FEW_BITS, Granularity, Grid, IntegerFormat
from prunekit.techniques.quantize.grids.ranges import narrowest_grid
from prunekit.techniques.quantize.placement.rules import fixed_grid
from prunekit.techniques.quantize.placement.units import SharedGrid, Unit

# Operations that read no values of a tensor.
_LENGTHS = ("SHAPE", "RANK")
# What rounding in kernels may add to a change of a bias, in steps of the results.
_ACCUMULATED = 0.05
# Beginning of the names of marks that round what an integer kernel reads. The operation before one computes in floating
# point, or was rounded already.
READING = "reading"


@dataclass(frozen=True, eq=False)
class FileRounding:
    """A rounding of the simulation, in a file.

    Attributes:
        grid: Its grid.
        index: Index of the tensor of integers that it became; None for one that the converter merged with another.
        steps: How many steps LiteRT's kernels may be off the simulation.
    """

    grid: Grid
    index: int | None
    steps: int = 1


@dataclass(frozen=True, eq=False)
class IntegerFile:
    """A LiteRT file that computes with integers.

    Attributes:
        content: The file.
        roundings: One for each mark.
        skipped: Layers and operations of the model that compute in floating point, with the kinds of their operations
            in the file; also operations of the file that belong to none.
        outputs: Names of its outputs, in the order of the model's flattened output structure.
        batch: The fixed batch size; None permits any.
        grids: Name of an input or output of integers in the signature -> its grid.
    """

    content: bytes
    roundings: tuple[FileRounding, ...]
    skipped: tuple[Skipped, ...]
    outputs: tuple[str, ...] = ()
    batch: int | None = None
    grids: Mapping[str, Grid] = field(default_factory=dict)


def with_integers(  # noqa: PLR0913
    content: bytes,
    marks: Mapping[str, Grid],
    units: Sequence[Unit],
    *,
    weights: Sequence[IntegerFormat],
    activations: IntegerFormat,
    computed_by: Mapping[str, str],
    integer_io: Sequence[str] = (),
    cells: Mapping[SharedGrid, Grid] | None = None,
) -> IntegerFile:
    """Returns a file that computes with integers.

    Args:
        content: A file of the converter.
        marks: Name of a fake-quantization operation -> its grid, in order of execution. No name begins with another.
        units: The units, each in the scope `SCOPE` with its place in this list.
        weights: Codes of weights, those with the fewest bits first.
        activations: Codes of the tensors between operations.
        computed_by: Name of an output in the signature -> name of the TensorFlow tensor, with the scope of its unit.
        integer_io: What of "inputs" and "outputs" is integers instead of float32; with "uint8" without a sign.
        cells: The grids of the cell states of LSTMs.

    Raises:
        ValueError: A tensor that is rounded has the name of no mark; an input or output that is to be integers is
            read or computed in floating point.
    """
    graph = LiteRTGraph(content)
    fix_shapes(graph)
    found = FileUnits(graph, units, computed_by)
    fold_biases(graph)
    fold_activations(graph)
    fold_normalizations(graph, found.is_normalization)
    if activations.bits == 16:
        move_blocks_by_axes(graph)
    rewriter = _Rewriter(graph, marks, found, weights, kernels_for(activations), cells or {})
    rewriter.run()
    merged = merge_reshapes(graph)
    skipped = found.listed(rewriter.skipped)
    found.remove_scopes()
    grids = with_integer_io(graph, rewriter.tensors.grids, integer_io)
    store_weights(graph, weights)
    merge_constants(graph)
    made, places = graph.content()
    roundings = [
        FileRounding(grid, places[merged.get(rewriter.found[name], rewriter.found[name])], rewriter.steps[name])
        if name in rewriter.found
        else FileRounding(grid, None)
        for name, grid in marks.items()
    ]
    return IntegerFile(made, tuple(roundings), skipped, grids=grids)


def with_integer_weights(
    content: bytes, weights: Sequence[IntegerFormat], group_sizes: Sequence[int] = ()
) -> IntegerFile:
    """Returns a file that computes in floating point, with integers for the weights that lie on grids.

    Args:
        content: A file of the converter.
        weights: Codes of weights, those with the fewest bits first.
        group_sizes: Numbers of consecutive inputs of an output that may share a scale.
    """
    graph = LiteRTGraph(content)
    fix_shapes(graph)
    store_weights(graph, weights, group_sizes)
    merge_constants(graph)
    made, _ = graph.content()
    return IntegerFile(made, (), ())


# ---- integers --------------------------------------------------------------------------------------------------------


class _Rewriter:
    """Rewrites the operations of a graph in order.

    Attributes:
        tensors: The tensors that became integers.
        found: Name of a mark -> index of the tensor of integers that it became.
        steps: Name of a mark -> steps that kernels may be off there.
        skipped: Operations that compute in floating point.
    """

    def __init__(
        self,
        graph: LiteRTGraph,
        marks: Mapping[str, Grid],
        units: FileUnits,
        weights: Sequence[IntegerFormat],
        kernels: Kernels,
        cells: Mapping[SharedGrid, Grid],
    ):
        self._graph, self._marks, self._units, self._cells = graph, marks, units, cells
        self._weights, self._kernels = weights, kernels
        self._readers = graph.readers()
        # (index of a table, its grid) -> index of its integers.
        self._tables: dict[tuple[int, Any], int] = {}
        self._operators: list[Any] = []
        self.tensors = IntegerTensors(graph, self._operators, kernels.dequantize)
        self._constants = IntegerConstants(graph, self.tensors, weights, kernels)
        self._lstms = LstmWriter(graph, self.tensors, weights, kernels)
        # Index of a tensor of integers -> steps that kernels may be off since the last mark; others are off by one.
        self._steps: dict[int, int] = {}
        self.found: dict[str, int] = {}
        self.steps: dict[str, int] = {}
        self.skipped: list[Any] = []

    def run(self) -> None:
        """Rewrites the graph."""
        split_results(self._graph, lambda index: [_key(one) for one in self._grids_behind(index)])
        self._readers = self._graph.readers()
        self._constants.join_kernels()
        for operator in self._graph.operators:
            self._rewrite(operator)
        self._graph.map_outputs({index: self.tensors.as_floats(index) for index in self._graph.outputs})
        self._graph.operators = self._operators

    def _rewrite(self, operator: Any) -> None:
        kind, lstm = self._graph.kind(operator), self._units.lstm(operator)
        if lstm is not None:
            self._write_lstm(operator, lstm)
        elif kind == "DEQUANTIZE":
            self.tensors.share(int(operator.outputs[0]), int(operator.inputs[0]))
        elif kind == "QUANTIZE":
            self._round(operator)
        elif kind in _LENGTHS:
            self.tensors.read_integers(operator)
            self._operators.append(operator)
        elif kind in self._kernels.float_moves and self._move_floats(operator):
            self.skipped.append(operator)
        elif self._becomes_integer(operator, kind):
            self._graph.require_op_version(operator, self._kernels.version_of(self._graph, operator))
            self._operators.append(operator)
        else:
            moved = kind in MOVES - self._kernels.float_moves and self._units.moves(operator)
            if not moved and any(self._graph.is_float(int(index)) for index in operator.outputs):
                self.skipped.append(operator)
            self.tensors.read_floats(operator)
            self._operators.append(operator)

    def _write_lstm(self, operator: Any, unit: Unit) -> None:
        source, target = self.tensors.standing_for(int(operator.inputs[0])), int(operator.outputs[0])
        outputs = self._grid_behind(target)
        if source is None or outputs is None or unit.cell is None:
            raise ValueError(f"An LSTM reads and computes integers. Received: {unit.name!r} with floats.")
        self._operators += self._lstms.operators(unit, source, target, cell=self._cells[unit.cell], outputs=outputs)
        self._steps[target] = LSTM_STEPS

    def _becomes_integer(self, operator: Any, kind: str) -> bool:
        if kind in MOVES:
            return kind not in self._kernels.float_moves and (self._move(operator) or self._look_up(operator, kind))
        # The converter writes the larger one of a value and 0 as a ReLU.
        return self._compute(operator, kind) or (
            kind == "RELU" and self._units.moves(operator) and self._move(operator)
        )

    def _round(self, operator: Any) -> None:
        source, target = int(operator.inputs[0]), int(operator.outputs[0])
        name, grid = self._mark(target)
        held = self.tensors.standing_for(source)
        steps = 1 if held is None else self._steps.pop(held, 1)
        if held is not None and _same(self.tensors.grids[held], grid):
            self.tensors.share(target, source)
            self.found[name], self.steps[name] = held, steps
            return
        if held is not None:
            operator.inputs = np.array([held], "int32")
        self.tensors.set_grid(target, grid)
        self.found[name], self.steps[name] = target, 1
        self._graph.require_op_version(operator, self._kernels.version_of(self._graph, operator))
        self._operators.append(operator)

    def _move(self, operator: Any) -> bool:
        """Gives the results the grid of the inputs; returns False if these differ, or are floats."""
        computed = self.tensors.computed_inputs(operator)
        held = [one for one in map(self.tensors.standing_for, computed) if one is not None]
        grid = _common([self.tensors.grids[one] for one in held])
        if grid is None or len(held) < len(computed):
            return False
        if any(self._graph.values(int(index)) is not None for index in operator.inputs):
            if not self._units.moves(operator):
                return False
            self._constants.round(operator, grid)
        self.tensors.read_integers(operator)
        steps = max(self._steps.get(index, 1) for index in held)
        for index in operator.outputs:
            self.tensors.set_grid(int(index), grid)
            self._steps[int(index)] = steps
        return True

    def _move_floats(self, operator: Any) -> bool:
        """Moves the values of integers in floating point, between conversions; returns False for other inputs."""
        source, target = int(operator.inputs[0]), int(operator.outputs[0])
        if self.tensors.standing_for(source) is None:
            return False
        grid = self.tensors.grid_of(source)
        moved = self._graph.new_tensor(f"{self._graph.name(target)}_float", self._graph.open_shape(target), "float32")
        rounding = self._graph.new_operator("QUANTIZE", [moved], [target])
        self._graph.require_op_version(rounding, self._kernels.version_of(self._graph, rounding))
        self.tensors.read_floats(operator)
        operator.outputs = np.array([moved], "int32")
        self.tensors.set_grid(target, grid)
        self._operators += [operator, rounding]
        return True

    def _look_up(self, operator: Any, kind: str) -> bool:
        """Lets an operation read rows of a table of integers, if all that reads this table is rounded on one grid."""
        table = int(operator.inputs[0])
        values = self._graph.values(table)
        if values is None or kind != "GATHER" or kind not in self._kernels.computes:
            return False
        if narrowest_grid(values, self._weights, Granularity((0,))).format.bits <= FEW_BITS:
            return False
        readers = self._readers[table]
        if any(one is self._graph or self._graph.kind(one) != "GATHER" for one in readers):
            return False
        behind = [grid for one in readers for grid in self._grids_behind(int(one.outputs[0]), reading=True)]
        grid = _common(behind)
        if grid is None:
            return False
        # A rounded row is a row of the rounded table.
        place = table, _key(grid)
        if place not in self._tables:
            self._tables[place] = self.tensors.new_constant(table, grid.codes(values), grid)
        operator.inputs = np.where(operator.inputs == table, self._tables[place], operator.inputs).astype("int32")
        self.tensors.set_grid(int(operator.outputs[0]), grid)
        return True

    def _compute(self, operator: Any, kind: str) -> bool:
        """Lets an operation read and compute integers; returns False if it reads floats, or is not rounded after."""
        output, computed = int(operator.outputs[0]), self.tensors.computed_inputs(operator)
        grid = self._grid_behind(output) if self._graph.is_float(output) else None
        if grid is None or not computed or any(self.tensors.standing_for(index) is None for index in computed):
            return False
        if not self._kernels.compute(self._graph, operator, float(self.tensors.grid_of(computed[0]).scale)):
            return False
        places = LINEAR.get(kind)
        if places is not None and self._graph.values(int(operator.inputs[places.weights])) is None:
            return False
        change = 0.0
        if places is None:
            self._constants.round(operator, None)
        else:
            change = self._constants.round_weights(operator, places, self._readers, grid)
        self.tensors.read_integers(operator)
        # Where the grid behind is another one, the values are rounded again there.
        if kind in PRESCRIBED:
            grid = fixed_grid(PRESCRIBED[kind], grid.format)
        elif kind in ON_INPUT_GRID:
            grid = self.tensors.grids[int(operator.inputs[0])]
        options = operator.builtinOptions
        if getattr(options, "fusedActivationFunction", NO_ACTIVATION) == RELU6 and _highest(grid) <= 6.0:
            # The grid ends there. The code of 6 would overflow in grids with very small steps, which kernels refuse.
            options.fusedActivationFunction = RELU
        if hasattr(options, "potScaleInt16"):
            # True by default: kernels would want scales that are powers of two.
            options.potScaleInt16 = False
        self.tensors.set_grid(output, grid)
        # Values that differ by less than a step are rounded to codes that are one apart at most.
        self._steps[output] = self._kernels.steps_of(self._graph, operator) + int(change + _ACCUMULATED)
        return True

    def _grid_behind(self, index: int) -> Grid | None:
        """Returns the grid on which a tensor is rounded, at once or after it was moved."""
        return _common(self._grids_behind(index))

    def _grids_behind(self, index: int, *, reading: bool = False) -> list[Grid | None]:
        """Returns the grid on which each reader wants a tensor; None for one that reads floats.

        Args:
            index: The tensor.
            reading: True: also the grids of tensors that were computed in floating point.
        """
        found: list[Grid | None] = []
        for reader in self._readers.get(index, ()):
            kind = "" if reader is self._graph else self._graph.kind(reader)
            if kind == "QUANTIZE":
                name, grid = self._mark(int(reader.outputs[0]))
                found.append(None if name.startswith(READING) and not reading else grid)
            elif kind in _LENGTHS:
                continue
            elif kind in MOVES and len(reader.outputs) == 1:
                found.append(_common(self._grids_behind(int(reader.outputs[0]), reading=reading)))
            else:
                found.append(None)
        return found

    def _mark(self, index: int) -> tuple[str, Grid]:
        # The converter writes scopes before a name, counts copies behind it, and joins the names of what it merges.
        names = [one.rsplit("/", 1)[-1] for one in self._graph.name(index).split(";")]
        found = [(key, grid) for key, grid in self._marks.items() if any(name.startswith(key) for name in names)]
        if not found:
            raise ValueError(f"A tensor that is rounded has the name of a mark. Received: {self._graph.name(index)!r}.")
        return found[0]


def _highest(grid: Grid) -> float:
    """Returns the highest value of a grid for a whole tensor."""
    return float(grid.scale) * (grid.format.highest - int(grid.zero_point))


def _same(one: Grid, other: Grid) -> bool:
    return _key(one) == _key(other)


def _key(grid: Grid | None) -> tuple[Any, ...] | None:
    """Returns what tells the grid of a whole tensor from others."""
    return None if grid is None else (grid.format, float(grid.scale), int(grid.zero_point))


def _common(grids: Sequence[Grid | None]) -> Grid | None:
    """Returns the grid that all are; None if they differ, or one is None."""
    return grids[0] if grids and len({_key(one) for one in grids}) == 1 else None

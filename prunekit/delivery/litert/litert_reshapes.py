"""Removes operations of a LiteRT file that give tensors another shape and back, as layers with one spatial axis do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from prunekit.delivery.litert.litert_graph import LiteRTGraph

# Operations that add or remove axes of length 1, and all that only give a tensor another shape.
_UNIT_AXES = ("EXPAND_DIMS", "SQUEEZE")
_RESHAPES = ("RESHAPE", *_UNIT_AXES)
# Operations that compute one entry from those along some axes.
_REDUCTIONS = ("MEAN", "REDUCE_MAX")


def reshape(graph: LiteRTGraph, source: int, target: int, shape: Sequence[int]) -> Any:
    """Returns an operation that gives a tensor another shape, in which -1 is an open length."""
    lengths = np.array(shape, "int32")
    constant = graph.new_constant(f"{graph.name(target)}_shape", lengths)
    options = graph.new_options("ReshapeOptions", newShape=lengths)
    return graph.new_operator("RESHAPE", [source, constant], [target], options)


def move_blocks_by_axes(graph: LiteRTGraph) -> None:
    """Replaces moves of blocks of pixels to channels and back by reshapes around a TRANSPOSE.

    LiteRT moves blocks of 8 bits alone. Where another length than the batch size is open, the operation stays.

    Args:
        graph: The file; changed.
    """
    for operator in list(graph.operators):
        if graph.kind(operator) not in ("DEPTH_TO_SPACE", "SPACE_TO_DEPTH"):
            continue
        source, target = int(operator.inputs[0]), int(operator.outputs[0])
        side, is_wide = int(operator.builtinOptions.blockSize), graph.kind(operator) == "DEPTH_TO_SPACE"
        before, after = graph.open_shape(source), graph.open_shape(target)
        if -1 in (*before[1:], *after[1:]):
            continue
        # Rows of all examples, rows and columns of a block, columns of blocks: of which the middle two are exchanged.
        width, entries = (before[2], side * after[3]) if is_wide else (after[2], side * before[3])
        axes = (-1, width, side, entries) if is_wide else (-1, side, width, entries)
        parts = [
            graph.new_tensor(f"{graph.name(target)}_{number}", lengths, "float32")
            for number, lengths in enumerate([axes, (axes[0], axes[2], axes[1], axes[3])])
        ]
        order = graph.new_constant(f"{graph.name(target)}_order", np.array([0, 2, 1, 3], "int32"))
        place = graph.operators.index(operator)
        graph.operators[place : place + 1] = [
            reshape(graph, source, parts[0], axes),
            graph.new_operator("TRANSPOSE", [parts[0], order], [parts[1]], graph.new_options("TransposeOptions")),
            reshape(graph, parts[1], target, (-1, *after[1:])),
        ]


def fix_shapes(graph: LiteRTGraph) -> None:
    """Gives reshapes constant shapes, with -1 for one open length, in the place of shapes that the file computes.

    The converter computes the shape of a reshape from that of its input if the batch size is open, although no other
    length is. Operations whose results nothing reads any more are removed.

    Args:
        graph: The file; changed.
    """
    for operator in list(graph.operators):
        if graph.kind(operator) != "RESHAPE" or len(operator.inputs) < 2:
            continue
        source, wanted, target = int(operator.inputs[0]), int(operator.inputs[1]), int(operator.outputs[0])
        lengths = graph.open_shape(target)
        if graph.integers(wanted) is None and lengths and lengths.count(-1) <= 1 and 0 not in lengths:
            graph.operators[graph.operators.index(operator)] = reshape(graph, source, target, lengths)
            _drop_lengths(graph, wanted)


def _drop_lengths(graph: LiteRTGraph, index: int) -> None:
    """Removes the operation that computes a tensor of lengths, and those before it, if nothing reads their results."""
    made = next((one for one in graph.operators if index in one.outputs), None)
    readers = graph.readers()
    if made is None or any(readers.get(int(one)) for one in made.outputs):
        return
    graph.operators.remove(made)
    for one in {int(one) for one in made.inputs if one >= 0 and not graph.is_float(int(one))}:
        _drop_lengths(graph, one)


def merge_reshapes(graph: LiteRTGraph) -> dict[int, int]:
    """Merges reshapes that follow one another, and removes those that undo one another.

    Between two convolutions with one spatial axis the tensor then stays an image of one row, which is padded and
    reduced as such.

    Args:
        graph: The file; changed.

    Returns:
        Index of a tensor that is gone -> that of one with the same entries.
    """
    gone: dict[int, int] = {}
    for operator in list(graph.operators):
        if graph.kind(operator) == "PAD":
            _pad_image(graph, operator, gone)
        elif graph.kind(operator) in _REDUCTIONS:
            _reduce_image(graph, operator)
    for operator in list(graph.operators):
        if graph.kind(operator) in _RESHAPES:
            _merge(graph, operator, gone)
    _drop_unread(graph, gone)
    return {index: _followed(index, gone) for index in gone}


def _followed(index: int, gone: dict[int, int]) -> int:
    while index in gone:
        index = gone[index]
    return index


def _source(graph: LiteRTGraph, index: int) -> Any:
    """Returns the reshape that computes a tensor; None if none does."""
    made = next((one for one in graph.operators if index in one.outputs), None)
    return made if made is not None and graph.kind(made) in _RESHAPES else None


def _merge(graph: LiteRTGraph, operator: Any, gone: dict[int, int]) -> None:
    """Lets a reshape read what the reshape before it reads, or lets its readers do so."""
    target, before = int(operator.outputs[0]), _source(graph, int(operator.inputs[0]))
    if before is None or target in graph.outputs:
        return
    first, lengths = int(before.inputs[0]), graph.open_shape(target)
    unit_axes = graph.kind(operator) in _UNIT_AXES and graph.kind(before) in _UNIT_AXES
    if lengths.count(-1) > 1 and not unit_axes:
        return
    if graph.open_shape(first) == lengths:
        graph.replace(target, first)
        gone[target] = first
        graph.operators.remove(operator)
    elif lengths.count(-1) <= 1:
        graph.operators[graph.operators.index(operator)] = reshape(graph, first, target, lengths)


def _drop_unread(graph: LiteRTGraph, gone: dict[int, int]) -> None:
    readers = graph.readers()
    for operator in graph.operators[::-1]:
        target = int(operator.outputs[0])
        if graph.kind(operator) in _RESHAPES and not readers.get(target):
            gone[target] = int(operator.inputs[0])
            graph.operators.remove(operator)
            readers = graph.readers()


def _adds_row(graph: LiteRTGraph, operator: Any) -> bool:
    """Returns True for a reshape that makes a sequence an image of one row."""
    before, after = graph.open_shape(int(operator.inputs[0])), graph.open_shape(int(operator.outputs[0]))
    return len(before) == 3 and after == (before[0], 1, *before[1:])


def _removes_row(graph: LiteRTGraph, operator: Any) -> bool:
    """Returns True for a reshape that makes an image of one row a sequence."""
    before, after = graph.open_shape(int(operator.inputs[0])), graph.open_shape(int(operator.outputs[0]))
    return len(after) == 3 and before == (after[0], 1, *after[1:])


def _pad_image(graph: LiteRTGraph, operator: Any, gone: dict[int, int]) -> None:
    """Pads an image of one row in the place of a sequence that becomes one."""
    source, paddings, target = int(operator.inputs[0]), int(operator.inputs[1]), int(operator.outputs[0])
    readers, amounts, before = graph.readers().get(target, []), graph.integers(paddings), _source(graph, source)
    if amounts is None or before is None or not _removes_row(graph, before):
        return
    if not readers or any(one is graph or graph.kind(one) not in _RESHAPES for one in readers):
        return
    if not all(_adds_row(graph, one) for one in readers):
        return
    image = int(readers[0].outputs[0])
    for one in readers:
        if int(one.outputs[0]) != image:
            gone[int(one.outputs[0])] = image
            graph.replace(int(one.outputs[0]), image)
        graph.operators.remove(one)
    gone[target] = image
    rows = np.insert(amounts, 1, 0, axis=0)
    operator.inputs = np.array(
        [int(before.inputs[0]), graph.new_constant(graph.name(paddings), rows)], operator.inputs.dtype
    )
    operator.outputs = np.array([image], "int32")


def _reduce_image(graph: LiteRTGraph, operator: Any) -> None:
    """Reduces the rows of an image of one row along with its columns, in the place of a sequence."""
    before, axes = _source(graph, int(operator.inputs[0])), graph.integers(int(operator.inputs[1]))
    if before is None or axes is None or operator.builtinOptions.keepDims or not _removes_row(graph, before):
        return
    if list(axes.reshape(-1)) not in ([1], [-2]):
        return
    both = graph.new_constant(graph.name(int(operator.inputs[1])), np.array([1, 2], "int32"))
    operator.inputs = np.array([int(before.inputs[0]), both], "int32")

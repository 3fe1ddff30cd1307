"""Finds blocks that can be removed: sets of calls between two tensors of the same shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras.src.backend.common.masking import get_keras_mask

from prunekit.anatomy.channels.graph_calls import Graph, GraphCall
from prunekit.anatomy.records.reports import Skipped
from prunekit.techniques.shrink.graph.layer_graph import LayerGraph
from prunekit.techniques.shrink.layers.dead_branches import is_sum, summands

L = keras.layers
RESIDUAL, LAYERS = "residual branch", "layers"
_WITHOUT_KERNEL = (L.BatchNormalization, L.LayerNormalization, L.GroupNormalization, L.RMSNormalization, L.PReLU)


@dataclass(frozen=True, eq=False)
class Block:
    """Calls that are bypassed by reading the tensor before them in the place of the tensor after them.

    Attributes:
        name: Name of the sum after a residual branch; otherwise that of the first layer with a kernel.
        kind: `RESIDUAL` or `LAYERS`.
        level: The graph with the calls.
        calls: The calls.
        entry: The tensor before the block, the only one that its calls read from outside.
        exit: The tensor after the block, the only one of its tensors that is read outside.
    """

    name: str
    kind: str
    level: Graph
    calls: tuple[GraphCall, ...]
    entry: Any
    exit: Any

    def kernels(self) -> frozenset[int]:
        """Returns the ids of the calls of layers with kernels."""
        return frozenset(id(call) for call in self.calls if has_kernel(call.operation))

    def keys(self) -> frozenset[int]:
        """Returns the ids of all calls."""
        return frozenset(map(id, self.calls))


def has_kernel(layer: Any) -> bool:
    """Returns True for layers with kernels, and for models that contain such layers."""
    if not isinstance(layer, L.Layer) or isinstance(layer, _WITHOUT_KERNEL):
        return False
    return any(len(weight.shape) > 1 for weight in layer.weights)


def find_blocks(graph: LayerGraph) -> tuple[list[Block], list[Skipped]]:
    """Returns the blocks that can be removed, in order, and what has the form of a block but must stay."""
    blocks: list[Block] = []
    left: list[Skipped] = []
    for level in graph.graphs():
        if level is not graph.main and graph.calls_of(level.model) > 1:
            left.append(Skipped(level.model.name, "the model is called several times"))
            continue
        found = [*_branches(level)]
        regions: list[tuple[Sequence[GraphCall], list[Any], list[Any]]] = [
            (level.calls, keras.tree.flatten(level.inputs), keras.tree.flatten(level.outputs))
        ]
        regions += [(block.calls[:-1], [block.entry], _last(block)) for block in found]
        for region in regions:
            found += _sequences(level, *region)
        seen: set[frozenset[int]] = set()
        for block in found:
            kernels = block.kernels()
            if not kernels or kernels in seen:
                continue
            seen.add(kernels)
            reason = _reason(block)
            if reason:
                left.append(Skipped(block.name, reason))
            else:
                blocks.append(block)
    return blocks, left


def _last(block: Block) -> list[Any]:
    return [one for one in summands(block.calls[-1]) if one is not block.entry]


def _reason(block: Block) -> str:
    """Returns why a block must stay although its shapes allow the removal, or ""."""
    if any(
        block.level.is_output(tensor) for call in block.calls for tensor in call.outputs if tensor is not block.exit
    ):
        return "it contains an output of the model"
    if block.kind == LAYERS and block.level.is_output(block.exit):
        return "it computes an output of the model"
    if not block.level.can_replace(block.exit, block.entry):
        return "without it, an output of the model would be an input or another output"
    if any(len(call.outputs) != 1 for call in block.calls):
        return "it contains a layer with several outputs"
    if not _keeps_mask(block):
        return "the mask after it is another one than the mask before it"
    return ""


def _keeps_mask(block: Block) -> bool:
    mask = get_keras_mask(block.entry)
    if mask is get_keras_mask(block.exit):
        return True
    # An Add layer makes a new mask, the conjunction of the masks that it reads.
    added = block.calls[-1]
    conjunction = block.kind == RESIDUAL and isinstance(added.operation, L.Add)
    return conjunction and all(get_keras_mask(one) is mask for one in summands(added))


def _alike(one: Any, other: Any) -> bool:
    return tuple(one.shape) == tuple(other.shape) and one.dtype == other.dtype


# ---- residual branches -----------------------------------------------------------------------------------------------


def _branches(level: Graph) -> Iterator[Block]:
    """Yields the branches that are added to the tensor which they read."""
    for call in level.calls:
        added = summands(call) if is_sum(call) else []
        if len(added) != 2:
            continue
        for entry, last in (added, added[::-1]):
            inside = _between(level, entry, last, call)
            if inside and _alike(entry, call.output):
                yield Block(call.name, RESIDUAL, level, (*inside, call), entry, call.output)
                break


def _between(level: Graph, entry: Any, last: Any, end: GraphCall) -> list[GraphCall]:
    """Returns the calls from `entry` to `last`; [] if others read their tensors, or if they read other tensors."""
    found: dict[int, GraphCall] = {}
    pending = [last]
    while pending:
        tensor = pending.pop()
        if tensor is entry:
            continue
        call = level.producer(tensor)
        if call is None:
            return []
        if id(call) not in found:
            found[id(call)] = call
            pending += call.inputs
    for call in found.values():
        for tensor in call.outputs:
            readers = level.readers(tensor)
            if any(id(one) not in found and not (one is end and tensor is last) for one in readers):
                return []
    return [call for call in level.calls if id(call) in found]


# ---- sequences of layers ---------------------------------------------------------------------------------------------


def _sequences(level: Graph, calls: Sequence[GraphCall], inputs: list[Any], outputs: list[Any]) -> Iterator[Block]:
    """Yields the shortest runs of layers with kernels, and of the layers after them, whose shapes are consistent."""
    cuts = _cuts(calls, inputs, outputs)
    kernels = [
        any(has_kernel(call.operation) for call in calls[first:end])
        for (first, _), (end, _) in zip(cuts, cuts[1:], strict=False)
    ]
    starts = [index for index, heavy in enumerate(kernels) if heavy]
    for number, start in enumerate(starts):
        end = _end(cuts, starts[number:], len(kernels))
        if end is not None:
            inside = tuple(calls[cuts[start][0] : cuts[end][0]])
            name = next(call.name for call in inside if has_kernel(call.operation))
            yield Block(name, LAYERS, level, inside, cuts[start][1], cuts[end][1])


def _end(cuts: Sequence[tuple[int, Any]], starts: Sequence[int], length: int) -> int | None:
    """Returns the cut at which the run that begins at the first start ends; None if no shape is the first one."""
    for one, following in zip(starts, [*starts[1:], length], strict=True):
        for end in range(following, one, -1):
            if _alike(cuts[end][1], cuts[starts[0]][1]):
                return end
    return None


def _cuts(calls: Sequence[GraphCall], inputs: list[Any], outputs: list[Any]) -> list[tuple[int, Any]]:
    """Returns (index, tensor) for each place between calls at which only one tensor is live."""
    last = {id(tensor): -1 for tensor in inputs}
    for index, call in enumerate(calls):
        last |= {id(tensor): index for tensor in (*call.inputs, *call.outputs)}
    last |= {id(tensor): len(calls) for tensor in outputs}
    live = {id(tensor): tensor for tensor in inputs if last[id(tensor)] >= 0}
    found = []
    for index in range(len(calls) + 1):
        if index:
            live |= {id(tensor): tensor for tensor in calls[index - 1].outputs}
        live = {key: tensor for key, tensor in live.items() if last[key] >= index}
        if len(live) == 1:
            found.append((index, next(iter(live.values()))))
    return found

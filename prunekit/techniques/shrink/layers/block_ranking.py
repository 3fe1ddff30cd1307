"""Ranks blocks by the change of the outputs without them, and counts what a removal saves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask

from prunekit.anatomy.graph.tracing import Trace, checked_trace
from prunekit.anatomy.layers.layers import sublayers
from prunekit.anatomy.records.name_patterns import NamePattern, listed_patterns
from prunekit.anatomy.records.reports import Skipped
from prunekit.core.layerwise.layerwise import Progress
from prunekit.core.outputs.graph_steps import steps_of
from prunekit.core.runtime.model_function import ModelFunction
from prunekit.core.runtime.random_state import kept_random_state
from prunekit.suggestions import did_you_mean
from prunekit.techniques.shrink.graph.layer_graph import LayerGraph
from prunekit.techniques.shrink.layers.blocks import Block


def selected(blocks: Sequence[Block], include: Any, exclude: Any) -> tuple[list[Block], list[Skipped]]:
    """Returns the blocks that the patterns select, and the others with the reason.

    Raises:
        ValueError: A pattern matches no block and no layer in one.
    """
    wanted, unwanted = _patterns(blocks, include, "include"), _patterns(blocks, exclude, "exclude")
    chosen: list[Block] = []
    left: list[Skipped] = []
    for block in blocks:
        if _matches(unwanted, block):
            left.append(Skipped(block.name, "excluded"))
        elif wanted and not _matches(wanted, block):
            left.append(Skipped(block.name, "not matched by include"))
        else:
            chosen.append(block)
    return chosen, left


def _patterns(blocks: Sequence[Block], given: Sequence[str] | str, option: str) -> list[NamePattern]:
    patterns = [NamePattern(one, option) for one in listed_patterns(given, option)]
    names = list(dict.fromkeys(name for block in blocks for name in _names(block)))
    for pattern in patterns:
        if not any(map(pattern, names)):
            hint = did_you_mean(pattern.pattern, names).strip()
            raise ValueError(
                f"Each pattern in `{option}` matches a removable block, or a layer in one. Received: "
                f"{pattern.pattern!r}, which matches none. {hint or 'The blocks are: ' + ', '.join(names[:8])}"
            )
    return patterns


def _names(block: Block) -> list[str]:
    return [block.name, *(call.name for call in block.calls)]


def _matches(patterns: Sequence[NamePattern], block: Block) -> bool:
    return any(pattern(name) for pattern in patterns for name in _names(block))


# ---- ranking ---------------------------------------------------------------------------------------------------------


class Bypass:
    """Runs the model with some blocks bypassed; compiled once for all blocks, which are switched by an argument.

    Args:
        model: The model.
        blocks: The blocks.
        batches: Batches of inputs.

    Attributes:
        blocks: The blocks that can be bypassed.
    """

    def __init__(self, model: Any, blocks: Sequence[Block], batches: Sequence[Any]):
        self._steps, self._batches = steps_of(model, batches[0]), batches
        known = {*self._steps.inputs, *(key for step in self._steps.steps for key in step.writes)}
        self.blocks = [one for one in blocks if {id(one.entry), id(one.exit)} <= known]
        self._function, self._model = ModelFunction(model, self._run), model
        self._reference = self._all_outputs([])
        if not all(np.isfinite(output).all() for outputs in self._reference for output in outputs):
            raise ValueError(
                f"The changes of the outputs of {model.name!r} cannot be measured. Received: data on which its outputs "
                "are not finite. Look for NaN in its weights, and for inputs of a wrong scale."
            )

    def change(self, bypassed: Sequence[Block]) -> float:
        """Returns the relative squared change of the outputs, averaged over several outputs."""
        count = len(self._steps.outputs)
        changed, size = np.zeros(count), np.zeros(count)
        for outputs, reference in zip(self._all_outputs(bypassed), self._reference, strict=True):
            for index, (new, old) in enumerate(zip(outputs, reference, strict=True)):
                changed[index] += np.square(new - old).sum()
                size[index] += np.square(old).sum()
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(changed == 0, 0.0, changed / size)
        # Outputs that are not numbers any more count as the largest change.
        return float(np.mean(np.nan_to_num(relative, nan=np.inf, posinf=np.inf)))

    def _all_outputs(self, bypassed: Sequence[Block]) -> list[list[np.ndarray]]:
        """Returns the outputs for each batch, with the same random numbers at each call; the model's seeds stay."""
        with kept_random_state(self._model):
            return [self._outputs(batch, bypassed) for batch in self._batches]

    def _outputs(self, batch: Any, bypassed: Sequence[Block]) -> list[np.ndarray]:
        switches = np.array([any(one is other for other in bypassed) for one in self.blocks], bool)
        found = self._function(batch, ops.convert_to_tensor(switches))
        return [np.asarray(ops.convert_to_numpy(one), "float64") for one in found]

    def _run(self, batch: Any, switches: Any) -> list[Any]:
        switched: dict[int, list[int]] = {}
        for index, block in enumerate(self.blocks):
            switched.setdefault(id(block.exit), []).append(index)
        values = dict(zip(self._steps.inputs, self._steps.flat_inputs(batch), strict=True))
        for step in self._steps.steps:
            step.compute(values)
            for key in step.writes:
                for index in switched.get(key, ()):
                    mask = get_keras_mask(values[key])
                    values[key] = ops.where(switches[index], values[id(self.blocks[index].entry)], values[key])
                    if mask is not None:
                        set_keras_mask(values[key], mask)
        return [values[key] for key in self._steps.outputs]


class Ranking:
    """Removes one block after another, the least important first.

    Attributes:
        alone: id of a block -> the change without this block alone.
        removed: The removed blocks, in order.
        totals: The change after each removal.
    """

    def __init__(self, bypass: Bypass, blocks: Sequence[Block]):
        self._bypass, self._blocks = bypass, list(blocks)
        self.alone: dict[int, float] = {}
        self.removed: list[Block] = []
        self.totals: list[float] = []

    def remove(self, number: int, progress: Progress | None = None) -> None:
        """Removes blocks; ranks the others again after each."""
        measured, most = 0, sum(max(1, len(self._blocks) - done) for done in range(number))
        for _ in range(number):
            left = [block for block in self._blocks if self._is_possible(block)]
            if not left:
                raise ValueError(
                    f"The model has fewer blocks that can be removed. Received: blocks={number}; "
                    f"{len(self.removed)} can be removed: {', '.join(one.name for one in self.removed)}."
                )
            changes = []
            for block in left:
                changes.append(self._bypass.change([*self.removed, block]))
                measured += 1
                if progress is not None:
                    progress(measured, most, block.name)
            if not self.removed:
                self.alone = {id(block): change for block, change in zip(left, changes, strict=True)}
            least = int(np.argmin(changes))
            self.removed.append(left[least])
            self.totals.append(changes[least])

    def source(self, tensor: Any) -> Any:
        """Returns the tensor that is read in the place of `tensor` after the removals."""
        moved = {id(block.exit): block.entry for block in self.removed}
        while id(tensor) in moved:
            tensor = moved[id(tensor)]
        return tensor

    def _is_possible(self, block: Block) -> bool:
        keys = block.keys()
        for other in self.removed:
            if keys & other.keys() and not keys > other.keys():
                return False
        return block.level.can_replace(block.exit, self.source(block.entry))


# ---- costs -----------------------------------------------------------------------------------------------------------


class Costs:
    """Parameters and multiply-accumulates of blocks.

    Args:
        graph: The graph of the model.

    Attributes:
        total: Multiply-accumulates of one example; None if unknown.
    """

    def __init__(self, graph: LayerGraph):
        self._graph = graph
        self._trace: Trace | None
        try:
            self._trace = checked_trace(graph.model, 1, None)
        except ValueError:
            self._trace = None
        self.total = self._macs([graph.model])

    def of(self, block: Block) -> tuple[tuple[str, ...], int, int | None]:
        """Returns the layers that a removal removes, their parameters and their multiply-accumulates."""
        called = {id(call.operation): call.operation for call in block.calls}
        inside = [sum(call.operation is one for call in block.calls) for one in called.values()]
        layers = [one for one, count in zip(called.values(), inside, strict=True) if count == self._graph.calls_of(one)]
        weights = {id(one): one for layer in layers for one in getattr(layer, "weights", ())}
        parameters = sum(math.prod(one.shape) for one in weights.values())
        return tuple(one.name for one in layers), parameters, self._macs(layers)

    def _macs(self, operations: Sequence[Any]) -> int | None:
        if self._trace is None:
            return None
        layers: dict[int, Any] = {}
        pending = [one for one in operations if isinstance(one, keras.layers.Layer)]
        while pending:
            layer = pending.pop()
            if id(layer) not in layers:
                layers[id(layer)] = layer
                pending += sublayers(layer)
        if layers.keys() & self._trace.unknown.keys():
            return None
        weights = {id(one): one for layer in layers.values() for one in layer.variables}
        total = sum(self._trace.uses.get(key, 0) * math.prod(one.shape) for key, one in weights.items())
        return total + sum(self._trace.products.get(key, 0) for key in layers)

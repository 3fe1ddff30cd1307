"""remove_blocks: removes the blocks whose removal changes the outputs least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask

from prunekit.anatomy.layers import sublayers
from prunekit.anatomy.model_graph import graph_of
from prunekit.anatomy.model_weights import check_built
from prunekit.anatomy.name_patterns import NamePattern, listed_patterns
from prunekit.anatomy.tracing import Trace, checked_trace
from prunekit.core.calibration import CheckedData
from prunekit.core.graph_steps import steps_of
from prunekit.core.layerwise import Progress
from prunekit.core.model_function import ModelFunction
from prunekit.core.random_state import kept_random_state
from prunekit.sparsity.arguments import whole
from prunekit.suggestions import did_you_mean
from prunekit.techniques.shrink.block_report import BlocksReport, RankedBlock
from prunekit.techniques.shrink.blocks import Block, find_blocks
from prunekit.techniques.shrink.graph_builder import build
from prunekit.techniques.shrink.layer_graph import LayerGraph
from prunekit.techniques.shrink.optimizer_state import carry_over, class_notes
from prunekit.techniques.shrink.simplify_report import Left

HIDDEN = "it is inside a model that is called several times, or with more than its inputs"


def remove_blocks(
    model: Any,
    number: int = 1,
    data: Any = None,
    *,
    include: Sequence[str] | str = (),
    exclude: Sequence[str] | str = (),
    progress: Progress | None = None,
) -> tuple[Any, BlocksReport]:
    """Removes whole blocks; returns (a model with fewer layers, its report). The given model is not changed.

    A block is a residual branch, which is added to the tensor that it reads, or a run of layers between two tensors of
    the same shape. In every round, each block is bypassed in turn, and the block without which the model's outputs on
    the data change least is removed. The kept layers keep their weights, and the optimizer the state of these weights;
    train the model again afterwards.

    Args:
        model: A built Sequential or functional model.
        number: Number of blocks to remove.
        data: Calibration data, as `pk.prune` takes them.
        include: Names, globs or `re:` patterns of blocks that may be removed, or of layers in them; empty = all.
        exclude: Names, globs or `re:` patterns of blocks that stay, or of layers in them; overrides `include`.
        progress: Called with the number of changes that were measured, the number in all, and the block's name.

    Raises:
        ValueError: No data; fewer blocks than asked can be removed; a pattern matches nothing; the model has no graph
            of layers.
        TypeError: `model` is not a Keras 3 model.
    """
    _check(model, number, data)
    graph = LayerGraph(model)
    layers = graph.layer_count()
    blocks, left = find_blocks(graph)
    batches = [inputs for inputs, _, _ in CheckedData(model, data)]
    bypass = _Bypass(model, blocks, batches)
    hidden = [Left(one.name, HIDDEN) for one in blocks if one not in bypass.blocks]
    chosen, unchosen = _selected(bypass.blocks, include, exclude)
    if number > len(chosen):
        raise ValueError(_too_few(number, chosen, [*left, *hidden, *unchosen]))
    ranking = _Ranking(bypass, chosen)
    ranking.remove(number, progress)
    costs = _Costs(graph)
    rows = tuple(_row(block, costs, ranking) for block in chosen)
    for block in ranking.removed:
        block.level.replace(block.exit, ranking.source(block.entry))
    made, variables = build(graph)
    notes = [*class_notes(model, made), *carry_over(model, made, variables)]
    if not all(map(math.isfinite, [*ranking.alone.values(), *ranking.totals])):
        notes.append("Without some of the blocks the outputs are not finite numbers.")
    if not any(ranking.alone.values()):
        notes.append("No block changes the outputs on these data, so the choice is arbitrary. Is the model trained?")
    report = BlocksReport(
        model.name,
        (layers, graph.layer_count()),
        (model.count_params(), made.count_params()),
        (costs.total, _Costs(LayerGraph(made)).total),
        rows,
        (*left, *hidden, *unchosen),
        tuple(notes),
    )
    return made, report


def _check(model: Any, number: int, data: Any) -> None:
    check_built(model)
    whole("number", number, 1)
    if graph_of(model) is None:
        raise ValueError(
            f"Blocks are found in the graph of a Sequential or functional model. Received: {model.name!r} "
            f"({type(model).__name__}), which has none. Build it as keras.Model(inputs, outputs); `pk.simplify` "
            "returns such a model where it can follow the calls."
        )
    if data is None:
        raise ValueError(
            "remove_blocks needs calibration data: how much a block changes the outputs cannot be read from its "
            "weights. Received: data=None. Pass some batches of inputs as `data`."
        )


def _too_few(number: int, chosen: Sequence[Block], left: Sequence[Left]) -> str:
    """Returns the refusal of a number that is larger than that of the removable blocks."""
    names = [one.name for one in chosen]
    listed = f" ({', '.join(names[:8])}{' ...' if len(names) > 8 else ''})" if names else ""
    reasons = "; ".join(f"{one.layer}: {one.reason}" for one in left[:5])
    reasons = reasons or "no other residual sum, and no other layers between tensors of one shape, were found"
    return (
        f"The model has fewer blocks that can be removed. Received: number={number}; {len(names)} can be "
        f"removed{listed}. What stays: {reasons}. pk.shrink removes channels instead of layers."
    )


def _row(block: Block, costs: _Costs, ranking: _Ranking) -> RankedBlock:
    layers, parameters, macs = costs.of(block)
    order = ranking.removed.index(block) + 1 if block in ranking.removed else 0
    total = ranking.totals[order - 1] if order else None
    return RankedBlock(block.name, block.kind, layers, parameters, macs, ranking.alone[id(block)], order, total)


def _selected(blocks: Sequence[Block], include: Any, exclude: Any) -> tuple[list[Block], list[Left]]:
    wanted, unwanted = _patterns(blocks, include, "include"), _patterns(blocks, exclude, "exclude")
    chosen: list[Block] = []
    left: list[Left] = []
    for block in blocks:
        if _matches(unwanted, block):
            left.append(Left(block.name, "excluded"))
        elif wanted and not _matches(wanted, block):
            left.append(Left(block.name, "not matched by include"))
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


class _Bypass:
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
            values.update(zip(step.writes, step.run([values[key] for key in step.reads]), strict=True))
            for key in step.writes:
                for index in switched.get(key, ()):
                    mask = get_keras_mask(values[key])
                    values[key] = ops.where(switches[index], values[id(self.blocks[index].entry)], values[key])
                    if mask is not None:
                        set_keras_mask(values[key], mask)
        return [values[key] for key in self._steps.outputs]


class _Ranking:
    """Removes one block after another, the least important first.

    Attributes:
        alone: id of a block -> the change without this block alone.
        removed: The removed blocks, in order.
        totals: The change after each removal.
    """

    def __init__(self, bypass: _Bypass, blocks: Sequence[Block]):
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
                    f"The model has fewer blocks that can be removed. Received: number={number}; "
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


class _Costs:
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

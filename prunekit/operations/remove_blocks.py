"""remove_blocks: removes the blocks whose removal changes the outputs least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from prunekit.anatomy.graph.model_graph import graph_of
from prunekit.anatomy.records.reports import Skipped
from prunekit.core.data.calibration import CheckedData
from prunekit.core.layerwise.layerwise import Progress
from prunekit.sparsity.arguments import check_functions, whole
from prunekit.techniques.quantize.rounding.simulation import check_computes_in_floats
from prunekit.techniques.shrink.channels.optimizer_state import carry_over, class_notes
from prunekit.techniques.shrink.graph.graph_builder import build
from prunekit.techniques.shrink.graph.layer_graph import LayerGraph
from prunekit.techniques.shrink.layers.block_ranking import Bypass, Costs, Ranking, selected
from prunekit.techniques.shrink.layers.block_report import BlocksReport, RankedBlock
from prunekit.techniques.shrink.layers.blocks import Block, find_blocks

HIDDEN = "it is inside a model that is called several times, or with more than its inputs"


def remove_blocks(
    model: Any,
    blocks: int = 1,
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
        blocks: Number of blocks to remove.
        data: Calibration data, as `pk.prune` takes them.
        include: Names, globs or `re:` patterns of blocks that may be removed, or of layers in them; empty = all.
        exclude: Names, globs or `re:` patterns of blocks that stay, or of layers in them; overrides `include`.
        progress: Called with the number of changes that were measured, the number in all, and the block's name.

    Raises:
        ValueError: No data; fewer blocks than asked can be removed; a pattern matches nothing; the model has no graph
            of layers.
        TypeError: `model` is not a Keras 3 model.
    """
    check_functions(progress=progress)
    _check(model, blocks, data)
    graph = LayerGraph(model)
    layers = graph.layer_count()
    found, left = find_blocks(graph)
    batches = [inputs for inputs, _, _ in CheckedData(model, data)]
    bypass = Bypass(model, found, batches)
    hidden = [Skipped(one.name, HIDDEN) for one in found if one not in bypass.blocks]
    chosen, unchosen = selected(bypass.blocks, include, exclude)
    if blocks > len(chosen):
        raise ValueError(_too_few(blocks, chosen, [*left, *hidden, *unchosen]))
    ranking = Ranking(bypass, chosen)
    ranking.remove(blocks, progress)
    costs = Costs(graph)
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
        (costs.total, Costs(LayerGraph(made)).total),
        rows,
        (*left, *hidden, *unchosen),
        tuple(notes),
    )
    return made, report


def _check(model: Any, blocks: int, data: Any) -> None:
    check_computes_in_floats(model)
    if not isinstance(blocks, Real):
        raise TypeError(
            f"`blocks` is the number of blocks to remove. Received: {type(blocks).__name__}. The data follow it: "
            "pk.remove_blocks(model, 1, data)."
        )
    whole("blocks", blocks, 1)
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


def _too_few(blocks: int, chosen: Sequence[Block], left: Sequence[Skipped]) -> str:
    """Returns the refusal of a number that is larger than that of the removable blocks."""
    names = [one.name for one in chosen]
    listed = f" ({', '.join(names[:8])}{' ...' if len(names) > 8 else ''})" if names else ""
    reasons = "; ".join(f"{one.name}: {one.reason}" for one in left[:5])
    reasons = reasons or "no other residual sum, and no other layers between tensors of one shape, were found"
    return (
        f"The model has fewer blocks that can be removed. Received: blocks={blocks}; {len(names)} can be "
        f"removed{listed}. What stays: {reasons}. pk.shrink removes channels instead of layers."
    )


def _row(block: Block, costs: Costs, ranking: Ranking) -> RankedBlock:
    layers, parameters, macs = costs.of(block)
    order = ranking.removed.index(block) + 1 if block in ranking.removed else 0
    total = ranking.totals[order - 1] if order else None
    return RankedBlock(block.name, block.kind, layers, parameters, macs, ranking.alone[id(block)], order, total)

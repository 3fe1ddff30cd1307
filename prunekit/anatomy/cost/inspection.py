"""The report on a model's weights: number of zeros, pattern of the zeros, and the saved multiply-accumulates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from prunekit.anatomy.cost.cost import nonzero_mask
from prunekit.anatomy.graph.example_inputs import fixed_batch
from prunekit.anatomy.graph.tracing import NOT_CALLED, Trace, forward_trace, item_bytes
from prunekit.anatomy.layers.layers import takes_part_in_products
from prunekit.anatomy.layers.model_weights import Weight, check_built, raw_variables_in, weights_in
from prunekit.anatomy.layers.targets import Target
from prunekit.anatomy.records.reports import Event, Skipped, SparsityReport, WeightRow
from prunekit.sparsity.detection import detect

__all__ = ["Event", "SparsityReport", "Skipped", "WeightRow", "inspect"]

# ---------------------------------------------------------------- inspecting


def inspect(model: Any, *, inputs: Any = None) -> SparsityReport:
    """Returns a report on the current weights of a Keras 3 model, with one row per variable.

    Args:
        model: A built Keras 3 model or layer.
        inputs: Example inputs, or their shapes such as (1, 128), for models whose inputs have no fixed size, as
            `prunekit.anatomy.graph.example_inputs.example_inputs` takes them. None: multiply-accumulates of such models
            are unknown, and a note gives the reason.

    Raises:
        TypeError: `model` is not a Keras 3 model; `inputs` are neither arrays nor tensors nor shapes.
        ValueError: `model` has no weights yet; `inputs` do not fit.
    """
    check_built(model)
    notes: list[str] = []
    batch, found = fixed_batch(model) or 1, None
    try:
        found = forward_trace(model, batch, inputs)
    except ValueError as error:
        if inputs is not None:
            raise
        notes.append(f"MACs are not known. {error}")
    weights = weights_in(model)
    rows = tuple(_row(weight, found, batch) for weight in weights)
    if found is not None:
        notes += _what_is_not_counted(model, weights, rows, found)
    return SparsityReport(model.name, rows, skipped=tuple(raw_variables_in(model)), notes=tuple(notes))


def inspect_again(before: SparsityReport, targets: Sequence[Target]) -> SparsityReport:
    """Returns the report on a model of which only the values of `targets` changed since the report `before`."""
    variables = {target.name: target for target in targets}
    rows = tuple(_renewed(row, variables[row.name]) if row.name in variables else row for row in before.weights)
    return replace(before, weights=rows)


def _renewed(row: WeightRow, target: Target) -> WeightRow:
    kept = nonzero_mask(target.variable)
    nonzeros = int(np.count_nonzero(kept))
    return replace(
        row,
        zeros=row.size - nonzeros,
        pattern=detect(kept, target.in_axes, target.out_axes),
        sparse_macs=None if row.macs is None else row.macs // row.size * nonzeros,
    )


def _what_is_not_counted(model: Any, weights: Sequence[Weight], rows: Sequence[WeightRow], found: Trace) -> list[str]:
    """Returns a message with the layers whose multiply-accumulates are unknown, by reason; [] if there are none."""
    layers: dict[str, dict[str, None]] = {}
    for weight, row in zip(weights, rows, strict=True):
        if row.macs is None:
            reason = found.unknown.get(id(weight.layer), NOT_CALLED)
            layers.setdefault(reason, {})[weight.layer_path or model.name] = None
    listed = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in layers.items())
    return [f"MACs are not known, and left out of the totals, for: {listed}."] if layers else []


def _row(weight: Weight, found: Trace | None, batch: int) -> WeightRow:
    kept = nonzero_mask(weight.values)
    nonzeros = int(np.count_nonzero(kept))
    uses = _uses(weight, found, batch)
    return WeightRow(
        name=weight.name,
        layer=weight.layer_path,
        role=weight.spec.role,
        shape=weight.shape,
        size=weight.size,
        zeros=weight.size - nonzeros,
        pattern=detect(kept, weight.spec.in_axes, weight.spec.out_axes),
        macs=None if uses is None else uses * weight.size,
        sparse_macs=None if uses is None else uses * nonzeros,
        bytes=math.prod(weight.variable.shape) * item_bytes(weight.variable.dtype),
    )


def _uses(weight: Weight, found: Trace | None, batch: int) -> int | None:
    """Returns the multiply-accumulates of each entry for one example; None if unknown."""
    if not takes_part_in_products(weight.layer, weight.spec):
        return 0
    if found is None or id(weight.layer) in found.unknown or id(weight.variable) not in found.uses:
        return None
    return found.uses[id(weight.variable)] // batch

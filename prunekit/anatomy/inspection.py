"""The report on a model's weights: number of zeros, pattern of the zeros, and the saved multiply-accumulates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from prunekit.anatomy.cost import nonzero_mask
from prunekit.anatomy.reports import Event, Report, WeightRow
from prunekit.anatomy.targets import Skipped, Target, Weight, check_built, raw_variables_in, weights_in
from prunekit.anatomy.tracing import Trace, fixed_batch, forward_trace, item_bytes
from prunekit.sparsity.detection import detect

__all__ = ["Event", "Report", "Skipped", "WeightRow", "inspect"]

# ---------------------------------------------------------------- inspecting


def inspect(model: Any) -> Report:
    """Returns a report on the current weights of a Keras 3 model, with one row per variable.

    Raises:
        TypeError: `model` is not a Keras 3 model.
        ValueError: `model` has no weights yet.
    """
    check_built(model)
    notes: list[str] = []
    try:
        batch = fixed_batch(model) or 1
        found = forward_trace(model, batch)
    except ValueError as error:
        batch, found = 1, Trace()
        notes.append(f"MACs are not known. {error}")
    weights = weights_in(model)
    rows = tuple(_row(weight, found, batch) for weight in weights)
    if not notes:
        notes += _what_is_not_counted(model, weights, found)
    return Report(model.name, rows, skipped=tuple(raw_variables_in(model)), notes=tuple(notes))


def inspect_again(before: Report, targets: Sequence[Target]) -> Report:
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
        sparse_macs=row.macs // row.size * nonzeros,
    )


def _what_is_not_counted(model: Any, weights: Sequence[Weight], found: Trace) -> list[str]:
    silent = [
        weight
        for weight in weights
        if id(weight.layer) in found.unknown or (weight.spec.prunable and id(weight.variable) not in found.uses)
    ]
    layers = ", ".join(dict.fromkeys(weight.layer_path or model.name for weight in silent))
    return [f"MACs are not known, and left out of the totals, for: {layers}."] if silent else []


def _row(weight: Weight, found: Trace, batch: int) -> WeightRow:
    kept = nonzero_mask(weight.values)
    nonzeros = int(np.count_nonzero(kept))
    uses = 0 if id(weight.layer) in found.unknown else found.uses.get(id(weight.variable), 0) // batch
    return WeightRow(
        name=weight.name,
        layer=weight.layer_path,
        role=weight.spec.role,
        shape=weight.shape,
        size=weight.size,
        zeros=weight.size - nonzeros,
        pattern=detect(kept, weight.spec.in_axes, weight.spec.out_axes),
        macs=uses * weight.size,
        sparse_macs=uses * nonzeros,
        bytes=math.prod(weight.variable.shape) * item_bytes(weight.variable.dtype),
    )

"""Pictures of a quantization's report, by reference: ranges of tensors, and errors of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prunekit.anatomy.records.sections import Picture, largest_by


def ranges_picture(ranges: Sequence[Mapping[str, Any]]) -> Picture:
    """Returns a picture with a bar for each range, or for each of the widest, in the model's order.

    Args:
        ranges: `name`, `low`, `high` and `chosen` ("data" or "kernel") of each range; at least one.
    """
    shown = largest_by(ranges, lambda one: one["high"] - one["low"])
    kernel = sum(one["chosen"] == "kernel" for one in ranges)
    low, high = min(one["low"] for one in ranges), max(one["high"] for one in ranges)
    told = f"{len(ranges)} {'range' if len(ranges) == 1 else 'ranges'} between {low:.4g} and {high:.4g}"
    told += f", {kernel} of them prescribed by kernels" if kernel else ""
    return Picture(
        "Range of each tensor",
        _which(len(shown), len(ranges), "widest"),
        f"Bars from the lowest to the highest value of a tensor: {told}. The table has the figures.",
        "ranges",
        {"ranges": shown},
        wide=True,
    )


def errors_picture(errors: Sequence[Mapping[str, Any]]) -> Picture:
    """Returns a picture with the error of each weight, or of those with the largest errors, in the model's order.

    Args:
        errors: `name`, `error` and `bits` of each weight; at least one.
    """
    shown = largest_by(errors, lambda one: one["error"])
    worst = max(errors, key=lambda one: one["error"])
    told = f"{worst['error']:.2g} at {worst['name']}"
    if len(errors) > 1:
        told = f"from {min(one['error'] for one in errors):.2g} to {told}"
    count = "error of 1 weight" if len(errors) == 1 else f"errors of {len(errors)} weights"
    return Picture(
        "Error of each weight",
        _which(len(shown), len(errors), "largest"),
        f"Points: {count}, {told}. The table has the figures.",
        "errors",
        {"errors": shown},
        wide=True,
    )


def bits_picture(data: Mapping[str, Any]) -> Picture:
    """Returns a picture of what bits cost: bytes of the model against its error, or against the evaluated metric.

    Args:
        data: `path`, the best choices as [bytes, error], from few bits to many; `chosen`, [bytes, error] of the choice;
            `budget` in bytes or None; `trials`, the evaluated choices as [bytes, metric]; `floor` of the metric or
            None.
    """
    size, error = data["chosen"]
    if data["trials"]:
        title, told = "Metric against bytes", f"{len(data['trials'])} evaluated choices, floor {data['floor']:.6g}"
        caption = "Each point is a choice of bits that was quantized and evaluated; the dashed line is the floor."
    else:
        title, told = "Error against bytes", f"from {data['path'][0][0]:,} to {data['path'][-1][0]:,} bytes"
        caption = "The best choices from the fewest to the most bits; the dashed line is the budget."
    label = f"{told}; the choice has {size:,} bytes and a summed error of {error:.3g}. The table has the figures."
    return Picture(title, caption, label, "bits", dict(data), wide=True)


def _which(shown: int, total: int, chosen: str) -> str:
    if shown < total:
        return f"The {shown} {chosen} of {total}, in the model's order; the table has the others."
    return "In the model's order."

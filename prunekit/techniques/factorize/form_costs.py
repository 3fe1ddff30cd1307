"""Multiply-accumulates of the layers of a form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from prunekit.techniques.factorize.forms import SEPARABLE, TUCKER, Layout, Structure


class FormCosts:
    """What the forms of a layer compute for one example.

    Args:
        layer: The layer.
        layout: The axes of its weight.
        uses: Multiply-accumulates of one entry of the weight; 0 if they are unknown.
        output: Shape of the layer's output; None if it is unknown.
    """

    def __init__(self, layer: Any, layout: Layout, uses: float, output: Sequence[int | None] | None):
        self._layout, self._uses = layout, uses
        self._ratios = _ratios(layer, output) if layout.window else []

    def macs(self, structure: Structure) -> float:
        """Returns the multiply-accumulates of the layers of a form."""
        sizes = [float(math.prod(shape)) for shape in self._layout.shapes(structure)]
        if structure.form == TUCKER:
            # It is computed before the strides of the window.
            sizes[0] *= math.prod(self._ratios)
        elif structure.form == SEPARABLE:
            sizes[0] *= self._ratios[1]
        return self._uses * sum(sizes)


def _ratios(layer: Any, output: Sequence[int | None] | None) -> list[float]:
    """Returns the length of each side of a convolution's input, as a multiple of that of its output."""
    strides = [float(one) for one in layer.strides]
    try:
        shape = layer.input.shape
    except (AttributeError, ValueError):
        # Called in a model without a graph, or several times.
        return strides
    last = layer.data_format == "channels_last"
    before, after = ((one or ())[1:-1] if last else (one or ())[2:] for one in (shape, output))
    if len(after) != len(strides) or None in (*before, *after) or 0 in after:
        return strides
    return [one / other for one, other in zip(before, after, strict=True)]

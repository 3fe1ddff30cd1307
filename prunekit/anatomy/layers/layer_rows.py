"""Rows of the table of layer types, and the descriptions of weights that several rows share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prunekit.anatomy.layers.counting import LayerShapes, Product
from prunekit.anatomy.layers.weight_spec import WeightSpec

STATE = "it is state that the layer keeps, not a weight that it learns"
Uses = Callable[[Any, LayerShapes], "int | Mapping[str, int]"]
Weights = Mapping[str, "WeightSpec | Callable[[Any], WeightSpec]"]


@dataclass(frozen=True)
class LayerRow:
    """One row of the table.

    Attributes:
        weights: Attribute name (without leading underscore) -> `WeightSpec`, or function layer -> `WeightSpec`.
        uses: Function (layer, Call) -> number of multiply-accumulates per kernel element in that call: one number for
            all kernels, or a dict per attribute. None: the weights take part in no counted multiply-accumulate.
        products: Function (layer, Call) -> the products between activations (attention).
        counted: False if the MACs of this layer type are unknown.
    """

    weights: Weights
    uses: Uses | None = None
    products: Callable[[Any, LayerShapes], tuple[Product, ...]] | None = None
    counted: bool = True


# ---------------------------------------------------------------- specs

KERNEL = WeightSpec("kernel", (-2,), (-1,))
TRANSPOSED = WeightSpec("kernel", (-1,), (-2,))
# Each (channel, multiplier) pair is a separate output unit that sums over space only: there is no input axis.
DEPTHWISE = WeightSpec("depthwise_kernel", (), (-2, -1), prunable=False, parallel_axes=(-2,))
RECURRENT = WeightSpec("recurrent_kernel", (-2,), (-1,))
# A lookup reads one row and sums over no axis.
EMBEDDING = WeightSpec("embedding", (-2,), (-1,), parallel_axes=(-2,))
# Every example reads the whole table of positions, and a zero saves no work: out by default.
POSITION = WeightSpec("embedding", (-2,), (-1,), prunable=False, parallel_axes=(-2,))
BIAS = WeightSpec("bias", (), (-1,), prunable=False)
NORM = WeightSpec("normalization", (), (), prunable=False)
NORM_STATE = WeightSpec("normalization", (), (), prunable=False, refused=STATE)
OTHER = WeightSpec("other", (), (), prunable=False)
OTHER_STATE = WeightSpec("other", (), (), prunable=False, refused=STATE)
SLOPE = WeightSpec("other", (), (), prunable=False, refused="a zero slope changes the activation and saves no work")

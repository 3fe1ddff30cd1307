"""Bytes of weights in LiteRT files."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import keras

from prunekit.anatomy.layers.linear_kinds import TRANSPOSED
from prunekit.techniques.quantize.grids.grids import FEW_BITS
from prunekit.techniques.quantize.placement.form_operations import FusedLstm
from prunekit.techniques.quantize.placement.placement import Placement
from prunekit.techniques.quantize.placement.subpixels import subpixels
from prunekit.techniques.quantize.placement.units import RoundedWeight

L = keras.layers
FLOAT_BYTES, ZERO_POINT_BYTES = 4, 8
# Constants of float operations with fewer entries, or fewer for each scale, would not become smaller.
ENTRIES, PER_SCALE = 64, 8


@dataclass(frozen=True)
class StoredWeight:
    """What a LiteRT file holds of a weight.

    Attributes:
        entries: Bytes of the entries: two codes of up to 4 bits share a byte, others have one, floats four.
        scales: Number of scales; 0 for floats, and for a table on the grid of the tensors that are made of its rows.
        zero_points: Number of zero points, which are one vector: that of all weights with as many.
    """

    entries: int
    scales: int = 0
    zero_points: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of the entries and the scales."""
        return self.entries + FLOAT_BYTES * self.scales


def zero_point_bytes(weights: Iterable[StoredWeight]) -> int:
    """Returns the bytes of the zero points of weights in one file, which stores equal vectors once."""
    return ZERO_POINT_BYTES * sum({one.zero_points for one in weights})


def stored_weight(
    placement: Placement, weight: RoundedWeight, bits: int | None, activations: int | None
) -> StoredWeight:
    """Returns what a LiteRT file holds of a weight.

    TRANSPOSE_CONV reads no codes of 4 bits, and of the kernels with tensors of 16 bits that of Dense layers
    alone does. Small constants of operations in floating point stay in floating point, and so do those inside of loops:
    the weights of recurrent layers that are not unrolled. A shorter group is stored as long as the others.

    Args:
        placement: Where tensors are rounded.
        weight: The weight.
        bits: Bits of a code; None for a weight in floating point.
        activations: Bits of the tensors between layers; None if these stay in floating point.
    """
    shape, units = tuple(weight.variable.shape), placement.readers[id(weight.variable)]
    size, scales = math.prod(shape), math.prod(weight.granularity.parameter_shape(shape))
    floats = StoredWeight(FLOAT_BYTES * size)
    if bits is not None and all(isinstance(unit.first.operation, FusedLstm) for unit in units):
        return StoredWeight(_code_bytes(size, 8), scales, 1)
    if bits is None or any(_is_in_loop(unit.first.operation, weight.variable) for unit in units):
        return floats
    layers = [unit.first.operation for unit in units]
    blocks = subpixels(layers[0], activations)
    if blocks is not None and all(unit.is_linear for unit in units):
        entries = [part.entries * math.prod(shape[-2:]) for part in blocks.parts]
        # Kernels with equally many scales share these.
        scales *= sum({part.pixels for part in blocks.parts})
        return StoredWeight(sum(_code_bytes(one, bits) for one in entries), scales, scales)
    if activations is not None and all(unit.is_linear for unit in units):
        return StoredWeight(_code_bytes(size, bits if _packs(layers, activations) else 8), scales, scales)
    if activations == 8 and bits > FEW_BITS and all(id(layer) in placement.integer_tables for layer in layers):
        return StoredWeight(_code_bytes(size, bits))
    if size < max(ENTRIES, PER_SCALE * scales):
        return floats
    group = weight.granularity.group_size
    if group is None:
        return StoredWeight(_code_bytes(size, bits), scales, scales)
    # The scales of groups are a constant of their own, without zero points.
    return StoredWeight(_code_bytes(scales * group, bits), scales)


def _code_bytes(size: int, bits: int) -> int:
    return -(-size // 2) if bits <= FEW_BITS else size


def _packs(layers: list[Any], activations: int) -> bool:
    """Returns True if the integer kernels of layers read two codes in each byte."""
    packed = (L.Dense, L.EinsumDense) if activations == 16 else L.Layer
    return all(isinstance(layer, packed) and not isinstance(layer, TRANSPOSED) for layer in layers)


def _is_in_loop(layer: Any, variable: Any) -> bool:
    """Returns True for a weight of a recurrent layer that files compute in a loop."""
    if not isinstance(layer, L.Layer):
        return False
    loops = [one for one in layer._flatten_layers() if isinstance(one, L.RNN) and not one.unroll]
    return any(variable is held for loop in loops for held in loop.variables)

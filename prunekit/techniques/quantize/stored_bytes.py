"""Bytes of weights in LiteRT files."""

from __future__ import annotations

import math
from typing import Any

import keras

from prunekit.anatomy.linear_kinds import TRANSPOSED, is_linear_kind
from prunekit.techniques.quantize.grids import Granularity

FLOAT_BYTES = 4
# Constants of float operations with fewer entries, or fewer for each scale, would not become smaller.
ENTRIES, PER_SCALE = 64, 8


def stored_bytes(size: int, bits: int | None, scales: int) -> int:
    """Returns the bytes of a weight and its scales: two codes of up to 4 bits share a byte, others have one.

    Args:
        size: Number of entries.
        bits: Bits of a code; None for a weight in floating point.
        scales: Number of scales.
    """
    if bits is None:
        return FLOAT_BYTES * size
    return (-(-size // 2) if bits <= 4 else size) + FLOAT_BYTES * scales


def bytes_in_file(target: Any, bits: int | None, granularity: Granularity, activations: int | None) -> int:
    """Returns the bytes of a weight and its scales in a file, as `stored_bytes` where kernels read its codes.

    Transposed convolutions read no codes of 4 bits, and of the kernels with tensors of 16 bits that of Dense layers
    alone does. Small constants of operations in floating point stay in floating point. A shorter group is stored as
    long as the others.

    Args:
        target: The weight.
        bits: Bits of a code; None for a weight in floating point.
        granularity: Which entries share a scale.
        activations: Bits of the tensors between layers; None if these stay in floating point.
    """
    size, scales = math.prod(target.shape), math.prod(granularity.parameter_shape(tuple(target.shape)))
    if bits is None:
        return stored_bytes(size, None, 0)
    if activations is None or not is_linear_kind(target.layer):
        stored = bits if size >= max(ENTRIES, PER_SCALE * scales) else None
        codes = scales * granularity.group_size if stored and granularity.group_size else size
        return stored_bytes(codes, stored, scales)
    packed = (keras.layers.Dense, keras.layers.EinsumDense) if activations == 16 else keras.layers.Layer
    packs = isinstance(target.layer, packed) and not isinstance(target.layer, TRANSPOSED)
    return stored_bytes(size, bits if packs else 8, scales)

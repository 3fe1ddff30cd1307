"""Masks of one weight with a given number of units."""

import math

import numpy as np

from prunekit.sparsity.selection import keep_largest_of_array
from prunekit.techniques.pruning.masks.mask_maker import ArrayMaskMaker


def kept_units(maker: ArrayMaskMaker, mask: np.ndarray) -> int:
    """Returns the number of units that a mask keeps: of entries, blocks or channels."""
    with np.errstate(all="ignore"):
        units = maker.pool(np.where(mask, 1.0, -math.inf), mask)
        return int(np.count_nonzero(mask) if units.size == mask.size else np.count_nonzero(units > -math.inf))


def mask_of(maker: ArrayMaskMaker, importance: np.ndarray, mask: np.ndarray, kept: int) -> np.ndarray:
    """Returns a mask of the most important units.

    Args:
        maker: Pools the weight's entries into units.
        importance: Importance of each entry, the weight's shape.
        mask: Entries that may be kept.
        kept: Number of units to keep.
    """
    with np.errstate(all="ignore"):
        pooled = maker.pool(importance, mask)
        return maker.finish(importance, pooled, mask, keep_largest_of_array(pooled, kept))[0]


def exchanged(
    maker: ArrayMaskMaker, mask: np.ndarray, kept_first: np.ndarray, grown_first: np.ndarray, share: float
) -> np.ndarray:
    """Returns a mask with as many kept units as `mask`, some of them others.

    Args:
        maker: Pools the weight's entries into units.
        mask: Current mask.
        kept_first: Importance of each entry; kept units with the smallest are dropped.
        grown_first: Score of each entry; pruned units with the largest are kept in their place.
        share: Fraction of the kept units to exchange.
    """
    everywhere = np.ones_like(mask)
    importance, score = (maker.pool(np.asarray(values, "float32"), everywhere) for values in (kept_first, grown_first))
    kept = maker.pool(np.where(mask, 1.0, -math.inf).astype("float32"), mask) > -math.inf
    count = min(int(share * np.count_nonzero(kept)), int(np.count_nonzero(~kept)))
    dropped = keep_largest_of_array(np.where(kept, -importance, -np.inf), count)
    grown = keep_largest_of_array(np.where(kept, -np.inf, score), count)
    return maker.expanded((kept & ~dropped) | grown)

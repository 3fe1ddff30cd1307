"""Criteria from the Hessians of layer outputs: what removing a weight costs, and how the others make up for it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from keras import ops

from prunekit.core.statistics.layer_products import LayerProduct
from prunekit.sparsity.arguments import whole
from prunekit.sparsity.patterns import NM, Block, Pattern, Unstructured
from prunekit.sparsity.reconstruction import (
    DAMPING,
    InverseFactor,
    Selection,
    curvatures,
    damped_hessian,
    refit,
)
from prunekit.sparsity.scores import Criterion
from prunekit.sparsity.selection import keep_largest_of_array
from prunekit.techniques.pruning.masks.mask_maker import ArrayMaskMaker


class HessianCriterion(Criterion):
    """w ** 2 / (2 [H^-1]_jj) for a weight w of input j."""

    needs: ClassVar[frozenset[str]] = frozenset({"hessian"})

    def __call__(self, weight, *, target: Any = None, seed_offset: int = 0, statistics: Any = None):
        """Float32 importances, the shape of `weight`."""
        curvature = ops.convert_to_tensor(statistics["hessian"]["curvature"])
        return ops.square(ops.cast(weight, curvature.dtype)) * curvature / 2


@dataclass(frozen=True)
class OutputError(HessianCriterion):
    """w ** 2 / (2 [H^-1]_jj): half the squared error of the layer's outputs after removing a weight of input j.

    The other weights of the same output are assumed to compensate (optimal brain surgeon for one layer). H = X^T X per
    example is the Hessian of half the layer's squared output error, which needs inputs but no labels; 1 % of its mean
    diagonal is added to its diagonal. Importances compare the errors of outputs before the activations, so between
    layers they are comparable only as far as these outputs are.

    In `pk.prune` with repair="weights" each layer is pruned in rounds: after each the kept weights are refitted to the
    layer's outputs, and the next round ranks the new weights (`prunekit.sparsity.reconstruction.thin`).

    Args:
        refits: Number of these rounds, at least 1. The number of kept weights falls by the cubic schedule of Zhu &
            Gupta 2017; the last round keeps as many as the importances of the unpruned model.

    Source: Hassibi & Stork 1992, eq. 5; with the Hessian of one layer Dong et al. 2017, arXiv:1705.07565, eq. 7.
    """

    refits: int = 16

    def __post_init__(self) -> None:
        object.__setattr__(self, "refits", whole("refits", self.refits, 1, largest=None))


@dataclass(frozen=True)
class SparseGPT(HessianCriterion):
    """Prunes the inputs of a layer run by run; all later weights compensate before the next run is chosen.

    In `pk.prune` layers are pruned one after another, on the inputs that the pruned layers before them produce. During
    a training the masks follow from the importances of `OutputError`, and the kept weights are set to the best fit at
    each mask update.

    Args:
        damping: Fraction of the mean diagonal of H that is added to its diagonal, which bounds its condition number.
        run: Number of inputs whose weights are chosen together. Each run keeps as many weights as it would by the
            importances of `OutputError` over the whole layer.

    Source: Frantar & Alistarh 2023, arXiv:2301.00774, section 3, algorithm 1.
    """

    damping: float = DAMPING
    run: int = 128

    reconstructs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.damping, bool) or not isinstance(self.damping, int | float) or not 0 <= self.damping < 100:
            raise ValueError(f"`damping` is a fraction of the mean diagonal, at least 0. Received: {self.damping!r}.")
        object.__setattr__(self, "run", whole("run", self.run, 1, largest=None))

    def fitted(self, product: LayerProduct, weight: np.ndarray, mask: np.ndarray, hessian: np.ndarray) -> np.ndarray:
        """Returns the kept weights that keep the layer's outputs for a given mask, all in the kernel's shape."""
        if product.diagonal:
            # One-hot rows: no other weight can compensate.
            return np.where(mask, weight, 0.0)
        rows = zip(product.matrix(weight).astype("float64"), product.matrix(mask), hessian, strict=True)
        return product.kernel(
            np.stack([refit(matrix, kept, damped_hessian(one, self.damping)[0]) for matrix, kept, one in rows])
        )


@dataclass(frozen=True, eq=False)
class RunSelection:
    """Chooses which weights of one target are kept, while its layer is reconstructed run by run.

    Attributes:
        maker: Pools the weight's entries into units, and expands units to entries.
        pattern: Pattern of the units.
        planned: Mask of the weight; as many units are kept as in it.
        allowed: Mask of the entries that may be kept.
        length: Number of inputs whose weights are chosen together.
    """

    maker: ArrayMaskMaker
    pattern: Pattern
    planned: np.ndarray
    allowed: np.ndarray
    length: int

    def __call__(
        self, product: LayerProduct, wanted: np.ndarray, factors: Sequence[InverseFactor]
    ) -> list[tuple[list[slice], Selection]]:
        """Returns, for each group, the runs of inputs and what chooses the kept weights of a run.

        Args:
            product: The product of the target.
            wanted: Weights to reproduce, shape (groups, inputs, outputs).
            factors: Factor of the inverse of each group's damped Hessian.
        """
        costs = product.kernel(np.square(wanted) * np.stack([curvatures(factor) for factor in factors])[:, :, None])
        kept = self.maker.kept_units(self.planned)
        planned = product.matrix(self.maker.mask_of(costs, self.allowed, kept))
        parts = list(runs(product, self.length, self.pattern))
        groups = zip(planned, product.matrix(self.allowed), strict=True)
        return [(parts, _select(plan, allowed, self.pattern)) for plan, allowed in groups]


def runs(product: LayerProduct, length: int, pattern: Pattern) -> Iterator[slice]:
    """Yields runs of about `length` inputs that cut no block and no N:M group."""
    if isinstance(pattern, Unstructured):
        height, part = 1, product.inputs
    else:
        # The inputs of each window position have blocks and groups of their own.
        height = pattern.m if isinstance(pattern, NM) else pattern.inputs if isinstance(pattern, Block) else 1
        part = product.inputs // product.window
    step = max(length // height, 1) * height
    for position in range(0, product.inputs, part):
        for start in range(position, position + part, step):
            yield slice(start, min(start + step, position + part))


def _select(planned: np.ndarray, allowed: np.ndarray, pattern: Pattern):
    """Returns the selection of a reconstruction: as many units per run as `planned` keeps, by the current errors."""

    def select(rows: slice, scores: np.ndarray) -> np.ndarray:
        plan = planned[rows]
        if type(pattern) not in (Unstructured, Block, NM) or plan.all() or not plan.any():
            return plan
        pooled = np.asarray(pattern.pool(np.where(allowed[rows], scores, -np.inf), (0,), (1,)))
        kept = plan.sum() if pooled.size == plan.size else _units(plan, pattern)
        chosen = keep_largest_of_array(pooled, int(kept))
        return np.asarray(pattern.expand(chosen, plan.shape, (0,), (1,))) & allowed[rows]

    return select


def _units(plan: np.ndarray, pattern: Pattern) -> int:
    return int(np.count_nonzero(np.asarray(pattern.pool(np.where(plan, 0.0, -np.inf), (0,), (1,))) > -np.inf))

"""Pruning criteria from derivatives of the loss: SNIP, GraSP, SynFlow, Taylor, Fisher, optimal brain damage.

Each multiplies a weight by a derivative. The derivatives are statistics; `score_statistics` and `example_statistics` of
`training_tools/gradients/` collect them. Factors that are the same for all weights of a model, such as SNIP's
normalisation, do not change the order of the weights and are left out.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from keras import ops

from prunekit.sparsity.arguments import whole
from prunekit.sparsity.scores import Criterion, wide


@dataclass(frozen=True)
class SNIP(Criterion):
    """SNIP, |w * g|: the change of the loss if the weight is removed, to first order, whatever its sign.

    Intended for one update before training. Needs labelled data and a compiled model. The gradient g of the loss is
    that of a training step: batch normalisation uses the statistics of each batch.

    Source: Lee et al. 2019, arXiv:1810.02340, eq. 4 and 6 (without the normalisation by the sum over all weights).
    """

    needs: ClassVar[frozenset[str]] = frozenset({"gradient"})
    before_training: ClassVar[bool] = True

    def __call__(self, weight, *, target: Any = None, seed_offset: int = 0, statistics: Any = None):
        """|weight * statistics["gradient"]|."""
        return ops.abs(_product(weight, statistics["gradient"]))


@dataclass(frozen=True)
class GraSP(Criterion):
    """GraSP, w * (H g): by how much the norm of the gradient decreases if the weight is removed, to first order.

    Weights whose removal increases the norm, which lets the loss fall faster, have a negative importance and are pruned
    first. Intended for one update before training. Needs labelled data and a compiled model.

    Source: Wang et al. 2020, arXiv:2002.07376, eq. 8, with the opposite sign (the paper removes the largest scores) and
        the compiled loss in place of a softmax with temperature.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"gradient_flow"})
    before_training: ClassVar[bool] = True

    def __call__(self, weight, *, target: Any = None, seed_offset: int = 0, statistics: Any = None):
        """weight * statistics["gradient_flow"]."""
        return _product(weight, statistics["gradient_flow"])


@dataclass(frozen=True)
class SynFlow(Criterion):
    """SynFlow, |w| * dR/d|w|: the part of the total flow R through the weight, for the model with weights |w|.

    R is the sum of the outputs on an input of ones. Needs no data. A mask update prunes in `rounds` rounds, each with
    new scores, because a single round would empty whole layers: round k of n leaves the density
    d0 ** (1 - k / n) * d ** (k / n), from the density d0 before the update to d. Intended for one update before
    training; each update of a schedule takes all rounds.

    Args:
        rounds: Number of rounds of a mask update.

    Source: Tanaka et al. 2020, arXiv:2006.05467, eq. 2 and algorithm 1.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"synflow"})
    before_training: ClassVar[bool] = True
    rounds: int = 100

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", whole("rounds", self.rounds, 1))

    def __call__(self, weight, *, target: Any = None, seed_offset: int = 0, statistics: Any = None):
        """|weight| * statistics["synflow"]."""
        return ops.abs(_product(weight, statistics["synflow"]))


@dataclass(frozen=True)
class Taylor(Criterion):
    """First-order Taylor importance, the mean over batches of (w * g)**2, with each batch's own gradient g.

    The square of the change of a batch's loss if the weight is removed, to first order. Needs labelled data and a
    compiled model; the size of the batches matters. With a single batch the order is that of SNIP.

    Source: Molchanov et al. 2019, arXiv:1906.10771, eq. 8, averaged over mini-batches as in the paper.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"square_batch_gradient"})

    def __call__(self, weight, *, target: Any = None, seed_offset: int = 0, statistics: Any = None):
        """weight ** 2 * statistics["square_batch_gradient"]."""
        return _product(weight, weight, statistics["square_batch_gradient"])


@dataclass(frozen=True)
class Fisher(Criterion):
    """w**2 * F / 2 with the diagonal F of the empirical Fisher matrix: the mean of squared per-example gradients.

    The increase of the loss if the weight is removed, to second order, at a minimum of a log-likelihood. Needs labelled
    data and a compiled model; TensorFlow only.

    Source: Theis et al. 2018, arXiv:1801.05787, section 3 (Fisher pruning), for single weights.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"square_gradient"})

    def __call__(self, weight, *, target: Any = None, seed_offset: int = 0, statistics: Any = None):
        """weight ** 2 * statistics["square_gradient"] / 2."""
        return 0.5 * _product(weight, weight, statistics["square_gradient"])


@dataclass(frozen=True)
class OptimalBrainDamage(Criterion):
    """Saliency w**2 * h / 2 of optimal brain damage, with the diagonal h of the Gauss-Newton matrix of the loss.

    The increase of the loss if the weight is removed, to second order, where the gradient is zero. Unlike the diagonal
    of the Fisher matrix, h uses the curvature of the loss in the outputs and not the gradient's value, so it does not
    vanish where examples are fitted. Needs labelled data and a compiled model; TensorFlow only; one backward pass per
    output of the model.

    Source: LeCun et al. 1990, "Optimal brain damage", NIPS 2, section 2, with the paper's Gauss-Newton
        (Levenberg-Marquardt) approximation, and without its second approximation, a recursion over the layers that
        drops the terms between units: the diagonal of the Gauss-Newton matrix is exact.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"gauss_newton"})

    def __call__(self, weight, *, target: Any = None, seed_offset: int = 0, statistics: Any = None):
        """weight ** 2 * statistics["gauss_newton"] / 2."""
        return 0.5 * _product(weight, weight, statistics["gauss_newton"])


def _product(weight, *factors):
    """Returns the product, at least in float32: in float16 squares overflow and small gradients become zero."""
    result = wide(weight)
    for factor in factors:
        result = result * ops.cast(ops.convert_to_tensor(factor), result.dtype)
    return result


# Products without sums: the same bits in single operations and in compiled functions.
PRODUCTS = (SNIP, GraSP, SynFlow, Taylor, Fisher, OptimalBrainDamage)

"""Gradual: the default policy, whose masks only shrink."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from keras import ops

from prunekit.anatomy.layers.targets import Target
from prunekit.core.runtime import backend
from prunekit.core.statistics.layer_products import product_of
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.pruning.masks.mask_calculator import MaskCalculator
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.masks.policy import MaskPolicy, MaskRequest, MaskUpdate


@dataclass(frozen=True)
class Gradual(MaskPolicy):
    """Removes the least important units that are still kept; pruned units stay pruned.

    Source: Zhu & Gupta 2017, arXiv:1710.01878, section 3.
    """

    usual_allocation: ClassVar[str] = "auto"

    def calculator(
        self, model: Any, targets: Sequence[Target], options: PruningOptions, final_sparsity: float
    ) -> MaskCalculator:
        """Returns a `MaskCalculator`, which counts exactly."""
        return MaskCalculator(targets, options, final_sparsity)

    def update(self, request: MaskRequest) -> MaskUpdate:
        """Returns masks that are subsets of the current masks, and the weights of a criterion that reconstructs."""
        calculator = request.calculator
        found = calculator.choose(request.sparsity, request.masks, request.statistics)
        if not calculator.criterion.reconstructs or request.statistics is None:
            return found
        return replace(found, weights=[_fitted(calculator.criterion, *row) for row in _rows(request, found)])


def _rows(request: MaskRequest, found: MaskUpdate) -> Iterator[tuple[Any, ...]]:
    return zip(request.targets, found.masks, request.statistics or (), strict=True)


def _fitted(criterion: Any, target: Target, mask: Any, statistics: dict[str, Any]) -> Any:
    weight = array_of(backend.value_now(target.variable))
    fitted = criterion.fitted(product_of(target), weight, array_of(mask), statistics["hessian"]["hessian"])
    return ops.cast(ops.convert_to_tensor(fitted.astype("float32")), target.variable.dtype)

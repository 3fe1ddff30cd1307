"""Gradual: the default policy, whose masks only shrink."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prunekit.anatomy.targets import Target
from prunekit.techniques.pruning.mask_calculator import MaskCalculator
from prunekit.techniques.pruning.options import PruningOptions
from prunekit.techniques.pruning.policy import MaskPolicy, MaskRequest, MaskUpdate


@dataclass(frozen=True)
class Gradual(MaskPolicy):
    """Removes the least important units that are still kept; pruned units stay pruned.

    Source: Zhu & Gupta 2017, arXiv:1710.01878, section 3.
    """

    def calculator(
        self, model: Any, targets: Sequence[Target], options: PruningOptions, final_sparsity: float
    ) -> MaskCalculator:
        """Returns a `MaskCalculator`, which counts exactly."""
        return MaskCalculator(targets, options, final_sparsity)

    def update(self, request: MaskRequest) -> MaskUpdate:
        """Returns masks that are subsets of the current masks."""
        return request.calculator.choose(request.sparsity, request.masks, request.statistics)

"""Straight-through training: the policy whose pruned weights go on training and may return with their values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from keras import ops

from prunekit.anatomy.layers.targets import Target
from prunekit.sparsity.arguments import non_negative
from prunekit.sparsity.schedules import OneShot, Schedule
from prunekit.sparsity.shorthands import sources_of
from prunekit.techniques.pruning.masks.dense_store import DenseStore
from prunekit.techniques.pruning.masks.mask_store import MaskStore
from prunekit.techniques.pruning.masks.policy import MaskRequest, MaskUpdate
from prunekit.techniques.pruning.policies.gradual import Gradual


@dataclass(frozen=True)
class StraightThrough(Gradual):
    """Keeps dense weights beside the sparse model, and gives them the gradients of the sparse model.

    The model is exactly sparse after every update, as with every policy: forward passes and gradients use the kept
    weights alone. The values of pruned weights are held beside the model and trained by the same optimizer; each mask
    update chooses among all of them. This takes memory for a second copy of each pruned weight.

    Args:
        decay: Coefficient lambda, 0 or more: lambda times the pruned weights is added to their gradients, so that masks
            change less often (SR-STE; the paper takes 2e-4 for N:M patterns). 0 = the straight-through estimator.

    Source: Bengio et al. 2013, arXiv:1308.3432, section 4; SR-STE: Zhou et al. 2021, arXiv:2102.04010, eq. 9.
    """

    decay: float = 0.0

    regrows: ClassVar[bool] = True
    keeps_zeros: ClassVar[bool] = False
    usual_allocation: ClassVar[str] = "erk"

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay", non_negative("decay", self.decay))

    def check(self, schedule: Schedule, options: Any) -> Schedule:
        """Returns the schedule unchanged.

        Raises:
            ValueError: The schedule has one update; the criterion needs statistics of updates, or changes weights;
                `keep_zeros` is True.
        """
        if isinstance(schedule, OneShot):
            raise ValueError(
                f"Straight-through training chooses masks at several updates. Received: {schedule}. Take a schedule "
                "with updates, such as PolynomialDecay(0.0, 0.9, 0, 4000, frequency=100)."
            )
        if "training" in sources_of(options.needs) or options.criterion.reconstructs:
            raise ValueError(
                "Straight-through training chooses among the values of all weights. Received: the criterion "
                f"{options.criterion}, which reads updates or changes weights. Choose another criterion."
            )
        if options.keep_zeros:
            raise ValueError(
                "Straight-through training changes all weights. Received: keep_zeros=True, which keeps zeros pruned. "
                "Leave it out."
            )
        return schedule

    def store(self, model: Any, targets: Sequence[Target]) -> MaskStore:
        """Returns masks that hold the values of pruned weights."""
        return DenseStore(targets, model, self.decay)

    def update(self, request: MaskRequest) -> MaskUpdate:
        """Returns masks chosen among all weights."""
        everything = [ops.ones(target.shape, "bool") for target in request.targets]
        return replace(super().update(replace(request, masks=everything)), changed=True)

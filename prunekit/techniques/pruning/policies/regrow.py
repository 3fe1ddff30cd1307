"""RigL and SET: policies that exchange kept weights for pruned ones while a network trains."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from prunekit.core.runtime import backend
from prunekit.sparsity.arguments import fraction, whole
from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.patterns import NM
from prunekit.sparsity.schedules import OneShot, Schedule
from prunekit.techniques.pruning.masks.policy import MaskRequest, MaskUpdate
from prunekit.techniques.pruning.policies.gradual import Gradual


@dataclass(frozen=True)
class Exchange(Gradual):
    """At each update, drops the smallest kept units of each weight and keeps as many pruned ones in their place.

    An update first prunes to the schedule's sparsity, as the policy "gradual" does; the first one only prunes. Then
    k = fraction * (1 + cos(pi * step / end)) / 2 of the kept units are exchanged, where `end` is the last step of the
    schedule; k = fraction if the schedule has no end. Units that an update drops do not return in the same update. The
    number of kept units of each weight stays exact at every step. What returns starts at zero, with empty optimizer
    slots.

    Args:
        exchanged: Fraction of the kept units that are exchanged, in [0, 1).
    """

    exchanged: float = 0.3

    regrows: ClassVar[bool] = True
    usual_allocation: ClassVar[str] = "erk"

    def __post_init__(self) -> None:
        object.__setattr__(self, "exchanged", fraction("exchanged", self.exchanged))

    def check(self, schedule: Schedule, options: Any) -> Schedule:
        """Returns the schedule unchanged.

        Raises:
            ValueError: The schedule has one update; the pattern is N:M, whose groups units cannot leave.
        """
        if isinstance(schedule, OneShot):
            raise ValueError(
                f"{type(self).__name__} exchanges weights at several updates of a training. Received: {schedule}. Take "
                "a schedule with updates, such as ConstantSparsity(0.9, begin_step=0, end_step=7500, frequency=100)."
            )
        if isinstance(options.pattern, NM):
            raise ValueError(
                f"{type(self).__name__} exchanges units of a whole weight. Received: pattern {options.pattern}, which "
                "fixes their number in each group. Choose another pattern."
            )
        return schedule

    @abstractmethod
    def growth(self, request: MaskRequest, index: int) -> np.ndarray:
        """Returns which units of a target return first: scores of the target's shape, higher = sooner."""

    def update(self, request: MaskRequest) -> MaskUpdate:
        """Returns masks with as many kept entries as the policy "gradual" keeps."""
        found = super().update(request)
        share = self._share(request)
        if found.nans.any() or not share or all(array_of(mask).all() for mask in request.masks):
            return found
        masks = [self._exchanged(request, index, array_of(mask), share) for index, mask in enumerate(found.masks)]
        return replace(found, masks=masks, kept=np.array([np.count_nonzero(mask) for mask in masks]), changed=True)

    def _share(self, request: MaskRequest) -> float:
        end = getattr(request.schedule, "end_step", -1)
        if end <= 0:
            return self.exchanged
        return self.exchanged * (1 + math.cos(math.pi * min(request.step / end, 1.0))) / 2

    def _exchanged(self, request: MaskRequest, index: int, mask: np.ndarray, share: float) -> np.ndarray:
        weight = np.abs(array_of(backend.value_now(request.targets[index].variable)).astype("float32"))
        return request.calculator.array_maker(index).exchanged(mask, weight, self.growth(request, index), share)


@dataclass(frozen=True)
class RigL(Exchange):
    """Grows the pruned units with the largest gradients of the loss, which only the updates calculate.

    The gradient is that of the calibration data in the current weights (statistic "gradient"), for all entries,
    pruned ones included. Pass some batches of the training data as `data`; a recipe draws them itself.

    Args:
        exchanged: Fraction of the kept units that the first updates exchange.

    Source: Evci et al. 2020, arXiv:1911.11134, algorithm 1; there, the gradient is that of the current batch.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"gradient"})

    def growth(self, request: MaskRequest, index: int) -> np.ndarray:
        """|gradient| of each entry."""
        statistics: Sequence[Any] = request.statistics or ()
        return np.abs(array_of(statistics[index]["gradient"]))


@dataclass(frozen=True)
class SET(Exchange):
    """Grows random pruned units; drawn from the seed, the step and the number of the target, so repeatable.

    Args:
        exchanged: Fraction of the kept units that the first updates exchange.
        seed: Non-negative integer.

    Source: Mocanu et al. 2018, arXiv:1707.04780, algorithm 1, with dropping by magnitude alone and a cosine-annealed
        fraction, as in Evci et al. 2020.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "seed", whole("seed", self.seed, 0, largest=None))

    def growth(self, request: MaskRequest, index: int) -> np.ndarray:
        """Uniform random numbers."""
        return np.random.default_rng((self.seed, request.step, index)).random(request.targets[index].shape)

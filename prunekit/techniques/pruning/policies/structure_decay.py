"""StructureDecay: the policy that reaches an N:M pattern through (M-1):M, (M-2):M and so on."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from prunekit.anatomy.layers.targets import Target
from prunekit.sparsity.patterns import NM
from prunekit.sparsity.schedules import Schedule
from prunekit.techniques.pruning.masks.mask_calculator import MaskCalculator
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.masks.policy import MaskUpdate
from prunekit.techniques.pruning.policies.gradual import Gradual


@dataclass(frozen=True)
class StructureDecay(Gradual):
    """Tightens an N:M pattern step by step: after each update every group of M keeps the same number of weights.

    That number is M (1 - s), rounded up, for the schedule's sparsity s. Pruned weights stay pruned.

    Source: Kao et al. 2022, arXiv:2209.07617, section 3 (structure decay), with a schedule of the user's choice.
    """

    usual_allocation: ClassVar[str] = "uniform"

    def check(self, schedule: Schedule, options: PruningOptions) -> Schedule:
        """Returns the schedule with its sparsities rounded down to multiples of 1 / M.

        Raises:
            ValueError: The pattern is not N:M.
        """
        if not isinstance(options.pattern, NM):
            raise ValueError(
                f'The policy "structure_decay" tightens an N:M pattern. Received: pattern={options.pattern}. Pass '
                'pattern="2:4" or another N:M, or leave the policy out.'
            )
        return schedule if isinstance(schedule, GroupSteps) else GroupSteps(schedule, options.pattern.m)

    def calculator(
        self, model: Any, targets: Sequence[Target], options: PruningOptions, final_sparsity: float
    ) -> MaskCalculator:
        """Returns a calculator with the pattern of each sparsity."""
        return TighteningCalculator(targets, options, final_sparsity)


@dataclass(frozen=True)
class GroupSteps(Schedule):
    """A schedule whose sparsities are rounded down to multiples of 1 / m; the final sparsity stays as it is.

    Args:
        inner: The schedule.
        m: Length of a group.
    """

    inner: Schedule
    m: int

    @property
    def begin_step(self) -> int:
        """The first update step."""
        return self.inner.begin_step

    @property
    def final_sparsity(self) -> float:
        """The final sparsity."""
        return self.inner.final_sparsity

    @property
    def final_step(self) -> int:
        """The first step at which the final sparsity holds."""
        return self.inner.final_step

    @property
    def last_update(self) -> int | None:
        """The last update step; None if updates never end."""
        return self.inner.last_update

    @property
    def frequency(self) -> int:
        """Number of steps between two updates."""
        return self.inner.frequency

    @property
    def is_open(self) -> bool:
        """Whether the steps of the schedule are unknown yet."""
        return self.inner.is_open

    def fitted(self, steps: int | None) -> Schedule:
        """Returns the schedule for a training of `steps` optimizer updates."""
        return replace(self, inner=self.inner.fitted(steps))

    def _sparsity(self, step: int) -> float:
        return 1.0 - kept_of(self.m, self.inner(step)) / self.m


def kept_of(m: int, sparsity: float) -> int:
    """Returns how many weights of a group of m are kept: m (1 - sparsity), rounded up.

    >>> [kept_of(4, sparsity) for sparsity in (0.0, 0.2, 0.25, 0.4, 0.5)]
    [4, 4, 3, 3, 2]
    """
    # 8 * (1 - 0.7) is 2.4000000000000004; a whole number may be missed in the same way.
    return min(m, math.ceil(m * (1.0 - sparsity) - 1e-6))


class TighteningCalculator(MaskCalculator):
    """Calculates masks with k of every M weights kept, where k follows from the sparsity.

    Args:
        targets: The weights.
        options: Pruning options with an N:M pattern.
        final_sparsity: Final sparsity, 1 - N / M.

    Raises:
        ValueError: The pattern does not fit a target, or cannot reach the sparsity.
    """

    def __init__(self, targets: Sequence[Target], options: PruningOptions, final_sparsity: float):
        super().__init__(targets, options, final_sparsity)
        final = cast(NM, self.pattern)
        self._m = final.m
        patterns = {kept: NM(kept, final.m) for kept in range(final.n + 1, final.m)}
        self._looser = {
            kept: MaskCalculator(targets, dataclasses.replace(options, pattern=pattern), pattern.sparsity)
            for kept, pattern in patterns.items()
        }

    def choose(self, sparsity: float, masks: Sequence[Any], statistics: Sequence[Any] | None = None) -> MaskUpdate:
        """Returns masks of the pattern k:M; positions pruned in `masks` stay pruned."""
        looser = self._looser.get(kept_of(self._m, sparsity))
        return (
            super().choose(sparsity, masks, statistics)
            if looser is None
            else looser.choose(sparsity, masks, statistics)
        )

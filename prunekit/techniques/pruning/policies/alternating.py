"""AC/DC: the policy of alternating phases with pruned weights and with all weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from keras import ops

from prunekit.core.runtime import backend
from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.schedules import ConstantSparsity, Schedule
from prunekit.sparsity.selection import count_true
from prunekit.techniques.pruning.masks.mask_store import leaking
from prunekit.techniques.pruning.masks.policy import MaskRequest, MaskUpdate
from prunekit.techniques.pruning.policies.gradual import Gradual


@dataclass(frozen=True)
class Alternation(Schedule):
    """Sparsity `sparsity` and 0 in turns, each for `phase` steps from `first` on; `sparsity` from `last` on.

    Args:
        sparsity: Sparsity of the phases with pruned weights, in [0, 1).
        first: First update step, the beginning of the first phase with pruned weights.
        last: Last update step, the beginning of the last phase with pruned weights.
        phase: Steps of a phase.
    """

    sparsity: float
    first: int
    last: int
    phase: int

    @property
    def begin_step(self) -> int:
        """`first`."""
        return self.first

    @property
    def final_sparsity(self) -> float:
        """`sparsity`."""
        return self.sparsity

    @property
    def final_step(self) -> int:
        """`last`."""
        return self.last

    @property
    def last_update(self) -> int:
        """`last`."""
        return self.last

    @property
    def frequency(self) -> int:
        """`phase`."""
        return self.phase

    def _sparsity(self, step: int) -> float:
        return 0.0 if (step - self.first) // self.phase % 2 else self.sparsity


@dataclass(frozen=True)
class ACDC(Gradual):
    """Trains with pruned weights and with all weights in turns; the last phase is pruned, and so is the model.

    Takes a `ConstantSparsity` schedule: before its `begin_step` all weights train, `frequency` is the number of steps
    of each phase, and `end_step` begins the last phase. Each pruned phase begins with newly chosen masks. A phase with
    all weights keeps every weight again: the pruned ones start at zero with empty optimizer slots.

    Source: Peste et al. 2021, arXiv:2106.12379, algorithm 1.
    """

    regrows: ClassVar[bool] = True
    keeps_zeros: ClassVar[bool] = False
    usual_allocation: ClassVar[str] = "erk"

    def check(self, schedule: Schedule, options: Any) -> Schedule:
        """Returns the schedule of the phases.

        Raises:
            ValueError: The schedule is not a ConstantSparsity with an `end_step` after its `begin_step`; `keep_zeros`
                is True.
        """
        if not isinstance(schedule, ConstantSparsity) or schedule.end_step <= schedule.begin_step:
            raise ValueError(
                "AC/DC alternates between phases of a ConstantSparsity schedule with an end. Received: "
                f"{schedule}. Take, for example, ConstantSparsity(0.9, begin_step=500, end_step=4500, frequency=500): "
                "phases of 500 steps, pruned from step 4500 on."
            )
        if options.keep_zeros:
            raise ValueError(
                "AC/DC trains all weights in turns. Received: keep_zeros=True, which keeps zeros pruned. Leave it out."
            )
        return Alternation(schedule.target_sparsity, schedule.begin_step, schedule.end_step, schedule.frequency)

    def update(self, request: MaskRequest) -> MaskUpdate:
        """Returns the masks of a pruned phase, or masks that keep every entry."""
        if request.sparsity:
            return super().update(request)
        masks = [ops.ones(target.shape, "bool") for target in request.targets]
        sizes = np.array([target.size for target in request.targets])
        return MaskUpdate(masks, nans=np.zeros_like(sizes), leaks=_leaks(request), kept=sizes)


def _leaks(request: MaskRequest) -> np.ndarray:
    pairs: Sequence[tuple[Any, Any]] = list(zip(request.masks, request.targets, strict=True))
    return np.array([int(array_of(count_true(leaking(m, backend.value_now(t.variable))))) for m, t in pairs])

"""What operations share that try several ways, and take the one whose outputs are nearest to the model's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from prunekit.core.layerwise.layerwise import Progress

# Parameters of the largest model on which several ways are tried: a trial takes as long as the repair.
LARGEST = 5_000_000

_Tried = TypeVar("_Tried")


def nearest(tried: Sequence[tuple[float, _Tried]]) -> tuple[_Tried, str]:
    """Returns what has the smallest error, and why it is taken, as a clause.

    Args:
        tried: The error of the outputs of each way, and what was found in that way.
    """
    (error, best), *others = sorted(tried, key=lambda one: one[0])
    reason = f"since its outputs are nearest: error {error:.3g}"
    if others:
        reason += f", otherwise {' to '.join(dict.fromkeys(f'{one[0]:.3g}' for one in (others[0], others[-1])))}"
    return best, reason


def trial_progress(progress: Progress | None, number: int, count: int, text: str = "") -> Progress | None:
    """Returns the progress that trial `number` of `count` tells.

    Args:
        progress: What is told of all trials.
        number: Number of the trial, from 0.
        count: How many trials there are.
        text: What comes before the name of a layer.
    """
    if progress is None:
        return None
    trial = f"trial {number + 1} of {count}: {text}"
    return lambda done, total, name: progress(number * total + done, count * total, f"{trial}{name}")

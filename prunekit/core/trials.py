"""What operations share that try several ways, and take the one whose outputs are nearest to the model's."""

from __future__ import annotations

from collections.abc import Sequence

from prunekit.core.layerwise import Progress

# Parameters of the largest model on which several ways are tried: a trial takes as long as the repair.
LARGEST = 5_000_000


def reason_of_nearest(error: float, others: Sequence[float]) -> str:
    """Returns why a way was taken, as a clause.

    Args:
        error: The error of its outputs.
        others: The errors of the others.
    """
    reason = f"since its outputs are nearest: error {error:.3g}"
    if not others:
        return reason
    ends = dict.fromkeys(f"{one:.3g}" for one in (min(others), max(others)))
    return f"{reason}, otherwise {' to '.join(ends)}"


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

"""Messages for the user at the end of a training: what the pruning could not do, and the remedy."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from prunekit.anatomy.layers.model_weights import weights_in
from prunekit.anatomy.records.reports import Skipped
from prunekit.sparsity.schedules import Schedule
from prunekit.techniques.pruning.masks.mask_calculator import MaskCalculator
from prunekit.techniques.pruning.masks.mask_store import MaskStore

LATER_TRAINING = (
    "The zeros are part of the weights. Training that continues without pk.PruningCallback lets them grow back: pass "
    "callbacks=[pk.KeepZeros()] to a later fit, or write `with pk.KeepZeros(model, optimizer):` around a loop."
)


def shortfall(schedule: Schedule, steps: int, *, grace: int, reached: float | None = None) -> list[str]:
    """Returns a message if a training of `steps` steps ends before the schedule; else [].

    Args:
        schedule: The schedule.
        steps: Number of steps.
        grace: Number of steps before the final step at which the training still reaches the final sparsity.
        reached: Sparsity at the end of the training; None if the training is still ahead.
    """
    final = schedule.final_step
    if steps >= final - grace:
        return []
    ended, will_end = ("has only", "will end") if reached is None else ("ended after", "ended")
    sparsity = schedule(schedule.latest_update(steps) or 0) if reached is None else reached
    return [
        f"The schedule lands on sparsity {schedule.final_sparsity:g} at step {final}, but training {ended} {steps} "
        f"steps: it {will_end} at {sparsity:.4f}. Train longer, or let the schedule end by step {steps}."
    ]


def abrupt(schedule: Schedule) -> list[str]:
    """Returns a message if a schedule that rises over several steps changes the masks at its last step only."""
    begin, end, frequency = schedule.begin_step, schedule.final_step, getattr(schedule, "frequency", None)
    if frequency is None or end - begin < 2 or schedule.latest_update(end - 1) not in (None, begin):
        return []
    return [
        f"The schedule rises from step {begin} to step {end}, but the masks change at step {end} only, because "
        f"frequency={frequency} is not smaller than these {end - begin} steps. For gradual pruning, pass a smaller "
        f"frequency, such as {max(1, (end - begin) // 20)}."
    ]


def step_never_called(schedule: Schedule, sparsity: float, when: str) -> str:
    """Returns the message that `Pruner.step` was never called; `when` says when to call it."""
    return (
        f"Pruner.step() was never called, so the schedule was not followed: the sparsity is {sparsity:.4f}, and the "
        f"schedule lands on {schedule.final_sparsity:g}. Call pruner.step() {when}."
    )


def masks_written_back(restored: int) -> list[str]:
    """Returns a message if `restored` pruned weights were non-zero at the end of the training."""
    if not restored:
        return []
    return [
        f"{restored:,} pruned weights had been written back at the end of training, as EarlyStopping does with "
        "the best weights of an epoch that was less sparse; they are zero again. Evaluate the model again, and "
        "use pk.AtFinalSparsity(EarlyStopping(...)), which chooses among epochs at the final sparsity. Without such a "
        "callback, the training loop writes weights without passing through the optimizer."
    ]


def emptied_weights(store: MaskStore, calculator: MaskCalculator, asked: float, kept: np.ndarray) -> list[str]:
    """Returns messages about targets with no unit or one unit left at the sparsity `asked`.

    Args:
        store: The masks.
        calculator: Calculator of the masks.
        asked: Overall sparsity that was asked for last.
        kept: Number of kept entries of each target, shape (targets,).
    """
    notes = []
    spared, emptied = calculator.only_kept_by_keep_one(asked, kept), kept == 0
    if spared.any():
        notes.append(
            f"Sparsity {asked:g} leaves at most one unit of these weights, and that unit is kept: "
            f"{store.named(kept * spared)}. Leave them out with `exclude`, or ask for less sparsity; with "
            "keep_one=False they may become zero throughout."
        )
    if emptied.any():
        sizes = np.array([target.size for target in store.targets])
        notes.append(
            f"Sparsity {asked:g} leaves nothing of these weights: {store.named(sizes * emptied)}. Leave them out with "
            "`exclude`, or leave keep_one=False out, so that one unit of each is kept."
        )
    return notes


class LateWeights:
    """Finds weights that are created after pruning began.

    A layer that the training step does not call is built later, for example by an evaluation.

    Args:
        model: The model.
    """

    def __init__(self, model: Any):
        self._model = model
        self._seen = {weight.name for weight in weights_in(model)}

    def found(self, skipped: Sequence[Skipped]) -> tuple[list[str], list[Skipped]]:
        """Returns messages about new weights, each named once, and `skipped` with these weights added."""
        late = [weight for weight in weights_in(self._model) if weight.name not in self._seen]
        if not late:
            return [], list(skipped)
        self._seen.update(weight.name for weight in late)
        layers = dict.fromkeys(weight.layer_path or self._model.name for weight in late)
        kept = [item for item in skipped if item.name not in layers]
        kept += [Skipped(weight.name, "its layer was built after pruning had begun") for weight in late]
        note = (
            f"{', '.join(layers)}: built after pruning had begun, so {', '.join(weight.name for weight in late)} is "
            "not pruned. Call these layers once before training, for example by calling the model on a batch of data."
        )
        return [note], kept

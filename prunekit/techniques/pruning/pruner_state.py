"""Saves the state of a Pruner, apart from the model's weights, as plain values and arrays, and restores it."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from prunekit.anatomy.inspection import Event
from prunekit.core import jax_state
from prunekit.core.snapshot import Snapshot, lacking
from prunekit.techniques.pruning.pruner import Pruner

_KINDS = {
    "targets": dict,
    "origin": int,
    "done": int,
    "calls": int,
    "last_update": int,
    "events": list,
    "movement_updates": int | None,
}


def pruner_state(pruner: Pruner) -> Snapshot:
    """Returns the pruner's current masks, schedule position, events and movement sums.

    Masks cannot be derived from the weights' zeros, because a kept weight may be exactly zero.
    """
    masks = pruner.masks
    arrays = {f"mask/{name}": np.packbits(mask) for name, mask in masks.items()}
    values = {
        "targets": {name: list(mask.shape) for name, mask in masks.items()},
        "origin": pruner.origin,
        "done": pruner.step_count,
        "calls": pruner._calls,
        "last_update": pruner._last_update,
        "events": [asdict(event) for event in pruner.events],
        "movement_updates": None,
    }
    if pruner._movements is not None:
        values["movement_updates"] = pruner._movements.updates
        sums = pruner._movements.sums
        arrays |= {f"movement/{name}": np.array(total) for name, total in zip(masks, sums, strict=True)}
    return Snapshot(values, arrays)


def restore_pruner(pruner: Pruner, state: Snapshot) -> None:
    """Restores a state, instead of calling `begin()`; weights and optimizer must already be restored.

    Raises:
        ValueError: The state belongs to a pruner of other weights, is incomplete, or has no movement sums although
            the criterion needs them.
    """
    values, arrays = state.values, state.arrays
    wrong = lacking(values, _KINDS)
    if wrong is not None:
        raise ValueError(f"The state of a pruner that is gone on with holds no {wrong} that this version reads.")
    _check_targets(pruner, values["targets"])
    missing = [target.name for target in pruner.targets if f"mask/{target.name}" not in arrays]
    if missing:
        raise ValueError(f"The state of a pruner that is gone on with holds no mask of {missing[0]}.")
    masks = [_unpacked(arrays[f"mask/{target.name}"], target.shape) for target in pruner.targets]
    pruner.store.replace(masks, pruner.optimizers)
    pruner._kept = np.array([np.count_nonzero(mask) for mask in masks])
    pruner.origin, pruner._calls, pruner._last_update = values["origin"], values["calls"], values["last_update"]
    pruner._done = pruner._checked = values["done"]
    pruner.events = [Event(**event) for event in values["events"]]
    pure = jax_state.steps_are_pure()
    pruner._seen_updates = jax_state.progress(pruner.optimizers) if pure else pruner.store.updates
    if pruner._movements is not None:
        if values["movement_updates"] is None:
            raise ValueError(
                f"The criterion {pruner.options.criterion} goes on from what updates did before the interruption. "
                "Received: the state of a training with another criterion. Use the criterion of the first run."
            )
        sums = [arrays[f"movement/{target.name}"] for target in pruner.targets]
        pruner._movements.restore(sums, values["movement_updates"])


def _unpacked(bits: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    size = int(np.prod(shape))
    return np.unpackbits(bits, count=size).astype(bool).reshape(shape)


def _check_targets(pruner: Pruner, before: Mapping[str, Any]) -> None:
    now = {target.name: list(target.shape) for target in pruner.targets}
    if now == before:
        return
    name = next(name for name in [*before, *now] if before.get(name) != now.get(name))
    was = f"of shape {tuple(before[name])}" if name in before else "not among them"
    here = f"of shape {tuple(now[name])}" if name in now else "not among them"
    raise ValueError(
        f"A training that is resumed prunes the weights that it pruned before. Received: {name}, which was {was} and "
        f"is {here} now. Use the model, `include` and `exclude` of the first run, or begin in another folder."
    )

"""PrunerState: everything besides weights and optimizer that an interrupted pruning continues from."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from prunekit.anatomy.layers.targets import Target
from prunekit.anatomy.records.reports import Event
from prunekit.core.runtime.snapshot import Snapshot, arrays_under, lacking

_KINDS = {
    "targets": dict,
    "origin": int,
    "done": int,
    "calls": int,
    "last_update": int,
    "events": list,
    "statistics": dict,
}


@dataclass(frozen=True, eq=False)
class PrunerState:
    """The state of a Pruner.

    Masks are part of it, because they cannot be derived from the weights' zeros: a kept weight may be exactly zero.

    Attributes:
        masks: Weight name -> boolean array, True = kept, in the order of the targets.
        origin: Optimizer update from which steps count.
        done: Number of steps.
        calls: Number of calls of `Pruner.step`.
        last_update: Update step of the schedule that was applied last, or -1.
        events: Mask updates so far.
        statistics: State of the statistics from training.
        pruned_values: Weight name -> values at pruned positions, where the policy trains these, too; else empty.
        planned_steps: Number of updates that an open schedule was fitted to; None for other schedules.
    """

    masks: dict[str, np.ndarray]
    origin: int
    done: int
    calls: int
    last_update: int
    events: tuple[Event, ...]
    statistics: Snapshot
    pruned_values: dict[str, np.ndarray] = field(default_factory=dict)
    planned_steps: int | None = None

    def to_snapshot(self) -> Snapshot:
        """Returns the state as plain values and arrays; a mask takes one bit per entry."""
        values = {
            "targets": {name: list(mask.shape) for name, mask in self.masks.items()},
            "origin": self.origin,
            "done": self.done,
            "calls": self.calls,
            "last_update": self.last_update,
            "events": [asdict(event) for event in self.events],
            "statistics": self.statistics.values,
            "planned_steps": self.planned_steps,
        }
        arrays = {f"mask/{name}": np.packbits(mask) for name, mask in self.masks.items()}
        arrays |= {f"pruned_values/{name}": array for name, array in self.pruned_values.items()}
        arrays |= {f"statistics/{name}": array for name, array in self.statistics.arrays.items()}
        return Snapshot(values, arrays)

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot, targets: Sequence[Target]) -> "PrunerState":
        """Returns the state that `to_snapshot` returned, for a pruner of the same targets.

        Raises:
            ValueError: The state belongs to a pruner of other weights, or is incomplete.
        """
        values = snapshot.values
        wrong = lacking(values, _KINDS)
        if wrong is not None:
            raise ValueError(f"The saved state of a pruner lacks {wrong}, or holds it as another version wrote it.")
        _check_targets(targets, values["targets"])
        missing = [target.name for target in targets if f"mask/{target.name}" not in snapshot.arrays]
        if missing:
            raise ValueError(f"The saved state of a pruner lacks the mask of {missing[0]}.")
        return cls(
            masks={t.name: _unpacked(snapshot.arrays[f"mask/{t.name}"], t.shape) for t in targets},
            origin=values["origin"],
            done=values["done"],
            calls=values["calls"],
            last_update=values["last_update"],
            events=tuple(Event(**event) for event in values["events"]),
            statistics=Snapshot(values["statistics"], arrays_under(snapshot.arrays, "statistics/")),
            pruned_values=arrays_under(snapshot.arrays, "pruned_values/"),
            planned_steps=values.get("planned_steps"),
        )


def _unpacked(bits: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    size = int(np.prod(shape))
    return np.unpackbits(bits, count=size).astype(bool).reshape(shape)


def _check_targets(targets: Sequence[Target], before: Mapping[str, Any]) -> None:
    now = {target.name: list(target.shape) for target in targets}
    if now == before:
        return
    name = next(name for name in [*before, *now] if before.get(name) != now.get(name))
    was = f"of shape {tuple(before[name])}" if name in before else "not among them"
    here = f"of shape {tuple(now[name])}" if name in now else "not among them"
    raise ValueError(
        f"A resumed training must prune the same weights as before. Received: {name}, which was {was} and "
        f"is {here} now. Use the model, `include` and `exclude` of the first run, or begin in another folder."
    )

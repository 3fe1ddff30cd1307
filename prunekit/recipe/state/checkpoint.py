"""Checkpoints of a run: its complete state at the end of an epoch or step, and a check that the run is the same."""

import functools
import hashlib
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import keras
import numpy as np
from pydantic import TypeAdapter

from prunekit.core.runtime import jax_state
from prunekit.core.runtime.model_copies import finalize_layers
from prunekit.core.runtime.random_state import restore_random_state
from prunekit.core.runtime.snapshot import Snapshot, Snapshots, arrays_under, lacking, write_bytes
from prunekit.delivery.reports.run_report import TEXTS
from prunekit.recipe.datasets.batches import Order
from prunekit.recipe.state import replica_state
from prunekit.recipe.state.directory import CHECKPOINT, CONTINUE, EXPORTS, START, START_OVER
from prunekit.recipe.state.replicas import ALONE, Replicas
from prunekit.recipe.state.run_state import RunMasks, RunState
from prunekit.recipe.text.loader import RecipeError
from prunekit.recipe.text.yaml_reader import first_difference
from prunekit.sparsity.array_ops import array_of


@dataclass
class CheckpointState:
    """Position of a run in its recipe, and the state of the run; the defaults describe the start of a run.

    Attributes:
        step: Index of the current or next step.
        epoch: Number of finished epochs of that step.
        seconds: Duration of that step so far.
        history: History of that step so far: metric -> value per epoch.
        callbacks: State of each callback of that step's training; None for one that has none.
        random: State of the global random generators that layers may use, for a checkpoint inside a step.
        run: State of the run; None before a checkpoint is written.
    """

    step: int = 0
    epoch: int = 0
    seconds: float = 0.0
    history: dict[str, list[float]] = field(default_factory=dict)
    callbacks: list[Snapshot | None] = field(default_factory=list)
    random: dict[str, Any] | None = None
    run: RunState | None = None


# Fields of `CheckpointState` that are written unchanged, and all values of a checkpoint, with their types.
_PLAIN = {
    "step": int,
    "epoch": int,
    "seconds": int | float,
    "history": dict,
    "random": dict | None,
}
_KINDS = _PLAIN | {"callbacks": list, "record": dict, "optimizer": bool, "files": dict}


class Checkpoints:
    """Keeps the two newest checkpoints of a run. The processes of a run write and restore at the same time.

    Args:
        folder: Folder of the unfinished run.
        run: Future run directory; files of export steps inside it belong to a checkpoint.
        every: Epochs between checkpoints inside a step. The end of a step always has a checkpoint.
        replicas: Replicas of the run. The chief writes; every replica restores its own statistics.
        reads: True if the run may have a checkpoint. False in a process whose chief has none: its files are ignored.

    Attributes:
        folder: Folder of the unfinished run.
    """

    def __init__(self, folder: Path, run: Path, every: int = 1, *, replicas: Replicas = ALONE, reads: bool = True):
        self.every = every
        self.folder, self._exports = folder, run / EXPORTS
        self._replicas, self._reads = replicas, reads
        self._snapshots = Snapshots(folder, CHECKPOINT)

    def write(self, model: keras.Model, state: CheckpointState) -> None:
        """Writes a checkpoint of the model's current state, including its optimizer.

        Raises:
            OSError: The checkpoint cannot be written; the earlier checkpoints remain.
            ValueError: `state` has no state of the run.
        """
        jax_state.sync_model_state(model)
        own = self._own_state(model)
        if state.run is None:
            raise ValueError("A checkpoint needs the state of the run. Received: None.")
        if not self._replicas.chief:
            return
        optimizer = _optimizer_built(model)
        variables = _variables(model, optimizer)
        arrays = {f"variable/{i}": np.array(array_of(v)) for i, v in enumerate(variables)}
        arrays |= _run_arrays(state.run)
        inner = {f"callback/{i}/": one for i, one in enumerate(state.callbacks) if one is not None}
        arrays |= {f"{prefix}{key}": array for prefix, one in inner.items() for key, array in one.arrays.items()}
        if own is not None:
            arrays["replicas"] = own
        values = {
            **{name: getattr(state, name) for name in _PLAIN},
            "record": plain_fields(state.run),
            "callbacks": [None if one is None else one.values for one in state.callbacks],
            "optimizer": optimizer,
            "files": self._files(),
        }
        self._snapshots.write(Snapshot(values, arrays))

    def restore(self, model_of: Callable[[RunState], keras.Model]) -> CheckpointState | None:
        """Restores the newest checkpoint; returns the position and the state of the run, or None without a checkpoint.

        Files that export steps wrote after the checkpoint are removed.

        Args:
            model_of: Function that returns the compiled model whose variables are restored.

        Raises:
            RecipeError: Every checkpoint is damaged, files of export steps have changed, or the processes of
                the run restored different checkpoints.
        """
        state = self._restored(model_of) if self._reads else None
        # All processes wait here: the first process to continue may replace the checkpoint.
        self._replicas.agree({"checkpoint": "none" if state is None else f"{state.step} {state.epoch}"})
        return state

    def _restored(self, model_of: Callable[[RunState], keras.Model]) -> CheckpointState | None:
        found = self._snapshots.newest()
        if found is None:
            if self._snapshots:
                raise RecipeError(
                    f"the checkpoints in {self.folder} are damaged, so nothing can be resumed: {START_OVER}."
                )
            return None
        wrong = lacking(found.values, _KINDS)
        if wrong is not None:
            raise RecipeError(
                f"the checkpoints in {self.folder} hold no {wrong} that this version of prunekit reads: {START_OVER}."
            )
        if self._replicas.chief:
            self._settle_files(found.values["files"])
        run = _run_state(found)
        self._restore_model(model_of(run), found)
        state = CheckpointState(**{name: found.values[name] for name in _PLAIN}, run=run)
        state.callbacks = [
            None if values is None else Snapshot(values, arrays_under(found.arrays, f"callback/{i}/"))
            for i, values in enumerate(found.values["callbacks"])
        ]
        return state

    def _restore_model(self, model: keras.Model, found: Snapshot) -> None:
        optimizer = found.values["optimizer"]
        if optimizer and not model.optimizer.built:
            with self._replicas.scope():
                model.optimizer.build(model.trainable_variables)
        variables, saved = _variables(model, optimizer), arrays_under(found.arrays, "variable/")
        if [tuple(v.shape) for v in variables] != [array.shape for array in saved.values()]:
            raise RecipeError(f"the checkpoints in {self.folder} are of another model: {START_OVER}.")
        for variable, array in zip(variables, saved.values(), strict=True):
            variable.assign(np.array(array))
        finalize_layers(model)
        if "replicas" in found.arrays:
            replica_state.restore_own_state(self._replicas.strategy, model, found.arrays["replicas"])

    def kept(self) -> str:
        """Returns a readable line on the progress that an interruption leaves on disk."""
        if not self._snapshots:
            return "Nothing was saved yet, and nothing is left behind."
        return f"The earlier checkpoints are kept in {self.folder}: repair the cause, then {CONTINUE}."

    def _own_state(self, model: keras.Model) -> np.ndarray | None:
        strategy = self._replicas.strategy
        return None if strategy is None or self._replicas.count == 1 else replica_state.own_state(strategy, model)

    def _files(self) -> dict[str, str]:
        return {path.name: _digest(path) for path in sorted(self._exports.glob("*")) if path.is_file()}

    def _settle_files(self, expected: Mapping[str, str]) -> None:
        for name, digest in expected.items():
            path = self._exports / name
            if not path.is_file() or _digest(path) != digest:
                raise RecipeError(f"{path} has changed since the unfinished run wrote it: {START_OVER}.")
        for path in self._exports.glob("*"):
            if path.name not in expected:
                path.unlink()


def _run_arrays(run: RunState) -> dict[str, np.ndarray]:
    arrays = {f"before/{name}": array for name, array in run.weights_before.items()}
    arrays |= {f"own/{name}": array for name, array in run.own_arrays.items()}
    arrays |= {f"mask/{name}": mask for name, mask in run.masks.pruned.items()}
    return arrays | {f"found/{name}": mask for name, mask in run.masks.original.items()}


def _run_state(found: Snapshot) -> RunState:
    before, pruned, original, own = (
        {name: np.array(array) for name, array in arrays_under(found.arrays, prefix).items()}
        for prefix in ("before/", "mask/", "found/", "own/")
    )
    arrays = dict(weights_before=before, masks=RunMasks(pruned, original), own_arrays=own)
    return from_plain(RunState, found.values["record"], **arrays)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _variables(model: keras.Model, optimizer: bool) -> list[Any]:
    """Returns all variables that training changes: weights, seeds of layers, slots, averages, the learning rate.

    Args:
        model: The model.
        optimizer: Whether the variables of the model's optimizer are among them.
    """
    found = [*model.variables, *(jax_state.own_variables(model.optimizer) if optimizer else ())]
    return list({id(variable): variable for variable in found}.values())


def _optimizer_built(model: keras.Model) -> bool:
    return getattr(model, "optimizer", None) is not None and model.optimizer.built


# ---- at the beginning and end of an epoch ----------------------------------------------------------------------------


class EpochCheckpoints(keras.callbacks.Callback):
    """Writes checkpoints at ends of epochs, and restores the random generators and the data order on resume.

    Args:
        order: Order of the training examples.
        state: State at which the step begins or resumes.
        every: Epochs between checkpoints; 0 writes no checkpoints.
        save: Function of the number of finished epochs and the history so far; writes a checkpoint.
    """

    def __init__(
        self, order: Order, state: CheckpointState, every: int, save: Callable[[int, dict[str, list[float]]], None]
    ):
        super().__init__()
        self.history = {name: list(values) for name, values in state.history.items()}
        self._order, self._every, self._save = order, every, save
        self._random = state.random

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._order.epoch = epoch
        if self._random is not None:
            restore_random_state(self.model, self._random)
            self._random = None

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(float(value))
        behind = epoch + 1
        # Not after the last epoch: Keras may still write averages into the weights. The step's own checkpoint follows.
        if self._every and behind % self._every == 0 and behind < self.params["epochs"]:
            self._save(behind, self.history)


# ---- results of the steps --------------------------------------------------------------------------------------------


@functools.cache
def _adapters(kind: Any) -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(kind)
    return {item.name: TypeAdapter(hints[item.name]) for item in fields(kind) if not item.metadata.get("arrays")}


def plain_fields(record: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass as JSON values, except fields whose metadata say "arrays"."""
    return {name: adapter.dump_python(getattr(record, name)) for name, adapter in _adapters(record.__class__).items()}


def from_plain(kind: Any, values: Mapping[str, Any], **others: Any) -> Any:
    """Builds a dataclass from the result of `plain_fields` and the remaining fields `others`."""
    made = {name: adapter.validate_python(values.get(name)) for name, adapter in _adapters(kind).items()}
    return kind(**made, **others)


# ---- the same run ----------------------------------------------------------------------------------------------------


def note_start(folder: Path, start: Mapping[str, Any]) -> None:
    """Writes the starting point of a run into its folder, or checks that a file already there agrees.

    Args:
        folder: Folder of the unfinished run.
        start: Locked "recipe"; digests of "model" and "data"; "versions".

    Raises:
        RecipeError: The unfinished run has a different or no recorded starting point; the run is unchanged.
    """
    path = folder / START
    if not path.exists():
        if Snapshots(folder, CHECKPOINT):
            raise RecipeError(
                f"{path} is missing, and only this file describes the checkpoints. Restore it, or {START_OVER}."
            )
        write_bytes(path, json.dumps(start, indent=1).encode())
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        differences = start_differences(before, json.loads(json.dumps(start)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RecipeError(f"{path} is damaged ({error}): {START_OVER}.") from error
    if differences:
        raise RecipeError(
            f"the unfinished run in {folder} cannot be resumed: {'; '.join(differences)}. Undo these changes, or "
            f"{START_OVER}, which deletes the unfinished run."
        )


def start_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the differences between the starting points of two runs as text; empty if the runs are the same.

    Args:
        before: Locked "recipe", digests of "model" and "data", and "versions" if they are to be compared.
        now: Like `before`.
    """
    found = _recipe_differences(before["recipe"], now["recipe"])
    for name, verb in (("model", "is"), ("data", "are")):
        if before.get(name) != now.get(name):
            found.append(f"the {name} {verb} not what it started from")
    old, new = before.get("versions", {}), now.get("versions", {})
    differing = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return found + [f"{name} was {old.get(name)} and is {new.get(name)}" for name in differing]


def _recipe_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    # A recipe without `name` has that of its file, and neither changes a result.
    before, now = ({key: value for key, value in one.items() if key not in TEXTS} for one in (before, now))
    edit = first_difference(before, now)
    if edit is None:
        return []
    old, new = before.get("variables") or {}, now.get("variables") or {}
    if list(old) != list(new) or old == new:
        return [f"the recipe was edited ({edit[0]}: {_short(edit[1])} before, {_short(edit[2])} now)"]
    # Report only the variables: every other difference follows from their values.
    others = [name for name in old if old[name] != new[name]]
    values = ", ".join(f"{name}: {_short(old[name])} before, {_short(new[name])} now" for name in others)
    asked = " ".join("--set " + shlex.quote(f"{name}={json.dumps(old[name])}") for name in others)
    in_python = ", ".join(f"{name!r}: {old[name]!r}" for name in others)
    return [f"variables of the recipe have other values ({values}): resume with {asked} (overrides={{{in_python}}})"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

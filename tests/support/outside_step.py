"""Step kinds as a package outside prunekit adds them: one removes half of the units of a Dense layer, one trains.

`halve` returns another model object; weights, masks and the optimizer's slots are cut along. `drift` trains with a
callback that has a state of its own.
"""

from typing import ClassVar

import keras
import numpy as np

from prunekit.anatomy.files.digests import weight_arrays
from prunekit.anatomy.records.sections import Column, Section
from prunekit.core.runtime.snapshot import Snapshot
from prunekit.recipe.settings.fields import Name, refusal
from prunekit.recipe.settings.step_base import StepSettings
from prunekit.recipe.settings.step_kinds import StepKind
from prunekit.recipe.state.checkpoint import CheckpointState
from prunekit.recipe.steps.step_handler import PreparedStep, StepHandler, StepResult


class Halve(StepSettings):
    """Removes the half of the units of a Dense layer with the smallest incoming weights."""

    example: ClassVar[str] = "{layer: hidden}"
    changes_weights: ClassVar[bool] = True
    returns_new_model: ClassVar[bool] = True
    layer: Name

    def text(self):
        return f"half of the units of {self.layer}"

    def check(self, earlier):
        super().check(earlier)
        if any(isinstance(step, Halve) and step.layer == self.layer for step in earlier):
            raise refusal(f"an earlier step already halves {self.layer!r}.", "layer")


class HalveStep(StepHandler[PreparedStep]):
    """Halves a layer of a Sequential model."""

    def prepare(self, settings, run):
        names = [layer.name for layer in run.model.layers[:-1] if isinstance(layer, keras.layers.Dense)]
        if settings.layer not in names:
            raise ValueError(f"expected one of the layers {', '.join(names)}. Received: {settings.layer!r}.")
        return PreparedStep(settings, model=halved(run.model, settings.layer))

    def run(self, prepared, workspace):
        model, name = workspace.model, prepared.settings.layer
        norms = np.linalg.norm(weight_arrays(model)[f"{name}/kernel"], axis=0)
        kept = np.sort(np.argsort(-norms, kind="stable")[: len(norms) // 2])
        with workspace.run.replicas.scope():
            small = halved(model, name)
            if model.compiled:
                small.compile_from_config(model.get_compile_config())
        pairs = list(zip(model.variables, small.variables, strict=True))
        if model.compiled and model.optimizer.built:
            pairs += zip(model.optimizer.variables, small.optimizer.variables, strict=True)
        for old, new in pairs:
            new.assign(cut(keras.ops.convert_to_numpy(old), new.shape, kept))
        shapes = {key: array.shape for key, array in weight_arrays(small).items()}
        masks = {key: cut(mask, shapes[key], kept) for key, mask in workspace.state.masks.all.items()}
        removed = [int(unit) for unit in np.setdiff1d(np.arange(len(norms)), kept)]
        rows = [(name, unit, float(norms[unit])) for unit in removed]
        section = Section(
            "Removed units", (Column("layer", "name"), Column("unit", "count"), Column("norm", "number")), rows
        )
        return StepResult(model=small, masks=masks, sections=[section], text=f"{len(removed)} units removed")


def halved(model, name):
    """The model with half of the units in one layer, with new weights."""
    config = model.get_config()
    for layer in config["layers"]:
        # Without it, the layers would be built with their former shapes.
        layer.pop("build_config", None)
        if layer["config"]["name"] == name:
            layer["config"]["units"] //= 2
    with keras.saving.CustomObjectScope({type(layer).__name__: type(layer) for layer in model.layers}):
        return type(model).from_config(config)


def cut(array, shape, kept):
    """The array with the kept units along the axis whose length differs."""
    for axis, (old, new) in enumerate(zip(array.shape, shape, strict=True)):
        if old != new:
            array = np.take(array, kept, axis)
    return array


class Drift(StepSettings):
    """Trains while the biases of the last layer drift, faster from step to step."""

    example: ClassVar[str] = "{epochs: 2}"
    changes_weights: ClassVar[bool] = True
    epochs: int

    @property
    def trains(self):
        return True

    def text(self):
        return f"train for {2 * self.epochs} epochs with a drift"


class Drifting(keras.callbacks.Callback):
    """Adds 0.001 times the number of batches so far to a bias after each batch."""

    batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        bias = self.model.layers[-1].bias
        bias.assign(bias + 0.001 * self.batches)

    def snapshot(self):
        return Snapshot({"batches": self.batches}, {"twice": np.array(2 * self.batches)})

    def resume(self, snapshot):
        assert int(snapshot.arrays["twice"]) == 2 * snapshot.values["batches"]
        self.batches = snapshot.values["batches"]


class DriftStep(StepHandler[PreparedStep]):
    """Trains twice, and keeps the losses of the first training for the second."""

    def prepare(self, settings, run):
        return PreparedStep(settings)

    def run(self, prepared, workspace):
        drifting, own, epochs = Drifting(), workspace.state.own, prepared.settings.epochs
        with workspace.holding_masks():
            if "first" not in own:
                history = workspace.fit(epochs, None, drifting)
                own["first"] = history["loss"]
                workspace.step.resumed = CheckpointState(
                    workspace.step.index, epochs, history=history, callbacks=[drifting.snapshot()]
                )
                workspace.save_epoch(epochs, history, [drifting])
            history = workspace.fit(2 * epochs, None, drifting, begin=epochs)
        rows = [(number, loss) for number, loss in enumerate(own["first"])]
        section = Section("First training", (Column("epoch", "count"), Column("loss", "number")), rows)
        return StepResult(history=history, sections=[section])


DRIFT = StepKind("drift", DriftStep, Drift)
HALVE = StepKind("halve", HalveStep, Halve)

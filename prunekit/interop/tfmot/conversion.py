"""Converts models of tf_keras and tensorflow-model-optimization to plain Keras 3 models with their training state."""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.layers.model_weights import weights_in
from prunekit.core.runtime import backend
from prunekit.core.runtime.optimizers import optimizers_of
from prunekit.core.runtime.partial_files import replace_model, write_problem
from prunekit.interop.tfmot import legacy
from prunekit.interop.tfmot.comparison import compared
from prunekit.interop.tfmot.files import LegacyFile, first_line, read_file
from prunekit.interop.tfmot.graph import Translation
from prunekit.interop.tfmot.layers import NotCarried
from prunekit.interop.tfmot.schedule_adoption import adopted
from prunekit.interop.tfmot.training_state import carried_loss, carried_optimizer, lost_settings
from prunekit.interop.tfmot.wrappers import Wrapping, without_rounding
from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.patterns import NM, Block, Pattern, Unstructured
from prunekit.sparsity.schedules import Schedule
from prunekit.techniques.pruning.masks.policy import MaskPolicy, get_policy
from prunekit.techniques.pruning.training.callbacks import PruningCallback


@dataclass(frozen=True, eq=False)
class Converted:
    """A legacy model in Keras 3, with the training state in its file.

    Weight names have prunekit's usual form ("hidden/kernel").

    Attributes:
        model: Plain Keras 3 model with pruned weights exactly zero; compiled if optimizer and loss could be
            carried.
        masks: Weight name -> boolean array, True = kept.
        step: Present step of the schedule, in optimizer updates; None if nothing was pruned.
        thresholds: Weight name -> magnitude below which the last mask pruned.
        schedules: Weight name -> prunekit schedule.
        patterns: Weight name -> sparsity pattern.
        optimizer: Optimizer, with slots and update count if they could be carried; None if it could not be carried.
        clusters: Layer name -> number of clusters of the layer's weights.
        ranges: Name of a fake quantization -> (lowest, highest), arrays; the ranges that quantization-aware training
            learned in addition to the weights.
        difference: Largest difference of an output on random inputs, relative to the largest output.
        not_carried: Parts that `model` does not have, with reasons; one line each.
    """

    model: keras.Model
    masks: Mapping[str, np.ndarray]
    step: int | None
    thresholds: Mapping[str, float]
    schedules: Mapping[str, Schedule]
    patterns: Mapping[str, Pattern]
    optimizer: keras.optimizers.Optimizer | None
    clusters: Mapping[str, int]
    ranges: Mapping[str, tuple[np.ndarray, np.ndarray]]
    difference: float
    not_carried: tuple[str, ...]

    @property
    def sparsity(self) -> float:
        """Fraction of pruned entries in the masked weights; 0 without masks."""
        size = sum(mask.size for mask in self.masks.values())
        return 1.0 - sum(int(mask.sum()) for mask in self.masks.values()) / size if size else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields except the model, masks and optimizer as JSON-compatible values."""
        return {
            "step": self.step,
            "sparsity": self.sparsity,
            "thresholds": dict(self.thresholds),
            "schedules": {name: str(schedule) for name, schedule in self.schedules.items()},
            "patterns": {name: str(pattern) for name, pattern in self.patterns.items()},
            "clusters": dict(self.clusters),
            "ranges": {name: [low.tolist(), high.tolist()] for name, (low, high) in self.ranges.items()},
            "difference": self.difference,
            "not_carried": list(self.not_carried),
        }

    def __str__(self) -> str:
        weights = sum(math.prod(variable.shape) for variable in self.model.weights)
        lines = [
            f"{self.model.name}: {len(self.model.layers)} layers, {weights:,} weights; outputs differ by "
            f"{self.difference:.1g} of the largest at most"
        ]
        if self.masks:
            lines.append(f"pruned: {len(self.masks)} weights, sparsity {self.sparsity:.4f} at step {self.step}")
            lines += [f"  {schedule}" for schedule in dict.fromkeys(map(str, self.schedules.values()))]
        if self.clusters:
            lines.append(f"clustered: {', '.join(self.clusters)}")
        if self.ranges:
            lines.append("quantization-aware: the float weights were read")
        if self.optimizer is not None:
            lines.append(f"optimizer: {self.optimizer.name}, {int(self.optimizer.iterations.numpy())} updates done")
        return "\n".join([*lines, *(f"not converted: {line}" for line in self.not_carried)])

    def callback(self, *names: str, **options: Any) -> PruningCallback:
        """Returns a callback that continues the schedule from its present step, on the weights that were pruned.

        Call this method after compiling the model: the callback counts steps by the model's optimizer, or with
        policy="tfmot" by forward passes from the start of the next training.

        Args:
            *names: Names of weights with the same schedule and pattern; no names means all pruned weights.
            **options: Options of `PruningCallback`; they replace the values from the file.

        Raises:
            ValueError: Nothing was pruned, the weights had several schedules or patterns, or a name is not in `masks`.
        """
        wanted = names or tuple(self.masks)
        missing = [name for name in wanted if name not in self.masks]
        if missing or not wanted or self.step is None:
            raise ValueError(
                f"`names` must be names of weights that were pruned: {', '.join(self.masks) or 'none in this model'}. "
                f"Received: {', '.join(missing) or 'no name'}."
            )
        found = {(self.schedules[name], self.patterns[name]) for name in wanted}
        if len(found) > 1:
            raise ValueError(
                "A callback has one schedule and one pattern. Received: weights with different ones: "
                f"{', '.join(wanted)}. Make a callback for each group of names."
            )
        ((schedule, pattern),) = found
        origin = self._steps_done(get_policy(options.get("policy", "gradual"))) - self.step
        settings = {"pattern": pattern, "include": wanted, "origin": origin}
        return PruningCallback(schedule, **{**settings, **options})

    def _steps_done(self, policy: MaskPolicy) -> int:
        """Returns the steps counted before the next training: optimizer updates; 0 where forward passes are counted."""
        optimizers = [] if policy.counts_forward_passes else optimizers_of(self.model)
        return max((int(backend.number(one.iterations)) for one in optimizers), default=0)


def read_model(source: Any, *, tolerance: float | None = None) -> Converted:
    """Returns a legacy model as a plain Keras 3 model, with masks, step and optimizer to continue its training.

    Removes the wrappers of `prune_low_magnitude`, `cluster_weights` and `quantize_model`. Calls both models on the same
    random inputs and compares the outputs; a quantization-aware model computes without rounding for this comparison.
    Runs no code from the file.

    Args:
        source: A .h5, .hdf5 or .keras file or a SavedModel folder that tf_keras wrote, or a tf_keras model. The
            comparison calls a given model, and its wrappers then set their pruned weights to zero.
        tolerance: Largest accepted difference of an output, relative to the largest output; None means 1e-4, or 2e-2
            for models that compute in half precision.

    Raises:
        ValueError: The file cannot be read, a layer has no equivalent in Keras 3, or the outputs differ.
        TypeError: `source` is neither a path nor a tf_keras model.
        ImportError: tf_keras or tensorflow-model-optimization is not installed.
    """
    file, where = _opened(source)
    translation = _translation(file.model, where)
    names = {id(weight.variable): weight.name for weight in weights_in(translation.model)}
    pruned = _pruned_weights(translation, names)
    for variable, mask, *_ in pruned.values():
        variable.assign(np.where(mask, array_of(variable), 0))
    with without_rounding(file.model):
        difference = compared(file.model, translation.model, where, tolerance)
    step, lost = _common_step(translation.wrappings)
    optimizer, more = _compiled(file, translation)
    return Converted(
        model=translation.model,
        masks={name: mask for name, (_, mask, *_) in pruned.items()},
        step=step,
        thresholds={name: threshold for name, (_, _, threshold, _) in pruned.items()},
        schedules={name: adopted(one.settings["pruning_schedule"]) for name, (*_, one) in pruned.items()},
        patterns={name: _pattern(one) for name, (*_, one) in pruned.items()},
        optimizer=optimizer,
        clusters={one.layer.name: one.clusters for one in translation.wrappings if one.clusters},
        ranges=dict(pair for one in translation.wrappings for pair in one.ranges.items()),
        difference=difference,
        not_carried=(*lost, *translation.lost, *more, *_lost_wrappers(file.model, translation)),
    )


def convert(old: str | os.PathLike[str], new: str | os.PathLike[str], *, force: bool = False) -> Converted:
    """Converts a legacy file to a `.keras` file of Keras 3; returns the converted model.

    Args:
        old: Path of the legacy file or folder, as for `read_model`.
        new: Path of the new file, which is written completely or not at all. Missing folders are made.
        force: True allows replacing an existing file.

    Raises:
        ValueError: As `read_model`; or `new` is not a `.keras` path, exists, cannot be written, or equals `old`.
        ImportError: As `read_model`.
    """
    path = Path(new)
    if path.suffix != ".keras":
        raise ValueError(f"The output must be a .keras file. Received: {new}.")
    if os.path.lexists(path) and (not force or path.is_dir()):
        raise ValueError(f"{new} exists already{'' if path.is_dir() else '; --force (force=True) replaces it'}.")
    if os.path.exists(path) and os.path.exists(old) and os.path.samefile(old, path):
        raise ValueError(
            f"{new} is the input file, and only this file has the masks, schedules and step. Choose another name."
        )
    # Check before reading the old file, which may take long.
    problem = write_problem(path)
    if problem is not None:
        raise ValueError(f"{new} cannot be written: {problem}.")
    converted = read_model(old)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_model(path, converted.model)
    return converted


def _opened(source: Any) -> tuple[LegacyFile, str]:
    """Returns the model with its training settings, and its name for errors."""
    if isinstance(source, str | os.PathLike):
        return read_file(source), os.fspath(source)
    if not isinstance(source, legacy.tf_keras().Model):
        kind = f"{type(source).__module__.split('.')[0]}'s {type(source).__name__}"
        raise TypeError(f"read_model needs a path or a model of tf_keras. Received: an object of {kind}.")
    return LegacyFile(source, {}), repr(source.name)


def _translation(model: Any, where: str) -> Translation:
    try:
        return Translation(model)
    except NotCarried as error:
        raise ValueError(f"{where} has parts that cannot be converted to Keras 3: {error}.") from error
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(f"{where} cannot be rebuilt in Keras 3: {first_line(error)}") from error


def _pruned_weights(
    translation: Translation, names: Mapping[int, str]
) -> dict[str, tuple[keras.Variable, np.ndarray, float, Wrapping]]:
    found = {}
    for around in translation.wrappings:
        for one in around.masks:
            variable = translation.counterpart(one.variable)
            found[names[id(variable)]] = (variable, one.mask, one.threshold, around)
    return found


def _common_step(wrappings: Sequence[Wrapping]) -> tuple[int | None, list[str]]:
    counted = {one.layer.name: one.step for one in wrappings if one.masks and one.step is not None}
    if not counted:
        return None, []
    # A layer called twice in a forward pass counts twice, so of two equally frequent counts the lower is correct.
    common = Counter(counted.values())
    step = min(common, key=lambda number: (-common[number], number))
    return max(step, 0), [
        f"the step of {name!r}: it counted {other} forward passes, the others {step}"
        for name, other in counted.items()
        if other != step
    ]


def _pattern(one: Wrapping) -> Pattern:
    if one.settings["sparsity_m_by_n"]:
        # Only live models have this setting, files do not. The setting counts zeros; NM counts kept weights.
        zeros, length = one.settings["sparsity_m_by_n"]
        return NM(length - zeros, length)
    height, width = one.settings["block_size"]
    if (height, width) == (1, 1):
        return Unstructured()
    return Block(height, width, pooling={"AVG": "average", "MAX": "max"}[one.settings["block_pooling_type"]])


def _compiled(file: LegacyFile, translation: Translation) -> tuple[keras.optimizers.Optimizer | None, list[str]]:
    """Compiles the model if optimizer and loss are carried; returns the optimizer, and descriptions of lost parts."""
    optimizer, why_no_optimizer = carried_optimizer(file, translation)
    loss, why_no_loss = carried_loss(file.training)
    lost = [why for why in (why_no_optimizer, why_no_loss, lost_settings(file.training)) if why]
    if file.training.get("metrics") or file.training.get("weighted_metrics"):
        lost.append("the metrics: name them in compile()")
    if not file.training and getattr(file.model, "_is_compiled", False):
        lost.append("the compilation: optimizer and loss of a model that is in no file are not read; save it first")
    if optimizer is not None and loss is not None:
        translation.model.compile(optimizer, loss)
    elif optimizer is not None:
        lost.append("the compilation: call model.compile(converted.optimizer, loss)")
    return optimizer, lost


def _lost_wrappers(model: Any, translation: Translation) -> list[str]:
    wrappings = translation.wrappings
    lost = [
        f"the clustering of {one.layer.name!r}: its weights are in {one.clusters} clusters, and further training does "
        "not preserve the clusters"
        for one in wrappings
        if one.clusters
    ]
    for one in wrappings:
        spans = [f"{name} from {_numbers(low)} to {_numbers(high)}" for name, (low, high) in one.ranges.items()]
        if spans:
            lost.append(f"the ranges of fake quantization: {'; '.join(spans)}")
    if any(one.kind == "quantized" for one in wrappings):
        apart = compared(model, translation.model, model.name, math.inf)
        lost.append(f"the rounding of fake quantization: without it outputs differ by {apart:.2g} of the largest")
    return lost


def _numbers(values: np.ndarray) -> str:
    return ", ".join(f"{value:.6g}" for value in np.ravel(values)[:4]) + (", ..." if np.size(values) > 4 else "")

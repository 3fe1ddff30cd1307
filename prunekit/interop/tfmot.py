"""Models of tf_keras and tensorflow-model-optimization -> plain Keras 3 models, with what is known of the training."""

import math
import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.targets import weights_in
from prunekit.core import backend
from prunekit.core.optimizers import optimizers_of
from prunekit.interop import legacy
from prunekit.interop.comparison import compared
from prunekit.interop.files import LegacyFile, first_line, read_file
from prunekit.interop.graph import Translation
from prunekit.interop.layers import NotCarried
from prunekit.interop.training_state import carried_loss, carried_optimizer, lost_settings
from prunekit.interop.wrappers import Wrapping, without_rounding
from prunekit.sparsity.adoption import adopted
from prunekit.sparsity.patterns import NM, Block, Pattern, Unstructured
from prunekit.sparsity.schedules import Schedule
from prunekit.techniques.pruning.callbacks import PruningCallback
from prunekit.techniques.pruning.tfmot_rules import RULES


@dataclass(frozen=True, eq=False)
class Converted:
    """A legacy model in Keras 3, and what its file knows of its training.

    Weights are named as everywhere in prunekit ("hidden/kernel").

    Attributes:
        model: The plain Keras 3 model; pruned weights are exactly zero in it. Compiled if optimizer and loss could be
            carried.
        masks: Weight name -> boolean array, True = kept.
        step: The optimizer update at which the schedule stands; None where nothing was pruned.
        thresholds: Weight name -> the magnitude below which the last mask pruned.
        schedules: Weight name -> schedule, as prunekit's own.
        patterns: Weight name -> the shape of the zeros.
        optimizer: The optimizer, with slots and count of updates where they could be carried; None where it could not.
        clusters: Layer name -> number of clusters that its weights were in.
        ranges: Name of a fake quantization -> (lowest, highest), arrays; what quantization-aware training has learned
            beside the weights.
        difference: The largest difference of an output on random inputs, relative to the largest output.
        not_carried: What is not in `model`, and why; one line each.
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
        """Fraction of the masked weights' entries that are pruned; 0 where nothing is masked."""
        size = sum(mask.size for mask in self.masks.values())
        return 1.0 - sum(int(mask.sum()) for mask in self.masks.values()) / size if size else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All but the model, the masks and the optimizer, as JSON takes it."""
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
        return "\n".join([*lines, *(f"not carried: {line}" for line in self.not_carried)])

    def callback(self, *names: str, **options: Any) -> PruningCallback:
        """A callback that goes on with the schedule where it stopped, on the weights that were pruned.

        Ask for it once the model is compiled: steps are counted by the optimizer that it has then, or with
        compat="tfmot" in forward passes from this training on.

        Args:
            *names: Names of weights that had one schedule and pattern; none means all of them.
            **options: As for `PruningCallback`, instead of what the file says.

        Raises:
            ValueError: Nothing was pruned, the weights had several schedules, or a name is none of theirs.
        """
        wanted = names or tuple(self.masks)
        missing = [name for name in wanted if name not in self.masks]
        if missing or not wanted or self.step is None:
            raise ValueError(
                f"A pruning goes on with weights that were pruned: {', '.join(self.masks) or 'here there are none'}. "
                f"Received: {', '.join(missing) or 'no name'}."
            )
        found = {(self.schedules[name], self.patterns[name]) for name in wanted}
        if len(found) > 1:
            raise ValueError(
                "One callback has one schedule and one pattern. Received: weights that had several: "
                f"{', '.join(wanted)}. Make a callback for each group of names."
            )
        ((schedule, pattern),) = found
        origin = self._steps_done(options.get("compat")) - self.step
        settings = {"pattern": pattern, "include": wanted, "origin": origin}
        return PruningCallback(schedule, **{**settings, **options})

    def _steps_done(self, compat: str | None) -> int:
        """What a training that begins now counts as done: the optimizer's updates, but no forward pass before it."""
        optimizers = RULES.get(compat, RULES[None]).counted(optimizers_of(self.model))
        return max((int(backend.number(one.iterations)) for one in optimizers), default=0)


def read_model(source: Any, *, tolerance: float | None = None) -> Converted:
    """A legacy model as a plain Keras 3 model, with masks, step and optimizer so that its training can go on.

    Wrappers of `prune_low_magnitude`, `cluster_weights` and `quantize_model` are taken off. Both models are called on
    the same random inputs, and a difference is refused; a quantization-aware model rounds nothing meanwhile. No code of
    the file is run.

    Args:
        source: A .h5, .hdf5 or .keras file or a SavedModel folder that tf_keras wrote, or a model of tf_keras. Being
            called, a wrapped model sets its pruned weights to zero, as tensorflow-model-optimization does.
        tolerance: The largest difference of an output, relative to the largest output; None takes 1e-4, and 2e-2 for
            models that compute in half precision.

    Raises:
        ValueError: The file cannot be read, a layer has no equal in Keras 3, the outputs differ.
        TypeError: `source` is neither a path nor a model of tf_keras.
        ImportError: tf_keras or tensorflow-model-optimization is not installed.
    """
    file, where = _opened(source)
    translation = _translation(file.model, where)
    names = {id(weight.variable): weight.name for weight in weights_in(translation.model)}
    pruned = _pruned_weights(translation, names)
    for variable, mask, *_ in pruned.values():
        variable.assign(np.where(mask, keras.ops.convert_to_numpy(variable), 0))
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
    """Reads a legacy file and writes a `.keras` file of Keras 3; returns what was read.

    Args:
        old: As for `read_model`.
        new: The file to write; it is there whole or not at all.
        force: An older file there may be replaced.

    Raises:
        ValueError: As `read_model`; `new` is no `.keras` file, there already, or `old` itself.
        ImportError: As `read_model`.
    """
    path = Path(new)
    if path.suffix != ".keras":
        raise ValueError(f"Models of Keras 3 are written as .keras files. Received: {new}.")
    if os.path.lexists(path) and (not force or path.is_dir()):
        raise ValueError(f"{new} exists already{'' if path.is_dir() else '; --force or force=True replaces it'}.")
    if os.path.exists(path) and os.path.exists(old) and os.path.samefile(old, path):
        raise ValueError(
            f"{new} is the model that is read, and masks, schedules and step are in it alone. Give another name."
        )
    # Before the old file is read, which may take long.
    if not os.access(path.parent, os.W_OK | os.X_OK) or not path.parent.is_dir():
        raise ValueError(f"{new} cannot be written: {path.parent} is not a folder that you may write to.")
    converted = read_model(old)
    temporary = path.with_name(f".{path.stem}-{secrets.token_hex(4)}.keras")
    try:
        converted.model.save(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), os.fspath(new)) from error
    finally:
        temporary.unlink(missing_ok=True)
    return converted


def _opened(source: Any) -> tuple[LegacyFile, str]:
    """The model with what is known of its training, and what to call it in errors."""
    if isinstance(source, str | os.PathLike):
        return read_file(source), os.fspath(source)
    if not isinstance(source, legacy.tf_keras().Model):
        kind = f"{type(source).__module__.split('.')[0]}'s {type(source).__name__}"
        raise TypeError(f"read_model takes a path or a model of tf_keras. Received: an object of {kind}.")
    return LegacyFile(source, {}), repr(source.name)


def _translation(model: Any, where: str) -> Translation:
    try:
        return Translation(model)
    except NotCarried as error:
        raise ValueError(f"{where} holds what cannot be carried to Keras 3: {error}.") from error
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
    # A layer that is called twice in a pass counts twice, so of two that are equally frequent the lower is right.
    common = Counter(counted.values())
    step = min(common, key=lambda number: (-common[number], number))
    return max(step, 0), [
        f"the step of {name!r}: it counted {other} forward passes, the others {step}"
        for name, other in counted.items()
        if other != step
    ]


def _pattern(one: Wrapping) -> Pattern:
    if one.settings["sparsity_m_by_n"]:
        # Only in a live model: no file has the setting. It counts zeros, NM what is kept.
        zeros, length = one.settings["sparsity_m_by_n"]
        return NM(length - zeros, length)
    height, width = one.settings["block_size"]
    if (height, width) == (1, 1):
        return Unstructured()
    return Block(height, width, pooling={"AVG": "average", "MAX": "max"}[one.settings["block_pooling_type"]])


def _compiled(file: LegacyFile, translation: Translation) -> tuple[keras.optimizers.Optimizer | None, list[str]]:
    """Compiles the model if it can be; returns the optimizer, and what is lost."""
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
        f"the clustering of {one.layer.name!r}: its weights are in {one.clusters} clusters, and a training parts them"
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

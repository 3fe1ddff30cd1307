"""The steps of a recipe to start from, with comments: those that pay where the model will run."""

import glob
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import keras
import yaml

from prunekit.anatomy.channels.channels import find_channels
from prunekit.anatomy.layers.targets import find_targets
from prunekit.core.runtime import backend
from prunekit.recipe.text.loader import RecipeError
from prunekit.sparsity.shorthands import Goal
from prunekit.techniques.quantize.after_training import planned_quantization
from prunekit.techniques.quantize.options import QuantizationOptions

GOALS: tuple[Goal, ...] = get_args(Goal)
_EPOCHS, _FINETUNE = 6, 2


@dataclass(frozen=True)
class _Plan:
    """Steps for one goal.

    Attributes:
        share: Share that `shrink` leaves, as the name of its target and the value; None removes no channels.
        prunes: Whether weights become zero: smaller downloads and sparse files.
        integers: Whether the model ends as a file of whole integers.
        formats: Formats of LiteRT files in floating point or with integer weights alone.
        settings: Further settings of the step quantize.
        why: Comments above the steps.
    """

    share: tuple[str, float] | None = None
    prunes: bool = False
    integers: bool = False
    formats: tuple[str, ...] = ()
    settings: str = ""
    why: tuple[str, ...] = ()


_PLANS: dict[Goal | None, _Plan] = {
    None: _Plan(prunes=True, integers=True, formats=("litert",)),
    "phone": _Plan(
        share=("channels", 0.5),
        prunes=True,
        integers=True,
        formats=("litert",),
        why=("For a phone: removed channels and whole integers make it faster, zeros make the download smaller.",),
    ),
    "microcontroller": _Plan(
        share=("channels", 0.25),
        integers=True,
        settings=", full_integer: true",
        why=(
            "For a microcontroller: few channels, and 8-bit integers alone: the recipe is refused if a layer would",
            "compute in floating point. Zeros take as much flash as other values there, so nothing is pruned.",
        ),
    ),
    "server": _Plan(
        share=("macs", 0.5),
        integers=True,
        formats=("litert",),
        why=(
            "For a server: removed channels are faster in every runtime, integers on processors. Servers compute zeros",
            "like other values, so nothing is pruned.",
        ),
    ),
}


def starting_steps(model: keras.Model, goal: Goal | None, metric: str, *, trained: bool) -> list[str]:
    """Returns the lines of the steps for a model with data.

    Args:
        model: The built model.
        goal: Where it will run; None keeps its size.
        metric: Name of the main metric, as text of YAML.
        trained: False for a model that is trained first.

    Raises:
        RecipeError: The goal needs integers, which the model or the backend has not.
    """
    chosen = _PLANS[goal]
    train = [] if trained else ["  - train: {epochs: 10}"]
    removal = [] if chosen.share is None else _shrink(model, *chosen.share)
    prune = _prune(model) if chosen.prunes else []
    return [
        *(f"# {line}" for line in chosen.why),
        "steps:",
        *train,
        *removal,
        *prune,
        *_export(chosen.formats, pruned=bool(prune)),
        *(_quantize(model, chosen, goal) if chosen.integers else []),
        "  - expect:                     # the run ends with exit code 1 if a bound is not met",
        f"      drop: {{{metric}: 0.1, relative: true}}  # worse than before the changes by at most this; choose it",
        *(["      sparsity: {min: $final}"] if prune else []),
    ]


def variables_of(steps: Sequence[str]) -> list[str]:
    """Returns the lines of the variables that the steps name."""
    line = "final: 0.8                    # change it for one run: --set final=0.9"
    return [line] if any("$final" in step for step in steps) else []


def _prune(model: keras.Model) -> list[str]:
    return [
        "  - prune:",
        f"      epochs: {_EPOCHS}",
        "      # The sparsity rises in the first three quarters of the epochs; begin, end and frequency change that.",
        "      schedule: {type: polynomial_decay, final_sparsity: $final}  # linear, cosine and others",
        "      criterion: auto           # which weights go: magnitude, movement, taylor ...",
        "      pattern: unstructured     # 2:4, block:4x1 or channel, where a runtime gains from it",
        "      allocation: auto          # how much of each layer: uniform, erk, global, lamp",
        *_exclude(model),
        f"  - finetune: {{epochs: {_FINETUNE}, learning_rate: 0.0001}}",
    ]


def _shrink(model: keras.Model, measure: str, share: float) -> list[str]:
    """Returns the step that removes channels; a comment for a model that has none to remove."""
    try:
        removable = any(len(group.channels) > 1 for group in find_channels(model).groups)
        reason = "no channel of this model can be removed"
    except ValueError as error:
        removable, reason = False, str(error)
    if not removable:
        return [f"  # - shrink: {_comment(reason)}"]
    return [
        f"  - shrink: {{{measure}: {share}}}     # the share that is left: smaller tensors, faster on every runtime",
        f"  - finetune: {{epochs: {_EPOCHS}}}",
    ]


def _quantize(model: keras.Model, chosen: _Plan, goal: Goal | None) -> list[str]:
    """Returns the step that writes the integer file; a comment where there is none, unless the goal is all integers."""
    reason = ""
    if not backend.on_tensorflow():
        reason = "integer files are made with Keras's TensorFlow backend"
    else:
        options = QuantizationOptions(full_integer=bool(chosen.settings))
        try:
            if not planned_quantization(model, options).weights:
                reason = "no weight of this model becomes integers"
        except (TypeError, ValueError) as error:
            reason = str(error)
    if reason and chosen.settings:
        raise RecipeError(f"a {goal} needs a model of integers alone: {reason}")
    if reason:
        return [f"  # - quantize: {_comment(reason)}"]
    line = f"  - quantize: {{bits: 8, activation_bits: 8{chosen.settings}}}"
    return [f"{line}  # a LiteRT file that computes with integers"]


def _comment(reason: str) -> str:
    return " ".join(reason.split())


def steps_without_data(model: keras.Model) -> list[str]:
    """Returns the lines of the steps for a model without data."""
    tensors = getattr(model, "inputs", None) or ()
    known = bool(tensors) and all(None not in tuple(tensor.shape)[1:] for tensor in tensors)
    return [
        "# Without data the model is pruned at once and not trained. Add data and compile to train while pruning: the",
        "# same sparsity then costs less accuracy. prunekit init MODEL --data DATA writes such a recipe.",
        "steps:",
        "  - prune:",
        "      sparsity: $sparsity",
        "      pattern: unstructured     # 2:4, block:4x1 or channel, where a runtime gains from it",
        "      allocation: auto          # how much of each layer: uniform, erk, global, lamp",
        *_exclude(model),
        *(_export(("litert",), pruned=True) if known else _EXPORT_NEEDS_DATA),
        *(["  # - quantize: {bits: 8}    # needs data: a file that computes with integers"] if known else []),
    ]


# A file is compared with the model on inputs, and inputs of an open size cannot be generated.
_EXPORT_NEEDS_DATA = ["  # - export: {formats: [keras, litert]}  # needs data: the model has inputs of an open size"]


def _exclude(model: keras.Model) -> list[str]:
    """Returns the line that leaves out the last layer: few entries, and each matters for one output."""
    targets, _ = find_targets(model)
    layers = [target.name.rpartition("/")[0] or target.name for target in targets]
    if len(set(layers)) < 2:
        return []
    pattern = text_of(glob.escape(layers[-1]))
    return [f"      exclude: [{pattern}]  # the last layer is small, and pruning it costs the most"]


def _export(formats: Sequence[str], *, pruned: bool) -> list[str]:
    found = ["keras", *(formats if backend.on_tensorflow() else ())]
    more = "  # litert-sparse: a smaller file of pruned layers" if pruned and len(found) > 1 else ""
    return [f"  - export: {{formats: [{', '.join(found)}]}}{more}"]


def text_of(value: Any) -> str:
    """Returns a value in YAML, on one line, as it may stand alone and in a list or mapping in brackets."""
    # As the entry of a list: a comma or a bracket needs quotes there.
    return yaml.safe_dump(
        [value], default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False
    ).strip()[1:-1]

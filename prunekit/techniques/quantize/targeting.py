"""Selects the weights and layers that are quantized by include and exclude patterns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prunekit.anatomy.layers.layers import weights_of
from prunekit.anatomy.layers.model_weights import check_built, places, quantized_by_keras, weights_in
from prunekit.anatomy.layers.targets import Target, find_targets, values_by_name
from prunekit.anatomy.records.name_patterns import NamePattern, listed_patterns, prefixes
from prunekit.anatomy.records.reports import Skipped
from prunekit.techniques.quantize.placement.units import WEIGHT_ROLES

# Most layers that an error names.
_LISTED = 5
_NO_BITS = "`bits` leaves it in floating point"


@dataclass(frozen=True, eq=False)
class Selection:
    """What is quantized, and what is not.

    Attributes:
        targets: id of a variable -> the weight to quantize.
        kept_float: id of a layer or weight that computes in floating point -> the reason.
        skipped: Weights that are not quantized, with reasons.
        bits: id of a variable -> bits, for the weights that a pattern gives some.
    """

    targets: dict[int, Target]
    kept_float: dict[int, str]
    skipped: tuple[Skipped, ...]
    bits: Mapping[int, int]


def selected(
    model: Any,
    include: Sequence[str] | str = (),
    exclude: Sequence[str] | str = (),
    bits: Mapping[str, int | None] | None = None,
) -> Selection:
    """Returns the weights and layers that are quantized.

    A layer computes in floating point if a pattern in `exclude` matches it, or if one of its kernels is not quantized.

    Args:
        model: A built Keras 3 model.
        include: Patterns of layers and weights; if given, only the kernels and tables of these layers are quantized.
        exclude: Patterns of layers that compute in floating point; overrides `include`.
        bits: Bits by patterns of weights and layers; None for layers that compute in floating point.

    Raises:
        TypeError: `model` is not a Keras 3 model.
        ValueError: The model is not built, Keras quantized layers of it, or a pattern matches nothing.
    """
    check_built(model)
    others = quantized_by_keras(model)
    if others:
        raise ValueError(
            "pk.quantize chooses the integers itself, from weights in floating point. Received: layers that Keras has "
            f"quantized already: {', '.join(others[:_LISTED])}. Quantize the model as it was before."
        )
    found, skipped = find_targets(model, include, exclude, also=("depthwise_kernel", "embedding"), verb="quantize")
    targets = {id(target.variable): target for target in found if target.role in WEIGHT_ROLES}
    named = values_by_name(model, list(targets.values()), bits or {}, "bits", verb="quantize")
    floats = {key: target for key, target in targets.items() if target.name in named and named[target.name] is None}
    skipped = [*skipped, *(Skipped(target.name, _NO_BITS) for target in floats.values())]
    targets = {key: target for key, target in targets.items() if key not in floats}
    reasons = {item.name: item.reason for item in skipped}
    kept: dict[int, str] = {}
    weights = weights_in(model)
    for weight in weights:
        if id(weight.variable) not in targets:
            kept[id(weight.variable)] = reasons.get(weight.name, "")
    patterns = [NamePattern(pattern, "exclude") for pattern in listed_patterns(exclude, "exclude")]
    for place in places(model):
        for pattern in patterns:
            if pattern.kind([*prefixes(place.path), *place.names], ()):
                kept[id(place.layer)] = f"excluded by {pattern.pattern!r}"
        for variable, _, spec in weights_of(place.layer):
            if spec.role in WEIGHT_ROLES and id(variable) in kept:
                kept.setdefault(id(place.layer), kept[id(variable)])
    given = {name: number for name, number in named.items() if number is not None}
    of_targets = {key: given[target.name] for key, target in targets.items() if target.name in given}
    # Integer files store biases with 32 bits, and normalizations are folded or compute in floating point.
    usual = {weight.name for weight in weights if weight.spec.role in ("bias", "normalization")}
    return Selection(targets, kept, tuple(item for item in skipped if item.name not in usual), of_targets)

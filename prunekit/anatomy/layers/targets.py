"""Selects a model's weights to prune by include and exclude patterns, with a reason for each skipped weight."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.layers.layers import own_variables, owns_kernels, refusal, spec_of
from prunekit.anatomy.layers.model_weights import (
    OneVariable,
    Weight,
    check_built,
    places,
    raw_variables_in,
    unbuilt_layers,
    weights_in,
)
from prunekit.anatomy.records.name_patterns import NamePattern, listed_patterns, near_misses, prefixes
from prunekit.anatomy.records.reports import Skipped, by_reason
from prunekit.sparsity.array_ops import array_of

_FROZEN = "frozen (trainable=False): training cannot make up for what is pruned, so it is out unless include names it"
_BIAS = 'pk.WeightSpec("bias", (), (), prunable=False)'
_OUT_BY_DEFAULT = {
    "bias": "a bias: out unless include names it",
    "normalization": "a normalisation weight: out unless include names it",
    "depthwise_kernel": "a depthwise kernel: out unless include names it",
    "embedding": "a table of positions: out unless include names it",
    "other": "not a kernel: out unless include names it",
}


@dataclass(frozen=True, eq=False)
class Target(OneVariable):
    """One weight variable that is pruned.

    Attributes:
        variable: The Keras variable.
        layer: The layer that owns the variable (for RNN layers, the cell).
        name: Readable path from the layers' names inside the model, such as "block/conv_1/kernel"; unique in the model
            and the same in every copy of it, unlike `variable.path`.
        role: "kernel", "recurrent_kernel", "embedding", "depthwise_kernel", "bias", "normalization" or "other".
        in_axes: Input (reduction) axes.
        out_axes: Axes that number the output units. Axes in neither are spatial or batch axes.
        parallel_axes: Axes along which nothing is summed; see `WeightSpec`.
        groups: Number of groups of output units; each group has input units of its own.
    """

    variable: Any = field(repr=False)
    layer: Any = field(repr=False)
    name: str
    role: str
    in_axes: tuple[int, ...]
    out_axes: tuple[int, ...]
    parallel_axes: tuple[int, ...] = ()
    groups: int = 1

    @property
    def path(self) -> str:
        """The same as `name`."""
        return self.name


# ---- patterns --------------------------------------------------------------------------------------------------------


class _Selection:
    """The weights that one pattern matches, each by its layer's name or by its own name."""

    def __init__(self, matcher: NamePattern, model: Any, weights: list[Weight]) -> None:
        self.matcher = matcher
        kinds = [matcher.kind(weight.scopes, weight.paths) for weight in weights]
        if not any(kinds):
            # Last resort only: `variable.path` starts with the model's name, which a glob could match by accident.
            kinds = [
                matcher.kind(list(prefixes(weight.variable.path))[:-1], [weight.variable.path]) for weight in weights
            ]
        self.kinds = {weight.name: kind for weight, kind in zip(weights, kinds, strict=True)}
        if not any(kinds):
            self._refuse(model, weights)

    def matches(self, weight: Weight) -> bool:
        return bool(self.kinds[weight.name])

    def names(self, weight: Weight) -> bool:
        """Returns True if the pattern names this weight. The plain name of a depthwise layer names its kernel."""
        named = self.matcher.literal and self.matcher.pattern in (weight.layer.name, weight.layer_path)
        # A separable convolution has a kernel that is pruned by default; its plain name selects only that kernel.
        depthwise = weight.spec.role == "depthwise_kernel" and not owns_kernels(weight.layer)
        return self.kinds[weight.name] == "weight" or (named and depthwise)

    def spells_out(self, weight: Weight) -> bool:
        """Returns True if the pattern names this weight, or is the plain name of its layer or of a model around it."""
        return self.kinds[weight.name] == "weight" or (self.matcher.literal and self.matches(weight))

    def _refuse(self, model: Any, weights: list[Weight]) -> None:
        """Raises ValueError, except for an `exclude` pattern that matches a layer without weights."""
        layers = [place for place in places(model) if place.path]
        known = dict.fromkeys(
            [weight.name for weight in weights]
            + [text for place in layers for text in (place.path, place.names[-1], place.full_path)]
        )
        weightless = any(map(self.matcher, known))
        if weightless and self.matcher.option == "exclude":
            return
        other = [name for name in known if not self.matcher(name)]
        what = "only layers without weights" if weightless else "no layer and no weight"
        raise ValueError(
            f"The pattern {self.matcher.pattern!r} in `{self.matcher.option}` matches {what} of the model "
            f"{model.name!r}. {near_misses(self.matcher.pattern, other, [weight.name for weight in weights])}"
        )


def _selections(patterns: Sequence[str] | str, option: str, model: Any, weights: list[Weight]) -> list[_Selection]:
    listed = listed_patterns(patterns, option)
    return [_Selection(NamePattern(pattern, option), model, weights) for pattern in listed]


# ---- selection of targets --------------------------------------------------------------------------------------------


def check_finite(targets: Iterable[Target]) -> None:
    """Raises ValueError if an entry of a weight is NaN or infinite."""
    for target in targets:
        if not np.isfinite(array_of(target.variable).astype("float32")).all():
            raise ValueError(f"Weights must be finite. Received: NaN or infinite values in {target.name}.")


def find_targets(
    model: Any,
    include: Sequence[str] | str = (),
    exclude: Sequence[str] | str = (),
    *,
    also: Sequence[str] = (),
    training: bool = False,
    verb: str = "prune",
) -> tuple[list[Target], list[Skipped]]:
    """Returns (targets, skipped): the weights to prune in layer order, and all other weights with reasons.

    By default every kernel and embedding is a target; a variable that several layers share appears once. Biases,
    normalisation weights, depthwise kernels and the weights of custom layers that prunekit does not know are targets
    only if a pattern in `include` matches the single weight ("conv_1/bias", "*/gamma"); a pattern that selects whole
    layers ("block_1", "conv_*", "dense/*") selects their kernels, and for pruning
    the trained matrices of unknown layers.

    Args:
        model: A built Keras 3 model or layer.
        include: Patterns; if given, only matching weights are pruned. A pattern is a glob, or a regular expression
            after "re:", and must match a whole layer name, a whole readable path ("block/conv_1/kernel"), the path of
            a layer or nested model (all weights in it), or, if none of these match, `variable.path` or its beginning.
        exclude: Patterns of the same kind, with priority over `include`.
        also: Roles that are selected like kernels, although pruning skips them by default.
        training: True if the model is trained meanwhile: weights outside its trainable variables are then selected only
            if a pattern in `include` names the single weight or is the plain name of its layer or of a model around it.
        verb: What is done with the targets, for messages: "prune", "quantize", "cluster".

    Raises:
        TypeError: `model` is not a Keras 3 model.
        ValueError: The model is not built; a pattern matches nothing, or nothing that can be pruned; no weight is left.
    """
    check_built(model)
    weights = weights_in(model)
    excluded = _selections(exclude, "exclude", model, weights)
    included = _selections(include, "include", model, weights)
    targets: list[Target] = []
    skipped: list[Skipped] = []
    trained = {id(variable) for variable in model.trainable_variables} if training else set()
    for weight in weights:
        frozen = training and id(weight.variable) not in trained
        reason = _reason_to_skip(weight, included, excluded, also, frozen, verb)
        if reason:
            skipped.append(Skipped(weight.name, reason))
        else:
            targets.append(_target(weight))
    _check_each_include_takes_something(included, targets, skipped, verb)
    skipped.extend(
        Skipped(place.path, "the layer is not built: the model has not called it yet")
        for place in unbuilt_layers(model)
        if place.path
    )
    skipped.extend(raw_variables_in(model))
    if not targets:
        listed = "; ".join(by_reason(skipped)[:8]) or "it has no weights at all"
        remedy = " Call it once on a batch of data." if any(True for _ in unbuilt_layers(model)) else ""
        raise ValueError(f"The model {model.name!r} has no weights to {verb}. Received: {listed}.{remedy}")
    return targets, skipped


def values_by_name(
    model: Any, targets: Sequence[Target], given: Mapping[str, Any], option: str, *, verb: str = "prune"
) -> dict[str, Any]:
    """Returns {target name: value} for patterns of layers and weights.

    Args:
        model: The model.
        targets: Its targets.
        given: Pattern, as in `include` -> value.
        option: Name of the option, for messages.
        verb: What is done with the targets, for messages: "prune", "quantize", "cluster".

    Raises:
        ValueError: A pattern matches no target, or two patterns give a target different values.
    """
    weights = weights_in(model) if given else []
    names = {target.name for target in targets}
    found: dict[str, Any] = {}
    for pattern, value in given.items():
        # The exact name of a weight may have characters of a glob, as "head[0]/kernel" has.
        matching = [pattern] if pattern in names else _matching(NamePattern(pattern, option), model, weights, names)
        if not matching:
            raise ValueError(
                f"A pattern in `{option}` must match a {_participle(verb)} weight. Received: {pattern!r}, which "
                f"matches only weights that are not {_participle(verb)}. Add them to `include`, or remove the pattern."
            )
        for name in matching:
            if found.setdefault(name, value) != value:
                raise ValueError(
                    f"Each weight takes one value. Received: {found[name]} and {value} for {name} in `{option}`. "
                    "Make the patterns more specific."
                )
    return found


def _matching(pattern: NamePattern, model: Any, weights: list[Weight], names: Collection[str]) -> list[str]:
    selection = _Selection(pattern, model, weights)
    return [weight.name for weight in weights if selection.matches(weight) and weight.name in names]


def targets_named(model: Any, names: Collection[str]) -> list[Target]:
    """Returns the weights of the exact `names` as targets, in layer order, whether pruning selects them or not.

    Raises:
        TypeError: `model` is not a Keras 3 model.
        ValueError: The model is not built, or has no weight of one of the names.
    """
    check_built(model)
    weights = weights_in(model)
    known = [weight.name for weight in weights]
    for name in names:
        if name not in known:
            raise ValueError(f"The model {model.name!r} has no weight {name!r}. {near_misses(name, known, known)}")
    return [_target(weight) for weight in weights if weight.name in names]


def _target(weight: Weight) -> Target:
    spec = weight.spec
    role = "kernel" if spec.role == "unknown" else spec.role
    axes = (spec.in_axes, spec.out_axes, spec.parallel_axes, spec.groups)
    return Target(weight.variable, weight.layer, weight.name, role, *axes)


def _participle(verb: str) -> str:
    return f"{verb}d" if verb.endswith("e") else f"{verb}ed"


def _reason_to_skip(
    weight: Weight,
    included: list[_Selection],
    excluded: list[_Selection],
    also: Sequence[str],
    frozen: bool,
    verb: str,
) -> str:
    """Returns the reason to skip the weight, or "" for a target; raises if `include` names an unprunable weight."""
    for selection in excluded:
        if selection.matches(weight):
            return f"excluded by {selection.matcher.pattern!r}"
    asking = [selection for selection in included if selection.matches(weight)]
    naming = [selection for selection in asking if selection.names(weight)]
    if asking and not naming and verb == "prune" and _may_be_kernel(weight):
        naming = asking
    if included and not asking:
        return "not matched by include"
    obstacle = _obstacle(weight)
    if not naming and not weight.spec.prunable and weight.spec.role not in also:
        return obstacle or (_unknown(weight) if weight.spec.role == "unknown" else _OUT_BY_DEFAULT[weight.spec.role])
    if frozen and not any(selection.spells_out(weight) for selection in asking):
        return obstacle or _FROZEN
    if obstacle and included:
        pattern = (naming or asking)[0].matcher.pattern
        raise ValueError(
            f"The weight {weight.name!r}, asked for by {pattern!r} in `include`, cannot be {_participle(verb)}: "
            f"{obstacle}. Leave it out with `exclude`."
        )
    return obstacle


def _obstacle(weight: Weight) -> str:
    """Returns the reason why the weight cannot be pruned at all, or "" if it can be pruned."""
    reason = refusal(weight.layer) or weight.spec.refused
    if reason:
        return reason
    if 0 in tuple(weight.variable.shape):
        return f"it has no entries: its shape is {tuple(weight.variable.shape)}"
    dtype = keras.backend.standardize_dtype(weight.variable.dtype)
    return "" if "float" in dtype else f"its type {dtype} is not a floating-point type"


def _unknown(weight: Weight) -> str:
    """Returns the same reason for all weights of a layer type, so that reports name the type once."""
    kind = type(weight.layer).__name__
    known = own_variables(weight.layer)
    ranks = {
        name: len(variable.shape)
        for variable, name, _ in known
        if spec_of(weight.layer, name, variable).role == "unknown"
    }
    described = ", ".join(f"{name}={_BIAS if ranks[name] < 2 else 'pk.WeightSpec()'}" for name in ranks)
    return (
        f"prunekit does not know the weights of {kind}: describe them with pk.register_layer({kind}, {described}), "
        "where a WeightSpec() has its inputs along axis -2 and its outputs along axis -1, or prune its matrices with "
        'include="*"'
    )


def _may_be_kernel(weight: Weight) -> bool:
    """Returns True for a weight of an unknown layer that a pattern for whole layers selects: a trained matrix."""
    return weight.spec.role == "unknown" and len(weight.variable.shape) >= 2 and weight.variable.trainable


def _check_each_include_takes_something(
    included: list[_Selection], targets: list[Target], skipped: list[Skipped], verb: str
) -> None:
    taken = {target.name for target in targets}
    for selection in included:
        matched = [name for name, kind in selection.kinds.items() if kind]
        if taken.isdisjoint(matched):
            reasons = "; ".join(by_reason([item for item in skipped if item.name in matched]))
            raise ValueError(
                f"The pattern {selection.matcher.pattern!r} in `include` matches nothing that is {_participle(verb)}. "
                f"Received: {reasons}. To {verb} a weight that is out by default, name the weight itself, as in "
                f"{matched[0]!r}."
            )

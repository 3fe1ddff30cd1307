"""Factorizes a model: candidates, ranks, factors, the new model, report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prunekit.anatomy.layers.model_weights import quantized_by_keras, weights_in
from prunekit.anatomy.layers.targets import Target, check_finite, find_targets
from prunekit.anatomy.records.reports import Skipped
from prunekit.core.data.calibration import batches_of
from prunekit.core.layerwise.layerwise import Progress
from prunekit.core.runtime.kept_grids import check_off_grids
from prunekit.core.statistics.layer_products import unfitted
from prunekit.sparsity.arguments import MEMORY
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.factorize.factorize_report import FactorizedLayer, FactorizeReport
from prunekit.techniques.factorize.fitting import Fitting, Found
from prunekit.techniques.factorize.forms import CHANNELS, PAIR, Layout, Structure
from prunekit.techniques.factorize.layer_parts import layout_of, refusal
from prunekit.techniques.factorize.new_model import called_layers, verify, with_parts
from prunekit.techniques.factorize.options import FactorizeOptions, RankTarget
from prunekit.techniques.factorize.rank_choice import ModelChoice, Sizes, choose, missed
from prunekit.techniques.factorize.ranks import Curve, Rivals
from prunekit.techniques.shrink.channels.measured_size import Measure
from prunekit.techniques.shrink.channels.optimizer_state import class_notes

_CLOSED = "its layer is called inside another one, whose calls cannot stand alone in a model, or see a mask there"
# Share of zeros from which a weight counts as pruned; fewer may be chance.
PRUNED = 0.01


@dataclass(frozen=True, eq=False)
class FactorizedModel:
    """A factorized model.

    Attributes:
        model: The model.
        report: What was done.
    """

    model: Any
    report: FactorizeReport


def candidates(model: Any, options: FactorizeOptions) -> tuple[list[Target], list[Skipped]]:
    """Returns the weights that can be factorized, and the others with reasons.

    Raises:
        TypeError: `model` is not a Keras 3 model.
        ValueError: The model is not built or Keras quantized it; a pattern matches nothing.
    """
    others = quantized_by_keras(model)
    if others:
        raise ValueError(
            "Factors are in floating point. Received: layers that Keras has quantized already: "
            f"{', '.join(others[:5])}. Factorize the model as it was before."
        )
    targets, skipped = find_targets(
        model, options.include, options.exclude, also=("depthwise_kernel", "embedding"), verb="factorize"
    )
    usual = {weight.name for weight in weights_in(model) if weight.spec.role in ("bias", "normalization")}
    skipped = [one for one in skipped if one.name not in usual]
    lacking = unfitted(targets)
    reasons = {target.name: refusal(target, options.form) or lacking.get(target.name) for target in targets}
    possible = [target for target in targets if reasons[target.name] is None]
    if possible:
        called = called_layers(model, possible)
        closed = [target for target in possible if id(target.layer) not in called]
        reasons |= dict.fromkeys((target.name for target in closed), _CLOSED)
    skipped += [Skipped(name, reason) for name, reason in reasons.items() if reason is not None]
    return [target for target in targets if reasons[target.name] is None], skipped


def factorize_model(
    model: Any,
    target: RankTarget,
    options: FactorizeOptions,
    data: Any = None,
    *,
    measure: Measure | None = None,
    memory: float = MEMORY,
    progress: Progress | None = None,
) -> FactorizedModel:
    """Returns a factorized model with its report. The given model is not changed.

    Args:
        model: A built model.
        target: How small the layers become.
        options: Which layers, and how.
        data: As for `Fitting`.
        measure: How models are measured, for a target that is not calculated.
        memory: Largest number of bytes of activations that are kept between layers.
        progress: Told of each weight: (done, total, name).

    Raises:
        TypeError, ValueError: As for `pk.factorize`.
    """
    targets, skipped = candidates(model, options)
    check_off_grids(model, "A factorization", "Factorize first, then quantize.")
    check_finite(targets)
    if not targets:
        raise ValueError(f"The model {model.name!r} has no layer that can be factorized. Received: {_listed(skipped)}.")
    fitting, sizes = Fitting(model, targets, options, data, memory, progress), Sizes(model)
    curves = sizes.curves(targets, fitting.errors(), options.form)
    choice = choose(model, targets, curves, target, options, sizes, measure)
    skipped += choice.left
    chosen = [one for one in targets if one.name in choice.ranks]
    if not chosen:
        raise ValueError(
            f"No layer becomes smaller by {target.measure}={target.value!r}. Received: {_listed(skipped)}. Pass a "
            "smaller one."
        )
    found = fitting.factors(_rivals(choice, curves, target))
    made, names, carried = with_parts(model, chosen, found)
    if fitting.data is not None:
        verify(model, made, found, next(iter(batches_of(fitting.data)))[0])
    after = Sizes(made)
    notes = [fitting.note] if fitting.note else []
    notes += [*_lost_zeros(chosen), *class_notes(model, made), *carried]
    notes += _notes_on_size(target, choice, sizes, after, options)
    rows = tuple(_row(one, names[one.name], curves[one.name], found) for one in chosen)
    parameters, macs = (sizes.parameters, after.parameters), (sizes.macs, after.macs)
    return FactorizedModel(made, FactorizeReport(model.name, rows, tuple(skipped), parameters, macs, tuple(notes)))


def with_structures(
    model: Any, structures: Mapping[str, Structure], data: Any, *, memory: float = MEMORY
) -> tuple[Any, dict[str, tuple[str, ...]]]:
    """Returns a model whose weights have given forms and ranks, and the names of the new layers of each weight.

    Weights that would not become smaller stay as they are.

    Args:
        model: The model; it is not changed.
        structures: Name of a weight that can be factorized -> its form and ranks.
        data: Calibration data.
        memory: Largest number of bytes of activations that are kept between layers.

    Raises:
        ValueError: The new model computes other outputs than its factors.
    """
    named = [one for one in find_targets(model)[0] if one.name in structures]
    chosen = [one for one in named if _is_smaller(layout_of(one), structures[one.name])]
    if not chosen:
        return model, {}
    found = Fitting(model, chosen, FactorizeOptions(), data, memory).factors(
        {one.name: [structures[one.name]] for one in chosen}
    )
    made, names, _ = with_parts(model, chosen, found)
    verify(model, made, found, next(iter(batches_of(data)))[0])
    return made, names


def _is_smaller(layout: Layout, structure: Structure) -> bool:
    return layout.parameters(structure) < layout.parameters(None)


def _rivals(choice: ModelChoice, curves: Mapping[str, Curve], target: RankTarget) -> Rivals:
    """Returns what each layer takes, and for a size the best choices of other forms that cost no more."""
    if target.measure == "rank":
        return {name: [one] for name, one in choice.ranks.items() if one is not None}
    return {name: curves[name].rivals(one) for name, one in choice.ranks.items() if one is not None}


def _row(target: Target, names: tuple[str, ...], curve: Curve, found: Found) -> FactorizedLayer:
    factors = found.factors[target.name]
    errors = tuple(one.error for one in curve.choices if one.structure.form in (PAIR, CHANNELS))
    return FactorizedLayer(
        target.name,
        names,
        tuple(target.shape),
        factors.form,
        factors.ranks,
        len(errors),
        (target.size, factors.size),
        found.errors[target.name],
        errors,
        found.by_form[target.name],
    )


def _notes_on_size(
    target: RankTarget, choice: ModelChoice, before: Sizes, after: Sizes, options: FactorizeOptions
) -> list[str]:
    """Returns a note if the share of the size that was asked for is not reached."""
    if choice.measured is not None:
        return missed(target, choice.measured.share, options)
    one, other = (getattr(sizes, target.measure, None) for sizes in (before, after))
    return [] if one is None or other is None else missed(target, other / one, options)


def zeros_of(target: Target) -> float:
    """Returns the share of zeros of a weight."""
    return float((array_of(target.variable) == 0).mean())


def _lost_zeros(chosen: Sequence[Target]) -> list[str]:
    lost = [one.name for one in chosen if zeros_of(one) >= PRUNED]
    if not lost:
        return []
    return [
        f"Zeros are lost in {', '.join(lost)}: the factors of a pruned weight are dense. Factorize first, then prune."
    ]


def _listed(skipped: Sequence[Skipped]) -> str:
    return "; ".join(f"{one.name}: {one.reason}" for one in skipped[:3]) or "no kernel"

"""Factorizes a model: ranks, factors, new layers, comparison, report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
from keras.src.backend.common.masking import get_keras_mask

from prunekit.anatomy.channels.recorded_calls import RecordedCall, recorded
from prunekit.anatomy.graph.model_graph import graph_of
from prunekit.anatomy.graph.tracing import Trace, forward_trace
from prunekit.anatomy.layers.model_weights import quantized_by_keras, weights_in
from prunekit.anatomy.layers.targets import Target, find_targets, values_by_name
from prunekit.anatomy.records.reports import Skipped
from prunekit.core.data.calibration import batches_of
from prunekit.core.data.synthetic_inputs import StandIn, stand_in
from prunekit.core.layerwise.layerwise import LayerwiseRepair, Progress
from prunekit.core.runtime.backend import native
from prunekit.core.runtime.kept_grids import check_off_grids
from prunekit.core.statistics.layer_products import product_of, unfitted
from prunekit.sparsity.arguments import MEMORY
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.factorize.factorize_report import FactorizedLayer, FactorizeReport
from prunekit.techniques.factorize.layer_factors import Factorizer
from prunekit.techniques.factorize.layer_pairs import Pair, insert, pair_of, refusal
from prunekit.techniques.factorize.low_rank import directions_of
from prunekit.techniques.factorize.optimizer_slots import Factors, carry_slots
from prunekit.techniques.factorize.options import FactorizeOptions, RankTarget
from prunekit.techniques.factorize.ranks import Curve, Ranks, for_budget
from prunekit.techniques.shrink.channels.measured_size import NEAR, Measure, Measured
from prunekit.techniques.shrink.channels.optimizer_state import carry_over, class_notes
from prunekit.techniques.shrink.graph.graph_builder import build
from prunekit.techniques.shrink.graph.layer_graph import LayerGraph

_CLOSED = "its layer is called inside another one, whose calls cannot stand alone in a model, or see a mask there"
# In the place of data: weights alone, without synthetic inputs.
NO_INPUTS = object()
# Most models that are measured in the search for a share.
_TRIES = 7
# Share of zeros from which a weight counts as pruned.
_PRUNED = 0.01
# Largest difference of the outputs of the new model from those with the matrices of low rank, relative to the largest.
_ROUNDING, _EXAMPLES = 0.01, 2


@dataclass(frozen=True, eq=False)
class Found:
    """The factors of a model.

    Attributes:
        values: New values, as (variable, tensor), with which the model computes as with the factors.
        factors: Name of a weight -> its factors.
        errors: Name of a weight -> the error of its layer.
    """

    values: Sequence[tuple[Any, Any]]
    factors: Mapping[str, tuple[np.ndarray, np.ndarray]]
    errors: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class FactorizedModel:
    """A model of which layers became two.

    Attributes:
        model: The model.
        report: What was done.
    """

    model: Any
    report: FactorizeReport


def candidates(model: Any, options: FactorizeOptions) -> tuple[list[Target], list[Skipped]]:
    """Returns the weights that can be two, and the others with reasons.

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
    reasons = {target.name: refusal(target) or lacking.get(target.name) for target in targets}
    possible = [target for target in targets if reasons[target.name] is None]
    if possible:
        graph = LayerGraph(model, Opened(model, possible))
        called = {id(call.operation) for level in graph.graphs() for call in level.calls}
        closed = [target for target in possible if id(target.layer) not in called]
        reasons |= dict.fromkeys((target.name for target in closed), _CLOSED)
    skipped += [Skipped(name, reason) for name, reason in reasons.items() if reason is not None]
    return [target for target in targets if reasons[target.name] is None], skipped


class Fitting:
    """Finds the factors of a model's weights, on data, on synthetic inputs, or without any.

    Args:
        model: The model.
        targets: The weights.
        options: How.
        data: Calibration data; None = synthetic inputs; `NO_INPUTS` = weights alone.
        memory: Largest number of bytes of activations that are kept between layers.
        progress: Told of each weight.

    Attributes:
        data: What is read; None = nothing.
        note: What the report says of the inputs; "" with data.
    """

    def __init__(
        self,
        model: Any,
        targets: Sequence[Target],
        options: FactorizeOptions,
        data: Any = None,
        memory: float = MEMORY,
        progress: Progress | None = None,
    ):
        self._model, self._targets, self._options = model, list(targets), options
        self._memory, self._progress = memory, progress
        self._standing_in: StandIn | None = stand_in(model) if data is None else None
        self.data = data if self._standing_in is None else self._standing_in.inputs
        if data is NO_INPUTS:
            self.data = None
        self.note = "" if self._standing_in is None else self._standing_in.note

    def errors(self) -> dict[str, np.ndarray]:
        """Returns the squared error of each layer's outputs with rank 1, 2, ..., relative to the outputs."""
        return self._fitted(self._targets, {})[1]

    def factors(self, ranks: Ranks) -> Found:
        """Returns the factors, each layer fitted from what the factorized layers before it compute."""
        return self._fitted([one for one in self._targets if ranks.get(one.name) is not None], ranks)[0]

    def _fitted(self, targets: Sequence[Target], ranks: Ranks) -> tuple[Found, dict[str, np.ndarray]]:
        if self.data is None:
            return _without_inputs(targets, ranks)
        solver = Factorizer(targets, ranks, corrects_biases=self._options.correct_biases)
        if self._standing_in is None:
            return self._on_data(targets, solver)
        try:
            with self._standing_in.renormalization(self._model) as statistics:
                found, errors = self._on_data(targets, solver)
                values = [(variable, statistics.on_data(id(variable), value)) for variable, value in found.values]
                return replace(found, values=values), errors
        except ValueError as error:
            # Nobody asked for synthetic inputs.
            self.note, self.data = self._standing_in.failed(error).note, None
            return _without_inputs(targets, ranks)

    def _on_data(self, targets: Sequence[Target], solver: Factorizer) -> tuple[Found, dict[str, np.ndarray]]:
        work = LayerwiseRepair(self._model, targets, solver, self._progress, memory=self._memory)
        work.run([inputs for inputs, _ in batches_of(self.data)])
        errors = {name: one.error for name, one in work.errors.items()}
        return Found(work.values, solver.factors, errors), solver.errors


def _without_inputs(targets: Sequence[Target], ranks: Ranks) -> tuple[Found, dict[str, np.ndarray]]:
    """Returns truncated singular value decompositions."""
    values, factors, errors, curves = [], {}, {}, {}
    for target in targets:
        product = product_of(target)
        matrix = product.matrix(array_of(target.variable).astype("float32")).astype("float64")[0]
        directions = directions_of(np.ones(len(matrix)), matrix)
        energy = float(np.square(matrix).sum())
        curves[target.name] = directions.dropped()[1:] / (energy or 1.0)
        rank = ranks.get(target.name)
        if rank is not None:
            first, second = factors[target.name] = directions.factors(matrix, rank)
            values.append((target.variable, product.kernel((first @ second)[None].astype("float32"))))
            errors[target.name] = float(curves[target.name][rank - 1])
    return Found(values, factors, errors), curves


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
    """Returns a model of which layers became two, with its report. The given model is not changed.

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
    _check_finite(targets)
    if not targets:
        raise ValueError(f"The model {model.name!r} has no layer that can be two. Received: {_listed(skipped)}.")
    fitting = Fitting(model, targets, options, data, memory, progress)
    errors = fitting.errors()
    trace = _traced(model)
    curves = _curves(targets, errors, trace)
    notes: list[str] = []
    measured: Measured | None = None
    if target.measure == "rank":
        ranks, left = _given_ranks(model, targets, curves, target)
    elif target.measure == "energy":
        ranks, left = _energy_ranks(curves, target.value)
    else:
        ranks, left, measured = _sized(model, targets, curves, target, _macs(model, trace), measure)
    skipped += left
    chosen = [one for one in targets if ranks.get(one.name) is not None]
    if not chosen:
        raise ValueError(
            f"No layer becomes smaller by {target.measure}={target.value!r}. Received: {_listed(skipped)}. Pass a "
            "smaller one."
        )
    found = fitting.factors(ranks)
    made, names, carried = _built(model, chosen, found)
    if fitting.data is not None:
        _verify(model, made, found, next(iter(batches_of(fitting.data)))[0])
    notes += [] if not fitting.note else [fitting.note]
    notes += _lost_zeros(chosen)
    notes += class_notes(model, made) + carried
    if measured is not None:
        notes += _missed(target, measured.share, options)
    sizes = {
        "parameters": (model.count_params(), made.count_params()),
        "macs": (_macs(model, trace), _macs(made, _traced(made))),
    }
    before, after = sizes.get(target.measure, (None, None))
    if before is not None and after is not None:
        notes += _missed(target, after / before, options)
    rows = tuple(
        FactorizedLayer(
            one.name,
            names[one.name],
            tuple(one.shape),
            int(ranks[one.name] or 0),
            len(curves[one.name].errors),
            (one.size, sum(factor.size for factor in found.factors[one.name])),
            found.errors[one.name],
            tuple(float(error) for error in curves[one.name].errors),
        )
        for one in chosen
    )
    report = FactorizeReport(model.name, rows, tuple(skipped), sizes["parameters"], sizes["macs"], tuple(notes))
    return FactorizedModel(made, report)


def _check_finite(targets: Sequence[Target]) -> None:
    for target in targets:
        if not np.isfinite(array_of(target.variable).astype("float32")).all():
            raise ValueError(f"Weights must be finite. Received: NaN or infinite values in {target.name}.")


def _lost_zeros(chosen: Sequence[Target]) -> list[str]:
    shares = {one.name: float((array_of(one.variable) == 0).mean()) for one in chosen}
    lost = [name for name, share in shares.items() if share >= _PRUNED]
    if not lost:
        return []
    return [
        f"Zeros are lost in {', '.join(lost)}: the factors of a pruned weight are dense. Factorize first, then prune."
    ]


def _listed(skipped: Sequence[Skipped]) -> str:
    return "; ".join(f"{one.name}: {one.reason}" for one in skipped[:3]) or "no kernel"


# ---- ranks -----------------------------------------------------------------------------------------------------------


def _traced(model: Any) -> Trace | None:
    """Returns what one pass over an example uses; None where this is unknown."""
    try:
        found = forward_trace(model, 1)
    except ValueError:
        return None
    return None if found.unknown else found


def _macs(model: Any, trace: Trace | None) -> int | None:
    """Returns the multiply-accumulates of one example; None if unknown."""
    if trace is None:
        return None
    of_weights = sum(trace.uses.get(id(one), 0) * math.prod(one.shape) for one in model.weights)
    return of_weights + sum(trace.products.values())


def _curves(targets: Sequence[Target], errors: Mapping[str, np.ndarray], trace: Trace | None) -> dict[str, Curve]:
    found = {}
    for target in targets:
        product = product_of(target)
        uses = 0 if trace is None else trace.uses.get(id(target.variable), 0)
        found[target.name] = Curve(
            target.name, product.inputs, product.outputs, errors[target.name], uses * target.size
        )
    return found


_DOES_NOT_PAY = "with rank {rank} both factors have {factors:,} entries, and the weight {size:,}"


def _given_ranks(
    model: Any, targets: Sequence[Target], curves: Mapping[str, Curve], target: RankTarget
) -> tuple[Ranks, list[Skipped]]:
    named = values_by_name(model, targets, target.patterns, "rank", verb="factorize")
    ranks: Ranks = {}
    left = []
    for name, curve in curves.items():
        rank = named.get(name, target.rank)
        if rank is None:
            reason = "`rank` leaves it as it is" if name in named else "no pattern of `rank` matches it"
            left.append(Skipped(name, reason))
        elif rank > curve.worthwhile:
            text = _DOES_NOT_PAY.format(rank=rank, factors=curve.parameters(rank), size=curve.parameters(None))
            left.append(Skipped(name, text))
        else:
            ranks[name] = rank
    return ranks, left


def _energy_ranks(curves: Mapping[str, Curve], energy: float) -> tuple[Ranks, list[Skipped]]:
    ranks = {name: curve.rank_for(energy) for name, curve in curves.items()}
    left = [
        Skipped(name, f"no rank that makes it smaller keeps {energy:g} of its energy")
        for name, rank in ranks.items()
        if rank is None
    ]
    return {name: rank for name, rank in ranks.items() if rank is not None}, left


def _sized(
    model: Any,
    targets: Sequence[Target],
    curves: Mapping[str, Curve],
    target: RankTarget,
    macs: int | None,
    measure: Measure | None,
) -> tuple[Ranks, list[Skipped], Measured | None]:
    """Returns ranks for a share of a size, what stays as it is, and the measured size."""
    by_macs = target.measure in ("macs", "latency")
    usable = {name: curve for name, curve in curves.items() if not by_macs or curve.macs}
    price: Callable[[Curve, int | None], float] = Curve.macs_with if by_macs else Curve.parameters
    if by_macs and not macs:
        raise ValueError(
            f"A target in {target.measure} needs the multiply-accumulates of each layer. Received: a model of which "
            "they are unknown, as pk.cost tells. Use `parameters`."
        )
    total = float(macs or 0) if by_macs else float(model.count_params())
    fixed = total - sum(price(curve, None) for curve in usable.values())

    def ranks_at(share: float) -> Ranks | None:
        return for_budget(list(usable.values()), share * total - fixed, price)

    if measure is None:
        ranks, measured = ranks_at(target.value), None
    else:
        ranks, measured = _searched(model, targets, ranks_at, target, measure)
    if ranks is None:
        least = sum(min(price(curve, None), price(curve, 1)) for curve in usable.values())
        raise ValueError(
            f"{target.measure}={target.value:g} cannot be reached: with rank 1 everywhere {(fixed + least) / total:.3f}"
            " is left. Pass a larger share, or prune or shrink the model."
        )
    left = [
        Skipped(name, "its rank is worth more than it costs" if name in usable else "a table multiplies nothing")
        for name, curve in curves.items()
        if ranks.get(name) is None
        if curve.worthwhile or name not in usable
    ]
    left += [
        Skipped(name, _DOES_NOT_PAY.format(rank=1, factors=curve.parameters(1), size=curve.parameters(None)))
        for name, curve in usable.items()
        if not curve.worthwhile
    ]
    return {name: rank for name, rank in ranks.items() if rank is not None}, left, measured


def _searched(
    model: Any,
    targets: Sequence[Target],
    ranks_at: Callable[[float], Ranks | None],
    target: RankTarget,
    measure: Measure,
) -> tuple[Ranks | None, Measured | None]:
    """Returns the ranks of the largest calculated share whose measured one is within the target."""
    low, high = 0.0, 1.0
    best: tuple[Ranks | None, Measured | None] = None, None
    share = float(target.value)
    for _ in range(_TRIES):
        ranks = ranks_at(share)
        chosen = [] if ranks is None else [one for one in targets if ranks.get(one.name) is not None]
        if ranks is None:
            low = share
        elif not chosen:
            high = share
        else:
            measured = measure.compare(_built(model, chosen, _empty(chosen, ranks))[0])
            if measured.share <= target.value * (1 + NEAR):
                low = share
                if best[1] is None or measured.share > best[1].share:
                    best = ranks, measured
                if measured.share >= target.value * (1 - NEAR):
                    break
            else:
                high = share
        share = (low + high) / 2
    return best


def _empty(chosen: Sequence[Target], ranks: Ranks) -> Found:
    """Returns factors without values, for a model whose size is measured."""
    factors: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for target in chosen:
        product, rank = product_of(target), ranks[target.name] or 0
        # Not zeros: a file keeps one copy of equal weights.
        draw = np.random.default_rng(len(factors))
        shapes = (product.inputs, rank), (rank, product.outputs)
        factors[target.name] = (draw.normal(size=shapes[0]), draw.normal(size=shapes[1]))
    return Found((), factors, {})


def _missed(target: RankTarget, share: float, options: FactorizeOptions) -> list[str]:
    """Returns a note if a share is not reached.

    Raises:
        ValueError: It is missed by more than the tolerance.
    """
    off = abs(share - target.value) / target.value
    if options.tolerance is not None and off > options.tolerance:
        raise ValueError(
            f"{target.measure}={target.value:g} is not reached within {options.tolerance:.0%}: {share:.3f} is left. "
            "Pass another share, or tolerance=None for the nearest."
        )
    return [] if off <= NEAR else [f"{target.measure}={target.value:g} is not reached: {share:.3f} is left."]


# ---- the new model ---------------------------------------------------------------------------------------------------


def _built(model: Any, chosen: Sequence[Target], found: Found) -> tuple[Any, dict[str, str], list[str]]:
    """Returns the new model, the name of the new layer for each weight, and notes."""
    graph = LayerGraph(model, Opened(model, chosen))
    values = {id(variable): np.array(array_of(value)) for variable, value in found.values}
    taken = {layer.name for layer in model._flatten_layers()}
    names: dict[str, str] = {}
    pairs: list[tuple[Target, Pair]] = []
    for target in chosen:
        first, second = found.factors[target.name]
        kind = "projection" if target.role == "embedding" else "reduction"
        name = _free(f"{graph.names.get(id(target.layer), target.layer.name)}_{kind}", taken)
        bias = getattr(target.layer, "bias", None)
        pair = pair_of(target, first, second, None if bias is None else values.get(id(bias)), name)
        insert(graph, target, pair)
        names[target.name] = name
        pairs.append((target, pair))
    replaced_here = {id(target.variable) for target in chosen}
    made, variables = build(
        graph, lambda one: values[id(one)] if id(one) in values and id(one) not in replaced_here else array_of(one)
    )
    replaced = []
    for target, pair in pairs:
        # Taken out of the pairs of former and new variables: the model did not have the new layer.
        (added,) = (variables.pop(id(variable))[1] for variable in pair.added.variables)
        own = variables[id(target.variable)][1]
        both = (own, added) if pair.follows else (added, own)
        replaced.append(Factors(product_of(target), *found.factors[target.name], both))
    shapes = {id(native(target.variable)): tuple(variables[id(target.variable)][1].shape) for target in chosen}

    def begun(weight: Any, value: np.ndarray) -> np.ndarray:
        shape = shapes.get(id(native(weight)))
        return value if shape is None else np.zeros(shape, value.dtype)

    notes = carry_over(model, made, variables, begun)
    former = getattr(model, "optimizer", None)
    if former is not None and former.built and made.compiled:
        carry_slots(former, made.optimizer, replaced)
    return made, names, notes


def _verify(model: Any, made: Any, found: Found, inputs: Any) -> None:
    """Checks that the new model computes what the model with the weights of low rank computes.

    Raises:
        ValueError: The outputs differ.
    """
    few = keras.tree.map_structure(lambda array: array[:_EXAMPLES], inputs)
    with keras.StatelessScope(state_mapping=list(found.values)):
        wanted = model(few, training=False)
    pairs = zip(keras.tree.flatten(wanted), keras.tree.flatten(made(few, training=False)), strict=True)
    for one, other in ((array_of(one).astype("float64"), array_of(other)) for one, other in pairs):
        size, change = np.abs(one).max(initial=0.0), np.abs(one - other).max(initial=0.0)
        if np.isfinite(size) and change > _ROUNDING * size:
            raise ValueError(
                f"The new model computes other outputs than the model {model.name!r} with weights of low rank, which "
                f"is a fault of prunekit. Received: a relative difference of {change / size:.2g}. Leave out custom "
                "layers with `exclude`, and report the model."
            )


def _free(name: str, taken: set[str]) -> str:
    number, found = 1, name
    while found in taken:
        found = f"{name}_{number}"
        number += 1
    taken.add(found)
    return found


class Opened:
    """Opens the layers and models in which a factorized layer is called, apart from those with a graph."""

    def __init__(self, model: Any, chosen: Sequence[Target]):
        self._wanted = {id(target.layer) for target in chosen}
        self._model = model
        self._found: dict[int, tuple[Any, RecordedCall | None]] = {}

    def __call__(self, node: Any) -> RecordedCall | None:
        if node is self._model:
            return None
        if id(node) not in self._found:
            self._found[id(node)] = node, self._opened(node)
        return self._found[id(node)][1]

    def _opened(self, node: Any) -> RecordedCall | None:
        layer = getattr(node, "operation", None)
        if not isinstance(layer, keras.layers.Layer) or id(layer) in self._wanted or graph_of(layer) is not None:
            return None
        if not any(id(one) in self._wanted for one in layer._flatten_layers()):
            return None
        # The calls inside would not see these masks.
        if any(get_keras_mask(tensor) is not None for tensor in (*node.input_tensors, *node.outputs)):
            return None
        call = recorded(layer, node.arguments.args, node.arguments.kwargs)
        return call if call is not None and call.repeatable else None

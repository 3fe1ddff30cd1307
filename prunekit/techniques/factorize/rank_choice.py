"""Chooses the form and the ranks of each layer: as given, for an energy, or for a share of a size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prunekit.anatomy.graph.tracing import Trace, forward_trace
from prunekit.anatomy.layers.targets import Target, values_by_name
from prunekit.anatomy.records.reports import Skipped
from prunekit.techniques.factorize.form_costs import FormCosts
from prunekit.techniques.factorize.forms import Structure
from prunekit.techniques.factorize.layer_parts import layout_of
from prunekit.techniques.factorize.new_model import with_random_factors
from prunekit.techniques.factorize.options import FactorizeOptions, RankTarget
from prunekit.techniques.factorize.ranks import Choice, Cost, Curve, Ranks, for_budget
from prunekit.techniques.shrink.channels.measured_size import NEAR, Measure, Measured

# Most models that are measured in the search for a share.
_TRIES = 7
_DOES_NOT_PAY = "with rank {rank} its factors have {factors:,} entries, and the weight {size:,}"


@dataclass(frozen=True, eq=False)
class ModelChoice:
    """The forms and ranks of a model's layers.

    Attributes:
        ranks: Name of a factorized weight -> its form and ranks.
        left: The weights that stay as they are, with reasons.
        measured: The measured size; None for a target that is calculated.
    """

    ranks: Ranks
    left: list[Skipped]
    measured: Measured | None = None


class Sizes:
    """What a model costs.

    Args:
        model: A built model.

    Attributes:
        parameters: Number of its parameters.
        macs: Multiply-accumulates of one example; None if unknown.
    """

    def __init__(self, model: Any):
        self._trace = _traced(model)
        self.parameters = model.count_params()
        self.macs: int | None = None
        if self._trace is not None:
            uses = self._trace.uses
            self.macs = sum(uses.get(id(one), 0) * math.prod(one.shape) for one in model.weights)
            self.macs += sum(self._trace.products.values())

    def curves(
        self, targets: Sequence[Target], errors: Mapping[str, Mapping[Structure, float]], form: str
    ) -> dict[str, Curve]:
        """Returns what each layer loses and costs with each form and ranks, by the name of its weight.

        Args:
            targets: The weights.
            errors: Their errors.
            form: The form of convolutions, or "auto".
        """
        found = {}
        for target in targets:
            costs, layout = self.costs(target), layout_of(target)
            choices = tuple(
                Choice(one, error, layout.parameters(one), costs.macs(one))
                for one, error in errors[target.name].items()
            )
            uses = 0 if self._trace is None else self._trace.uses.get(id(target.variable), 0)
            found[target.name] = Curve(target.name, target.size, uses * target.size, choices, layout.asked(form))
        return found

    def costs(self, target: Target) -> FormCosts:
        """Returns what the forms of a layer compute."""
        uses, output = 0, None
        if self._trace is not None:
            uses = self._trace.uses.get(id(target.variable), 0)
            output = self._trace.outputs.get(id(target.layer))
        return FormCosts(target.layer, layout_of(target), uses, output)


def _traced(model: Any) -> Trace | None:
    try:
        found = forward_trace(model, 1)
    except ValueError:
        return None
    return None if found.unknown else found


def choose(
    model: Any,
    targets: Sequence[Target],
    curves: Mapping[str, Curve],
    target: RankTarget,
    options: FactorizeOptions,
    sizes: Sizes,
    measure: Measure | None,
) -> ModelChoice:
    """Returns the forms and ranks of a model's layers.

    Args:
        model: The model.
        targets: The weights that can be factorized.
        curves: What each loses and costs.
        target: How small the layers become.
        options: In which form.
        sizes: What the model costs.
        measure: How models are measured, for a target that is not calculated.

    Raises:
        ValueError: A pattern matches nothing; the target cannot be reached, or needs what is unknown.
    """
    if target.measure == "rank":
        return _given_ranks(model, targets, target, options.form)
    if target.measure == "energy":
        return _energy_ranks(curves, target.value)
    return _Budget(model, targets, curves, target, sizes).choice(measure)


def _given_ranks(model: Any, targets: Sequence[Target], target: RankTarget, form: str) -> ModelChoice:
    named = values_by_name(model, targets, target.patterns, "rank", verb="factorize")
    ranks: Ranks = {}
    left = []
    for one in targets:
        name, layout = one.name, layout_of(one)
        rank = named.get(name, target.rank)
        if rank is None:
            reason = "`rank` leaves it as it is" if name in named else "no pattern of `rank` matches it"
            left.append(Skipped(name, reason))
            continue
        # The number of values between two layers: of "auto", the form that has two.
        structure = layout.of_rank(layout.asked(form)[0], rank)
        if layout.parameters(structure) < layout.parameters(None):
            ranks[name] = structure
        else:
            left.append(_does_not_pay(name, rank, layout.parameters(structure), layout.parameters(None)))
    return ModelChoice(ranks, left)


def _energy_ranks(curves: Mapping[str, Curve], energy: float) -> ModelChoice:
    found = {name: curve.choice_for(energy) for name, curve in curves.items()}
    left = [
        Skipped(name, f"no rank that makes it smaller keeps {energy:g} of its energy")
        for name, choice in found.items()
        if choice is None
    ]
    return ModelChoice({name: choice.structure for name, choice in found.items() if choice is not None}, left)


def _does_not_pay(name: str, rank: int, factors: int, size: int) -> Skipped:
    return Skipped(name, _DOES_NOT_PAY.format(rank=rank, factors=factors, size=size))


def _parameters(one: Choice | Curve) -> float:
    return one.parameters


def _macs(one: Choice | Curve) -> float:
    return one.macs


class _Budget:
    """The ranks for a share of a size. Bytes follow parameters, and the latency multiply-accumulates.

    Raises:
        ValueError: The multiply-accumulates are needed, and unknown.
    """

    def __init__(
        self,
        model: Any,
        targets: Sequence[Target],
        curves: Mapping[str, Curve],
        target: RankTarget,
        sizes: Sizes,
    ):
        by_macs = target.measure in ("macs", "latency")
        if by_macs and not sizes.macs:
            raise ValueError(
                f"A target in {target.measure} needs the multiply-accumulates of each layer. Received: a model of "
                "which they are unknown, as pk.cost tells. Use `parameters`."
            )
        self._model, self._targets, self._curves, self._target = model, targets, curves, target
        # A table multiplies nothing, and its projection would.
        self._usable = {name: curve for name, curve in curves.items() if not by_macs or curve.macs}
        self._price: Cost = _macs if by_macs else _parameters
        self._total = float(sizes.macs or 0) if by_macs else float(sizes.parameters)
        self._fixed = self._total - sum(map(self._price, self._usable.values()))

    def choice(self, measure: Measure | None) -> ModelChoice:
        """Returns the ranks.

        Raises:
            ValueError: The share cannot be reached.
        """
        share = float(self._target.value)
        ranks, measured = (self._at(share), None) if measure is None else self._searched(measure)
        if ranks is None:
            least = sum(
                min(self._price(one), *map(self._price, one.worthwhile), math.inf) for one in self._usable.values()
            )
            raise ValueError(
                f"{self._target.measure}={share:g} cannot be reached: with rank 1 everywhere "
                f"{(self._fixed + least) / self._total:.3f} is left. Pass a larger share, or prune or shrink the model."
            )
        return ModelChoice(
            {name: one for name, one in ranks.items() if one is not None},
            [self._reason(name) for name in self._curves if ranks.get(name) is None],
            measured,
        )

    def _at(self, share: float) -> Ranks | None:
        return for_budget(list(self._usable.values()), share * self._total - self._fixed, self._price)

    def _reason(self, name: str) -> Skipped:
        if name not in self._usable:
            return Skipped(name, "a table multiplies nothing")
        curve = self._curves[name]
        if curve.worthwhile:
            return Skipped(name, "its rank is worth more than it costs")
        least = min(curve.choices, key=lambda one: one.parameters)
        return _does_not_pay(name, 1, least.parameters, curve.parameters)

    def _searched(self, measure: Measure) -> tuple[Ranks | None, Measured | None]:
        """Returns the ranks of the largest calculated share whose measured one is within the target."""
        low, high, wanted = 0.0, 1.0, float(self._target.value)
        best: tuple[Ranks | None, Measured | None] = None, None
        share = wanted
        for _ in range(_TRIES):
            ranks = self._at(share)
            chosen = [] if ranks is None else [one for one in self._targets if ranks.get(one.name) is not None]
            if ranks is None:
                low = share
            elif not chosen:
                high = share
            else:
                measured = measure.compare(with_random_factors(self._model, chosen, ranks))
                if measured.share <= wanted * (1 + NEAR):
                    low = share
                    if best[1] is None or measured.share > best[1].share:
                        best = ranks, measured
                    if measured.share >= wanted * (1 - NEAR):
                        break
                else:
                    high = share
            share = (low + high) / 2
        return best


def missed(target: RankTarget, share: float, options: FactorizeOptions) -> list[str]:
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

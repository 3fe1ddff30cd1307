"""Costs of a mixture as terms of a program: a kernel's bytes are those of an entry times its inputs and outputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from prunekit.anatomy.channels.channel_links import WeightAxes
from prunekit.searching.candidates import Level
from prunekit.searching.choice import Choice, Term, choose, totals
from prunekit.searching.latencies import LayerSeconds, layer_axes, stored_width
from prunekit.searching.searched_model import SearchedModel
from prunekit.searching.table import Table, WeightRow
from prunekit.sparsity.shorthands import SearchTechnique
from prunekit.techniques.quantize.placement.stored_bytes import FLOAT_BYTES, stored_weight

# Removal of channels, fewer than 8 bits, zeros.
TECHNIQUES = get_args(SearchTechnique)
# Bytes of an output channel besides its entries: a scale and a bias of 32 bits.
_CHANNEL = 8


@dataclass(frozen=True)
class Mixture:
    """What is chosen: a level for each weight, and the kept units of each group.

    Attributes:
        levels: Name of a weight -> its level.
        kept: Name of a group -> number of units that are left.
        error: The sum of the errors of the table.
        costs: "bytes" and, where they were measured, "latency" -> the sum over the layers.
        gap: See `Choice`.
    """

    levels: Mapping[str, Level]
    kept: Mapping[str, int]
    error: float
    costs: Mapping[str, float]
    gap: float


class Costs:
    """The errors, bytes and latencies of all mixtures of one model.

    Args:
        subject: The model.
        table: The measured rows.
        packed: True counts the bytes of packed files: entropies of codes; False those of LiteRT files.
        techniques: What may be chosen, names of `TECHNIQUES`.
        latencies: Name of a weight -> bits of its entries in a LiteRT file -> seconds of its layer; None counts none.

    Attributes:
        whole: "bytes" and "latency" of the model with 8 bits.
    """

    def __init__(
        self,
        subject: SearchedModel,
        table: Table,
        *,
        packed: bool,
        techniques: Sequence[str] = TECHNIQUES,
        latencies: Mapping[str, Mapping[int, LayerSeconds]] | None = None,
    ):
        self._subject, self._timed = subject, latencies is not None
        table = _restricted(table, techniques)
        weights = {name: table.of_weight(name) for name in subject.products}
        groups = {name: table.of_group(name) for name in subject.orders}
        # What no call reads was not measured.
        self._rows = {name: self._undominated(name, rows, packed) for name, rows in weights.items() if rows}
        self._groups = {name: rows for name, rows in groups.items() if rows}
        self._number = {name: i for i, name in enumerate([*self._rows, *self._groups])}
        self.sizes = [*(len(rows) for rows, _ in self._rows.values()), *(len(rows) for rows in self._groups.values())]
        self.terms = [*self._errors(), *itertools.chain.from_iterable(map(self._bytes, self._rows)), *self._others()]
        for name in self._rows:
            self.terms += self._latencies(name, (latencies or {}).get(name, {}))
        # The last level of a weight has the most bits, the first row of a group all channels.
        last = [len(rows) - 1 for rows, _ in self._rows.values()] + [0] * len(self._groups)
        self.whole = {name: value for name, value in totals(self.terms, last).items() if name != "error"}
        if latencies is not None:
            self.terms = [self._balanced(term) for term in self.terms]

    def _undominated(self, name: str, rows: Sequence[WeightRow], packed: bool) -> tuple[list[WeightRow], list[float]]:
        """Returns the levels for which no other has fewer bits and less error, and the bits of an entry of each.

        Where latencies count, levels that LiteRT stores in another width may be faster, and are compared apart.
        """
        bits = [row.entropy if packed else self._stored_bits(name, row.bits) for row in rows]
        order = sorted(range(len(rows)), key=lambda i: (bits[i], rows[i].error))
        kept: list[int] = []
        least: dict[int, float] = {}
        for i in order:
            width = stored_width(rows[i].bits) if self._timed else 0
            if rows[i].error < least.get(width, math.inf):
                least[width] = rows[i].error
                kept.append(i)
        return [rows[i] for i in kept], [bits[i] for i in kept]

    def _stored_bits(self, name: str, bits: int) -> float:
        target, preparation = self._subject.products[name].target, self._subject.preparation
        weight, width = self._subject.rounded_weight(target), preparation.options.activation_width
        return 8 * stored_weight(preparation.placement, weight, bits, width).entries / target.size

    def _errors(self) -> list[Term]:
        found = [
            Term((self._number[name],), {"error": np.array([row.error for row in rows])})
            for name, (rows, _) in self._rows.items()
        ]
        return found + [
            Term((self._number[name],), {"error": np.array([row.error for row in rows])})
            for name, rows in self._groups.items()
        ]

    def _bytes(self, name: str) -> list[Term]:
        """Returns the bytes of a weight: a sum over the groups among its inputs and those among its outputs."""
        target = self._subject.products[name].target
        axes = self._subject.channels.links.weights.get(id(target.variable))
        _, bits = self._rows[name]
        parts = [self._parts(axes, axis, length) for axis, length in enumerate(target.shape)]
        found = self._products(parts, (self._number[name],), np.array(bits) / 8)
        for axis in target.out_axes:
            of_channel = np.full(len(bits), _CHANNEL / len(target.out_axes))
            found += self._products([parts[axis]], (self._number[name],), of_channel)
        return found

    def _latencies(self, name: str, seconds: Mapping[int, LayerSeconds]) -> list[Term]:
        """Returns the latency of a weight's layer: a constant, parts for its inputs and its outputs, and a product."""
        if not seconds:
            return []
        rows, target = self._rows[name][0], self._subject.products[name].target
        axes = self._subject.channels.links.weights.get(id(target.variable))
        parts = [self._parts(axes, axis, length) for axis, length in enumerate(target.shape)]
        of_level = [seconds[stored_width(row.bits)] for row in rows]
        inputs, outputs = layer_axes(target)
        found = []
        for part, read in (("constant", ()), ("inputs", inputs), ("outputs", outputs), ("both", (*inputs, *outputs))):
            size = math.prod(target.shape[axis] for axis in read)
            values = np.array([getattr(one, part) for one in of_level]) / size
            if values.any():
                found += self._products([parts[axis] for axis in read], (self._number[name],), values, "latency")
        return found

    def _balanced(self, term: Term) -> Term:
        """Returns a term with what is minimised where bytes and latency count alike."""
        shares = [value / (self.whole.get(name) or 1.0) for name, value in term.costs.items() if name != "error"]
        return term if not shares else replace(term, costs={**term.costs, "balanced": np.sum(shares, axis=0)})

    def _others(self) -> list[Term]:
        """Returns the bytes of the weights that no level is chosen for, as far as they lose channels."""
        chosen = {id(self._subject.products[name].target.variable) for name in self._rows}
        integers = {id(one.variable) for one in self._subject.preparation.weights}
        found = []
        for key, axes in self._subject.channels.links.weights.items():
            shape = tuple(axes.variable.shape)
            if key in chosen or len(shape) < 2:
                continue
            parts = [self._parts(axes, axis, length) for axis, length in enumerate(shape)]
            found += self._products(parts, (), np.array(1.0 if key in integers else float(FLOAT_BYTES)))
        return [term for term in found if term.variables]

    def _products(
        self,
        parts: Sequence[Sequence[tuple[str | None, float]]],
        variables: tuple[int, ...],
        of_entry: np.ndarray,
        cost: str = "bytes",
    ) -> list[Term]:
        """Returns the cost of an array whose axes have the channels of groups, one term for each combination."""
        return [
            self._term(
                variables, [group for group, _ in chosen], math.prod(size for _, size in chosen) * of_entry, cost
            )
            for chosen in itertools.product(*parts)
        ]

    def _parts(self, axes: WeightAxes | None, axis: int, length: int) -> list[tuple[str | None, float]]:
        """Returns the groups whose channels an axis has, each with its share of the axis' length; None = the others."""
        numbers = None if axes is None else axes.channels.get(axis)
        if numbers is None:
            return [(None, float(length))]
        channel = self._subject.channels.channel_of[numbers]
        found: list[tuple[str | None, float]] = []
        for group in self._subject.channels.groups:
            count = np.count_nonzero(np.isin(channel, group.channels))
            if count and group.name in self._groups:
                found.append((group.name, length * count / channel.size))
        rest = length - sum(size for _, size in found)
        return [*found, (None, rest)] if rest > 1e-9 or not found else found

    def _term(self, variables: tuple[int, ...], groups: Sequence[str | None], table: np.ndarray, cost: str) -> Term:
        named = [group for group in groups if group is not None]
        distinct = list(dict.fromkeys(named))
        for group in distinct:
            shares = np.array([row.kept / row.channels for row in self._groups[group]]) ** named.count(group)
            table = table[..., None] * shares
        return Term((*variables, *(self._number[group] for group in distinct)), {cost: table})

    def least(self, name: str, bounds: Mapping[str, float]) -> Mixture:
        """Returns the mixture of least error or cost within bounds.

        Args:
            name: "error", "bytes", "latency", or "balanced": the sum of the last two, as shares of the whole model's.
            bounds: Name of another one -> the most.

        Raises:
            Unreachable: There is none.
        """
        return self._mixture(choose(self.sizes, self.terms, name, bounds))

    @property
    def errors(self) -> tuple[float, float]:
        """The least and the largest error of a mixture."""
        return tuple(  # type: ignore[return-value]
            sum(float(pick(term.costs["error"])) for term in self.terms if "error" in term.costs)
            for pick in (np.min, np.max)
        )

    def _mixture(self, choice: Choice) -> Mixture:
        at = dict(zip(self._number, choice.levels, strict=True))
        levels = {name: rows[at[name]].level for name, (rows, _) in self._rows.items()}
        kept = {name: rows[at[name]].kept for name, rows in self._groups.items()}
        costs = {name: value for name, value in choice.totals.items() if name in ("bytes", "latency")}
        return Mixture(levels, kept, choice.totals["error"], costs, choice.gap)


def _restricted(table: Table, techniques: Sequence[str]) -> Table:
    """Returns the rows of some techniques."""
    weights = [
        row
        for row in table.weights
        if ("prune" in techniques or not row.sparsity)
        and ("quantize" in techniques or (row.bits, row.rate) == (8, 0.0))
    ]
    removals = [row for row in table.removals if "shrink" in techniques or row.kept == row.channels]
    return replace(table, weights=tuple(weights), removals=tuple(removals))

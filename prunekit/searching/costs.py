"""Costs of a mixture as terms of a program: a kernel's bytes are those of an entry times its inputs and outputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from prunekit.anatomy.channels.channel_links import WeightAxes
from prunekit.anatomy.layers.targets import Target
from prunekit.searching.candidates import Level
from prunekit.searching.choice import Choice, Program, Term, Unreachable, totals
from prunekit.searching.latencies import LayerSeconds, layer_axes, seconds_of, stored_width
from prunekit.searching.searched_model import SearchedModel
from prunekit.searching.table import Table, WeightRow
from prunekit.sparsity.shorthands import SearchTechnique
from prunekit.techniques.quantize.placement.stored_bytes import FLOAT_BYTES, ZERO_POINT_BYTES, stored_weight

# Removal of channels, low rank, fewer than 8 bits, zeros.
TECHNIQUES = get_args(SearchTechnique)
# The most bytes that a layer reads and writes. In the program each layer has a cost of its own.
ARENA = "arena"
# Bytes of an output channel besides its entries: a scale and a bias of 32 bits. Layers with as many channels have their
# zero points in common.
_CHANNEL = 8
# Bytes of one more layer besides its weights, in a LiteRT file and in a packed one: an operation, tensors and grids.
_LAYER, _PACKED_LAYER = 600, 200


@dataclass(frozen=True)
class Mixture:
    """What is chosen: a level for each weight, and the kept units of each group.

    Attributes:
        levels: Name of a weight -> its level.
        kept: Name of a group -> number of units that are left.
        error: The sum of the errors of the table.
        costs: "bytes" and, where they were measured, "latency" -> the sum over the layers; "arena" -> the largest of
            the layers.
        gap: See `Choice`.
        techniques: What it was chosen among.
    """

    levels: Mapping[str, Level]
    kept: Mapping[str, int]
    error: float
    costs: Mapping[str, float]
    gap: float
    techniques: tuple[str, ...] = ()

    def equals(self, other: Mixture) -> bool:
        """Returns True if another one has the same levels and units, whatever it was chosen among."""
        return (self.levels, self.kept) == (other.levels, other.kept)


@dataclass(frozen=True, eq=False)
class _Stored:
    """A level of a weight: bytes of its array, or of two of low rank, and `fixed` bytes that no removal saves."""

    row: WeightRow
    bytes: tuple[float, ...]
    fixed: float

    @property
    def total(self) -> float:
        return sum(self.bytes) + self.fixed

    def beats(self, other: _Stored, *, apart: bool) -> bool:
        """Returns True if this has no more bytes than another one, and no more error, whatever channels are kept.

        A share u of the inputs and v of the outputs leaves u v of a weight, and of two arrays u of one and v of the
        other, which is no less; so two arrays beat no weight.

        Args:
            other: Another level of the same weight.
            apart: True compares levels of one width and form alone: others may be faster, or need less memory.
        """
        kinds = [(stored_width(one.row.bits), one.row.form) for one in (self, other)]
        if self.row.error > other.row.error or (apart and kinds[0] != kinds[1]):
            return False
        if self.row.form:
            # A smaller rank also has a smaller tensor between both layers, and a shorter latency.
            fewer = all(a <= b for a, b in zip(self.bytes, other.bytes, strict=True)) if other.row.form else False
            return fewer and self.row.rank <= other.row.rank
        return self.total <= other.total and self.fixed <= other.fixed


class Costs:
    """The errors, bytes and latencies of all mixtures of one model.

    Args:
        subject: The model.
        table: The measured rows.
        packed: True counts the bytes of packed files: entropies of codes; False those of LiteRT files.
        techniques: What may be chosen, names of `TECHNIQUES`.
        latencies: Name of a weight -> seconds of its layer, for each width in a LiteRT file and some ranks; None counts
            none.
        planned: True if arenas may be bounded.

    Attributes:
        techniques: As given.
        whole: "bytes" and "latency" of the model with 8 bits.
    """

    def __init__(
        self,
        subject: SearchedModel,
        table: Table,
        *,
        packed: bool,
        techniques: Sequence[str] = TECHNIQUES,
        latencies: Mapping[str, Sequence[LayerSeconds]] | None = None,
        planned: bool = False,
    ):
        self._subject, self._timed = subject, latencies is not None
        self._compares_apart = self._timed or planned
        # Zero points are all the same, and no bytes of a packed file.
        self._layer, self._zero_point = (_PACKED_LAYER, 0) if packed else (_LAYER, ZERO_POINT_BYTES)
        self.techniques = tuple(techniques)
        self._solved: dict[Any, Mixture] = {}
        table = _restricted(table, techniques)
        weights = {name: self._possible(name, table.of_weight(name)) for name in subject.products}
        groups = {name: table.of_group(name) for name in subject.orders}
        self._rows = {name: self._undominated(name, rows, packed) for name, rows in weights.items()}
        self._groups = {name: rows for name, rows in groups.items() if rows}
        self._number = {name: i for i, name in enumerate([*self._rows, *self._groups])}
        sizes = [*map(len, self._rows.values()), *map(len, self._groups.values())]
        self._terms = [*self._errors(), *itertools.chain.from_iterable(map(self._bytes, self._rows)), *self._others()]
        self._arenas: list[str] = []
        for name in self._rows:
            self._terms += self._latencies(name, (latencies or {}).get(name, []))
            self._terms += self._arena(name)
        # The last level of a weight is the whole one of the most bits, the first row of a group has all channels.
        last = [len(rows) - 1 for rows in self._rows.values()] + [0] * len(self._groups)
        self.whole = {name: value for name, value in totals(self._terms, last).items() if name in ("bytes", "latency")}
        if latencies is not None:
            self._terms = [self._balanced(term) for term in self._terms]
        self._program = Program(sizes, self._terms)

    def _possible(self, name: str, rows: Sequence[WeightRow]) -> list[WeightRow]:
        """Returns the rows without those that cannot be in the file: full integers look up codes of 8 bits alone.

        A weight that was not measured has 8 bits, like those that no level is chosen for.
        """
        is_table = self._subject.products[name].target.role == "embedding"
        whole_bytes = is_table and self._subject.preparation.options.full_integer
        found = [row for row in rows if not whole_bytes or row.bits == 8]
        return found or [WeightRow(name, 0.0, 8, 0.0, 0.0, (8.0,))]

    def _undominated(self, name: str, rows: Sequence[WeightRow], packed: bool) -> list[_Stored]:
        """Returns the levels for which no other has fewer bytes and less error, whatever channels are kept.

        Where latencies or arenas count, levels that LiteRT stores in another width or form are compared apart.
        """
        kept: list[_Stored] = []
        for one in sorted(
            (self._stored(name, row, packed) for row in rows), key=lambda one: (one.total, one.row.error)
        ):
            if not any(other.beats(one, apart=self._compares_apart) for other in kept):
                kept.append(one)
        return sorted(kept, key=lambda one: not one.row.form)

    def _stored(self, name: str, row: WeightRow, packed: bool) -> _Stored:
        """Returns a level with the bytes of its arrays."""
        entries = [self._subject.products[name].target.size]
        if row.structure is not None:
            entries = [math.prod(shape) for shape in self._subject.layouts[name].shapes(row.structure)]
        target, preparation = self._subject.products[name].target, self._subject.preparation
        weight, width = self._subject.rounded_weight(target), preparation.options.activation_width
        stored = stored_weight(preparation.placement, weight, row.bits, width)
        bits = row.entropies if packed else (8 * stored.entries / target.size,) * len(entries)
        fixed = _CHANNEL * row.rank + self._layer if row.form else 0
        if target.role == "embedding":
            # A table of few bits has a scale for each row.
            fixed += FLOAT_BYTES * stored.scales + self._zero_point * stored.zero_points
        return _Stored(row, tuple(size * one / 8 for size, one in zip(entries, bits, strict=True)), float(fixed))

    def _errors(self) -> list[Term]:
        rows = {name: [one.row.error for one in found] for name, found in self._rows.items()}
        rows |= {name: [row.error for row in found] for name, found in self._groups.items()}
        return [Term((self._number[name],), {"error": np.array(errors)}) for name, errors in rows.items()]

    def _bytes(self, name: str) -> list[Term]:
        """Returns the bytes of a weight: a sum over the groups among its inputs and those among its outputs.

        Of two arrays of low rank, the first one has the inputs, and the second one the outputs.
        """
        target, rows, variables = self._subject.products[name].target, self._rows[name], (self._number[name],)
        parts = self._parts_of(target)

        def part(read: Sequence[int], values: Sequence[float]) -> list[Term]:
            if not any(values):
                return []
            of_entry = np.array(values) / math.prod(target.shape[axis] for axis in read)
            return self._products([parts[axis] for axis in read], variables, of_entry)

        found = part(range(len(parts)), [0.0 if one.row.form else one.bytes[0] for one in rows])
        found += part(target.in_axes, [one.bytes[0] if one.row.form else 0.0 for one in rows])
        found += part(target.out_axes, [one.bytes[1] if one.row.form else 0.0 for one in rows])
        found += part((), [one.fixed for one in rows])
        outputs = 0 if target.role == "embedding" else math.prod(target.shape[axis] for axis in target.out_axes)
        return found + part(target.out_axes, [float(_CHANNEL * outputs)] * len(rows))

    def _latencies(self, name: str, seconds: Sequence[LayerSeconds]) -> list[Term]:
        """Returns the latency of a weight's layer: a constant, parts for its inputs and its outputs, and a product."""
        if not seconds:
            return []
        target = self._subject.products[name].target
        parts = self._parts_of(target)
        of_level = [seconds_of(seconds, one.row.bits, one.row.structure) for one in self._rows[name]]
        inputs, outputs = layer_axes(target)
        found = []
        for part, read in (("constant", ()), ("inputs", inputs), ("outputs", outputs), ("both", (*inputs, *outputs))):
            size = math.prod(target.shape[axis] for axis in read)
            values = np.array([getattr(one, part) for one in of_level]) / size
            if values.any():
                found += self._products([parts[axis] for axis in read], (self._number[name],), values, "latency")
        return found

    def _arena(self, name: str) -> list[Term]:
        """Returns the bytes that a weight's layer reads and writes; of two layers of low rank, those of each."""
        target, rows = self._subject.products[name].target, self._rows[name]
        shapes = self._subject.shapes.get(id(target.layer))
        if shapes is None:
            return []
        parts = self._parts_of(target)
        # A depthwise kernel has its inputs along its outputs.
        sides = {"inputs": target.in_axes or target.out_axes[:1], "outputs": target.out_axes}
        entries, found = shapes.entries(target), []

        def part(cost: str, side: str, factors: Sequence[float]) -> list[Term]:
            read = sides[side]
            of_entry = np.array(factors) * entries[side] / math.prod(target.shape[axis] for axis in read)
            return self._products([parts[axis] for axis in read], (self._number[name],), of_entry, cost)

        first, second = f"{ARENA} {name}", f"{ARENA} {name}, second layer"
        low_rank = [float(bool(one.row.form)) for one in rows]
        found = part(first, "inputs", [1.0] * len(rows)) + part(first, "outputs", [1.0 - one for one in low_rank])
        self._arenas.append(first)
        if any(low_rank):
            found += part(second, "outputs", low_rank)
            between = np.array([float(shapes.between(target, one.row.structure)) for one in rows])
            found += [Term((self._number[name],), {cost: between}) for cost in (first, second)]
            self._arenas.append(second)
        return found

    def _balanced(self, term: Term) -> Term:
        """Returns a term with what is minimised where bytes and latency count alike."""
        counted = ("bytes", "latency")
        shares = [value / (self.whole.get(name) or 1.0) for name, value in term.costs.items() if name in counted]
        return term if not shares else replace(term, costs={**term.costs, "balanced": np.sum(shares, axis=0)})

    def _others(self) -> list[Term]:
        """Returns the bytes that a removal saves of zero points, and of the weights that no level is chosen for."""
        chosen = {id(self._subject.products[name].target.variable) for name in self._rows}
        integers = {id(one.variable) for one in self._subject.preparation.weights}
        found = []
        if self._zero_point:
            for name, rows in self._groups.items():
                kept = np.array([row.kept for row in rows], float)
                found.append(Term((self._number[name],), {"bytes": self._zero_point * kept}))
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

    def _parts_of(self, target: Target) -> list[list[tuple[str | None, float]]]:
        """Returns the groups of each axis of a weight; see `_parts`."""
        axes = self._subject.channels.links.weights.get(id(target.variable))
        return [self._parts(axes, axis, length) for axis, length in enumerate(target.shape)]

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
            name: "error", "bytes", "latency", "arena", or "balanced": the sum of bytes and latency, as shares of the
                whole model's.
            bounds: Name of another one -> the most.

        Raises:
            Unreachable: There is none.
        """
        asked = name, frozenset(bounds.items())
        if asked in self._solved:
            return self._solved[asked]
        most = dict(bounds)
        if ARENA in most:
            arena = most.pop(ARENA)
            most |= dict.fromkeys(self._arenas, arena)
        minimised = self._arenas if name == ARENA else name
        return self._solved.setdefault(asked, self._mixture(self._program.choose(minimised, most)))

    def least_of_each(self, bounds: Mapping[str, float]) -> dict[str, float | None]:
        """Returns the least of each bounded cost while the other bounds hold; None where these cannot be met."""
        found: dict[str, float | None] = {}
        for name in bounds:
            others = {other: most for other, most in bounds.items() if other != name}
            try:
                mixture = self.least(name, others)
            except (Unreachable, TimeoutError):
                found[name] = None
            else:
                found[name] = mixture.error if name == "error" else mixture.costs[name]
        return found

    @property
    def counted(self) -> tuple[str, ...]:
        """The costs that are counted here."""
        found = {"bytes": True, "latency": self._timed, ARENA: bool(self._arenas)}
        return tuple(name for name, is_counted in found.items() if is_counted)

    @property
    def errors(self) -> tuple[float, float]:
        """The least and the largest error of a mixture."""
        return tuple(  # type: ignore[return-value]
            sum(float(pick(term.costs["error"])) for term in self._terms if "error" in term.costs)
            for pick in (np.min, np.max)
        )

    def _mixture(self, choice: Choice) -> Mixture:
        at = dict(zip(self._number, choice.levels, strict=True))
        levels = {name: rows[at[name]].row.level for name, rows in self._rows.items()}
        kept = {name: rows[at[name]].kept for name, rows in self._groups.items()}
        found = {**choice.totals, ARENA: max((choice.totals[name] for name in self._arenas), default=0.0)}
        # A cost without terms is 0: no layer that is left was timed.
        costs = {name: found.get(name, 0.0) for name in self.counted}
        return Mixture(levels, kept, choice.totals["error"], costs, choice.gap, self.techniques)


def _restricted(table: Table, techniques: Sequence[str]) -> Table:
    """Returns the rows of some techniques."""
    weights = [row for row in table.weights if row.level.techniques <= set(techniques)]
    removals = [row for row in table.removals if "shrink" in techniques or row.kept == row.channels]
    return replace(table, weights=tuple(weights), removals=tuple(removals))

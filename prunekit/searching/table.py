"""The table of a search: what each level of each weight and each removal does to the outputs, by itself."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prunekit.anatomy.records.plain_data import Record
from prunekit.core.layerwise.layerwise import Progress
from prunekit.searching.candidates import (
    FACTOR_SHARES,
    Candidate,
    LayerLevels,
    Level,
    candidates,
    low_rank_candidates,
    removal_changes,
)
from prunekit.searching.latencies import LayerSeconds
from prunekit.searching.repaired_scan import RepairedScan
from prunekit.searching.searched_model import SearchedModel
from prunekit.searching.time_limit import NO_LIMIT, Pace, TimeLimit
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.factorize.forms import Structure

SHARES = (0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.0625)
# Fewer than `_FEW` of the channels and more than `_MOSTLY_ZERO` zeros are measured if the level before has an error of
# `_SLIGHT` at most.
_FEW, _MOSTLY_ZERO, _SLIGHT = 0.25, 0.95, 0.02
# LiteRT stores 5 to 8 bits in a byte, and fewer in half a byte; zeros do not pay there.
STORED_BITS = (8, 4)
# Share of zeros -> (bits, price of a bit), besides 8 bits: on four layers of a network for MNIST, these have the least
# error for their entropy among 5 numbers of bits and 8 prices. The more zeros there are, the more a price finds.
_MANY = ((5, 2.0), (4, 1.0), (3, 0.5), (3, 0.1))
_SOME = ((6, 1.0), (5, 1.0), (4, 0.5), (3, 0.1))
PACKED_BITS = {
    0.0: ((8, 1.0), (6, 1.0), (5, 0.5), (4, 0.5), (3, 0.2)),
    **dict.fromkeys((0.5, 0.7), _SOME),
    **dict.fromkeys((0.8, 0.9, 0.95, 0.98, 0.99), _MANY),
}
# The same of arrays of low rank, besides 8 bits.
_LOW_RANK = ((6, 1.0), (5, 1.0), (4, 0.5))


@dataclass(frozen=True)
class WeightRow(Record):
    """One weight at one level.

    Attributes:
        weight: Its name.
        sparsity: Share of zeros.
        bits: Bits of its codes.
        rate: Price of a bit in the choice of the codes.
        error: Squared error of the outputs, with the layers behind repaired.
        entropies: Bits of an entry by the frequencies of its codes; for low rank one number for each array.
        form: Form of the arrays of low rank; "" = the weight itself.
        rank: Number of values between the arrays; 0 = the weight itself.
    """

    weight: str
    sparsity: float
    bits: int
    rate: float
    error: float
    entropies: tuple[float, ...]
    form: str = ""
    rank: int = 0

    @property
    def level(self) -> Level:
        """The level."""
        return Level(self.sparsity, self.bits, self.rate, self.structure)

    @property
    def structure(self) -> Structure | None:
        """Form and rank; None = the weight itself."""
        return Structure(self.form, (self.rank,)) if self.form else None


@dataclass(frozen=True)
class RemovalRow(Record):
    """One group with fewer channels.

    Attributes:
        group: Its name.
        channels: Number of its units.
        kept: Number of those that are left.
        error: Squared error of the outputs, with the layers behind repaired.
    """

    group: str
    channels: int
    kept: int
    error: float


@dataclass(frozen=True)
class Table(Record):
    """All rows.

    Attributes:
        settings: What determines the rows: digests of model and data, levels.
        weights: Rows of weights.
        removals: Rows of removals.
        latencies: Seconds of layers, on `machine`; empty where no question was about latency.
        machine: The machine and LiteRT that measured them.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    weights: tuple[WeightRow, ...] = ()
    removals: tuple[RemovalRow, ...] = ()
    latencies: tuple[LayerSeconds, ...] = ()
    machine: str = ""

    def of_weight(self, name: str) -> list[WeightRow]:
        """Returns the rows of a weight."""
        return [row for row in self.weights if row.weight == name]

    def extreme_structures(self) -> dict[str, list[Structure]]:
        """Returns the smallest and the largest rank of each form of a weight, by the weight's name."""
        found: dict[str, list[Structure]] = {}
        ranks: dict[tuple[str, str], list[int]] = {}
        for row in self.weights:
            if row.form:
                ranks.setdefault((row.weight, row.form), []).append(row.rank)
        for (weight, form), listed in ranks.items():
            found.setdefault(weight, []).extend(Structure(form, (rank,)) for rank in sorted({min(listed), max(listed)}))
        return found

    def has_latencies(self, structures: Mapping[str, Sequence[Structure]]) -> bool:
        """Returns True if layers were timed, and wherever a layer was, those of low rank that are given as well."""
        timed = {(row.weight, row.form, row.rank) for row in self.latencies}
        wanted = {(name, one.form, one.ranks[0]) for name, found in structures.items() for one in found}
        return bool(timed) and all(row in timed for row in wanted if (row[0], "", 0) in timed)

    def of_group(self, name: str) -> list[RemovalRow]:
        """Returns the rows of a group."""
        return [row for row in self.removals if row.group == name]


@dataclass(frozen=True)
class Levels:
    """The levels that are measured.

    Attributes:
        weights: Of each weight.
        factors: Of the arrays of low rank that may stand in its place; empty = of none.
    """

    weights: tuple[Level, ...]
    factors: tuple[Level, ...] = ()


def missing(subject: SearchedModel, known: Table) -> list[str]:
    """Returns the weights and groups that a table has no rows of."""
    weights, groups = {row.weight for row in known.weights}, {row.group for row in known.removals}
    lacking = [name for name in subject.products if name not in weights]
    return lacking + [name for name in subject.orders if name not in groups]


def scan(  # noqa: PLR0913
    subject: SearchedModel,
    measure: Callable[[], RepairedScan],
    levels: Levels,
    known: Table,
    keep: Callable[[Table], None],
    progress: Progress | None = None,
    only: Collection[str] | None = None,
    limit: TimeLimit = NO_LIMIT,
) -> tuple[Table, list[str]]:
    """Measures all levels of all weights, and all removals, one at a time.

    Args:
        subject: The model.
        measure: Returns the scan that measures; not called where all rows are known.
        levels: The levels of each weight.
        known: Rows that were measured before, with the settings of the table.
        keep: Told of the table after each weight and each group.
        progress: Told of each weight and each group: (done, total, name).
        only: The weights and groups that are measured; None = all.
        limit: When the measurements end. The largest weights and groups come first.

    Returns:
        The table, and the weights and groups that there was no time for.
    """
    work = _Scan(subject, levels, known, keep, progress, only)
    late = work.run(measure(), limit) if work.missing else []
    return work.table, late


class _Scan:
    def __init__(
        self,
        subject: SearchedModel,
        levels: Levels,
        known: Table,
        keep: Callable[[Table], None],
        progress: Progress | None,
        only: Collection[str] | None,
    ):
        self._subject, self._levels, self._keep, self._progress = subject, levels, keep, progress
        self._known, self._weights, self._removals = known, list(known.weights), list(known.removals)
        self._total = len(subject.products) + len(subject.orders)
        self.missing = {name for name in missing(subject, known) if only is None or name in only}

    @property
    def table(self) -> Table:
        return replace(self._known, weights=tuple(self._weights), removals=tuple(self._removals))

    def run(self, measure: RepairedScan, limit: TimeLimit) -> list[str]:
        """Measures what is missing; returns what there was no time for."""
        at = self._calls(measure)
        # What no call reads is not measured.
        names = [name for name in (*self._subject.orders, *self._subject.products) if name in self.missing & set(at)]
        costs = {name: (len(measure.steps) - at[name]) * self._count(name) for name in names}
        pace, late = Pace(limit, costs, {name: self._subject.entries_of(name) for name in costs}), []
        for name in sorted(names, key=lambda name: at[name]):
            made = pace.has_time_for(name)
            if made:
                while measure.at < at[name]:
                    measure.advance()
                if name in self._subject.orders:
                    self._removals += self._of_group(measure, name)
                else:
                    self._weights += self._of_weight(measure, name)
                self._tell(name)
            else:
                late.append(name)
            pace.note_finished(name, made=made)
        return late

    def _calls(self, measure: RepairedScan) -> dict[str, int]:
        """Returns the number of the call before which each weight and each group is measured."""
        subject = self._subject
        numbers = {id(step.layer): number for number, step in reversed([*enumerate(measure.steps)])}
        found = {
            name: numbers.get(subject.called[id(product.target.layer)]) for name, product in subject.products.items()
        }
        for name in subject.orders:
            values, _ = removal_changes(subject.channels, subject.removed({name: 1}))
            found[name] = measure.start_of(values)
        return {name: number for name, number in found.items() if number is not None}

    def _count(self, name: str) -> int:
        """Returns about how many levels of a weight or a group are measured."""
        if name in self._subject.orders:
            return len(SHARES)
        factors = len(self._levels.factors) * len(FACTOR_SHARES) if name in self._subject.layouts else 0
        return len(self._levels.weights) + factors

    def _tell(self, name: str) -> None:
        self.missing.remove(name)
        self._keep(self.table)
        if self._progress is not None:
            self._progress(self._total - len(self.missing), self._total, name)

    def _of_weight(self, measure: RepairedScan, name: str) -> list[WeightRow]:
        subject, product = self._subject, self._subject.products[name]
        target = product.target
        layer = LayerLevels(product, array_of(target.variable), measure.moments(product))
        grid_of = functools.partial(subject.grid_of, target)
        rows: list[WeightRow] = []
        slight = True
        for sparsity, levels in itertools.groupby(self._levels.weights, lambda level: level.sparsity):
            if sparsity > _MOSTLY_ZERO and not slight:
                break
            found = candidates(layer, list(levels), grid_of)
            made = list(_measured(name, found, measure))
            slight = any(row.error <= _SLIGHT for row in made)
            rows += made
        if name in subject.layouts:
            grid_of = functools.partial(subject.grid_of_factor, target)
            found = low_rank_candidates(layer, subject.layouts[name], self._levels.factors, grid_of)
            rows += _measured(name, found, measure)
        return rows

    def _of_group(self, measure: RepairedScan, name: str) -> list[RemovalRow]:
        subject, order = self._subject, self._subject.orders[name]
        rows: list[RemovalRow] = []
        error = 0.0
        for kept in subject.kept_counts(name, SHARES):
            if kept < _FEW * order.total and error > _SLIGHT:
                break
            if kept < order.total:
                error = measure.error(*removal_changes(subject.channels, subject.removed({name: kept})))
            if not math.isfinite(error):
                break
            rows.append(RemovalRow(name, order.total, kept, error))
        return rows


def _measured(name: str, found: Iterable[Candidate], measure: RepairedScan) -> Iterator[WeightRow]:
    """Yields the rows of a weight, without those after which an output is not finite."""
    for one in found:
        error, level = measure.error(one.values), one.level
        if math.isfinite(error):
            form, rank = ("", 0) if level.structure is None else (level.structure.form, level.structure.ranks[0])
            yield WeightRow(name, level.sparsity, level.bits or 8, level.rate, error, one.entropies, form, rank)


def levels_for(*, packed: bool) -> Levels:
    """Returns the levels that may pay in a LiteRT file, or in its packed form."""
    if not packed:
        stored = tuple(Level(0.0, bits) for bits in STORED_BITS)
        return Levels(stored, stored)
    weights = [Level(zeros, bits, rate) for zeros, found in PACKED_BITS.items() for bits, rate in [(8, 0.0), *found]]
    return Levels(tuple(weights), tuple(Level(0.0, bits, rate) for bits, rate in [(8, 0.0), *_LOW_RANK]))


def settings_of(levels: Levels, hashes: Mapping[str, str | None]) -> dict[str, Any]:
    """Returns what determines a table."""
    measured = {"levels": levels.weights, "low_rank": levels.factors}
    told = {name: [[one.sparsity, one.bits, one.rate] for one in found] for name, found in measured.items()}
    return {**hashes, **told, "ranks": list(FACTOR_SHARES), "shares": list(SHARES)}

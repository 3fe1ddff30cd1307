"""One search: the scan, the question, the files, and the report."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import keras
import numpy as np

from prunekit.anatomy.files.digests import architecture_digest, data_digest, model_digest
from prunekit.anatomy.records.plain_data import plain
from prunekit.core.layerwise.layerwise import Progress
from prunekit.core.runtime.model_copies import copied_model
from prunekit.core.runtime.partial_files import replace_json
from prunekit.delivery.litert.arena import arena_bytes
from prunekit.delivery.litert.model_measures import machine
from prunekit.delivery.reports.formatting import names
from prunekit.delivery.reports.metrics import Metric
from prunekit.searching.building import FORMS, Built, bits_of, build, levels_of, weights_of, write_file
from prunekit.searching.candidates import Level
from prunekit.searching.choice import Unreachable
from prunekit.searching.costs import TECHNIQUES, Costs, Mixture
from prunekit.searching.finding import Finder
from prunekit.searching.judge import Judge, SearchData, first_rows
from prunekit.searching.known_files import KnownFiles, kept_record
from prunekit.searching.latencies import FileClock, LayerSeconds, by_weight, layer_latencies
from prunekit.searching.made_files import MadeFiles
from prunekit.searching.question import MINIMISED, Made, Question
from prunekit.searching.search_report import SearchedGroup, SearchedWeight, SearchPoint, SearchReport, TechniqueAlone
from prunekit.searching.searched_model import EIGHT_BITS, SearchedModel
from prunekit.searching.shared_scan import ScanInputs, scan_by_ray
from prunekit.searching.table import STORED_BITS, Table, levels_for, missing, scan, settings_of
from prunekit.searching.time_limit import NO_LIMIT, TimeLimit
from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.shorthands import SearchProfile, SearchTarget, SearchWorkers
from prunekit.techniques.factorize.factorizing import PRUNED, zeros_of
from prunekit.techniques.quantize.placement.stored_bytes import FLOAT_BYTES
from prunekit.techniques.quantize.quantization_state import QuantizationState
from prunekit.version import __version__

# The table of all levels, by target.
TABLES = {target: f"scan-{target}.json" for target in get_args(SearchTarget)}
# What is known of files, by target.
FILES = {target: f"files-{target}.json" for target in get_args(SearchTarget)}
# Share of the time for the table, and of what is left then for latencies of layers.
_TABLE = 0.5
# Names in a note.
_NAMED = 8
# Examples to which the layers of files are fitted, for each input of a layer that computes one position of an example.
_EXAMPLES = 4
# Trains a model on integers, in place: (model, option `bits`, weights whose zeros stay, a text that identifies the
# mixture) -> the quantized model.
Train = Callable[[Any, Any, Sequence[str], str], QuantizationState]


class SearchRun:
    """One search.

    Args:
        model: The model; it is not changed.
        data: Its examples, in their parts.
        target: A key of `FORMS`.
        techniques: What may be chosen, names of `TECHNIQUES`.
        memory: Largest number of bytes of activations that are kept.
        progress: Told of each scanned weight and each file: (done, total, text).
        metric: The metric in which the drop is measured; None takes the model's first one.
        workers: "ray": nodes of a Ray cluster measure the levels; None = this process.
        limit: When the search ends.
        folder: Where the table of all levels, and what is known of files, are kept for other questions; None keeps
            neither.
    """

    def __init__(  # noqa: PLR0913
        self,
        model: Any,
        data: SearchData,
        target: str,
        techniques: Sequence[str],
        memory: float,
        progress: Progress | None,
        metric: Metric | None = None,
        workers: SearchWorkers | None = None,
        limit: TimeLimit = NO_LIMIT,
        folder: Path | None = None,
    ):
        self._notes: list[str] = []
        self._folder = folder
        self._model, self._data, self._memory, self._techniques = model, data, memory, techniques
        self._progress: Progress = progress or (lambda done, total, text: None)
        self._workers, self._limit = workers, limit
        self._target, self._form = target, FORMS[target]
        self._options = replace(EIGHT_BITS, full_integer=self._form.full_integer)
        self._subject = SearchedModel(model, data.fitted, self._options)
        wanted = max(math.ceil(_EXAMPLES * self._subject.inputs_per_position), _count(data.fitted))
        self._calibration = first_rows(data.calibration, wanted)
        self._judge = Judge(model, data, metric)
        self._notes += self._judge.notes
        self._clock: FileClock | None = None
        self._most_time: tuple[float, bool] | None = None
        self._counts_arena = False
        self._costs: dict[tuple[str, ...], Costs] = {}

    def _check_drop(self, drop: float) -> None:
        """Refuses points where a fraction is wanted."""
        metric = self._judge.metric
        if metric.fraction and drop >= 1:
            raise ValueError(
                f"A drop of {metric.title} is a fraction, below 1. Received: drop={drop:g}. For {drop:g} points, pass "
                f"{drop / 100:g}."
            )

    def question(
        self,
        drop: float | None,
        most: int | None,
        time: tuple[float, bool] | None,
        profile: SearchProfile,
        arena: int | None = None,
    ) -> Question:
        """Returns the question, with the latency in seconds.

        Args:
            drop: Most drop.
            most: Most bytes.
            time: (most seconds, False), or (most share of the time of the model's file in float32, True).
            profile: What is minimised within the drop.
            arena: Most bytes for activations.

        Raises:
            ValueError: The drop is in points, where the metric is a fraction.
        """
        if drop is not None:
            self._check_drop(drop)
        seconds, self._most_time = None, time
        if time is not None or profile != "small":
            self._clock = FileClock(self._model, self._data.fitted)
            if time is not None:
                seconds = time[0] * self._clock.whole if time[1] else time[0]
        self._counts_arena = arena is not None or self._target == "microcontroller"
        return Question(drop, most, seconds, profile, arena)

    def scan(self, question: Question) -> None:
        """Measures all levels, or takes them from the folder, which is kept up to date."""
        path = self._path(TABLES)
        levels = levels_for(packed=self._form.packed)
        hashes = {
            "model": model_digest(self._model),
            "architecture": architecture_digest(self._model),
            "data": data_digest((self._data.fitted, self._data.measured)),
        }
        subject, data = self._subject, self._data
        limit = self._limit.share(_TABLE)
        inputs = ScanInputs(self._model, data.fitted, data.measured, levels, self._memory, self._options, limit)
        settings = settings_of(levels, hashes) | {"examples": inputs.examples(subject), "version": __version__}
        other = "was of another model, or of other data or settings, and is made anew."
        known = kept_record(path, Table(settings), self._notes, other)

        def keep(table: Table) -> None:
            if path is not None:
                replace_json(path, table.to_dict())

        def told(done: int, total: int, name: str) -> None:
            self._progress(done, total, f"measured {name}")

        useful = None if math.isinf(limit.end) else self._choosable()
        if self._workers == "ray" and missing(subject, known):
            known, notes = scan_by_ray(subject, inputs, known, keep, told, useful)
            self._notes += notes
        measure = functools.partial(inputs.measure, subject)
        self._table, late = scan(subject, measure, levels, known, keep, told, useful, limit)
        self._is_whole = not late
        if late:
            self._notes.append(
                "There was no time to measure these weights and groups, which have 8 bits and all channels: "
                f"{names(late, _NAMED)}."
            )
        self._seconds = self._layer_seconds(keep) if question.is_timed else None
        self._costs.clear()

    def _layer_seconds(self, keep: Callable[[Table], None]) -> dict[str, list[LayerSeconds]]:
        """Returns the seconds of layers by weight, measured where the table lacks them."""
        structures = self._table.extreme_structures() if "factorize" in self._techniques else {}
        if self._table.machine != machine() or not self._table.has_latencies(structures):
            limit = self._limit.share(_TABLE)
            rows, late = layer_latencies(self._subject, STORED_BITS, self._progress, structures, limit)
            self._table = replace(self._table, latencies=tuple(rows), machine=machine())
            if late:
                self._is_whole = False
                self._notes.append(f"There was no time for the latencies of these layers: {names(late, _NAMED)}.")
            else:
                keep(self._table)
        found = by_weight(self._table.latencies)
        if not found:
            raise ValueError(
                f"No layer of the model {self._model.name!r} can be timed by itself. Ask for bytes, and measure the "
                "file."
            )
        return found

    def _path(self, names: Mapping[str, str]) -> Path | None:
        return None if self._folder is None else self._folder / names[self._target]

    def _choosable(self) -> list[str]:
        """Returns the weights and groups that the techniques may change."""
        groups = list(self._subject.orders) if "shrink" in self._techniques else []
        return groups + (list(self._subject.products) if set(self._techniques) - {"shrink"} else [])

    def _costs_of(self, techniques: Sequence[str]) -> Costs:
        """Returns the costs of the mixtures of some techniques, which are counted once."""
        some = tuple(techniques)
        if some not in self._costs:
            self._costs[some] = Costs(
                self._subject,
                self._table,
                packed=self._form.packed,
                techniques=some,
                latencies=self._seconds,
                planned=self._counts_arena,
            )
        return self._costs[some]

    def answer(self, question: Question, train: Train | None = None) -> tuple[Built, SearchReport]:
        """Returns the file that answers a question, and how it was found.

        Args:
            question: The question.
            train: Trains a mixture; None trains nothing.

        Raises:
            ValueError: No file answers it.
        """
        trained = None if train is None else lambda made: self._trained(made, train)
        fewer = [functools.partial(self._costs_of, some) for some in self._subsets()]
        known = self._known(question)
        finder = Finder(
            question,
            self._costs_of(self._used),
            lambda mixture: known.with_file(self._file(mixture)),
            trained,
            self._progress,
            self._limit,
            fewer,
            known.made(),
            known.answered,
        )
        made = finder.found()
        if made.built is None:
            raise ValueError("The file that answers has its model.")
        if train is None and finder.files.is_complete and self._is_whole:
            known.answer(question.drop)
        return made.built, self._report(made, made.built, finder.files)

    def _known(self, question: Question) -> KnownFiles:
        """Returns the files that were made for other drops."""
        path, data = self._path(FILES), self._data
        if path is None:
            return KnownFiles(None, {}, self._notes)
        # What the metric says of the model tells metrics of one name apart.
        metric = plain(self._judge.metric), self._judge.before
        settings = {
            "table": self._table.settings,
            # Without time, fewer weights are measured: their errors are counted as none.
            "missing": missing(self._subject, self._table),
            "techniques": self._used,
            "target": self._target,
            "profile": question.profile,
            # A share of the time in float32 is another time whenever that is measured.
            "bounds": {**question.costs, "latency": self._most_time},
            "data": data_digest((self._calibration, data.held_out, data.labels)),
            "metric": metric,
            # Without time, fewer layers are timed.
            "machine": (machine(), len(self._seconds)) if self._seconds is not None else "",
            "version": __version__,
        }
        return KnownFiles(path, settings, self._notes, 1.0 if self._clock is None else self._clock.whole)

    @property
    def _used(self) -> tuple[str, ...]:
        """The techniques that may be chosen, and make files of the target smaller."""
        return tuple(name for name in TECHNIQUES if name in self._techniques and (name != "prune" or self._form.packed))

    def _subsets(self) -> list[tuple[str, ...]]:
        """Returns some of the techniques, the most first."""
        counts = range(len(self._used) - 1, 0, -1)
        return [some for count in counts for some in itertools.combinations(self._used, count)]

    def _file(self, mixture: Mixture) -> Made:
        inputs, samples = self._calibration, self._data.held_out
        built = build(self._subject, mixture, inputs, samples, self._form, memory=self._memory)
        return self._judged(mixture, built)

    def _trained(self, made: Made, train: Train) -> Made:
        if made.built is None:
            raise ValueError("A mixture is trained from its model.")
        # The file before may be the one that is delivered.
        model, arrays = copied_model(made.built.model), made.built.arrays
        levels = levels_of(made.mixture, arrays)
        told = repr((sorted(made.mixture.levels.items()), sorted(made.mixture.kept.items())))
        state = train(model, bits_of(levels), self._zeros_of(model, levels), told)
        built = write_file(state, arrays, self._data.held_out, self._form)
        return self._judged(made.mixture, built, is_trained=True)

    def _zeros_of(self, model: Any, levels: Mapping[str, Level]) -> list[str]:
        """Returns the weights whose zeros stay in a training: all in packed files, else those that came with zeros."""
        weights = weights_of(model)
        if not self._form.packed:
            # Small weights become zero by rounding; and the factors of a weight have none of its zeros.
            before = {target.name: target for target in self._subject.targets}
            chosen = {one.name: levels[one.name].structure for one in weights if one.name in levels}
            weights = [before.get(one.name, one) for one in weights if chosen.get(one.name) is None]
        # Weights that are zero throughout cannot be held, and a training may fill them.
        return [one.name for one in weights if PRUNED <= zeros_of(one) < 1]

    def _judged(self, mixture: Mixture, built: Built, *, is_trained: bool = False) -> Made:
        seconds = None if self._clock is None else self._clock.seconds(built.file)
        drops, error = self._judge.drops(built.outputs), self._judge.error(built.outputs)
        arena = arena_bytes(built.file) if self._counts_arena else None
        return Made(mixture, built, drops, error, built.bytes, seconds, arena, is_trained)

    def _report(self, made: Made, built: Built, files: MadeFiles) -> SearchReport:
        before, after = self._judge.before[1], self._judge.values(built.outputs)[1]
        points = [
            SearchPoint(
                predicted_error=one.mixture.error,
                error=one.error,
                counted_bytes=one.mixture.costs["bytes"],
                bytes=one.bytes,
                drop=one.drops[0],
                delivered=one is made,
                trained=one.is_trained,
                arena=one.arena,
                seconds=one.seconds,
                counted_seconds=one.mixture.costs.get("latency"),
                techniques=self._techniques_of(one.mixture),
                proven=files.question.drop is None or one.drops[1] <= files.question.drop,
            )
            for one in sorted(files.made, key=lambda one: one.bytes)
        ]
        data, weights, question = self._data, self._model.weights, files.question
        return SearchReport(
            model_name=self._model.name,
            target=self._target,
            metric=self._judge.metric,
            before=before,
            after=after,
            asked_drop=question.drop,
            asked_bytes=question.bytes,
            examples=(_count(self._calibration), _count(data.measured), data.choosing, data.judging),
            bytes_before=FLOAT_BYTES * sum(math.prod(one.shape) for one in weights),
            bytes=made.bytes,
            gap=made.mixture.gap,
            points=tuple(points),
            weights=tuple(self._rows_of_weights(made.mixture, built)),
            groups=tuple(self._rows_of_groups(made.mixture)),
            skipped=self._subject.skipped,
            notes=(*self._notes, *files.notes),
            profile=question.profile,
            asked_arena=question.arena,
            arena=made.arena,
            asked_seconds=question.latency,
            seconds=made.seconds,
            seconds_before=None if self._clock is None else self._clock.whole,
            alone=self._alone(made, question),
        )

    def _techniques_of(self, mixture: Mixture) -> tuple[str, ...]:
        """Returns the techniques that change something in a mixture."""
        used = set().union(*(level.techniques for level in mixture.levels.values()))
        if any(count < self._subject.orders[name].total for name, count in mixture.kept.items()):
            used.add("shrink")
        return tuple(name for name in TECHNIQUES if name in used)

    def _alone(self, made: Made, question: Question) -> tuple[TechniqueAlone, ...]:
        """Returns what each technique alone would have at the error that is predicted of a file."""
        mixture = made.mixture
        besides = made.bytes - mixture.costs["bytes"]
        used = self._used
        if len(used) < 2:
            return ()
        only_time = question.drop is None and set(question.costs) == {"latency"}
        goal = "latency" if only_time else MINIMISED[question.profile]
        found = []
        for together in [*((name,) for name in used), used]:
            if not self._limit.left:
                break
            costs = self._costs_of(together)
            try:
                one = costs.least(goal, {"error": max(mixture.error, costs.errors[0]) * (1 + 1e-6)})
            except (Unreachable, TimeoutError):
                continue
            size = one.costs["bytes"] + besides
            found.append(TechniqueAlone(" and ".join(together), one.error, size, one.costs.get("latency")))
        return tuple(found)

    def _rows_of_weights(self, mixture: Mixture, built: Built) -> list[SearchedWeight]:
        rows = {(row.weight, row.level): row for row in self._table.weights}
        stored = {target.name: array_of(target.variable) for target in weights_of(built.model)}
        found = []
        for name, level in mixture.levels.items():
            if (name, level) not in rows:
                # It was not measured.
                continue
            row, shape = rows[name, level], tuple(self._subject.products[name].target.shape)
            entries = np.concatenate([stored[array].ravel() for array in built.arrays[name]])
            zeros, rank = float((entries == 0).mean()), row.rank if len(built.arrays[name]) > 1 else None
            found.append(SearchedWeight(name, shape, zeros, level.bits or 32, level.rate, row.error, rank))
        return found

    def _rows_of_groups(self, mixture: Mixture) -> list[SearchedGroup]:
        rows = {(row.group, row.kept): row for row in self._table.removals}
        found = [rows[pair] for pair in mixture.kept.items()]
        return [SearchedGroup(row.group, row.channels, row.kept, row.error) for row in found]


def _count(inputs: Any) -> int:
    return len(keras.tree.flatten(inputs)[0])

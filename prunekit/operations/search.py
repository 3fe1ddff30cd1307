"""search: the smallest file for a drop that the user names, or the best one for a number of bytes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import keras

from prunekit.anatomy.files.digests import architecture_digest, data_digest, model_digest
from prunekit.anatomy.layers.model_weights import check_built
from prunekit.anatomy.layers.targets import find_targets
from prunekit.core.data.calibration import CheckedData
from prunekit.core.layerwise.layerwise import Progress
from prunekit.core.runtime.partial_files import checked_folder, replace_file, replace_model
from prunekit.delivery.litert.model_measures import check_measure
from prunekit.delivery.plots.files_plot import files_figure
from prunekit.delivery.plots.plots import to_png
from prunekit.searching.building import Built, build
from prunekit.searching.choice import Unreachable
from prunekit.searching.costs import TECHNIQUES, Costs, Mixture
from prunekit.searching.judge import Judge, SearchData, batched
from prunekit.searching.repaired_scan import RepairedScan
from prunekit.searching.search_report import SearchedGroup, SearchedWeight, SearchPoint, SearchReport
from prunekit.searching.searched_model import SearchedModel
from prunekit.searching.table import Table, levels_for, scan, settings_of
from prunekit.sparsity.arguments import MEMORY, check_functions, non_negative, number_of_bytes, whole
from prunekit.sparsity.array_ops import array_of
from prunekit.suggestions import did_you_mean
from prunekit.techniques.quantize.placement.stored_bytes import FLOAT_BYTES
from prunekit.techniques.quantize.rounding.simulation import check_computes_in_floats

Target = Literal["litert", "packed"]
Technique = Literal["shrink", "quantize", "prune"]
TABLE, REPORT, MODEL, FILE, PACKED = "scan.json", "search.json", "model.keras", "model.tflite", "model.pack"
PICTURE = "search.png"
# Most files that are made, the factor between the errors that are tried, and the ratio of errors that is near enough.
_FILES, _FACTOR, _NEAR = 9, 3.0, 1.2
# First error that is tried, for each unit of the drop.
_START = 4.0
# Share of the bytes that may be left unused.
_UNUSED = 0.03


@dataclass(frozen=True, eq=False)
class SearchResult:
    """What a search delivers.

    Attributes:
        model: The Keras model whose integer file was judged; its weights lie on their grids.
        report: How the file was found.
        file: The LiteRT file.
        packed: The packed file; b"" unless target="packed".
    """

    model: Any
    report: SearchReport
    file: bytes
    packed: bytes

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes the model (model.keras), its files (model.tflite, model.pack) and the report (search.json, .png)."""
        path = checked_folder(folder, "search", (REPORT, PICTURE, MODEL, FILE, PACKED))
        path.mkdir(parents=True, exist_ok=True)
        replace_model(path / MODEL, self.model)
        replace_file(path / FILE, self.file)
        if self.packed:
            replace_file(path / PACKED, self.packed)
        replace_file(path / PICTURE, to_png(files_figure(self.report.picture.data)))
        replace_file(path / REPORT, (json.dumps(self.report.to_dict(), indent=1) + "\n").encode())
        return path


def search(  # noqa: PLR0913
    model: Any,
    data: Any,
    *,
    drop: float | None = None,
    bytes: float | str | None = None,
    target: Target = "litert",
    techniques: Literal["all"] | Sequence[Technique] | Technique = "all",
    output: str | os.PathLike[str] | None = None,
    seed: int = 0,
    memory: float | str = MEMORY,
    progress: Progress | None = None,
) -> SearchResult:
    """Returns the smallest integer file of a model that loses at most a drop, or the best one of so many bytes.

    Each layer's zeros and bits, and the channels that are kept, are chosen together. Every level is measured by itself
    on examples, with the layers behind it repaired; an exact program chooses one for each; the file of the choice is
    made, run, and measured on other examples, and the choice is made again, stricter or bolder, up to nine times. The
    file that is returned held the drop on examples that no choice has seen. The model is not changed or trained.

    Args:
        model: A built Sequential or functional Keras model.
        data: A pair (inputs, labels), a dataset or a list of such batches; some thousands of examples that the model
            was not trained on. Inputs alone: the drop is one of agreement with the model.
        drop: By how much the metric may become worse, in its own unit: 0.005 = half a point of accuracy. The metric is
            the first that the model is compiled with, else the accuracy for labels that are classes, else the loss.
        bytes: Most bytes of the file, such as "200kB". With `drop` the file of fewest bytes has to meet both.
        target: "litert": bytes of the LiteRT file. "packed": bytes of its packed form (`pk.pack`), which is what apps
            download: there zeros count, too.
        techniques: What may be chosen: "shrink" (channels), "quantize" (fewer than 8 bits), "prune" (zeros, in packed
            files alone); "all", or some of them.
        output: Folder for model.keras, model.tflite, model.pack, the report (search.json, search.png) and the table of
            all levels (scan.json). A search that was interrupted there is continued, and another question on the same
            model and data begins with the table.
        seed: Seed of the draw of the examples for each purpose.
        memory: Largest number of bytes of activations that are kept; less memory costs time, not accuracy.
        progress: Told of each scanned weight and each file: (done, total, text).

    Raises:
        ValueError: Neither drop nor bytes are given; no file meets them: the message has what is reachable; there are
            fewer than 128 examples; the model has a `call` of its own; this machine makes no LiteRT files.
        TypeError: `model` is not a Keras 3 model.
    """
    check_functions(progress=progress)
    if drop is None and bytes is None:
        raise ValueError("A search needs a question: drop=0.005, bytes='200kB', or both. Received: neither.")
    if target not in get_args(Target):
        raise ValueError(
            f"`target` is one of {', '.join(get_args(Target))}. Received: {target!r}."
            f"{did_you_mean(str(target), get_args(Target))}"
        )
    allowed = _techniques(techniques)
    most_drop = None if drop is None else non_negative("drop", drop)
    most_bytes = None if bytes is None else int(number_of_bytes("bytes", bytes))
    check_measure("bytes")
    check_built(model)
    check_computes_in_floats(model)
    checked = CheckedData(model, data)
    next(iter(checked))
    folder = None
    if output is not None:
        folder = checked_folder(output, "search", (TABLE, REPORT, PICTURE, MODEL, FILE, PACKED))
        folder.mkdir(parents=True, exist_ok=True)
    work = _Search(model, SearchData(data, whole("seed", seed, 0)), target, number_of_bytes("memory", memory), progress)
    if most_drop is not None:
        work.check_drop(most_drop)
    work.scan(folder, allowed)
    result = work.within_drop(most_drop, most_bytes) if most_drop is not None else work.within_bytes(most_bytes or 0)
    if folder is not None:
        result.save(folder)
    return result


@dataclass(frozen=True, eq=False)
class _Made:
    """A mixture whose file was made."""

    mixture: Mixture
    built: Built
    drops: tuple[float, float]
    error: float


class _Search:
    def __init__(self, model: Any, data: SearchData, target: str, memory: float, progress: Progress | None):
        self._model, self._data, self._memory = model, data, memory
        self._progress: Progress = progress or (lambda done, total, text: None)
        self._target, self._packed = target, target == "packed"
        self._subject = SearchedModel(model, data.fitted)
        self._judge = Judge(model, data)
        self._levels = levels_for(packed=self._packed)
        self._made: list[_Made] = []

    def check_drop(self, drop: float) -> None:
        """Refuses points where a fraction is wanted."""
        metric = self._judge.metric
        if metric.fraction and drop >= 1:
            raise ValueError(
                f"A drop of {metric.title} is a fraction, below 1. Received: drop={drop:g}. For {drop:g} points, pass "
                f"{drop / 100:g}."
            )

    def scan(self, folder: Path | None, techniques: Sequence[str]) -> None:
        """Measures all levels, or takes them from a folder; `techniques` may be chosen."""
        hashes = {
            "model": model_digest(self._model),
            "architecture": architecture_digest(self._model),
            "data": data_digest((self._data.fitted, self._data.measured)),
        }
        settings = settings_of(self._levels, hashes)
        known = Table(settings) if folder is None else _kept_table(folder / TABLE, settings)

        def keep(table: Table) -> None:
            if folder is not None:
                replace_file(folder / TABLE, (json.dumps(table.to_dict(), indent=1) + "\n").encode())

        fitted, measured = batched(self._data.fitted, 64), batched(self._data.measured, 128)
        products = list(self._subject.products.values())
        self._table = scan(
            self._subject,
            lambda: RepairedScan(self._model, fitted, measured, products, self._memory),
            self._levels,
            known,
            keep,
            lambda done, total, name: self._progress(done, total, f"measured {name}"),
        )
        self._costs = Costs(self._subject, self._table, packed=self._packed, techniques=techniques)

    # ---- files -------------------------------------------------------------------------------------------------------

    def _file_of(self, mixture: Mixture) -> _Made:
        for made in self._made:
            if (made.mixture.levels, made.mixture.kept) == (mixture.levels, mixture.kept):
                return made
        data = self._data
        built = build(self._subject, mixture, data.fitted, data.held_out, packed=self._packed, memory=self._memory)
        made = _Made(mixture, built, self._judge.drops(built.outputs), self._judge.error(built.outputs))
        self._made.append(made)
        self._progress(len(self._made), _FILES, f"a file of {built.bytes:,} bytes, drop {made.drops[0]:.4g}")
        return made

    def within_drop(self, drop: float, most_bytes: int | None) -> SearchResult:
        """Returns the smallest file that holds a drop."""
        low, high = self._costs.errors
        low = max(low * (1 + 1e-6), 1e-12)
        held = self._smallest(drop, low, high)
        proven = next((made for made in held if made.drops[1] <= drop), None)
        if proven is None:
            raise ValueError(self._missed(drop))
        if most_bytes is not None and proven.built.bytes > most_bytes:
            raise ValueError(
                f"No file meets both bounds. Received: drop={drop:g} and bytes={most_bytes:,}; the smallest file "
                f"with this drop has {proven.built.bytes:,} bytes. Allow more of one of them."
            )
        return self._result(proven, drop, most_bytes)

    def _smallest(self, drop: float, low: float, high: float) -> list[_Made]:
        """Makes files along the bound of the error; returns those that hold the drop, the smallest first."""
        bound = min(max(_START * drop, low), high)
        holds: float | None = None
        fails: float | None = None
        while len(self._made) < _FILES:
            if self._file_of(self._costs.least_bytes(bound)).drops[0] <= drop:
                holds = bound
            else:
                fails = bound
            if fails is None:
                if bound >= high:
                    break
                bound = min(bound * _FACTOR, high)
            elif holds is None:
                if bound <= low:
                    break
                bound = max(bound / _FACTOR, low)
            elif fails / holds < _NEAR:
                break
            else:
                bound = math.sqrt(holds * fails)
        found = [made for made in self._made if made.drops[0] <= drop]
        return sorted(found, key=lambda made: made.built.bytes)

    def _missed(self, drop: float) -> str:
        nearest = min(self._made, key=lambda made: max(made.drops))
        return (
            f"No file holds the drop without training. Received: drop={drop:g}; the nearest of {len(self._made)} files "
            f"loses {max(nearest.drops):.4g} and has {nearest.built.bytes:,} bytes. Allow more, or train on integers: "
            "pk.QuantizationCallback."
        )

    def within_bytes(self, most: int) -> SearchResult:
        """Returns the file of least error with at most so many bytes."""
        bound, best = float(most), None
        while len(self._made) < _FILES:
            before = len(self._made)
            try:
                made = self._file_of(self._costs.least_error(bound))
            except Unreachable:
                # Counted bytes are not those of a file: its graph adds some, and packing may save some.
                made = self._file_of(self._costs.least_bytes(self._costs.errors[1]))
                if made.built.bytes > most:
                    raise ValueError(
                        f"No file is so small without training. Received: bytes={most:,}; the smallest has "
                        f"{made.built.bytes:,}."
                    ) from None
            offset = made.built.bytes - made.mixture.bytes
            fits = made.built.bytes <= most
            if fits and (best is None or made.error < best.error):
                best = made
            if len(self._made) == before or (fits and made.built.bytes >= (1 - _UNUSED) * most):
                break
            bound = most - offset if fits else min(most - offset, 0.98 * bound)
        if best is None:
            least_bytes = min(made.built.bytes for made in self._made)
            raise ValueError(
                f"No file of so few bytes was found. Received: bytes={most:,}; the smallest of {len(self._made)} files "
                f"has {least_bytes:,}. Allow more."
            )
        return self._result(best, None, most)

    def _result(self, made: _Made, drop: float | None, most: int | None) -> SearchResult:
        before, after = self._judge.before[1], self._judge.values(made.built.outputs)[1]
        points = [
            SearchPoint(one.mixture.error, one.error, one.mixture.bytes, one.built.bytes, one.drops[0], one is made)
            for one in sorted(self._made, key=lambda one: one.built.bytes)
        ]
        data, weights = self._data, self._model.weights
        report = SearchReport(
            model_name=self._model.name,
            target=self._target,
            metric=self._judge.metric,
            before=before,
            after=after,
            asked_drop=drop,
            asked_bytes=most,
            examples=(_count(data.fitted), _count(data.measured), data.choosing, data.judging),
            bytes_before=FLOAT_BYTES * sum(math.prod(one.shape) for one in weights),
            bytes=made.built.bytes,
            gap=made.mixture.gap,
            points=tuple(points),
            weights=tuple(self._rows_of_weights(made)),
            groups=tuple(self._rows_of_groups(made.mixture)),
            skipped=self._subject.skipped,
        )
        return SearchResult(made.built.model, report, made.built.file, made.built.packed)

    def _rows_of_weights(self, made: _Made) -> list[SearchedWeight]:
        rows = {(row.weight, row.level): row.error for row in self._table.weights}
        stored = {
            target.name: array_of(target.variable)
            for target in find_targets(made.built.model, also=("depthwise_kernel", "embedding"))[0]
        }
        found = []
        for name, level in made.mixture.levels.items():
            shape, zeros = tuple(self._subject.products[name].target.shape), float((stored[name] == 0).mean())
            found.append(SearchedWeight(name, shape, zeros, level.bits or 32, level.rate, rows[name, level]))
        return found

    def _rows_of_groups(self, mixture: Mixture) -> list[SearchedGroup]:
        rows = {(row.group, row.kept): row for row in self._table.removals}
        found = [rows[pair] for pair in mixture.kept.items()]
        return [SearchedGroup(row.group, row.channels, row.kept, row.error) for row in found]


def _techniques(given: Any) -> tuple[str, ...]:
    listed = TECHNIQUES if given == "all" else (given,) if isinstance(given, str) else tuple(given)
    wrong = [one for one in listed if one not in TECHNIQUES]
    if wrong or not listed:
        raise ValueError(
            f'`techniques` is "all", or some of {", ".join(TECHNIQUES)}. Received: {given!r}.'
            f"{did_you_mean(str(wrong[0]), TECHNIQUES) if wrong else ''}"
        )
    return listed


def _count(inputs: Any) -> int:
    return len(keras.tree.flatten(inputs)[0])


def _kept_table(path: Path, settings: dict[str, Any]) -> Table:
    """Returns the table at a path if it is of the same model, data and levels; else an empty one."""
    from prunekit.anatomy.records.plain_data import from_plain

    try:
        found: Table = from_plain(Table, json.loads(path.read_bytes()))
    except FileNotFoundError:
        return Table(settings)
    except (ValueError, TypeError, RecursionError):
        return Table(settings)
    return found if found.settings == settings else Table(settings)

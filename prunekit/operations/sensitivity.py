"""sensitivity: measures what pruning or rounding each weight costs; keeps partial results, continues earlier scans."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import keras
import numpy as np

from prunekit.anatomy.files.digests import architecture_digest, data_digest, model_digest
from prunekit.anatomy.records.name_patterns import listed_patterns
from prunekit.core.data.calibration import CheckedData
from prunekit.core.layerwise.layerwise import Progress
from prunekit.core.outputs.output_metrics import Batch, compiled_metrics
from prunekit.core.runtime.partial_files import checked_folder, replace_file, replace_json
from prunekit.delivery.plots.plots import to_png
from prunekit.delivery.plots.sensitivity_plot import sensitivity_figure
from prunekit.delivery.reports.metrics import Metric, inferred
from prunekit.delivery.reports.sensitivity import ScannedWeight, SensitivityReport, SensitivityRow
from prunekit.sparsity.arguments import MEMORY, check_functions, fraction, number_of_bytes, whole
from prunekit.sparsity.patterns import NM, Pattern
from prunekit.sparsity.scores import Criterion
from prunekit.sparsity.shorthands import CriterionName, Misfits, PatternName
from prunekit.techniques.pruning.after_training.sensitivity_scan import SensitivityScan
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.quantize.bits.bit_scan import BitScan
from prunekit.techniques.quantize.options import QuantizationOptions
from prunekit.techniques.quantize.rounding.simulation import check_computes_in_floats
from prunekit.techniques.quantize.targeting import selected

TABLE = "sensitivity.json"
PICTURE = "sensitivity.png"
SPARSITIES = (0.5, 0.7, 0.8, 0.9, 0.95)
# Part of the text of a function, different in each process.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Told after each weight: (done, total, name of the weight).


def sensitivity(  # noqa: PLR0913
    model: Any,
    data: Any,
    *,
    sparsity: float | Sequence[float] | None = None,
    bits: int | Sequence[int] | None = None,
    criterion: CriterionName | Criterion | Callable[..., Any] = "magnitude",
    pattern: PatternName | Pattern = "unstructured",
    include: Sequence[str] | str = (),
    exclude: Sequence[str] | str = (),
    misfits: Misfits = "error",
    batch_size: int = 128,
    memory: float | str = MEMORY,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> SensitivityReport:
    """Measures the model with one weight pruned, or rounded, at a time, at several levels; changes nothing.

    Each row has the metrics and the loss that the model is compiled with, and the output error: the L2 norm of the
    change of the outputs, relative to the L2 norm of the outputs. What a model computes before a weight's first call is
    computed once for all levels. A subclassed model with a `call` of its own is computed whole each time.

    Args:
        model: A built Keras model. It is compiled, unless only output errors are wanted.
        data: A pair (inputs, labels), a triple with sample weights, a dataset or a list of such batches; inputs alone
            for output errors alone. All of it is in memory during the scan.
        sparsity: Sparsities, each in (0, 1); None = 0.5, 0.7, 0.8, 0.9, 0.95, or the sparsity of an N:M pattern.
        bits: Numbers of bits, each 2 to 8: weights are not pruned but put on the nearest values of grids of so many
            bits, whose ranges are those of `pk.quantize`. `pk.choose_bits` reads such a scan.
        criterion: As for `pk.prune`. A criterion that reconstructs, such as "sparsegpt", selects weights only.
        pattern: As for `pk.prune`.
        include: As for `pk.prune`.
        exclude: As for `pk.prune`.
        misfits: As for `pk.prune`.
        batch_size: Number of examples per batch, for data given as arrays.
        memory: Largest number of bytes of activations that are kept; less memory costs time, not accuracy.
        output: Folder for the rows (sensitivity.json, written after each weight) and the picture (sensitivity.png). A
            scan that was interrupted there is continued.
        force: True replaces a scan of another model, other data or other settings in that folder.
        progress: Called as progress(done, total, name) after each weight.

    Raises:
        ValueError: As for `pk.prune`; the folder holds a scan of another model, other data or other settings.
        TypeError: An argument is of a wrong type.
    """
    check_functions(progress=progress)
    check_computes_in_floats(model)
    options = PruningOptions(criterion, pattern, "uniform", include, exclude, misfits=misfits)
    if bits is None:
        technique: _Technique = _Pruning(options, _levels(sparsity, options))
    else:
        _check_rounding(options, sparsity)
        technique = _Rounding(QuantizationOptions(include=include, exclude=exclude), _bits(bits))
    most = number_of_bytes("memory", memory)
    batches = list(CheckedData(model, data, whole("batch_size", batch_size, 1)))
    report = _empty(model, batches, technique, batch_size)
    folder = None if output is None else _folder(output)
    earlier = None if folder is None else _earlier(folder / TABLE, report, force)
    if earlier is not None and earlier.complete:
        report = earlier
    else:
        work = technique.scan(model, batches, most)
        try:
            report = _scanned(work, _described(report, work), earlier, folder, progress or (lambda *_: None))
        finally:
            work.scan.end()
    if folder is not None:
        replace_file(folder / PICTURE, to_png(sensitivity_figure(report)))
    return report


class _Technique(Protocol):
    """What is varied, and how it is measured."""

    def settings(self) -> dict[str, Any]:
        """Returns what determines the rows, with "levels"."""

    def scan(self, model: Any, batches: Sequence[Batch], memory: float) -> SensitivityScan | BitScan:
        """Returns the scan of a model."""


@dataclass(frozen=True)
class _Pruning:
    options: PruningOptions
    levels: tuple[float, ...]

    def settings(self) -> dict[str, Any]:
        options = self.options
        return {
            "criterion": _ADDRESS.sub("", str(options.criterion)),
            "pattern": str(options.pattern),
            "levels": list(self.levels),
            "include": list(options.include),
            "exclude": list(options.exclude),
            "misfits": options.misfits,
        }

    def scan(self, model: Any, batches: Sequence[Batch], memory: float) -> SensitivityScan:
        return SensitivityScan(model, batches, self.options, self.levels, memory)


@dataclass(frozen=True)
class _Rounding:
    options: QuantizationOptions
    levels: tuple[int, ...]

    def settings(self) -> dict[str, Any]:
        patterns = {name: list(listed_patterns(getattr(self.options, name), name)) for name in ("include", "exclude")}
        return {"technique": "quantize", "levels": list(self.levels), **patterns}

    def scan(self, model: Any, batches: Sequence[Batch], memory: float) -> BitScan:
        selection = selected(model, self.options.include, self.options.exclude)
        return BitScan(model, batches, selection, self.options, self.levels, memory)


def _check_rounding(options: PruningOptions, sparsity: Any) -> None:
    """Refuses options of pruning beside `bits`."""
    usual = PruningOptions("magnitude", "unstructured", "uniform", options.include, options.exclude)
    named = [name for name in ("criterion", "pattern", "misfits") if getattr(options, name) != getattr(usual, name)]
    if sparsity is not None:
        named.insert(0, "sparsity")
    if named:
        raise ValueError(
            f"With `bits`, weights are rounded and none is pruned. Received: `bits` and {', '.join(named)}. Scan "
            "twice, with two output directories."
        )


def _bits(bits: Any) -> tuple[int, ...]:
    given = list(bits) if isinstance(bits, Sequence | np.ndarray) and not isinstance(bits, str) else [bits]
    levels = tuple(sorted({whole("bits", one, 2, largest=8) for one in given}))
    if not levels:
        raise ValueError(f"`bits` is one or more numbers from 2 to 8. Received: {bits!r}.")
    return levels


def _levels(sparsity: Any, options: PruningOptions) -> tuple[float, ...]:
    if sparsity is None:
        return (options.pattern.sparsity,) if isinstance(options.pattern, NM) else SPARSITIES
    given = (
        list(sparsity) if isinstance(sparsity, Sequence | np.ndarray) and not isinstance(sparsity, str) else [sparsity]
    )
    levels = tuple(sorted({fraction("sparsity", level) for level in given}))
    if not levels or not levels[0]:
        raise ValueError(f"`sparsity` is one or more numbers between 0 and 1. Received: {sparsity!r}.")
    return levels


def _empty(model: Any, batches: Sequence[Batch], technique: _Technique, batch_size: int) -> SensitivityReport:
    """Returns a report without rows, which tells whether an earlier scan is of the same model, data and settings."""
    settings = {
        **technique.settings(),
        "compiled": _compiled(model),
        "examples": sum(len(keras.tree.flatten(batch[0])[0]) for batch in batches),
        "batch_size": batch_size,
    }
    hashes = {
        "model": model_digest(model),
        "architecture": architecture_digest(model),
        "data": data_digest(list(batches)),
    }
    return SensitivityReport(model.name, settings, (), (), {}, (), hashes=hashes)


def _compiled(model: Any) -> str | None:
    """Returns loss and metrics as JSON; None for a model that is not compiled."""
    if not model.compiled:
        return None
    found = model.get_compile_config() or {}
    wanted = {name: found.get(name) for name in ("loss", "loss_weights", "metrics", "weighted_metrics")}
    return json.dumps(wanted, sort_keys=True, default=str)


# ---- the scan --------------------------------------------------------------------------------------------------------


def _described(report: SensitivityReport, work: SensitivityScan | BitScan) -> SensitivityReport:
    targets = tuple(ScannedWeight(target.name, tuple(target.shape), target.size) for target in work.targets)
    return replace(
        report,
        targets=targets,
        measures=_measures(work.scan.dense, work.model),
        dense=work.scan.dense,
        skipped=work.skipped,
        notes=tuple(_notes(work)),
    )


def _measures(dense: Mapping[str, float], model: Any) -> tuple[Metric, ...]:
    """Returns the metrics, the loss last."""
    compiled = compiled_metrics(model)
    found = [inferred(key, compiled.get(key)) for key in dense]
    return tuple(sorted(found, key=lambda metric: metric.name.endswith("loss")))


def _notes(work: SensitivityScan | BitScan) -> list[str]:
    notes = []
    if work.scan.runs.whole:
        notes.append("Each measurement computed the whole model: it has no graph of layers.")
    if work.scan.metrics.whole:
        notes.append(f"Each measurement evaluated the whole model: {work.scan.metrics.whole}.")
    if not work.scan.dense:
        notes.append("Only output errors were measured: the model is not compiled, or the data have no labels.")
    return [*notes, *work.notes]


def _scanned(
    work: SensitivityScan | BitScan,
    report: SensitivityReport,
    earlier: SensitivityReport | None,
    folder: Path | None,
    progress: Progress,
) -> SensitivityReport:
    names = {target.name for target in report.targets}
    rows = [] if earlier is None else [row for row in earlier.rows if row.target in names]
    report = replace(report, rows=tuple(rows))
    for number, target in enumerate(work.targets, start=1):
        if not any(row.target == target.name for row in rows):
            rows += [
                SensitivityRow(
                    target.name,
                    report.technique,
                    report.level,
                    one.level,
                    one.entries,
                    one.effect.metrics,
                    one.effect.output_error,
                )
                for one in work.measure(target)
            ]
            report = replace(report, rows=tuple(rows))
            _write(report, folder)
        progress(number, len(work.targets), target.name)
    if work.scan.runs.overflowed:
        note = f"Activations of some calls exceeded `memory` and were computed again for each {report.level}."
        report = replace(report, notes=(*report.notes, note))
        _write(report, folder)
    return report


def _write(report: SensitivityReport, folder: Path | None) -> None:
    if folder is not None:
        replace_json(folder / TABLE, report.to_dict())


# ---- the folder ------------------------------------------------------------------------------------------------------


def _folder(output: str | os.PathLike[str]) -> Path:
    path = checked_folder(output, "scan", (TABLE, PICTURE))
    path.mkdir(parents=True, exist_ok=True)
    return path


def read_scan(path: str | os.PathLike[str]) -> SensitivityReport:
    """Returns the scan in a sensitivity.json file.

    Raises:
        ValueError: The file is missing or damaged, or of another version.
    """
    try:
        return SensitivityReport.from_dict(json.loads(Path(path).read_bytes()))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file.") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _earlier(path: Path, report: SensitivityReport, force: bool) -> SensitivityReport | None:
    """Returns the scan at `path`, if it is of the same model, data and settings; None if it is to be replaced."""
    if not path.exists():
        return None
    remedy = "Choose another output directory, or replace that scan with --force (force=True)."
    try:
        found = read_scan(path)
    except ValueError as error:
        if force:
            return None
        raise ValueError(f"{error} {remedy}") from error
    then, now = ({**asdict(one)["settings"], **one.hashes} for one in (found, report))
    different = next((name for name in {**then, **now} if then.get(name) != now.get(name)), None)
    if different is None:
        return found
    if force:
        return None
    if different in report.hashes:
        raise ValueError(f"{path} is a scan of another {different}. {remedy}")
    was, now_is = (json.dumps(one.get(different)) for one in (then, now))
    changed = f"{found.level if different == 'levels' else different} was {was} then, and is {now_is} now"
    if different == "technique":
        words = ("rounded", "pruned") if found.technique == "quantize" else ("pruned", "rounded")
        changed = "weights were {} then, and are {} now".format(*words)
    raise ValueError(f"{path} was made with other settings: {changed}. {remedy}")

"""Exports a model; keeps only files that run and agree with the Keras model.

Every file is written under a temporary name, reopened, run on real samples one by one and in batches, compared
with the Keras model, and only then renamed. LiteRT files run in a separate process (`isolated_run`): a defective
file can crash the process that opens it. Sparse-encoded files are also checked for XNNPACK's behaviour on ARM64 and
in WebAssembly (`xnnpack`): some files compute wrong numbers there but not on x86.
"""

from __future__ import annotations

import contextlib
import math
import os
import reprlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np

from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.sections import Section
from prunekit.core.data.calibration import check_inputs, without_labels
from prunekit.core.data.synthetic_inputs import comparison_inputs
from prunekit.core.runtime.arguments import require_positive, writable_file, writable_folder
from prunekit.core.runtime.partial_files import partial_file
from prunekit.delivery.litert.export_reference import Format, Measure, ReferenceModel
from prunekit.delivery.litert.isolated_run import Comparison, ExportRejected, run_in_subprocess
from prunekit.delivery.litert.keras_file import kept, saved_and_loaded, temporary
from prunekit.delivery.litert.litert import ConversionError, Traced, convert
from prunekit.delivery.litert.xnnpack import read_verdict
from prunekit.delivery.reports.advice import runtime_advice
from prunekit.delivery.reports.report_sections import export_section
from prunekit.delivery.reports.rows import INTEGERS, ExportRow, RuntimeAdvice, names_integers
from prunekit.sparsity.arguments import check_functions
from prunekit.suggestions import did_you_mean
from prunekit.techniques.quantize.rounding.simulation import check_computes_in_floats

__all__ = ["FORMATS", "ExportReport", "ExportRow", "Format", "RuntimeAdvice", "export", "runtime_advice"]

_CHUNK = 64
# Endings of a path that names a file, and no folder.
_ENDINGS = (".keras", ".tflite")
# Endings of files that no folder is named by.
_OTHER_ENDINGS = (".h5", ".hdf5", ".onnx", ".pb", ".pt")


FORMATS: dict[str, Format] = {
    "keras": Format(".keras", max_error=1e-5),
    "litert": Format(".tflite"),
    "litert-sparse": Format("-sparse.tflite", sparse=True),
    "litert-float16": Format("-float16.tflite", "float16", max_error=1e-2, mean_error=1e-3),
    "litert-float16-sparse": Format("-float16-sparse.tflite", "float16", True, max_error=1e-2, mean_error=1e-3),
    "litert-dynamic-int8": Format("-dynamic-int8.tflite", "int8", max_error=0.25, mean_error=0.02),
}
# Formats that are known to be broken for every model: format -> reason.
_BROKEN = {
    "litert-dynamic-int8-sparse": (
        "LiteRT fails to load sparse-encoded dynamic int8, and computes nonsense where blocks are encoded; use "
        "'litert-dynamic-int8', which gzip makes smaller than its sparse encoding would be"
    ),
}


@dataclass(frozen=True)
class ExportReport(Displayed):
    """What an export wrote; a sequence of its rows.

    Attributes:
        files: One row per format, in the requested order.
    """

    main_items: ClassVar[str] = "files"
    files: tuple[ExportRow, ...]

    def sections(self) -> tuple[Section, ...]:
        """Returns the table of the files with the results of their checks."""
        return (export_section(self.files),)

    def verdict(self) -> str:
        """Returns one sentence: the files with their bytes, and the formats without one."""
        written = [f"{row.file} ({row.bytes:,} bytes)" for row in self.files if row.status == "ok"]
        others = [f"{row.format} {row.status}" for row in self.files if row.status != "ok"]
        return f"{', '.join([*written, *others]) or 'no file'}."

    def __iter__(self) -> Iterator[ExportRow]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> ExportRow:
        return self.files[index]


def export(  # noqa: PLR0913
    model: keras.Model,
    path: str | os.PathLike[str],
    data: Any = None,
    formats: Sequence[str] = (),
    *,
    labels: Any = None,
    measure: Measure | None = None,
    name: str = "model",
    batch_size: int | None = None,
    keep_going: bool = True,
) -> ExportReport:
    """Exports `model` to a file, or in several formats to a folder; returns a report with one row per format.

    Only files that run and agree with `model` remain on disk.

    Args:
        model: A built Keras model; it is not changed. The `.keras` file holds it without its optimizer.
        path: A file, "NAME.keras" or "NAME.tflite"; or a folder, which is made if missing.
        data: Inputs on which files and model are compared, examples along axis 0: an array, or a list, tuple or dict of
            arrays in the model's input structure. Labels beside them, (inputs, labels), are left out. Every example is
            run, so a few hundred are enough. None = random numbers.
        formats: Names from `prunekit.operations.export.FORMATS`, such as "keras" or "litert". A file has the format of
            its ending, or the one that is given.
        labels: Classes of the examples for the first output, as integers (examples,) or one-hot (examples, classes).
        measure: Function of a file's outputs for the first examples, as a list of arrays, that returns metrics by name.
        name: Stem of the names of files in a folder.
        batch_size: Fixes the batch size of the LiteRT files; None leaves it open. LiteRT.js runs fixed ones only.
        keep_going: True reports an `OSError` (for example, a full disk) as a "failed" row; False raises it.

    Raises:
        ValueError: A format is unknown, the path cannot be written, the model is not built, data or labels do not fit
            the model, or there are no data and no random inputs can be made.
        TypeError: An argument is of a wrong type.
    """
    target = _checked_path(path)
    chosen = _formats_of(target, checked_formats(formats))
    if Path(name).name != name or not name:
        raise ValueError(f"`name` must be a plain file name. Received: {name!r}.")
    check_functions(measure=measure)
    require_positive(batch_size=batch_size)
    if not isinstance(keep_going, bool):
        raise TypeError(f"`keep_going` is True or False. Received: {keep_going!r}.")
    check_computes_in_floats(model)
    if keep_going:  # else the error of writing is raised, which a recipe goes on from
        (writable_file if target.suffix in _ENDINGS else writable_folder)(path)
    with contextlib.ExitStack() as scratch:
        given = comparison_inputs(model) if data is None else without_labels(model, data)
        subject = ReferenceModel(model, given, labels, batch_size, scratch, measure)
        check_inputs(model, keras.tree.pack_sequence_as(subject.structure, subject.inputs))
        with contextlib.suppress(ExportRejected):  # raise the caller's error before any work
            _ = subject.reference
        if target.suffix not in _ENDINGS:
            rows = _export_each(subject, chosen, target, name, keep_going)
            return ExportReport(tuple(rows[key] for key in chosen))
        folder = scratch.enter_context(tempfile.TemporaryDirectory())
        row = _export_each(subject, chosen, Path(folder), name, keep_going)[chosen[0]]
        if row.file is None:
            return ExportReport((row,))
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial_file(target, f".unfinished-{target.name}") as partial:
            shutil.copyfile(Path(folder, row.file), partial)
        return ExportReport((replace(row, file=target.name),))


def _checked_path(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"`path` is the name of a file or a folder. Received: {path!r}.")
    target = Path(path)
    if target.suffix in _OTHER_ENDINGS:
        raise ValueError(f'A file ends with ".keras" or ".tflite". Received: {str(path)!r}.')
    return target


def _formats_of(target: Path, formats: list[str]) -> list[str]:
    """Returns the formats that are written to a path."""
    if target.suffix not in _ENDINGS:
        if not formats:
            raise ValueError(
                'A folder needs formats, such as ["litert"]; a file ends with ".keras" or ".tflite". Received: '
                f"{str(target)!r} without formats."
            )
        return formats
    if not formats:
        return [format_of_file(target)]
    if len(formats) > 1 or (formats[0] in FORMATS and not ending_of(formats[0]).endswith(target.suffix)):
        raise ValueError(
            f"A file has one format, that of its ending. Received: {str(target)!r} and formats={formats}. Pass a "
            "folder."
        )
    return formats


def ending_of(name: str) -> str:
    """Returns the end of the names of a format's files; "" for a format of which no file is written."""
    return FORMATS[name].suffix if name in FORMATS else ""


def format_of_file(path: Path) -> str:
    """Returns the format of a file by its ending, without options."""
    return next(name for name, one in FORMATS.items() if one.suffix == path.suffix)


def _export_each(
    subject: ReferenceModel, chosen: Sequence[str], directory: Path, name: str, keep_going: bool
) -> dict[str, ExportRow]:
    rows = {}
    # Write the Keras file first, so that the model is on disk even if a converter crashes this process.
    for key in sorted(chosen, key=lambda key: key != "keras"):
        target = directory / (name + ending_of(key))
        try:
            if key in _BROKEN:
                raise ExportRejected("refused", _BROKEN[key])
            rows[key] = _export_keras(subject, target) if key == "keras" else _export_litert(subject, key, target)
        except ExportRejected as unfit:
            rows[key] = _row_of_unfit(key, unfit, target)
        except OSError as error:
            if not keep_going:
                raise
            rows[key] = _row_of_unfit(
                key, ExportRejected("failed", f"cannot write {target}: {error.strerror or error}"), target
            )
    return rows


def checked_formats(formats: Sequence[str], integers: str = INTEGERS) -> list[str]:
    """Returns the names of formats, each once.

    Args:
        formats: Names.
        integers: Answer to an unknown name that asks for integers: where integer files come from.

    Raises:
        TypeError: `formats` is no list of names.
        ValueError: A format is unknown.
    """
    if (
        isinstance(formats, str)
        or not isinstance(formats, Sequence)
        or not all(isinstance(one, str) for one in formats)
    ):
        raise TypeError(
            '`formats` must be a list of names, such as ["litert"], the argument after `data`. Received: '
            f"{reprlib.repr(formats)}."
        )
    for key in formats:
        if key not in FORMATS and key not in _BROKEN:
            hint = f" {integers}" if names_integers(str(key)) else did_you_mean(str(key), FORMATS)
            raise ValueError(f"Unknown export format. Received: {key!r}.{hint} Valid formats: {', '.join(FORMATS)}.")
    return list(dict.fromkeys(formats))


def _row_of_unfit(key: str, unfit: ExportRejected, target: Path) -> ExportRow:
    note, found = str(unfit), unfit.found
    with contextlib.suppress(OSError):
        if key in FORMATS and target.is_file():
            note += f". The {target.name} in {target.parent} is from an earlier export"
    return ExportRow(key, None, None, None, unfit.status, note, *_figures(found))


def _figures(found: Comparison | None) -> tuple[Any, ...]:
    return (found.max_error, found.agreement, found.accuracy, found.metrics) if found else (None,) * 4


def _export_keras(subject: ReferenceModel, target: Path) -> ExportRow:
    model = subject.model
    with temporary(target) as path:
        loaded, zeros = saved_and_loaded(model, path)
        answers = subject.answers(loaded)
        found = subject.measured(subject.compare(FORMATS["keras"], answers, "the samples"), answers)
        total = sum(math.prod(weight.shape) for weight in model.weights)
        return _ship("keras", path, target, f"{zeros} zeros in {total} weights, each where the model has it", found)


def _export_litert(subject: ReferenceModel, key: str, target: Path) -> ExportRow:
    chosen = FORMATS[key]
    traced, content = subject.converted()
    dense_size = len(content)
    if key != "litert":
        try:
            content = convert(traced, weights=chosen.weights, sparse=chosen.sparse)
        except ConversionError as error:
            raise ExportRejected("failed", f"the conversion failed: {error}") from error
    notes = _sparse_notes(content, dense_size if chosen.weights == "float32" else None) if chosen.sparse else []
    if traced.batch is not None:
        notes.append(f"takes batches of {traced.batch}")
    with temporary(target) as path:
        path.write_bytes(content)
        found = _run_and_compare(subject, key, traced, path)
        return _ship(key, path, target, "; ".join(notes), found)


def _sparse_notes(content: bytes, dense_size: int | None) -> list[str]:
    """Returns the notes on a sparse-encoded file.

    Raises:
        ExportRejected: The file is known to fail or to compute wrong numbers on some platform.
    """
    verdict = read_verdict(content)
    if verdict.wrong is not None:
        raise ExportRejected(
            "refused",
            f"{verdict.wrong}. Export the format without '-sparse' instead (gzip compresses the zeros), or change "
            "that part of the model",
        )
    if not verdict.sparse_tensors:
        return ["no constant has the 30 % zeros from which the converter encodes sparsely: stored densely"]
    notes = [f"{verdict.sparse_tensors} constants stored sparsely"]
    if verdict.blocks:
        notes.append(f"{verdict.blocks} of them in blocks that x86 computes sparsely")
    if verdict.switched:
        notes.append("1x1 convolutions run sparse on ARM64 and in WebAssembly")
    if dense_size is not None and len(content) > dense_size:
        notes.append("larger than the dense file: too few zeros")
    return notes


def _run_and_compare(subject: ReferenceModel, key: str, traced: Traced, path: Path) -> Comparison:
    """Runs a few samples one by one, then all samples in batches; returns the comparison over all samples."""
    whole = subject.count // (traced.batch or 1) * (traced.batch or 1)
    if not whole:
        raise ExportRejected(
            "failed", f"it takes batches of {traced.batch}, and the check has only {subject.count} samples"
        )
    runs = {traced.batch or _CHUNK: whole}
    if traced.batch is None:
        runs = {1: min(4, whole)} | runs
    outputs = run_in_subprocess(
        path, {spec.name: v for spec, v in zip(subject.specs, subject.inputs, strict=True)}, runs
    )
    for chunk, count in runs.items():
        answers = [outputs[f"{chunk}/{name}"] for name in traced.outputs]
        what = f"the first {count} samples one by one" if chunk == 1 else f"the samples in batches of {chunk}"
        found = subject.compare(FORMATS[key], [np.asarray(values, np.float32) for values in answers], what)
    return subject.measured(found, answers)


def _ship(key: str, path: Path, target: Path, note: str, found: Comparison) -> ExportRow:
    """Renames a checked file to its final name; returns its row."""
    if found.alike:
        note += "; " * bool(note) + "the model gives all samples the same answer, so agreeing with it proves little"
    size, compressed = kept(path, target)
    return ExportRow(key, target.name, size, compressed, "ok", note, *_figures(found))

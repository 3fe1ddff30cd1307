"""Rows of a run's report on exports and runtimes, as plain data. Does not import Keras."""

from __future__ import annotations

from dataclasses import dataclass, field

# Format of integer files, beside the formats of exports.
INTEGER_FORMAT = "litert-integer"
# Entries of the advice on runtimes that are about sizes of files.
DOWNLOAD, DISK = "download (gzip)", "disk, uncompressed"
# Where a file comes from that exports do not make.
NEEDS_DATA = "A file that computes with integers needs data for its ranges:"
INTEGERS = f"{NEEDS_DATA} pk.quantize(model, data).export(PATH), prunekit quantize, or the step quantize of a recipe."


def names_integers(name: str) -> bool:
    """Returns True if an unknown name of a format asks for integers, as "litert-int8" does.

    "litert-dynamic-int8" is near in spelling, and computes in floating point.
    """
    return any(word in name.lower() for word in ("int4", "int8", "int16", "16x8", "integer"))


@dataclass(frozen=True)
class RuntimeAdvice:
    """Benefit of a model's zeros and of removed channels on one runtime, with the reason."""

    runtime: str
    what_it_buys: str
    why: str


@dataclass(frozen=True)
class ExportRow:
    """Result of the export in one format.

    Attributes:
        format: The requested format.
        file: Name of the file inside the folder; None if no file was kept.
        bytes: Size of the file.
        gzip_bytes: Size after `gzip -9`.
        status: "ok", "refused" (known to fail or to compute wrong numbers somewhere, so not written) or "failed".
        note: The reason for the status, or a remark on the file.
        max_error: Largest absolute difference from the Keras model, as a fraction of the range of its outputs.
        agreement: Fraction of samples with the same most likely class; None if the first output is not a classifier.
        accuracy: Fraction of samples whose most likely class is the label, None without labels.
        metrics: Metrics and loss of the file's outputs on the samples, by name; None if not measured.
        packed_bytes: Size after `pk.pack`; None if it was not packed.
    """

    format: str
    file: str | None
    bytes: int | None
    gzip_bytes: int | None
    status: str
    note: str
    max_error: float | None
    agreement: float | None
    accuracy: float | None
    metrics: dict[str, float] | None = None
    packed_bytes: int | None = None


@dataclass(frozen=True)
class StageRow:
    """One model of a run as a LiteRT file: the model before pruning, after a step, or an exported file.

    Attributes:
        name: "before", "after 2. shrink", or the format of an exported file.
        kind: "before", "step" or "file".
        metrics: Metrics and loss by name; empty if not measured.
        bytes: Size of the file; None if the model does not convert.
        gzip_bytes: Size after `gzip -9`.
        latency: Median duration of one call in seconds; None if not measured.
        file: Name of the file; those of stages are removed at the end of the run.
        note: Why there is no file; "" if there is one.
    """

    name: str
    kind: str
    metrics: dict[str, float] = field(default_factory=dict)
    bytes: int | None = None
    gzip_bytes: int | None = None
    latency: float | None = None
    file: str | None = None
    note: str = ""

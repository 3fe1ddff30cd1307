"""Rows of a run's report on exports and runtimes, as plain data. Imports no Keras: reports are also read without it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RuntimeAdvice:
    """One line of the table: a runtime, what this model's zeros buy there, and why."""

    runtime: str
    what_it_buys: str
    why: str


@dataclass(frozen=True)
class ExportRow:
    """What became of one format.

    Attributes:
        format: The format asked for.
        file: Name of the file inside the folder, None if none was left there.
        bytes: Size of the file.
        gzip_bytes: Size after `gzip -9`.
        status: "ok", "refused" (known to fail or to compute wrong numbers somewhere, so not written) or "failed".
        note: The reason, or what is worth knowing about the file.
        max_error: Largest absolute difference from the Keras model, as a fraction of the range of its outputs.
        agreement: Fraction of samples with the same most likely class, None where the first output is no classifier.
        accuracy: Fraction of samples whose most likely class is the label, None without labels.
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

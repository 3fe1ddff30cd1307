"""What a search keeps in its folder for its next questions: records, among them what is known of files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from prunekit.anatomy.records.plain_data import Record, from_plain, plain
from prunekit.core.runtime.partial_files import replace_json
from prunekit.searching.costs import Mixture
from prunekit.searching.question import Made


class _WithSettings(Protocol):
    @property
    def settings(self) -> Mapping[str, Any]:
        """What determines the record."""


Kept = TypeVar("Kept", bound=_WithSettings)


def kept_record(path: Path | None, empty: Kept, notes: list[str], other: str = "") -> Kept:
    """Returns the record at a path if it has the settings of an empty one; else the empty one.

    Args:
        path: Where it is kept; None keeps none.
        empty: An empty record with its settings.
        notes: A note is added for a file that cannot be read.
        other: Text of the note, behind the file's name, if the record has other settings; "" adds no note.
    """
    if path is None:
        return empty
    try:
        found = from_plain(type(empty), json.loads(path.read_bytes()))
    except FileNotFoundError:
        return empty
    except (ValueError, TypeError, RecursionError):
        notes.append(f"{path.name} could not be read, and is made anew.")
        return empty
    if found.settings == empty.settings:
        return found
    notes += [f"{path.name} {other}"] if other else []
    return empty


@dataclass(frozen=True)
class KnownFile(Record):
    """A file that was made; see `Made`.

    Attributes:
        share: Time of a call as a share of that of the model's file in float32, in the same turns.
    """

    mixture: Mixture
    drops: tuple[float, float]
    error: float
    bytes: int
    share: float | None = None
    arena: int | None = None


@dataclass(frozen=True)
class _Kept(Record):
    """What the file has.

    Attributes:
        settings: What determines the files: digests of model and examples, bounds besides the drop.
        files: The files.
        answered: The drops that were asked for and answered; None: none was asked for.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    files: tuple[KnownFile, ...] = ()
    answered: tuple[float | None, ...] = ()


class KnownFiles:
    """Files of one model that were made for questions that differ in the drop alone.

    Args:
        path: Where they are kept; None keeps none.
        settings: What determines them; files of others are forgotten.
        notes: A note is added if they cannot be read.
        whole: Seconds of a call of the model's file in float32, now.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any], notes: list[str], whole: float = 1.0):
        self._path, self._kept, self._whole = path, kept_record(path, _Kept(plain(settings)), notes), whole

    def made(self) -> list[Made]:
        """Returns the files, without their models."""
        found = []
        for one in self._kept.files:
            seconds = None if one.share is None else one.share * self._whole
            found.append(Made(one.mixture, None, one.drops, one.error, one.bytes, seconds, one.arena))
        return found

    @property
    def answered(self) -> tuple[float | None, ...]:
        """The drops whose search came to its end; None: no drop was asked for."""
        return self._kept.answered

    def with_file(self, one: Made) -> Made:
        """Keeps what is known of a file, and returns it."""
        if all(map(math.isfinite, (*one.drops, one.error))):
            share = None if one.seconds is None else one.seconds / self._whole
            known = KnownFile(one.mixture, one.drops, one.error, one.bytes, share, one.arena)
            others = [other for other in self._kept.files if not other.mixture.equals(one.mixture)]
            self._keep(replace(self._kept, files=(*others, known)))
        return one

    def answer(self, drop: float | None) -> None:
        """Keeps that a search for a drop came to its end."""
        if drop not in self.answered:
            self._keep(replace(self._kept, answered=(*self._kept.answered, drop)))

    def _keep(self, kept: _Kept) -> None:
        self._kept = kept
        if self._path is not None:
            replace_json(self._path, kept.to_dict())

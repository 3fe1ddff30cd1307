"""What is known of files that were made, kept in the folder of a search for its next questions."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prunekit.anatomy.records.plain_data import Record, from_plain, plain
from prunekit.core.runtime.partial_files import replace_file
from prunekit.searching.costs import Mixture
from prunekit.searching.question import Made


@dataclass(frozen=True)
class KnownFile(Record):
    """A file that was made; see `Made`."""

    mixture: Mixture
    drops: tuple[float, float]
    error: float
    bytes: int
    seconds: float | None = None
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
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]):
        self._path, self._kept = path, _Kept(plain(settings))
        if path is None:
            return
        try:
            found: _Kept = from_plain(_Kept, json.loads(path.read_bytes()))
        except (FileNotFoundError, ValueError, TypeError, RecursionError):
            return
        if found.settings == self._kept.settings:
            self._kept = found

    def made(self) -> list[Made]:
        """Returns the files, without their models."""
        return [
            Made(one.mixture, None, one.drops, one.error, one.bytes, one.seconds, one.arena) for one in self._kept.files
        ]

    @property
    def answered(self) -> tuple[float | None, ...]:
        """The drops whose search came to its end; None: no drop was asked for."""
        return self._kept.answered

    def with_file(self, one: Made) -> Made:
        """Keeps what is known of a file, and returns it."""
        if all(map(math.isfinite, (*one.drops, one.error))):
            known = KnownFile(one.mixture, one.drops, one.error, one.bytes, one.seconds, one.arena)
            others = [other for other in self._kept.files if not other.mixture.is_as(one.mixture)]
            self._keep(replace(self._kept, files=(*others, known)))
        return one

    def answer(self, drop: float | None) -> None:
        """Keeps that a search for a drop came to its end."""
        if drop not in self.answered:
            self._keep(replace(self._kept, answered=(*self._kept.answered, drop)))

    def _keep(self, kept: _Kept) -> None:
        self._kept = kept
        if self._path is not None:
            replace_file(self._path, (json.dumps(kept.to_dict(), indent=1) + "\n").encode())

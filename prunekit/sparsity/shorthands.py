"""Names of criteria, allocations and patterns in options and recipes; imports neither Keras nor NumPy."""

import re
from typing import Literal, NamedTuple, TypeAlias

CriterionName: TypeAlias = Literal["magnitude", "l1", "l2", "movement", "random"]
AllocationName: TypeAlias = Literal["uniform", "global", "erk"]
PATTERNS = (
    "unstructured, channel, n:m such as 2:4 (2 of every 4 kept), block:INPUTSxOUTPUTS such as block:4x1, or "
    "block:4x1:max for maximum pooling"
)
_NUMBERED = re.compile(
    r"(?P<n>[0-9]{1,9}):(?P<m>[0-9]{1,9})"
    r"|block:(?P<inputs>[0-9]{1,9})x(?P<outputs>[0-9]{1,9})(:(?P<pooling>average|max))?"
)


class ParsedPattern(NamedTuple):
    """The parts of a pattern's name.

    Attributes:
        kind: "unstructured", "channel", "nm" or "block".
        numbers: (n, m) or (inputs, outputs), unchecked; empty for the other kinds.
        pooling: "average" or "max" if the name of a block contains it, else None.
    """

    kind: str
    numbers: tuple[int, ...] = ()
    pooling: str | None = None


def parse_pattern(text: str) -> ParsedPattern | None:
    """Returns the parts of a pattern's name, or None if `text` is not the name of a pattern.

    >>> parse_pattern("block:4x1:max")
    ParsedPattern(kind='block', numbers=(4, 1), pooling='max')
    """
    if text in ("unstructured", "channel"):
        return ParsedPattern(text)
    match = _NUMBERED.fullmatch(text)
    if match is None:
        return None
    if match["n"] is not None:
        return ParsedPattern("nm", (int(match["n"]), int(match["m"])))
    return ParsedPattern("block", (int(match["inputs"]), int(match["outputs"])), match["pooling"])

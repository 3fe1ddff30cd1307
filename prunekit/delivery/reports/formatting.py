"""Formats figures and names in the same way for the HTML page, the pictures and the terminal."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prunekit.anatomy.records.sections import Column

MISSING = "–"
NO_ROWS = "No rows."
_JOINERS = "\u200c\u200d"


def clean(value: object) -> str:
    """Returns the value as one line of printable text.

    Layer names are user input. Control characters (terminal escapes, line breaks), lone surrogates (not encodable as
    UTF-8) and invisible formatting characters (right-to-left overrides) become U+FFFD.
    """
    return "".join("\ufffd" if _is_unprintable(character) else character for character in str(value))


def _is_unprintable(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in _JOINERS


def literal(value: object) -> str:
    """Returns a setting in recipe notation without quotes: plain text, 0.9, true, null."""
    return clean(value if isinstance(value, str) else json.dumps(value))


def shorten(text: str, width: int) -> str:
    """Shortens `text` to `width` characters; omits the middle, because names differ at their ends."""
    if len(text) <= width:
        return text
    tail = (width - 1) * 3 // 5
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def is_number(value: Any) -> bool:
    """Returns True for finite numbers; False for None, nan, inf, booleans and text."""
    if value is None or isinstance(value, (bool, str)):
        return False
    try:
        return math.isfinite(value)
    except TypeError:
        return False


def count(value: Any) -> str:
    """Formats a whole number with thousands separators: 34,560."""
    return f"{int(value):,}" if is_number(value) else MISSING


def number(value: Any, digits: int = 4) -> str:
    """Formats a measured figure with `digits` significant digits; whole numbers keep all digits."""
    if not is_number(value):
        return MISSING
    if float(value).is_integer() and abs(value) < 1e15:
        return count(value)
    return f"{value:.{digits}g}"


def accuracy(value: Any) -> str:
    """Formats an accuracy as a fraction with four decimals: 0.9722."""
    return f"{value:.4f}" if is_number(value) else MISSING


def sparsity(value: Any) -> str:
    """Formats a sparsity with three decimals, or with more where three would round it to 0 or 1."""
    if not is_number(value):
        return MISSING
    for decimals in range(3, 9):
        text = f"{value:.{decimals}f}"
        if value in (0, 1) or 0 < float(text) < 1:
            return text
    return f"{value:.3g}"


def size(value: Any) -> str:
    """Formats bytes in units of 1000: 153.6 kB."""
    return f"{_scaled(value)}B" if is_number(value) else MISSING


def short_count(value: Any) -> str:
    """Formats a large count with three digits: 1.18 M."""
    return _scaled(value).rstrip() if is_number(value) else MISSING


def _scaled(value: float) -> str:
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # 999,950 would print as 1000.0 k.
        if abs(value) >= 0.99995 * factor:
            scaled = value / factor
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {unit}"
    return f"{value:.0f} "


def duration(seconds: Any) -> str:
    """Formats a duration: 0.42 s, 12.3 s, 4 min 05 s."""
    if not is_number(seconds):
        return MISSING
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def latency(seconds: Any) -> str:
    """Formats the duration of one call with three digits: 4.27 µs, 21.4 µs, 3.52 ms, 1.20 s."""
    if not is_number(seconds):
        return MISSING
    # 999.6 µs would print as 1000 µs.
    unit, factor = ("s", 1.0) if seconds >= 0.9995 else ("ms", 1e-3) if seconds >= 0.9995e-3 else ("µs", 1e-6)
    scaled = seconds / factor
    return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {unit}"


def ratio(value: Any) -> str:
    """Formats how many times something is as fast or as large, with two or three digits: 0.94x, 1.88x, 12.3x."""
    return f"{value:.{2 if value < 9.995 else 1}f}x" if is_number(value) else MISSING


def shape(dimensions: Any) -> str:
    """Formats a weight's shape: 3×3×16×32, or "scalar"."""
    return "×".join(str(dimension) for dimension in dimensions) or "scalar"


def change(before: Any, after: Any) -> str:
    """Formats the signed difference of two accuracies: +0.0012, −0.0028, ±0."""
    if not (is_number(before) and is_number(after)):
        return MISSING
    difference = round(after - before, 4)
    return f"{difference:+.4f}".replace("-", "−") if difference else "±0"


def share(part: Any, whole: Any) -> str:
    """Formats `part` as a percentage of `whole`: 15.8 %; the missing mark if there is no ratio."""
    if not (is_number(part) and is_number(whole)) or whole <= 0:
        return MISSING
    return f"{100 * part / whole:.1f} %"


def names(values: Sequence[object], most: int | None = None) -> str:
    """Formats a list of names, or its first `most` names: "a/bias, b/bias and 3 more"."""
    shown = ", ".join(map(str, values[:most]))
    return shown if most is None or len(values) <= most else f"{shown} and {len(values) - most} more"


# ---- cells of sections -----------------------------------------------------------------------------------------------

# Kind of a column, as in `anatomy/records/sections.py` -> the text of a value.
_FORMATTERS: dict[str, Callable[[Any], str]] = {
    "count": count,
    "short_count": short_count,
    "fraction": accuracy,
    "sparsity": sparsity,
    "bytes": size,
    "seconds": duration,
    "latency": latency,
}


def cell(value: Any, column: Column) -> str:
    """Returns the text of a cell: texts as they are, the missing mark for None and nan, other values by their kind."""
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, float) and not math.isfinite(value):
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if column.kind == "number":
        return number(value, column.digits)
    if isinstance(value, (list, tuple)):
        return shape(value) if column.kind == "shape" else names(value)
    return _FORMATTERS.get(column.kind, str)(value)


# A value in a column of the kind "status" -> "good", "warn" or "bad"; "warn" for other values.
_TONES = dict.fromkeys(("ok", "met", "done", "healthy"), "good")
_TONES |= dict.fromkeys(("failed", "not met", "dead", "exploding", "none", "nan"), "bad")


def tone(status: Any) -> str:
    """Returns "good", "warn" or "bad" for a value of the kind "status"."""
    return _TONES.get(status, "warn") if isinstance(status, str) else "warn"

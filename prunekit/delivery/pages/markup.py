"""Builds pieces of HTML; user text is escaped exactly once, on its conversion to `Markup`."""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prunekit.anatomy.records.sections import Column, Section, Value
from prunekit.delivery.reports import formatting
from prunekit.delivery.reports.formatting import clean, count, is_number

# Number of rows from which a table gets its own scroll bar.
_TALL = 30
# Number of columns above which the first column stays in place while the others scroll, and above which a table may be
# wider than a phone.
_MANY_COLUMNS, _PHONE_COLUMNS = 8, 5
# Kind of a column -> CSS class of its cells.
_CLASSES = {"name": "name", "names": "text", "text": "text", "code": "text", "sparsity": "bars", "label": "short"}


class Markup(str):
    """Finished HTML, which is not escaped again; every other string is escaped."""


def escaped(value: object) -> Markup:
    """Returns the value as HTML; escapes every value that is not `Markup`."""
    return value if isinstance(value, Markup) else Markup(html.escape(clean(value)))


def joined(parts: Iterable[str]) -> Markup:
    """Joins parts with line breaks."""
    return Markup("\n".join(parts))


def badge(kind: str, text: str) -> Markup:
    """Returns a small coloured label; `kind` is its CSS class, such as "good", "warn" or "bad"."""
    return Markup(f'<span class="badge {kind}">{escaped(text)}</span>')


def paragraph(text: object, css: str = "hint") -> Markup:
    """Returns a paragraph with the CSS class `css`."""
    return Markup(f'<p class="{css}">{escaped(text)}</p>')


def bullets(texts: Sequence[str], css: str) -> Markup:
    """Returns a list of notes with the CSS class `css`."""
    items = "".join(f"<li>{escaped(text)}</li>" for text in texts)
    return Markup(f'<ul class="{css}" aria-label="Notes">{items}</ul>')


# ---- tables ----------------------------------------------------------------------------------------------------------


def table(section: Section) -> Markup:
    """Returns the table of a section with its own scroll bars if it is large; a row's first cell is its header."""
    shown = [index for index, column in enumerate(section.columns) if not column.under]
    many = len(shown) > _MANY_COLUMNS
    lines = [_line(section, row, shown) for row in section.rows]
    foot = f"<tfoot>{_line(section, section.total, shown)}</tfoot>" if section.total else ""
    tall = " tall" if len(lines) > _TALL else ""
    hint = paragraph("Wide tables scroll sideways.", "hint phone") if len(shown) > _PHONE_COLUMNS else ""
    # Focusable, so that the table scrolls by keyboard.
    return Markup(
        f'{hint}<div class="scroll{tall}" role="region" tabindex="0" aria-label="{escaped(section.title)}">\n'
        f'<table class="{"many" if many else ""}"><thead>{_head(section, shown)}</thead>\n'
        f"<tbody>\n{joined(lines)}\n</tbody>{foot}</table></div>"
    )


def _head(section: Section, shown: Sequence[int]) -> Markup:
    """Returns the rows of headings: two rows if columns share a group."""
    columns = [section.columns[index] for index in shown]
    rows = 2 if any(column.group for column in columns) else 1
    upper, lower = [], []
    for group, members in itertools.groupby(columns, key=lambda column: column.group):
        found = list(members)
        if group:
            upper.append(f'<th scope="colgroup" colspan="{len(found)}" class="group">{escaped(group)}</th>')
            lower += [
                f'<th scope="col" class="{_css(column, columns)}">{escaped(column.name)}</th>' for column in found
            ]
            continue
        for column in found:
            span = f' rowspan="{rows}"' if rows > 1 else ""
            text = ", ".join([column.heading, *(name.lower() for name in _names_under(section, column))])
            upper.append(f'<th scope="col"{span} class="{_css(column, columns)}">{escaped(text)}</th>')
    return Markup("".join(f"<tr>{''.join(row)}</tr>" for row in (upper, lower) if row))


def _names_under(section: Section, column: Column) -> list[str]:
    return [other.name for other in section.columns if other.under == column.heading]


def _css(column: Column, columns: Sequence[Column]) -> str:
    if column is columns[0]:
        return "name"
    return "number" if column.numeric and column.kind != "sparsity" else _CLASSES.get(column.kind, "")


def _line(section: Section, row: Sequence[Value], shown: Sequence[int]) -> Markup:
    columns = [section.columns[index] for index in shown]
    cells = []
    for index, column in zip(shown, columns, strict=True):
        below = [
            formatting.cell(row[other], section.columns[other])
            for other in range(len(row))
            if section.columns[other].under == column.heading
        ]
        text = " · ".join(filter(None, below))
        sub = f'<span class="sub">{escaped(text)}</span>' if text else ""
        tag, scope = ("th", ' scope="row"') if index == shown[0] else ("td", "")
        cells.append(f'<{tag}{scope} class="{_css(column, columns)}">{_cell(row[index], column)}{sub}</{tag}>')
    return Markup(f"<tr>{''.join(cells)}</tr>")


def _cell(value: Value, column: Column) -> Markup:
    text = formatting.cell(value, column)
    if value is None or value == "" or column.kind not in _CELLS:
        return escaped(text)
    return _CELLS[column.kind](value, text)


def _status(value: Any, text: str) -> Markup:
    tone = formatting.tone(value)
    return badge(tone, {"good": "✓ ", "bad": "✗ "}.get(tone, "") + text)


def _bar(value: Any, text: str) -> Markup:
    if not is_number(value):
        return escaped(text)
    width = 100 * min(max(value, 0), 1)
    return Markup(
        f'<span class="one-line"><span class="bar" aria-hidden="true"><i style="width:{width:.1f}%"></i></span>'
        f"{escaped(text)}</span>"
    )


def _bytes(value: Any, text: str) -> Markup:
    """Returns the bytes with a unit; the tooltip shows the exact number."""
    return Markup(f'<span title="{count(value)} bytes">{escaped(text)}</span>') if is_number(value) else escaped(text)


def _breakable(value: Any, text: str) -> Markup:
    """Returns a name with permitted line breaks after its slashes."""
    return Markup(escaped(text).replace("/", "/<wbr>"))


def _code(value: Any, text: str) -> Markup:
    return Markup(f"<code>{escaped(text)}</code>")


# Kind of a column -> function of a value and its text, for the kinds that the page does not show as the text alone.
_CELLS: dict[str, Callable[[Any, str], Markup]] = {
    "status": _status,
    "sparsity": _bar,
    "bytes": _bytes,
    "name": _breakable,
    "code": _code,
}

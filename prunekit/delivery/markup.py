"""Builds pieces of HTML; user text is escaped exactly once, on its conversion to `Markup`."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from prunekit.delivery.formatting import MISSING, clean, count, is_number, size

# Number of rows from which a table gets its own scroll bar.
_TALL = 30


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


def small(main: object, below: object) -> Markup:
    """Returns a cell with a second, smaller line."""
    return Markup(f'{escaped(main)}<span class="sub">{escaped(below)}</span>')


def breakable(name: str) -> Markup:
    """Returns a weight's name with permitted line breaks after its slashes."""
    return Markup(escaped(name).replace("/", "/<wbr>"))


def bytes_of(value: Any) -> Markup:
    """Formats bytes with a unit; the tooltip shows the exact number."""
    return Markup(f'<span title="{count(value)} bytes">{size(value)}</span>') if is_number(value) else Markup(MISSING)


def table(
    label: str, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[object]], foot: Sequence[object] = ()
) -> Markup:
    """Returns a table with its own scroll bar if it is too wide; the first cell of a row is the row header.

    Args:
        label: Accessible name of the table, for screen readers.
        columns: (heading, class); class "number" aligns to the right.
        rows: Cells; all values except `Markup` are escaped.
        foot: Cells of the last row, the totals.
    """
    head = "".join(f'<th scope="col" class="{css}">{escaped(heading)}</th>' for heading, css in columns)
    classes = [css for _, css in columns]
    return scrolling_table(label, f"<tr>{head}</tr>", classes, rows, foot)


def scrolling_table(
    label: str,
    head: str,
    classes: Sequence[str],
    rows: Sequence[Sequence[object]],
    foot: Sequence[object] = (),
    kind: str = "",
) -> Markup:
    def line(cells: Sequence[object]) -> str:
        first, *rest = zip(cells, classes, strict=True)
        others = "".join(f'<td class="{css}">{escaped(cell)}</td>' for cell, css in rest)
        return f'<tr><th scope="row" class="{first[1]}">{escaped(first[0])}</th>{others}</tr>'

    body = "\n".join(map(line, rows))
    total = f"<tfoot>{line(foot)}</tfoot>" if foot else ""
    tall = " tall" if len(rows) > _TALL else ""
    # Focusable, so that the table scrolls by keyboard.
    return Markup(
        f'<div class="scroll{tall}" role="region" tabindex="0" aria-label="{escaped(label)}">\n<table class="{kind}">'
        f"<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>{total}</table></div>"
    )


def paragraph(text: object, css: str = "hint") -> Markup:
    """Returns a paragraph with the CSS class `css`."""
    return Markup(f'<p class="{css}">{escaped(text)}</p>')

"""Pieces of HTML: everything that a user named is escaped, once, where it becomes HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from prunekit.delivery.formatting import MISSING, clean, count, is_number, size

# Rows from which a table scrolls by itself.
_TALL = 30


class Markup(str):
    """HTML that is ready; any other string is escaped."""


def escaped(value: object) -> Markup:
    """The value as HTML: escaped, unless it is `Markup`."""
    return value if isinstance(value, Markup) else Markup(html.escape(clean(value)))


def joined(parts: Iterable[str]) -> Markup:
    """Parts below one another."""
    return Markup("\n".join(parts))


def badge(kind: str, text: str) -> Markup:
    """A small coloured label of a kind: "good" or "bad"."""
    return Markup(f'<span class="badge {kind}">{escaped(text)}</span>')


def small(main: object, below: object) -> Markup:
    """A cell with a second, smaller line."""
    return Markup(f'{escaped(main)}<span class="sub">{escaped(below)}</span>')


def breakable(name: str) -> Markup:
    """A weight's name, which a narrow column breaks at its slashes."""
    return Markup(escaped(name).replace("/", "/<wbr>"))


def bytes_of(value: Any) -> Markup:
    """Bytes in units, the exact number for the pointer."""
    return Markup(f'<span title="{count(value)} bytes">{size(value)}</span>') if is_number(value) else Markup(MISSING)


def table(
    label: str, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[object]], foot: Sequence[object] = ()
) -> Markup:
    """A table that scrolls by itself where it is too wide; the first cell of each row is its header.

    Args:
        label: What the table holds, read out before it.
        columns: (heading, class); class "number" aligns to the right.
        rows: Cells; what is not `Markup` is escaped.
        foot: Cells of a last row of totals.
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
    # Focusable, so that a keyboard can scroll it.
    return Markup(
        f'<div class="scroll{tall}" role="region" tabindex="0" aria-label="{escaped(label)}">\n<table class="{kind}">'
        f"<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>{total}</table></div>"
    )


def paragraph(text: object, css: str = "hint") -> Markup:
    """A paragraph of that class."""
    return Markup(f'<p class="{css}">{escaped(text)}</p>')

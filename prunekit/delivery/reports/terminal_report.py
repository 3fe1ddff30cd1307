"""Prints the sections of a report on the terminal; `html_report` renders the same sections as HTML, with pictures."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prunekit.anatomy.records.sections import Column, Section, Value
from prunekit.anatomy.records.tables import aligned
from prunekit.delivery.reports import formatting
from prunekit.delivery.reports.formatting import clean
from prunekit.delivery.reports.model_sections import model_sections
from prunekit.delivery.reports.report_sections import summary

if TYPE_CHECKING:
    from rich.console import ConsoleOptions, RenderableType, RenderResult

    from prunekit.anatomy.records.reports import SparsityReport
    from prunekit.delivery.reports.run_report import RunReport

# Most names of a list that a terminal shows; the HTML page and piped output list all names.
_MOST_NAMES = 6
_STYLES = {"good": "green", "warn": "yellow", "bad": "bold red"}


class FittedTable(Table):
    """A section's table that drops columns to fit the terminal's width, and prints as plain aligned text in a pipe.

    Args:
        section: The section whose table is shown.
        title: Line above the table; "" for none.
    """

    def __init__(self, section: Section, title: str = "") -> None:
        super().__init__(title=Text(clean(title)) if title else None, title_justify="left", title_style="bold")
        self.section = section
        self.heading = clean(title)
        self.heads = [clean(column.heading) for column in section.columns]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the renderables that rich prints."""
        if not console.is_terminal:
            yield from (Text(line, overflow="fold") for line in self.plain_lines(options.max_width))
            return
        columns, total = self.section.columns, self._cells(self.section.total, _MOST_NAMES)
        rows = [self._cells(row, _MOST_NAMES) for row in self.section.rows]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=self.title, show_edge=False)
        table.title_justify, table.title_style, table.show_footer = "left", "bold", bool(total)
        chosen = self._fitting(options.max_width, [self.heads, *rows, *([total] if total else [])])
        for index in chosen:
            table.add_column(
                Text(self.heads[index]),
                Text(total[index], style="bold") if total else "",
                justify="right" if columns[index].numeric else "left",
                no_wrap=columns[index].numeric,
                overflow="fold",
            )
        for row, values in zip(rows, self.section.rows, strict=True):
            table.add_row(*(Text(row[index], style=_style(values[index], columns[index])) for index in chosen))
        yield table

    def _cells(self, row: tuple[Value, ...], most_names: int | None = None) -> list[str]:
        # Cells hold names from the user: escape them with `clean`, and use Text, since rich would interpret markup.
        return [
            clean(
                formatting.names(value, most_names)
                if column.kind == "names" and isinstance(value, tuple)
                else formatting.cell(value, column)
            )
            for value, column in zip(row, self.section.columns, strict=bool(row))
        ]

    def _fitting(self, width: int, rows: list[list[str]]) -> list[int]:
        """Returns the columns that fit in `width`, two cells apart; texts may fold to 24 cells, figures never fold."""
        columns = self.section.columns
        widths = [max(map(cell_len, cells)) for cells in zip(*rows, strict=True)]
        needed = [w if column.numeric else min(w, 24) for w, column in zip(widths, columns, strict=True)]
        chosen = list(range(len(columns)))
        while sum(needed[index] + 2 for index in chosen) - 2 > width:
            least = min(chosen, key=lambda index: (columns[index].keep, -index))
            if columns[least].keep == 9:
                break
            chosen.remove(least)
        return chosen

    def plain_lines(self, width: int | None = None) -> Iterator[str]:
        """Yields the table's lines as aligned text, with two spaces between columns.

        Args:
            width: Number of character cells; columns that do not fit are dropped. None shows all columns.
        """
        total = self.section.total
        rows = [self.heads, *map(self._cells, self.section.rows), *([self._cells(total)] if total else [])]
        chosen = list(range(len(self.heads))) if width is None else self._fitting(width, rows)
        if self.heading:
            yield self.heading
        left = [place for place, index in enumerate(chosen) if not self.section.columns[index].numeric]
        yield from aligned([[row[index] for index in chosen] for row in rows], left, cell_len)


def _style(value: Value, column: Column) -> str:
    return _STYLES[formatting.tone(value)] if column.kind == "status" else ""


def inspect_table(report: SparsityReport) -> Table:
    """Returns a table of a model's weights; a star marks the weights that an operation pruned.

    On a terminal the table drops columns that do not fit; in a pipe it prints as plain aligned text.
    """
    return FittedTable(model_sections(report)[0])


def render_terminal(report: RunReport, console: Console) -> None:
    """Prints the report: compact tables on a terminal, plain lines without truncation or wrapping in a pipe."""
    _say(console, f"{report.title}: {report.verdict()}", "bold")
    for note in report.all_notes:
        _say(console, f"note: {note}", "yellow")
    for section in (summary(report), *report.sections()):
        print_section(section, console)


def text_of(sections: Sequence[Section]) -> str:
    """Returns sections as plain text."""
    text = io.StringIO()
    for section in sections:
        print_section(section, Console(file=text, color_system=None))
    return text.getvalue().strip("\n")


def print_section(section: Section, console: Console) -> None:
    """Prints one section with its parts: table, text, notes. Pictures and what only the page shows are left out."""
    if section.shown != "always":
        return
    parts = [part for part in section.parts if part.shown == "always"]
    if not (section.columns or section.notes or section.text or parts):
        return
    _say(console, "")
    if section.rows:
        table = FittedTable(section, section.title)
        if console.is_terminal:
            console.print(table)
        else:
            for line in table.plain_lines():
                _say(console, line)
    if section.rows or section.text or parts:
        lines = [*([] if section.rows else [section.title]), *section.text.splitlines(), *section.notes]
    else:
        lines = [f"{section.title}: {' '.join(section.notes) or formatting.NO_ROWS}"]
    for line in lines:
        _say(console, line)
    for part in parts:
        print_section(part, console)


def _say(console: Console, text: str, style: str = "") -> None:
    line: RenderableType = Text(clean(text), style=style)
    # In a pipe a long line must not wrap: other programs read line by line.
    console.print(line, soft_wrap=not console.is_terminal)

"""Prints a run report on the terminal; `html_report` renders the same report as HTML, with pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from prunekit.delivery import formatting
from prunekit.delivery.formatting import clean, count, number, short_count, size
from prunekit.delivery.run_report import RunReport, bound_text, compressed_sizes

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from prunekit.anatomy.inspection import Report, WeightRow

__all__ = ["RunReport", "compressed_sizes", "inspect_table", "render_terminal"]

# Most names of skipped weights that a terminal shows per reason; the HTML page and piped output list all names.
_MOST_NAMES = 6


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        heading: Text at the top of the column.
        keep: Priority. A narrow terminal drops the columns with the lowest number first; 9 is never dropped.
        right: True aligns the cells to the right and never breaks them, as for figures.
    """

    heading: str
    keep: int = 9
    right: bool = False


class FittedTable(Table):
    """A table that drops columns to fit the terminal's width, and prints as plain aligned text in a pipe."""

    def __init__(
        self, columns: Sequence[Column], rows: Sequence[Sequence[str]], total: Sequence[str] = (), title: str = ""
    ) -> None:
        super().__init__(title=Text(title) if title else None, title_justify="left", title_style="bold")
        self.heads = tuple(columns)
        # Cells hold names from the user: escape them with `clean`, and use Text, since rich would interpret markup.
        self.cells = [tuple(clean(cell) for cell in row) for row in rows]
        self.total = tuple(clean(cell) for cell in total)
        self.heading = title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the renderables that rich prints."""
        if not console.is_terminal:
            yield from (Text(line, overflow="fold") for line in self.plain_lines(options.max_width))
            return
        chosen = self._fitting(options.max_width)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=self.title, show_edge=False)
        table.title_justify, table.title_style, table.show_footer = "left", "bold", bool(self.total)
        for index in chosen:
            head = self.heads[index]
            table.add_column(
                Text(head.heading),
                Text(self.total[index], style="bold") if self.total else "",
                justify="right" if head.right else "left",
                no_wrap=head.right,
                overflow="fold",
            )
        for row in self.cells:
            table.add_row(*(Text(row[index]) for index in chosen))
        yield table

    def _widths(self) -> list[int]:
        rows = [tuple(head.heading for head in self.heads), *self.cells, *([self.total] if self.total else [])]
        return [max(cell_len(row[index]) for row in rows) for index in range(len(self.heads))]

    def _fitting(self, width: int) -> list[int]:
        """Returns the columns that fit in `width`, two cells apart; texts may fold to 24 cells, figures never fold."""
        needed = [w if head.right else min(w, 24) for w, head in zip(self._widths(), self.heads, strict=True)]
        chosen = list(range(len(self.heads)))
        while sum(needed[index] + 2 for index in chosen) - 2 > width:
            least = min(chosen, key=lambda index: (self.heads[index].keep, -index))
            if self.heads[least].keep == 9:
                break
            chosen.remove(least)
        return chosen

    def plain_lines(self, width: int | None = None) -> Iterator[str]:
        """Yields the table's lines as aligned text, with two spaces between columns.

        Args:
            width: Number of character cells; columns that do not fit are dropped. None shows all columns.
        """
        widths = self._widths()
        chosen = list(range(len(self.heads))) if width is None else self._fitting(width)
        if self.heading:
            yield self.heading
        for row in [tuple(head.heading for head in self.heads), *self.cells, *([self.total] if self.total else [])]:
            cells = []
            for index in chosen:
                space = " " * (widths[index] - cell_len(row[index]))
                cells.append(space + row[index] if self.heads[index].right else row[index] + space)
            yield "  ".join(cells).rstrip()


# ---- a model's weights -----------------------------------------------------------------------------------------------

_WEIGHT_COLUMNS = (
    Column("weight"),
    Column("shape", keep=3),
    Column("params", keep=6, right=True),
    Column("zeros", right=True),
    Column("sparsity", right=True),
    Column("pattern"),
    Column("MACs", keep=5, right=True),
    Column("sparse MACs", keep=2, right=True),
    Column("bytes", keep=4, right=True),
)
_MOVED = Column("moved per update", keep=1, right=True)


def inspect_table(report: Report) -> Table:
    """Returns a table of a model's weights; a star marks the weights that an operation pruned.

    On a terminal the table drops columns that do not fit; in a pipe it prints as plain aligned text.
    """
    return _weight_table(report, report.weights)


def _weight_table(
    report: Report, rows: Sequence[WeightRow], title: str = "", run: RunReport | None = None
) -> FittedTable:
    marked = set(report.targets) if len(rows) == len(report.weights) else set()
    cells: list[tuple[str, ...]] = [
        (
            row.name + (" *" if row.name in marked else ""),
            formatting.shape(row.shape),
            count(row.size),
            count(row.zeros),
            formatting.sparsity(row.sparsity),
            row.pattern,
            short_count(row.macs),
            short_count(row.sparse_macs),
            size(row.bytes),
        )
        for row in rows
    ]
    figures = (count(report.parameters), count(report.zeros), formatting.sparsity(report.sparsity), "")
    costs = (short_count(report.macs), short_count(report.sparse_macs), size(report.bytes))
    heads: tuple[Column, ...] = _WEIGHT_COLUMNS
    total: tuple[str, ...] = ("whole model", "", *figures, *costs)
    if run is not None and run.changes:
        heads, total = (*heads, _MOVED), (*total, "")
        cells = [(*cell, number(run.relative_change(row.name), 2)) for cell, row in zip(cells, rows, strict=True)]
    return FittedTable(heads, cells, total, title)


# ---- a run -----------------------------------------------------------------------------------------------------------


def render_terminal(report: RunReport, console: Console) -> None:
    """Prints the report: compact tables on a terminal, plain lines without truncation or wrapping in a pipe."""
    _say(console, f"{report.title}: {report.verdict()}", "bold")
    for note in report.all_notes:
        _say(console, f"note: {note}", "yellow")
    for table in _tables(report):
        _say(console, "")
        if console.is_terminal:
            console.print(table)
        else:
            for line in table.plain_lines():
                _say(console, line)
    if report.after.skipped:
        _say(console, "")
    for reason, names in report.skipped_reasons.items():
        shown = names[:_MOST_NAMES] if console.is_terminal else names
        more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
        _say(console, f"left alone, {reason}: {', '.join(shown)}{more}")
    _say(console, "")
    for row in report.expectations:
        mark, style = ("met", "green") if row.get("met") else ("NOT MET", "bold red")
        measured = number(row.get("measured"), 6) if formatting.is_number(row.get("measured")) else "not measured"
        _say(console, f"{mark}: {row.get('what')} {measured}, expected {bound_text(row.get('bound'))}", style)


def _say(console: Console, text: str, style: str = "") -> None:
    line: RenderableType = Text(clean(text), style=style)
    # In a pipe a long line must not wrap: other programs read line by line.
    console.print(line, soft_wrap=not console.is_terminal)


def _tables(report: RunReport) -> Iterator[FittedTable]:
    yield FittedTable(
        (Column("summary"), Column("", right=True), Column("compared with")), [card for card in report.cards()]
    )
    if report.pruned:
        yield _weight_table(report.after, report.pruned, "Pruned weights", report)
    if report.steps:
        yield FittedTable(
            (Column("step"), Column("what"), Column("took", right=True), Column("accuracy", right=True)),
            [_step_cells(index, step) for index, step in enumerate(report.steps, start=1)],
            title="Steps",
        )
    if report.exports:
        yield FittedTable(_EXPORT_COLUMNS, [_export_cells(row) for row in report.exports], title="Exported files")
    if report.advice:
        columns = (Column("runtime"), Column("benefit"), Column("why", keep=1))
        rows = [(row.runtime, row.what_it_buys, row.why) for row in report.advice]
        yield FittedTable(columns, rows, title="Where sparsity pays off")


def _step_cells(index: int, step: dict[str, Any]) -> tuple[str, ...]:
    kind, name = str(step.get("kind", "")), str(step.get("name") or "")
    return (
        f"{index}. {kind}",
        name,
        formatting.duration(step.get("seconds")),
        formatting.accuracy(step.get("accuracy")),
    )


_EXPORT_COLUMNS = (
    Column("format"),
    Column("status"),
    Column("bytes", right=True),
    Column("gzip", right=True),
    Column("error", keep=3, right=True),
    Column("agrees", keep=4, right=True),
    Column("accuracy", right=True),
    Column("note", keep=1),
)


def _export_cells(row: Any) -> tuple[str, ...]:
    figures = (size(row.bytes), size(row.gzip_bytes), number(row.max_error, 2))
    return (
        row.format,
        row.status,
        *figures,
        formatting.accuracy(row.agreement),
        formatting.accuracy(row.accuracy),
        row.note,
    )

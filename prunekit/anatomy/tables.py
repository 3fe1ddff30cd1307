"""Formats tables as plain text with columns of fixed width."""

from collections.abc import Collection, Sequence


def plain(value: object) -> str:
    """Returns a cell's text: numbers with separators, fractions with four digits, "?" for unknown values."""
    if value is None:
        return "?"
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def table(
    head: tuple[str, ...], rows: Sequence[tuple[str, ...]], total: tuple[str, ...], *, left: Collection[int]
) -> list[str]:
    """Returns the table's lines, with rules under the head and above the total.

    Args:
        head: Names of the columns.
        rows: Cells of each row.
        total: Cells of the last row.
        left: Indices of left-aligned columns; all other columns are right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, total, strict=True)]

    def line(cells: tuple[str, ...]) -> str:
        aligned = (
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(aligned).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return [line(head), rule, *map(line, rows), rule, line(total)]


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Returns the rows as lines, columns two spaces apart: columns in `left` left-aligned, others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [
        [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    return ["  ".join(row).rstrip() for row in cells]

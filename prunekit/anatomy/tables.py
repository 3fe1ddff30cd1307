"""Tables as plain text, in columns of one width."""

from collections.abc import Collection, Sequence


def plain(value: object) -> str:
    """A cell: numbers with separators, fractions with four digits, "?" for what is not known."""
    if value is None:
        return "?"
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def table(
    head: tuple[str, ...], rows: Sequence[tuple[str, ...]], total: tuple[str, ...], *, left: Collection[int]
) -> list[str]:
    """Its lines, with rules under the head and above the total.

    Args:
        head: Names of the columns.
        rows: Cells of each row.
        total: Cells of the last row.
        left: Columns that are aligned to the left, the others to the right.
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
    """The rows as lines, columns two spaces apart: those in `left` begin together, the others end together."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [
        [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    return ["  ".join(row).rstrip() for row in cells]

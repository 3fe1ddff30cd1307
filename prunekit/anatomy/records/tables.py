"""Formats tables as plain text with columns of fixed width."""

from collections.abc import Callable, Collection, Iterable, Sequence


def plain(value: object) -> str:
    """Returns a cell's text: numbers with separators, fractions with four digits, "–" for unknown values."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def known_sum(figures: Iterable[int | None]) -> int | None:
    """Returns the sum of the known figures; None if a figure is unknown and no other is above 0."""
    listed = list(figures)
    total = sum(figure for figure in listed if figure is not None)
    return None if not total and None in listed else total


def at_least(total: int | None, complete: bool, write: Callable[[int | None], str] = plain) -> str:
    """Returns a total's text: "at least 1,234" where figures are missing in it, "–" for None."""
    return f"at least {write(total)}" if total is not None and not complete else write(total)


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
    cells = [head, *rows, total]
    first, *body, last = aligned(cells, left)
    rule = "-" * (sum(_widths(cells, len)) + 2 * (len(head) - 1))
    return [first, rule, *body, rule, last]


def aligned(rows: Sequence[Sequence[str]], left: Collection[int], width_of: Callable[[str], int] = len) -> list[str]:
    """Returns the rows as lines, with two spaces between columns.

    Args:
        rows: Cells of each row, the head included.
        left: Indices of left-aligned columns; all other columns are right-aligned.
        width_of: Width of a text, such as the number of cells of a terminal that it takes.
    """
    widths = _widths(rows, width_of)

    def line(cells: Sequence[str]) -> str:
        spaces = (" " * (width - width_of(cell)) for cell, width in zip(cells, widths, strict=True))
        padded = (
            cell + space if index in left else space + cell
            for index, (cell, space) in enumerate(zip(cells, spaces, strict=True))
        )
        return "  ".join(padded).rstrip()

    return list(map(line, rows))


def _widths(rows: Sequence[Sequence[str]], width_of: Callable[[str], int]) -> list[int]:
    return [max(map(width_of, column)) for column in zip(*rows, strict=True)]

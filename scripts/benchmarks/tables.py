"""Tables of Markdown."""

from collections.abc import Sequence

from benchmarks.figures import spread, turn_ratios


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are figures."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rows_beside(seconds: dict[str, Sequence[float]], base: str, digits: int) -> list[list[str]]:
    """One row per way: its name, milliseconds, and the ratio to the way `base`, turn by turn.

    Args:
        seconds: Seconds of each turn, by way.
        base: The way that the others are compared to.
        digits: Decimals of the ratio.
    """
    return [
        [name, spread(values, 1e3), spread(turn_ratios(values, seconds[base]), digits=digits)]
        for name, values in seconds.items()
    ]

"""Statistics of repeated measurements, and the text of a table's cell."""

from collections.abc import Sequence
from statistics import median


def quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4], median(ordered), ordered[(3 * len(ordered)) // 4]


def turn_ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Each value over the one of `base` in the same turn."""
    return [value / other for value, other in zip(values, base, strict=True)]


def spread(values: Sequence[float], unit: float = 1.0, digits: int = 1) -> str:
    """Median and quartiles, as `28.1 (27.9 to 28.6)`."""
    if not values:
        return "-"
    low, middle, high = (f"{value * unit:.{digits}f}" for value in quantiles(values))
    return f"{middle} ({low} to {high})"


def number(value: float | None) -> str:
    """Two decimals, or a dash for None."""
    return "-" if value is None else f"{value:.2f}"


def verdict(value: float, most: float) -> str:
    """Whether a figure is below the most that was wanted, and its ratio to that where it is not."""
    return "met" if value < most else f"**not met**, {value / most:.2f} times the limit"

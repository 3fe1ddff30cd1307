"""Range rules: the interval of values that an integer grid covers."""

from prunekit.techniques.quantize.grids.ranges import MeanSquaredError, MinMax, Percentile, RangeRule

__all__ = [
    "MeanSquaredError",
    "MinMax",
    "Percentile",
    "RangeRule",
]

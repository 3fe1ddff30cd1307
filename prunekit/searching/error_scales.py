"""Learns from files how much the error of each technique counts in a mixture, beside its error alone in the table.

A layer that is pruned itself makes up for less of the zeros ahead than the whole layer did when they were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

# Least number of files, and the least ratio between their errors as shares of the predicted ones that says anything.
_FEWEST, _APART = 4, 1.3
# Penalty of a scale apart from the others, beside the squared relative errors of the files; and the largest scale, and
# one over the smallest.
_PENALTY, _WIDEST = 0.01, 3.0


def error_scales(predicted: Sequence[Mapping[str, float]], measured: Sequence[float]) -> dict[str, float]:
    """Returns a factor for the errors of each technique, around one: the unit of the errors stays as it is.

    Ridge regression of relative errors within bounds: the least sum over the files of (sum of a technique's error times
    its scale / measured error - 1)^2, plus `_PENALTY` times the sum of (scale - mean ratio)^2 / mean ratio^2.

    Args:
        predicted: For each file the errors of the table, summed by technique.
        measured: The error of each file.

    Returns:
        {technique: scale}; {} where there are too few files, or the table predicts them well.
    """
    names = sorted({name for errors in predicted for name, error in errors.items() if error > 0})
    rows = [[errors.get(name, 0.0) for name in names] for errors in predicted]
    parts = np.array(rows).reshape(len(rows), len(names))
    totals, wanted = parts.sum(axis=1), np.asarray(measured, "float64")
    usable = (totals > 0) & (wanted > 0)
    if usable.sum() < _FEWEST or len(names) < 2:
        return {}
    ratios = wanted[usable] / totals[usable]
    if ratios.max() < _APART * ratios.min():
        return {}
    from scipy.optimize import lsq_linear

    mean = np.exp(np.log(ratios).mean())
    shares = mean * parts[usable] / wanted[usable, None]
    left = np.concatenate([shares, np.sqrt(_PENALTY) * np.eye(len(names))])
    sides = np.concatenate([np.ones(len(shares)), np.full(len(names), np.sqrt(_PENALTY))])
    found = lsq_linear(left, sides, bounds=(1 / _WIDEST, _WIDEST)).x
    return {name: float(scale) for name, scale in zip(names, found, strict=True)}

"""Checks of numeric arguments: returns plain Python numbers, or raises an error that names the argument."""

import math
from numbers import Integral, Real
from typing import Any

# Optimizers count their updates in 64 bits.
LARGEST = 2**63 - 1


def fraction(name: str, value: Any) -> float:
    """Returns the value as a fraction of removed weights, in [0, 1)."""
    value = float(_number(name, value, "a fraction removed, in [0, 1)"))
    # Written so that NaN, which compares false with every number, is refused too.
    if not 0.0 <= value < 1.0:
        hint = f" For {value:g} %, pass {value / 100:g}." if 1.0 < value < 100.0 else ""
        raise ValueError(f"{name} must be a fraction removed, in [0, 1). Received: {name}={value}.{hint}")
    return value


def positive(name: str, value: Any) -> int | float:
    """Returns the value as a finite number above 0."""
    value = _number(name, value, "a number above 0")
    if not 0.0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0. Received: {name}={value}.")
    return int(value) if isinstance(value, Integral) else float(value)


def _number(name: str, value: Any, expected: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be {expected}. Received: {name}={value!r} of type {type(value).__name__}.")
    # Python cannot convert larger integers to floats nor, from 4,300 digits on, to text.
    if isinstance(value, Integral) and abs(int(value)) > LARGEST:
        raise ValueError(f"{name} must be {expected}. Received: a number of {int(value).bit_length()} bits.")
    return value


def whole(name: str, value: Any, minimum: int) -> int:
    """Returns the value as a number of optimizer updates, at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"{name} must be an int, counted in optimizer updates. "
            f"Received: {name}={value!r} of type {type(value).__name__}."
        )
    if abs(int(value)) > LARGEST:
        raise ValueError(
            f"{name} must be in [{minimum}, 2**63), the range of an optimizer's step counter. "
            f"Received: a number of {int(value).bit_length()} bits."
        )
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}. Received: {name}={value}.")
    return int(value)

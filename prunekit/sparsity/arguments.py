"""Checks of arguments: returns plain Python numbers, or raises an error that names the argument."""

import math
import re
import reprlib
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from prunekit.suggestions import did_you_mean

# Optimizers count their updates in 64 bits.
LARGEST = 2**63 - 1
# Bytes of activations that operations keep, unless `memory` is given.
MEMORY = 1e9
_UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
_TIMES = {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}


def fraction(name: str, value: Any) -> float:
    """Returns the value as a fraction of removed weights, in [0, 1)."""
    return _below_one(name, value, "a fraction removed, in [0, 1)", zero=True)


def kept_fraction(name: str, value: Any) -> float:
    """Returns the value as the fraction that is left, in (0, 1)."""
    return _below_one(name, value, "the fraction that is left, in (0, 1)", zero=False)


def _below_one(name: str, value: Any, expected: str, zero: bool) -> float:
    value = float(_number(name, value, expected))
    # Written so that NaN, which compares false with every number, is refused too.
    if not (0.0 < value < 1.0 or (zero and value == 0.0)):
        hint = f" For {value:g} %, pass {value / 100:g}." if 1.0 < value < 100.0 else ""
        raise ValueError(f"{name} must be {expected}. Received: {name}={value}.{hint}")
    return value


def positive(name: str, value: Any) -> int | float:
    """Returns the value as a finite number above 0."""
    value = _number(name, value, "a number above 0")
    if not 0.0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0. Received: {name}={value}.")
    return int(value) if isinstance(value, Integral) else float(value)


def number_of_bytes(name: str, value: Any) -> float:
    """Returns a number of bytes above 0, which may be given as a text such as "500MB".

    >>> number_of_bytes("memory", "1.5 GB")
    1500000000.0
    """
    if not isinstance(value, str):
        return float(positive(name, value))
    number, unit = re.fullmatch(r"(.*?)\s*([kMG]B)?", value, re.DOTALL).groups()  # type: ignore[union-attr]
    try:
        count = float(number) * _UNITS.get(unit, 1)
    except ValueError:
        count = 0.0
    # A text without a unit may mean megabytes, which would be far too few bytes.
    if not (0 if unit else 1e4) < count < math.inf:
        raise ValueError(f"{name} must be bytes, such as 500MB, 1GB or 1e9. Received: {value!r}.")
    return count


def time_or_share(name: str, value: Any) -> tuple[float, bool]:
    """Returns (seconds, False) of a time such as "2ms", or (share, True) of a share of another time, in (0, 1].

    >>> time_or_share("latency", "2 ms")
    (0.002, False)
    """
    if isinstance(value, str):
        seconds = _seconds(value, ("s", "ms", "us"))
        if seconds is None:
            raise ValueError(
                f"{name} must be a time, such as 2ms or 500us, or a share such as 0.5. Received: {value!r}."
            )
        return seconds, False
    share = float(positive(name, value))
    if share > 1.0:
        raise ValueError(
            f"{name} must be a share of the time of the model's float32 file, at most 1, or a time such as '2ms'. "
            f"Received: {name}={value}."
        )
    return share, True


def duration(name: str, value: Any) -> float:
    """Returns a number of seconds above 0, which may be given as a text such as "20min".

    >>> duration("time", "1.5 h")
    5400.0
    """
    if not isinstance(value, str):
        return float(positive(name, value))
    seconds = _seconds(value, ("s", "min", "h"))
    if seconds is None:
        raise ValueError(f"{name} must be a time, such as 90s, 20min or 2h. Received: {value!r}.")
    return seconds


def _seconds(text: str, units: Sequence[str]) -> float | None:
    """Returns the seconds of a text with a number and one of the units; None if it is none above 0."""
    found = re.fullmatch(rf"(.*?)\s*({'|'.join(units)})", text, re.DOTALL)
    if found is None:
        return None
    try:
        seconds = float(found[1]) * _TIMES[found[2]]
    except ValueError:
        return None
    return seconds if 0.0 < seconds < math.inf else None


def one_of(name: str, value: Any, known: Sequence[str]) -> str:
    """Returns the value if it is one of the known names."""
    if value not in known:
        hint = did_you_mean(str(value), known)
        raise ValueError(f"`{name}` is one of {', '.join(known)}. Received: {value!r}.{hint}")
    return str(value)


def non_negative(name: str, value: Any) -> float:
    """Returns the value as a finite number, 0 or more."""
    value = float(_number(name, value, "a number, 0 or more"))
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number, 0 or more. Received: {name}={value}.")
    return value


def check_functions(**functions: Any) -> None:
    """Raises a TypeError for an argument that is neither a function nor None."""
    for name, value in functions.items():
        if value is not None and not callable(value):
            kind = type(value).__name__
            raise TypeError(f"`{name}` is a function or None. Received: {reprlib.repr(value)} of type {kind}.")


def _number(name: str, value: Any, expected: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be {expected}. Received: {name}={value!r} of type {type(value).__name__}.")
    # Python cannot convert larger integers to floats nor, from 4,300 digits on, to text.
    if isinstance(value, Integral) and abs(int(value)) > LARGEST:
        raise ValueError(f"{name} must be {expected}. Received: a number of {int(value).bit_length()} bits.")
    return value


def whole(
    name: str,
    value: Any,
    minimum: int | None = None,
    *,
    largest: int | None = LARGEST,
    wrong_type: type[Exception] = TypeError,
) -> int:
    """Returns the value as an int of Python.

    Args:
        name: Name of the argument, for the message.
        value: The value that the user passed.
        minimum: The smallest permitted number; None permits every number.
        largest: The largest permitted number; None permits every number.
        wrong_type: Exception for a value that is not an integer; numbers out of range always raise ValueError.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        kind = type(value).__name__
        raise wrong_type(f"{name} must be an int. Received: {name}={reprlib.repr(value)} of type {kind}.")
    number = int(value)
    # Python cannot convert integers of more than 4,300 digits to text.
    shown = f"{name}={number}" if number.bit_length() <= 64 else f"a number of {number.bit_length()} bits"
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be at least {minimum}. Received: {shown}.")
    if largest is not None and number > largest:
        raise ValueError(f"{name} must be at most {largest}. Received: {shown}.")
    return number

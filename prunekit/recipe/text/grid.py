"""Builds the points of a parameter grid: one checked recipe per combination of values. Does not import Keras."""

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from prunekit.recipe.settings.fields import shown
from prunekit.recipe.settings.schema import Recipe, Variable
from prunekit.recipe.text.loader import RecipeError, load_recipe
from prunekit.recipe.text.yaml_reader import read_value

MOST_POINTS = 1_000
# Together with the suffix of a temporary run directory, this stays below the 255-byte limit of file names.
_LONGEST_NAME = 120
_PIECE = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^,]*)\s*(?:,|\Z)""")


@dataclass(frozen=True)
class Point:
    """One combination of values.

    Attributes:
        name: Name of the run directory, such as "final=0.8,width=16".
        values: Variable -> value, in the given order.
        recipe: The recipe with these values.
    """

    name: str
    values: Mapping[str, Variable]
    recipe: Recipe


def read_values(text: str) -> list[Variable]:
    """Reads comma-separated values, each with the rules of `--set`: "0.5, 0.8" or "magnitude,'a,b'".

    Raises:
        RecipeError: A part of the text is not a value, or is empty.
    """
    pieces, start = [], 0
    while start <= len(text):
        match = _PIECE.match(text, start)
        if match is None:
            raise RecipeError(f"expected values with commas between them. Received: {shown(text)}.")
        pieces.append(match[1].rstrip())
        start = match.end() + (0 if match[0].endswith(",") else 1)
    if not all(pieces):
        raise RecipeError(f"expected values with commas between them, and one is empty. Received: {shown(text)}.")
    return [read_value(piece) for piece in pieces]


def grid(
    recipe: str | os.PathLike[str] | Mapping[str, Any],
    over: Mapping[str, Iterable[Variable]],
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Point, ...]:
    """Returns a checked point for every combination of values; the last variable changes fastest.

    Args:
        recipe: A file, the name of a built-in recipe, or a mapping.
        over: Variable that the recipe declares -> its values.
        overrides: Values of other variables, the same in every point.

    Raises:
        RecipeError: A recipe has a mistake (the first is reported), or there are no or more than `MOST_POINTS` points.
    """
    if not isinstance(over, Mapping):
        raise TypeError(f"`over` is a mapping of variables to lists of values. Received: {shown(over)}.")
    if not isinstance(overrides, Mapping | None):
        raise TypeError(f"`overrides` maps variables of the recipe to values. Received: {shown(overrides)}.")
    values = {name: _checked(name, given) for name, given in over.items()}
    if not values:
        raise RecipeError(
            'a sweep needs at least one variable to go over, such as --over final=0.5,0.9 (over={"final": [0.5, 0.9]}).'
        )
    both = [name for name in values if name in (overrides or {})]
    if both:
        raise RecipeError(f"variable {both[0]!r} is set to one value, and swept over several: leave one of them out.")
    count = math.prod(map(len, values.values()))
    if count > MOST_POINTS:
        raise RecipeError(
            f"expected at most {MOST_POINTS:,} points. Received: {count:,}. Split it into several sweeps."
        )
    points: dict[str, Point] = {}
    for combination in itertools.product(*values.values()):
        point = _point(recipe, dict(zip(values, combination, strict=True)), overrides or {})
        if point.name in points:
            raise RecipeError(f"two points have the name {point.name}: their values differ only in type.")
        points[point.name] = point
    return tuple(points.values())


def _checked(name: str, given: Any) -> Sequence[Variable]:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise RecipeError(f"values of {name!r} to sweep over: expected a list of values. Received: {shown(given)}.")
    values = list(given)
    if not values:
        raise RecipeError(f"values of {name!r} to sweep over: expected at least one value. Received: none.")
    for index, value in enumerate(values):
        if any(isinstance(value, bool) == isinstance(other, bool) and value == other for other in values[:index]):
            raise RecipeError(f"values of {name!r} to sweep over: {shown(value)} is given twice.")
    return values


def _point(recipe: Any, values: dict[str, Variable], overrides: Mapping[str, Any]) -> Point:
    try:
        loaded = load_recipe(recipe, {**overrides, **values})
    except RecipeError as error:
        described = ", ".join(f"{name}={shown(value)}" for name, value in values.items())
        message = f"{error.message} (At the point {described}.)"
        raise RecipeError(message, error.source, error.line, error.column) from None
    return Point(point_name(values), values, loaded)


def point_name(values: Mapping[str, Variable]) -> str:
    """Returns a folder name made of the values; characters special to a shell or file system become %XX."""
    name = ",".join(f"{key}={quote(_text(value), safe='+')}" for key, value in values.items())
    if len(name) <= _LONGEST_NAME:
        return name
    mark = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{name[: _LONGEST_NAME - 13]}~{mark}"


def _text(value: Variable) -> str:
    # Not `formatting.literal`, which maps all unprintable characters to the same character.
    return value if isinstance(value, str) else json.dumps(value)

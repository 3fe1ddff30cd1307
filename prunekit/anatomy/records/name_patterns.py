"""Patterns that select weights by the names and paths of layers and weights, and hints for patterns without a match."""

import fnmatch
import re
from collections.abc import Iterable, Iterator, Sequence

from prunekit.suggestions import did_you_mean

# Placeholder name for any weight of a layer: a pattern that matches it selects the layer, not one weight.
_ANY_WEIGHT = "qxzjq"


class NamePattern:
    """A glob pattern, or a regular expression after "re:", that must match a whole name or path."""

    def __init__(self, pattern: str, option: str) -> None:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"`{option}` takes patterns as non-empty strings. Received: {pattern!r}.")
        self.pattern = pattern
        self.option = option
        self.literal = not pattern.startswith("re:") and not set("*?[") & set(pattern)
        try:
            self._match = re.compile(pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern)).fullmatch
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"The pattern {pattern[:100]!r} in `{option}` is not a regular expression. Received: {error}."
            ) from error

    def __call__(self, text: str) -> bool:
        return self._match(text) is not None

    def kind(self, scopes: Iterable[str], paths: Iterable[str]) -> str:
        """Returns what of a weight the pattern matches.

        Args:
            scopes: Names and paths of the weight's layer and of the models around it.
            paths: Paths of the weight.

        Returns:
            "layer" if a scope matches, or if any weight of the layer would match; "weight" if only the paths match;
            "" if nothing matches.
        """
        if any(map(self, scopes)):
            return "layer"
        paths = list(paths)
        if any(self("/".join([*path.split("/")[:-1], _ANY_WEIGHT])) for path in paths):
            return "layer"
        return "weight" if any(map(self, paths)) else ""


def listed_patterns(given: Sequence[str] | str, option: str) -> tuple[str, ...]:
    """Returns the patterns of an option as a tuple; a single string is one pattern.

    Raises:
        TypeError: `given` is neither a string nor a sequence.
    """
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Sequence):
        raise TypeError(f"`{option}` takes a pattern or a list of patterns. Received: {given!r}.")
    return tuple(given)


def prefixes(path: str) -> Iterator[str]:
    """Yields the path's beginnings, at each slash: "a/b/c" gives "a", "a/b" and "a/b/c"; "" gives none."""
    parts = path.split("/")
    return ("/".join(parts[:end]) for end in range(1, len(parts) + 1) if path)


def near_misses(pattern: str, known: Iterable[str], names: Sequence[str]) -> str:
    """Returns an error's hint: the known names that are similar to `pattern`, or else `names`, those of the weights."""
    plain = re.sub(r"[^\w/#]+", "", pattern.removeprefix("re:"))
    hint = did_you_mean(plain, known, most=5).strip()
    if hint:
        return hint
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"Its weights are: {', '.join(map(repr, names[:8]))}{more}."

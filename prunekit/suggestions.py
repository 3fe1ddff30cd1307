"""Suggests the known names that an unknown name may stand for: the "Did you mean" of every error message."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

# Similarity from which difflib's matches are suggested, between 0 (nothing in common) and 1 (equal).
_CUTOFF = 0.5
_LONGEST_WORD = 100


def did_you_mean(name: str, known: Iterable[str], *, most: int = 1, write: Callable[[str], str] = repr) -> str:
    """Returns " Did you mean 'x'?" for the known names that are similar to `name`, and "" if none is similar.

    Args:
        name: The unknown name, as the user wrote it.
        known: The names that are valid.
        most: Number of suggestions at most.
        write: Function that quotes a suggestion.
    """
    found = _closest(name, known)[:most]
    return f" Did you mean {', '.join(map(write, found))}?" if found else ""


def check_names(options: Iterable[str], known: Sequence[str], former: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raises for an option that a call does not have.

    Args:
        options: Names that were given.
        known: Valid names.
        former: Former name -> present name.

    Raises:
        TypeError: A name is not known.
    """
    for name in options:
        if name not in known:
            hint = f" It is now {former[name]!r}." if name in former else did_you_mean(name, known)
            raise TypeError(f"Unknown option. Received: {name!r}. Valid are: {', '.join(known)}.{hint}")


def _closest(name: str, known: Iterable[str]) -> list[str]:
    """Returns the known names that differ from `name` by at most two slips, or else the names that difflib finds."""
    word = name[:_LONGEST_WORD].lower()
    words = {key[:_LONGEST_WORD].lower(): key for key in reversed(list(known))}
    # Check typing slips first: difflib rates `adamax` closer to `adma` than `adam`.
    slips = sorted((count, key) for key in words if (count := _slips(word, key)) <= min(2, len(key) // 2))
    close = [key for _, key in slips] or difflib.get_close_matches(word, words, n=5, cutoff=_CUTOFF)
    return [words[key] for key in close]


def _slips(word: str, other: str) -> int:
    """Returns the number of letters omitted, added, changed or swapped with a neighbour; 3 if there are more."""
    if abs(len(word) - len(other)) > 2:
        return 3
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(word, start=1):
        before, last, row = row, before, [i]
        for j, letter_of_other in enumerate(other, start=1):
            changed = before[j - 1] + (letter != letter_of_other)
            row.append(min(before[j] + 1, row[j - 1] + 1, changed))
            if i > 1 and j > 1 and letter == other[j - 2] and word[i - 2] == letter_of_other:
                row[j] = min(row[j], last[j - 2] + 1)
    return min(row[-1], 3)

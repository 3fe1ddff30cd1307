"""Reads a recipe file into plain values with their positions; accepts only safe YAML 1.2 (core schema).

PyYAML scans and composes; this module constructs the values. YAML 1.1 would misread a recipe: in YAML 1.1, 2:4 is the
number 124, 1e-3 is text, and `no` is false.
"""

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeAlias

import yaml

from prunekit.recipe.settings.fields import shortened, shown

LARGEST_FILE = 64 * 1024
MOST_VALUES = 5_000
MOST_ALIASES = 64
DEEPEST = 40
LONGEST_NUMBER = 100
LONGEST_MESSAGE = 2_000

# Control characters other than line breaks and tabs, and lone surrogates.
_FORBIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

Path: TypeAlias = tuple[str | int, ...]


class RecipeError(ValueError):
    """Error in a recipe or its use; the message is one line, with file, line and column if known."""

    def __init__(self, message: str, source: str | None = None, line: int | None = None, column: int | None = None):
        """Creates an error at `line` and `column` (from 1) of the file `source`; converts `message` to one line."""
        message = one_line(message)
        # The message may contain a name or path as long as the whole file.
        self.message = message if len(message) <= LONGEST_MESSAGE else f"{message[: LONGEST_MESSAGE - 3]}..."
        self.source, self.line, self.column = source, line, column
        where = ":".join(str(part) for part in (one_line(source) if source else None, line, column) if part is not None)
        super().__init__(f"{where}: {self.message}" if where else self.message)


class Position(NamedTuple):
    """Line and column in the text, counted from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class Document:
    """Plain values and their positions by path; values given in Python have no positions."""

    data: Any
    source: str | None = None
    values: dict[Path, Position] = field(default_factory=dict)
    keys: dict[Path, Position] = field(default_factory=dict)

    def fail(self, message: str, path: Path = (), key: bool = False) -> NoReturn:
        """Raises a RecipeError for the value (or its key) at `path`, at the nearest known position."""
        place = self.position(path, key)
        name = path_text(path[:-1] if key else path)
        raise RecipeError(f"{name}: {message}" if name else message, self.source, *(place or ()))

    def position(self, path: Path, key: bool = False) -> Position | None:
        """Returns the position of the value (or its key) at `path`, or of the nearest enclosing value."""
        if key and path in self.keys:
            return self.keys[path]
        while path and path not in self.values:
            path = path[:-1]
        return self.values.get(path)


def path_text(path: Path) -> str:
    """Returns the path as text, such as steps[1].prune.schedule."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{shortened(part)}" if text else shortened(str(part))
    return text


def first_difference(before: Any, now: Any, path: Path = ()) -> tuple[str, Any, Any] | None:
    """Returns the first place where two plain documents differ, as text, and both values; None for equal documents."""
    if isinstance(before, dict) and isinstance(now, dict):
        pairs: list[tuple[Any, Any, Any]] = [(key, before.get(key), now.get(key)) for key in {**before, **now}]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = [(index, *pair) for index, pair in enumerate(zip(before, now, strict=True))]
    else:
        # `==` alone would treat 1, 1.0 and True as equal.
        same = before == now and type(before) is type(now)
        return None if same else (path_text(path) or "the recipe", before, now)
    return next(filter(None, (first_difference(old, new, (*path, key)) for key, old, new in pairs)), None)


def read_text(raw: bytes, source: str) -> Document:
    """Returns the single YAML document in `raw`.

    Args:
        raw: Bytes of the file, UTF-8.
        source: Name of the file, for errors.

    Raises:
        RecipeError: The file is not UTF-8, not YAML, too large, or uses a YAML feature that recipes do not allow.
    """
    check_size(raw, source, 1, 1)
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line_start = raw.rfind(b"\n", 0, error.start) + 1
        column = len(raw[line_start : error.start].decode("utf-8", "replace")) + 1
        raise RecipeError(
            f"expected UTF-8 text. Received: byte 0x{raw[error.start]:02x}.",
            *(source, raw.count(b"\n", 0, error.start) + 1, column),
        ) from None
    return _Values(source).document(_compose(text, source))


def check_size(raw: bytes, *place: Any) -> None:
    """Checks that a file's bytes are within the size limit of a recipe.

    Raises:
        RecipeError: The file is too large; the error has the position `place`: source, line, column.
    """
    if len(raw) > LARGEST_FILE:
        raise RecipeError(f"expected a recipe of at most {LARGEST_FILE // 1024} KiB; this file is larger.", *place)


def check_values(data: Any) -> None:
    """Checks that plain values are within the reader's limits and contain only allowed characters.

    Much faster than writing and reading them as YAML; does not check the size of the written file.

    Raises:
        RecipeError: A limit is exceeded or a character is not allowed; the error has no position.
    """
    pending: list[tuple[Any, int]] = [(data, 0)]
    values = characters = 0
    while pending:
        value, level = pending.pop()
        values += 1
        if values > MOST_VALUES:
            raise RecipeError(f"expected at most {MOST_VALUES} values in a recipe.")
        if level > DEEPEST:
            raise RecipeError(f"expected at most {DEEPEST} levels.")
        if isinstance(value, Mapping):
            pending += [(item, level + 1) for pair in value.items() for item in pair]
        elif isinstance(value, list | tuple):
            pending += [(item, level + 1) for item in value]
        elif isinstance(value, str):
            characters += len(value)
            _check_characters(value)
        elif type(value) is int and abs(value) >= 10 ** (LONGEST_NUMBER - 1):
            raise RecipeError(f"expected a number of at most {LONGEST_NUMBER} characters.")
        if characters > LARGEST_FILE:
            raise RecipeError(f"expected at most {LARGEST_FILE:,} characters.")


def _check_characters(text: str, *place: Any) -> None:
    forbidden = _FORBIDDEN.search(text)
    if forbidden:
        raise RecipeError(f"character U+{ord(forbidden[0]):04X} is not allowed in a recipe.", *place)


def read_value(text: str) -> str | int | float | bool | None:
    """Returns a single value read as in a recipe, such as the right side of --set final=0.9.

    Raises:
        RecipeError: `text` is not a single value.
    """
    if text[:1] in ("'", '"'):
        value = read_text(text.encode("utf-8", "surrogateescape"), "--set").data
        if isinstance(value, dict | list):
            raise RecipeError(f"expected one value. Received: {shown(text)}.")
        return value
    tag = _Composer("").resolve(yaml.ScalarNode, text, (True, False))
    return _Values("--set").scalar(yaml.ScalarNode(tag, text), ())


def one_line(text: str) -> str:
    """Returns the text without line breaks, control characters and lone surrogates, so any terminal can print it."""
    characters = (
        " " if c.isspace() else "\ufffd" if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c
        for c in text
    )
    return " ".join("".join(characters).split())


class _Composer(yaml.SafeLoader):
    """Composes nodes within limits, and tags plain scalars by the core schema of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def __init__(self, text: str):
        super().__init__(text)
        self.depth = self.count = self.aliases = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        self.count += 1
        if self.count > MOST_VALUES:
            self._refuse(f"expected at most {MOST_VALUES} values in a recipe.", event)
        if self.depth > DEEPEST:
            self._refuse(f"expected at most {DEEPEST} levels.", event)
        if isinstance(event, yaml.AliasEvent):
            self.aliases += 1
            if self.aliases > MOST_ALIASES:
                self._refuse(f"expected at most {MOST_ALIASES} aliases (*name) in a recipe.", event)
        elif getattr(event, "tag", None) is not None:
            self._refuse(f"a recipe uses no YAML tags. Received: {shown(event.tag)}.", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def _refuse(self, message: str, event: Any) -> NoReturn:
        raise yaml.MarkedYAMLError(problem=message, problem_mark=event.start_mark)


_KINDS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?(\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN",
        list("-+.0123456789"),
    ),
}
_TAG = "tag:yaml.org,2002:"


def add_kinds(resolver: Any) -> None:
    """Adds the plain scalars of YAML 1.2's core schema to a PyYAML loader or dumper."""
    for kind, (pattern, first) in _KINDS.items():
        resolver.add_implicit_resolver(_TAG + kind, re.compile(rf"^(?:{pattern})\Z", re.ASCII), first)


add_kinds(_Composer)


# Part of a problem of PyYAML -> how to solve it.
_HINTS = {
    "'\\t'": " (indent with spaces)",
    "<block end>": " (this line does not go on with the lines above: check its indentation, and the space after '-')",
}


def _compose(text: str, source: str) -> yaml.Node | None:
    composer: _Composer | None = None
    try:
        composer = _Composer(text)
        return composer.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        hint = next((hint for part, hint in _HINTS.items() if part in (error.problem or "")), "")
        place = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise RecipeError(f"{error.problem or error.context or 'not YAML'}{hint}", source, *place) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise RecipeError(
            f"character U+{ord(text[error.position]):04X} is not allowed.", source, line, column
        ) from None
    except (ValueError, OverflowError):
        # PyYAML passes some escapes ("\Uffffffff") and directives (%YAML 1.<5000 digits>) unchecked to chr() and int().
        mark = composer.get_mark() if composer else None
        place = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise RecipeError("an invalid escape sequence or number.", source, *place) from None
    finally:
        if composer is not None:
            composer.dispose()


class _Values:
    """Converts nodes to plain values and records the position of each value."""

    def __init__(self, source: str):
        self.source = source
        self.values: dict[Path, Position] = {}
        self.keys: dict[Path, Position] = {}
        self.count = 0
        self.open: list[yaml.Node] = []

    def document(self, node: yaml.Node | None) -> Document:
        data = None if node is None else self.value(node, ())
        self.values.setdefault((), Position(1, 1))
        return Document(data, self.source, self.values, self.keys)

    def value(self, node: yaml.Node, path: Path) -> Any:
        self.values[path] = self._position(node)
        self.count += 1
        if self.count > MOST_VALUES:
            self._fail(f"expected at most {MOST_VALUES} values in a recipe, with aliases written out.", node)
        if any(node is parent for parent in self.open):
            self._fail("an alias (*name) inside the value of the anchor that it names.", node)
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        self.open.append(node)
        if isinstance(node, yaml.SequenceNode):
            value: Any = [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
        else:
            value = dict(self._items(node, path))
        self.open.pop()
        return value

    def scalar(self, node: yaml.ScalarNode, path: Path) -> str | int | float | bool | None:
        text, kind = node.value, node.tag.removeprefix(_TAG)
        if kind == "str":
            return self._text(text, node)
        if kind in ("int", "float") and len(text) > LONGEST_NUMBER:
            self._fail(f"expected a number of at most {LONGEST_NUMBER} characters.", node)
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind == "int":
            base = {"0o": 8, "0x": 16}.get(text[:2], 10)
            return int(text, base)
        number = math.inf if text.lower().endswith(("inf", "nan")) else float(text)
        if not math.isfinite(number):
            self._fail(f"expected a finite number. Received: {text}.", node)
        return number

    def _items(self, node: yaml.Node, path: Path) -> Iterator[tuple[str, Any]]:
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != f"{_TAG}str":
                self._fail("expected a key that is a name. Put it in quotes if it is meant as text.", key_node)
            key = self._text(key_node.value, key_node)
            if key == "<<":
                self._fail("a recipe uses no merge keys (<<): write the keys out.", key_node)
            if (*path, key) in self.keys:
                first = self.keys[*path, key]
                self._fail(f"key {shown(key)} is a duplicate; the first is in line {first.line}.", key_node)
            self.keys[*path, key] = self._position(key_node)
            yield key, self.value(value_node, (*path, key))

    def _text(self, text: str, node: yaml.Node) -> str:
        _check_characters(text, self.source, *self._position(node))
        return text

    def _position(self, node: yaml.Node) -> Position:
        mark = node.start_mark
        return Position(mark.line + 1, mark.column + 1) if mark else Position(1, 1)

    def _fail(self, message: str, node: yaml.Node) -> NoReturn:
        raise RecipeError(message, self.source, *self._position(node))

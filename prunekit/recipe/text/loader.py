"""Loads a recipe from a file, mapping or built-in name; errors name file, line and column.

Does not import Keras, so that `prunekit check` is fast.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any, NoReturn

import yaml
from pydantic import ValidationError

from prunekit.recipe.settings import fields
from prunekit.recipe.settings.fields import nearest, shortened, shown
from prunekit.recipe.settings.schema import VERSION, Recipe
from prunekit.recipe.text.yaml_reader import (
    DEEPEST,
    LARGEST_FILE,
    Document,
    Path,
    Position,
    RecipeError,
    add_kinds,
    check_size,
    check_values,
    read_text,
)
from prunekit.sparsity.schedules import SCHEDULES

__all__ = ["RecipeError", "builtin_recipes", "dump_recipe", "load_recipe", "located", "require_trust"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_REFERENCE = re.compile(rf"\$({_NAME.pattern})", re.ASCII)
# Such as "data.label: ..." and "steps[2].expect: ...".
_PLACE = re.compile(r"((?:model|data|compile|distribute|steps)[\w.\[\]-]*): ", re.ASCII)
# `$$` is a dollar sign; a `$` without a following name is literal, as at the end of a regular expression.
_DOLLARS = re.compile(r"\$\$|\$(?=[A-Za-z_{])", re.ASCII)


def load_recipe(
    source: str | os.PathLike[str] | Mapping[str, Any] | Recipe,
    overrides: Mapping[str, Any] | None = None,
    *,
    data_given: bool = False,
) -> Recipe:
    """Loads and checks a whole recipe; replaces variables and makes file paths absolute.

    Args:
        source: A file, the name of a built-in recipe, a mapping, or a Recipe (returned unchanged).
        overrides: Values for declared variables.
        data_given: True if the caller provides data, so that a step may train although the recipe names no data.

    Raises:
        RecipeError: The recipe has a mistake. One line reports the first: file, line, column, expected, received.
        TypeError: `overrides` is no mapping.
    """
    if not isinstance(overrides, Mapping | None):
        raise TypeError(f"`overrides` maps variables of the recipe to values. Received: {overrides!r}.")
    if isinstance(source, Recipe):
        if overrides:
            raise RecipeError(
                "a Recipe has its variables replaced already: pass overrides together with a file or a mapping."
            )
        return source
    if isinstance(source, Mapping):
        return _recipe(Document(_copied(source)), overrides or {}, {"base": os.getcwd(), "need_data": not data_given})
    document = document_of(source)
    path = FilePath(str(document.source))
    context = {"base": str(path.resolve().parent), "need_data": not data_given}
    if isinstance(document.data, dict) and "name" not in document.data and _is_name(path.stem):
        document.data["name"] = path.stem.replace("$", "$$")
    return _recipe(document, overrides or {}, context)


def document_of(source: str | os.PathLike[str]) -> Document:
    """The values of a recipe as they are written, with their positions; unchecked.

    Args:
        source: A file, or the name of a built-in recipe.

    Raises:
        RecipeError: There is no such recipe, or the file is not YAML as recipes use it.
    """
    path = find_recipe(source)
    return read_text(_read(path), str(path))


@contextlib.contextmanager
def located(source: Any) -> Iterator[None]:
    """Adds file, line and column to errors of later checks whose message begins with a place in the recipe.

    Args:
        source: The recipe as it was given; a mapping or a Recipe has no positions.

    Raises:
        RecipeError: A RecipeError was raised inside.
    """
    try:
        yield
    except RecipeError as error:
        place = _PLACE.match(error.message)
        if place is None or error.source is not None or not isinstance(source, str | os.PathLike):
            raise
        try:
            document = document_of(source)
        except RecipeError:
            # The file changed in the meantime.
            raise error from None
        path = tuple(int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", place[1]))
        path = _document_path(document.data, path)
        raise RecipeError(error.message, document.source, *(document.position(path) or ())) from error


def find_recipe(source: str | os.PathLike[str]) -> FilePath:
    """Returns the file that `source` names: a path, or the name of a built-in recipe.

    Raises:
        RecipeError: No such file or built-in recipe exists.
    """
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"A recipe is a path, a mapping or a Recipe. Received: {source!r}.")
    text = os.fspath(source)
    if not text or "\0" in text:
        raise RecipeError(f"expected the path of a recipe. Received: {shown(text)}.")
    path = FilePath(text)
    builtin = builtin_recipes()
    try:
        if path.is_file() or (text not in builtin and path.exists() and not path.is_dir()):
            return path
        is_folder = path.is_dir()
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}.", text) from None
    if text in builtin:
        return builtin[text]
    what = "a folder, not a recipe" if is_folder else "no such file, and no built-in recipe of that name"
    raise RecipeError(f"{what}.{nearest(text, builtin)}", text)


def builtin_recipes() -> dict[str, FilePath]:
    """Returns the built-in recipes, name -> file, in alphabetical order."""
    package = FilePath(__file__).resolve().parents[2]
    # The recipes are inside the package in a wheel, and next to the package in a source checkout.
    folders = [package / "recipes"]
    if (package.parent / "pyproject.toml").is_file():
        folders.append(package.parent / "recipes")
    found = {path.stem: path for folder in reversed(folders) for path in folder.glob("*.yaml")}
    return dict(sorted(found.items()))


def dump_recipe(recipe: Recipe) -> str:
    """Returns the recipe as YAML with all defaults written out; loading that YAML gives an equal recipe."""
    return _yaml(_plain(recipe))


def _plain(recipe: Recipe) -> Any:
    return _doubled_dollars(recipe.model_dump(mode="json", exclude_none=True))


def _yaml(data: Any) -> str:
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def require_trust(recipe: Recipe, trust: bool, model_given: bool = False, data_given: bool = False) -> None:
    """Refuses to import Python code that a recipe names, unless the caller trusts it.

    Args:
        recipe: The recipe.
        trust: True if the caller trusts the recipe's Python code.
        model_given: True if the caller provides the model, so that the recipe's model is not built.
        data_given: True if the caller provides the data.

    Raises:
        RecipeError: The recipe names Python code and `trust` is False; the message names the code.
    """
    given = {"model": model_given, "data": data_given}
    factories = [text for text in recipe.factories() if not given.get(text.partition(":")[0])]
    if factories and not trust:
        raise RecipeError(
            f"recipe {recipe.name!r} imports and runs Python code ({', '.join(factories)}). Read that code, and "
            "allow it with --trust (trust=True) if you trust it."
        )


def _read(path: FilePath) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}.", str(path)) from None


def _is_name(text: str) -> bool:
    return bool(re.fullmatch(fields.NAME, text, re.ASCII))


def _recipe(document: Document, overrides: Mapping[str, Any], context: dict[str, Any]) -> Recipe:
    _check_version(document)
    data, origins = _Variables(document, overrides).replaced()
    try:
        check_values(data)
    except RecipeError as error:
        document.fail(f"with aliases and variables written out: {error.message}")
    try:
        recipe = Recipe.model_validate(data, context=context | {"patterns": fields.PatternBudget()})
    except ValidationError as error:
        _fail_with(replace(document, data=data), error, origins)
    try:
        written = _plain(recipe)
        check_values(written)
        check_size(_yaml(written).encode("utf-8"))
    except RecipeError as error:
        document.fail(f"with every default written out this recipe could not be read again: {error.message}")
    return recipe


def _check_version(document: Document) -> None:
    """Checks the version first: keys of another version must not be reported as mistakes."""
    data = document.data
    if not isinstance(data, Mapping):
        document.fail(f"expected a recipe: a mapping with version, model, data and steps. Received: {shown(data)}.")
    if "version" not in data:
        document.fail(f"'version' is missing: add 'version: {VERSION}' at the top.")
    version = data["version"]
    if type(version) is not int or version != VERSION:
        document.fail(
            f"this prunekit reads recipes of version {VERSION}. Received: {_as_written(version)}.", ("version",)
        )


class _Variables:
    """Replaces `$name` scalars by the values of declared variables, and records the replaced paths."""

    def __init__(self, document: Document, overrides: Mapping[str, Any]):
        self.document = document
        self.used: set[str] = set()
        self.origins: dict[Path, str] = {}
        self.overridden = set(overrides)
        self.values: dict[str, Any] = {}
        self._declare(overrides)

    def replaced(self) -> tuple[dict[str, Any], dict[Path, str]]:
        """Returns the recipe's values, and a mapping path -> variable of the replaced values."""
        data = {
            key: value if key == "variables" else self._replace(value, (key,))
            for key, value in self.document.data.items()
        }
        for name in self.overridden - self.used:
            self.document.fail(
                f"variable {shown(name)} is set, but nothing uses ${shortened(name)}.", ("variables", name), key=True
            )
        if self.values:
            data["variables"] = self.values
        return data, self.origins

    def _declare(self, overrides: Mapping[str, Any]) -> None:
        declared = self.document.data.get("variables", {})
        if not isinstance(declared, Mapping):
            self.document.fail(f"expected a mapping of names and values. Received: {shown(declared)}.", ("variables",))
        for name in overrides:
            if name not in declared:
                self._check_sections()
                self.document.fail(
                    f"variable {shown(name)} is set, but not declared under 'variables'.{nearest(str(name), declared)}",
                    ("variables",),
                )
        for name, value in declared.items():
            path = ("variables", name)
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                self.document.fail(
                    f"expected a name of letters, digits and '_'. Received: {shown(name)}.", path, key=True
                )
            value = overrides[name] if name in overrides else self._replace(value, path)
            if value is not None and type(value) not in (bool, int, float, str):
                self.document.fail(f"expected text, a number, true or false. Received: {shown(value)}.", path)
            self.values[name] = value

    def _replace(self, value: Any, path: Path) -> Any:
        if isinstance(value, Mapping):
            return {key: self._replace(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self._replace(item, (*path, i)) for i, item in enumerate(value)]
        if not isinstance(value, str) or "$" not in value:
            return value
        reference = _REFERENCE.fullmatch(value)
        if reference is None:
            return _DOLLARS.sub(lambda match: self._dollar(match[0], path), value)
        name = reference[1]
        if name not in self.values:
            self._check_sections()
            later = " It is declared further down." if name in (self.document.data.get("variables") or {}) else ""
            self.document.fail(
                f"unknown variable ${shortened(name)}.{later or nearest(name, self.values)}{self._declared()}", path
            )
        self.used.add(name)
        self.origins[path] = name
        return self.values[name]

    def _check_sections(self) -> None:
        """Raises for a misspelt key at the top, such as `variabels`: the variables under it are not declared."""
        for key in self.document.data:
            if key not in Recipe.model_fields:
                self.document.fail(
                    f"unknown key {shown(key)}.{nearest(str(key), Recipe.model_fields)}", (key,), key=True
                )

    def _declared(self) -> str:
        """Names the line of the variables, where a name may be misspelt."""
        place = self.document.position(("variables",), key=True) if self.values else None
        return "" if place is None else f" They are declared under line {place.line}."

    def _dollar(self, text: str, path: Path) -> str:
        if text == "$":
            self.document.fail("$name replaces a whole value, not a part of a value. Write $$ for a dollar sign.", path)
        return "$"


def _copied(value: Any, path: Path = ()) -> Any:
    """Copies the caller's mapping into dicts and lists, so that later changes do not affect the recipe."""
    if len(path) > DEEPEST:
        raise RecipeError(f"expected at most {DEEPEST} levels.")
    if isinstance(value, Mapping):
        return {key: _copied(item, (*path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item, (*path, i)) for i, item in enumerate(value)]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _doubled_dollars(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _doubled_dollars(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_doubled_dollars(item) for item in value]
    return value.replace("$", "$$") if isinstance(value, str) else value


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or YAML 1.2 would not read as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


add_kinds(_Dumper)


def _fail_with(document: Document, error: ValidationError, origins: dict[Path, str]) -> NoReturn:
    """Raises the RecipeError of the first mistake; misspelt keys are reported before their consequences."""
    mistakes = []
    for details in error.errors(include_url=False):
        kind, context = details["type"], details.get("ctx", {})
        path = _document_path(document.data, (*details["loc"], *context.get("at", ())))
        if kind == "union_tag_invalid":
            path = (*path, "type")
        key = kind == "unknown_key" or details["loc"][-1:] == ("[key]",)
        place = document.position(path, key) or Position(0, 0)
        mistakes.append((kind != "unknown_key", place, path, key, details))
    _, _, path, key, first = min(mistakes, key=lambda mistake: mistake[:2])
    message = _message(first)
    origin = next((origins[path[:i]] for i in range(len(path), 0, -1) if path[:i] in origins), None)
    document.fail(message if origin is None else f"{message} (The value of ${shortened(origin)}.)", path, key)


def _document_path(data: Any, location: Iterable[Any]) -> Path:
    """Returns the part of a location that exists in the document, under the keys as written: no union tags."""
    path: list[str | int] = []
    for part in location:
        if isinstance(data, Mapping) and part not in data:
            part = next((key for key in data if (key, part) in fields.FORMER_KEYS), part)
        if (isinstance(data, Mapping) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and 0 <= part < len(data)
        ):
            data = data[part]
            path.append(part)
    return tuple(path)


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "mapping_type": "a mapping",
}


def _message(details: Any) -> str:
    kind, received, context = details["type"], details["input"], details.get("ctx", {})
    if "message" in context:
        return context["message"]
    if "unknown" in context:
        word = context["word"]
        hint = nearest(word if isinstance(word, str) else repr(word), context["valid"])
        return f"unknown {context['unknown']} {shown(word)}.{hint}"
    if kind == "missing":
        return f"{details['loc'][-1]!r} is missing."
    if kind == "union_tag_not_found":
        return f"'type' is missing.{nearest('', SCHEDULES)}"
    if kind == "union_tag_invalid":
        return f"unknown type {shown(context['tag'])}.{nearest(str(context['tag']), _quoted(context['expected_tags']))}"
    if kind == "literal_error":
        valid = _quoted(context["expected"])
        return f"unknown value {shown(received)}.{nearest(str(received), valid)}"
    if kind in _EXPECTED:
        remedy = " Put it in quotes." if kind == "string_type" and type(received) in (int, float, bool) else ""
        if kind in ("tuple_type", "list_type") and isinstance(received, str):
            remedy = f" Write [{shortened(received)}]."
        return f"expected {_EXPECTED[kind]}. Received: {_as_written(received)}.{remedy}"
    return f"{details['msg'][:1].lower()}{details['msg'][1:]}. Received: {shown(received)}."


def _as_written(value: Any) -> str:
    """Returns a value as `shown` does, with the point that tells 1.0 from a whole number."""
    return repr(value) if isinstance(value, float) else shown(value)


def _quoted(text: str) -> list[str]:
    return re.findall(r"'([^']*)'", text)

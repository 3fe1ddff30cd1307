"""Names and arguments of the models in `keras.applications`, read from Keras's source: Keras is not imported."""

import ast
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

# Value of an argument without a default, or with a default that is not a plain value.
REQUIRED = object()
# Folders in which versions of Keras keep the list of their public names.
_LISTS = ("applications/__init__.py", "api/applications/__init__.py")


@functools.cache
def applications() -> Mapping[str, str]:
    """Returns {name of an application: module that defines it}, in alphabetical order."""
    found = {}
    for node in ast.walk(_parsed(*_LISTS)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("keras.src."):
            # Classes of models have capital letters; the modules' own functions have none.
            found.update({alias.name: node.module for alias in node.names if alias.name != alias.name.lower()})
    if not found:
        listed = vars(importlib.import_module("keras").applications)
        found = {name: value.__module__ for name, value in listed.items() if inspect.isfunction(value)}
    return MappingProxyType(dict(sorted(found.items())))


@functools.cache
def arguments_of(name: str) -> Mapping[str, Any]:
    """Returns {argument: default} of an application's function, `REQUIRED` without a plain default.

    Raises:
        KeyError: `keras.applications` has no such model.
    """
    path = applications()[name].removeprefix("keras.").replace(".", "/")
    for node in _parsed(f"{path}.py").body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return MappingProxyType(_signature(node))
    function = getattr(importlib.import_module("keras").applications, name)
    parameters = inspect.signature(function).parameters.values()
    return MappingProxyType(
        {one.name: REQUIRED if one.default is one.empty else one.default for one in parameters if _is_named(one)}
    )


def _is_named(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def _signature(node: ast.FunctionDef) -> dict[str, Any]:
    positional = [argument.arg for argument in node.args.args]
    required = len(positional) - len(node.args.defaults)
    defaults: list[ast.expr | None] = [*[None] * required, *node.args.defaults]
    pairs = [*zip(positional, defaults, strict=True)]
    pairs += zip((argument.arg for argument in node.args.kwonlyargs), node.args.kw_defaults, strict=True)
    return {name: REQUIRED if default is None else _value(default) for name, default in pairs}


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return REQUIRED


def _parsed(*paths: str) -> ast.Module:
    """Returns the first of these files of the installed Keras, parsed; an empty module if Keras has none of them."""
    spec = importlib.util.find_spec("keras")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in paths:
            file = Path(folder, path)
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
    return ast.Module(body=[], type_ignores=[])

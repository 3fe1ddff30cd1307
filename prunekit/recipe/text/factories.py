"""Calls the Python functions that a recipe names. Callers must have called `require_trust` before."""

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from prunekit.recipe.text.loader import RecipeError


def call_factory(reference: str, arguments: Mapping[str, Any], what: str) -> Any:
    """Calls the function and returns its result; an exception inside the function propagates unchanged.

    Args:
        reference: "package.module:function"; the working directory is searched first, as `python -m` does.
        arguments: Keyword arguments of the function.
        what: "model" or "data", for errors.

    Raises:
        RecipeError: The module or function does not exist, or the function does not accept the arguments.
    """
    module_name, _, path = reference.partition(":")
    function: Any = _imported(module_name, what)
    for part in path.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise RecipeError(
            f"the {what} factory is a function inside its module. Received: {reference!r}, and {module_name!r} has no "
            f"function {path!r}."
        )
    try:
        return function(**dict(arguments))
    except TypeError as error:
        # The call itself raised: one traceback level. A deeper traceback means an error inside the function.
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:
            raise RecipeError(f"the {what} factory {reference!r} does not take these arguments: {error}.") from error
        raise


def _imported(module_name: str, what: str) -> Any:
    directory = os.getcwd()
    missing = directory not in sys.path
    if missing:
        sys.path.insert(0, directory)
    try:
        # The finder's cache may hide a file written since the last import.
        importlib.invalidate_caches()
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A missing import inside the user's module is an error of that module, not a wrong name in the recipe.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise RecipeError(
            f"the {what} factory's module {module_name!r} was not found, neither among the installed packages nor in "
            f"{directory}."
        ) from error
    finally:
        if missing and directory in sys.path:
            sys.path.remove(directory)

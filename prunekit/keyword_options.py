"""Keyword options that several calls share: their names and defaults in each signature."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import TypeVar, get_type_hints

_Function = TypeVar("_Function", bound=Callable[..., object])


def keyword_options(options: type, types: type) -> Callable[[_Function], _Function]:
    """Decorator that shows the single options in place of `**options`, to `help`, notebooks and `inspect.signature`.

    Type checkers read `Unpack[types]`.

    Args:
        options: The dataclass of the options, which has the defaults.
        types: The TypedDict of the call's own options.
    """
    found = {field.name: field for field in fields(options)}
    hints = get_type_hints(types)

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        keywords = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default if field.default_factory is MISSING else field.default_factory(),
                annotation=hints[name],
            )
            for name, field in found.items()
            if name in hints and name not in signature.parameters
        ]
        function.__signature__ = signature.replace(parameters=[*own, *keywords])  # type: ignore[attr-defined]
        return function

    return decorate

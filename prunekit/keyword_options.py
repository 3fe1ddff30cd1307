"""Keyword options that several calls share: their names and defaults in each signature."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any, TypeVar, cast, get_type_hints

from prunekit.suggestions import check_names

_Function = TypeVar("_Function", bound=Callable[..., object])


def keyword_options(
    options: type, types: type, former: Mapping[str, str] = MappingProxyType({})
) -> Callable[[_Function], _Function]:
    """Decorator that shows the single options in place of `**options`, and refuses names that the call does not have.

    `help`, notebooks and `inspect.signature` show them; type checkers read `Unpack[types]`.

    Args:
        options: The dataclass of the options, which has the defaults.
        types: The TypedDict of the call's own options.
        former: Former name of an argument -> its present name, for the message.
    """
    found = {field.name: field for field in fields(options)}
    hints = get_type_hints(types)

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        unnamed = [one.name for one in own if one.kind is inspect.Parameter.VAR_POSITIONAL]
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
        shown = signature.replace(parameters=[*own, *keywords])
        known = [name for name in shown.parameters if name not in ("self", *unnamed)]

        @functools.wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            check_names(given, known, former)
            return function(*args, **given)

        checked.__signature__ = shown  # type: ignore[attr-defined]
        return cast("_Function", checked)

    return decorate

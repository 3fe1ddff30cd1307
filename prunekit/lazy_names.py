"""Public names of a package that are loaded on first use (PEP 562)."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for the `__init__.py` of a package.

    Args:
        package: The package's own name.
        homes: Public name -> the module that defines it, or the folder in which it is a module.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = importlib.import_module(homes[name])
        # A folder's public module is no attribute of it before it is imported.
        value = importlib.import_module(f"{home.__name__}.{name}") if hasattr(home, "__path__") else getattr(home, name)
        vars(sys.modules[package])[name] = value
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names

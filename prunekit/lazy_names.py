"""Loads the public names of a package on first use (PEP 562)."""

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from prunekit.missing_packages import missing_backend


def lazy_names(
    package: str, homes: Mapping[str, str], moved: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` for the `__init__.py` of a package.

    Args:
        package: Name of the package.
        homes: Public name -> module that defines the name; for a public module, the package that contains the module.
        moved: Former name -> present name inside the package, "schedules.OneShot"; a use of the former one warns.
    """

    def get(name: str) -> Any:
        if name in moved:
            group, _, present = moved[name].rpartition(".")
            warnings.warn(f"{package}.{name} is now {package}.{moved[name]}.", DeprecationWarning, stacklevel=2)
            return getattr(get(group), present)
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{_in_a_group(package, name)}")
        try:
            home = importlib.import_module(homes[name])
        except ModuleNotFoundError as error:
            # Users call `pk.gradients.hvp`, not the folder.
            message = missing_backend(f"{package}.{name}".replace(".training_tools.", "."), error)
            if message is None:
                raise
            raise ModuleNotFoundError(message, name=error.name) from error
        # A submodule is not an attribute of its package before the submodule is imported.
        value = importlib.import_module(f"{home.__name__}.{name}") if hasattr(home, "__path__") else getattr(home, name)
        vars(sys.modules[package])[name] = value
        return value

    def names() -> list[str]:
        own = (name for name in vars(sys.modules[package]) if name.startswith("__"))
        return sorted({*own, *homes})

    return get, names


def _in_a_group(package: str, name: str) -> str:
    """Returns where a name is that is in a public module of the package, such as `pk.criteria`; "" if in none."""
    # Nothing is imported for an error, which `hasattr` asks for, too.
    for path in Path(sys.modules[package].__file__ or "").parent.glob("*.py"):
        if path.stem != "__init__" and f'    "{name}",' in path.read_text(encoding="utf-8"):
            return f". It is {package}.{path.stem}.{name}"
    return ""

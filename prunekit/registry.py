"""Registries of named extensions: plain rows that schemas and run-time code read; imports neither Keras nor NumPy."""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from prunekit.suggestions import did_you_mean


@dataclass(frozen=True)
class Row:
    """One named extension.

    Attributes:
        name: Name in options and recipes.
        factory: Class or function that makes the run-time object, or its place as "package.module:attribute". A place
            is imported at the first use, so that reading a registry imports nothing.
    """

    name: str
    factory: str | Callable[..., Any]

    def load(self) -> Callable[..., Any]:
        """Returns the factory; imports its module if `factory` is a place."""
        if not isinstance(self.factory, str):
            return self.factory
        module, _, attribute = self.factory.partition(":")
        return getattr(importlib.import_module(module), attribute)


R = TypeVar("R", bound=Row)
T = TypeVar("T")


class Registry(Mapping[str, R], Generic[R]):
    """The known extensions of one kind, by name, in the order of registration.

    Args:
        kind: What the rows are, such as "criterion"; part of error messages.
        rows: The rows that prunekit provides.
    """

    def __init__(self, kind: str, rows: Iterable[R] = ()):
        self.kind = kind
        self._rows: dict[str, R] = {}
        for row in rows:
            self.add(row)

    def __getitem__(self, name: str) -> R:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def named(self, name: str, alternative: str = "") -> R:
        """Returns the row `name`.

        Args:
            name: Name as the user wrote it.
            alternative: What the user may pass in place of a name, such as ", or a function"; part of the error.

        Raises:
            ValueError: No such row is registered.
        """
        if name in self._rows:
            return self._rows[name]
        hint = did_you_mean(name, self._rows)
        raise ValueError(
            f"Unknown {self.kind}. Received: {name!r}. Valid are: {', '.join(self._rows)}{alternative}.{hint}"
        )

    def resolve(self, value: Any, kind: type[T], expected: str) -> T:
        """Returns the object that the row named `value` makes; returns an instance of `kind` unchanged.

        Args:
            value: Name or instance, as the user passed it.
            kind: Base class of the objects.
            expected: Beginning of the error for other values, such as "A policy is one of NAMES, or a MaskPolicy".

        Raises:
            ValueError: `value` is an unknown name.
            TypeError: `value` is neither a name nor an instance of `kind` (a class is not an instance).
        """
        if isinstance(value, kind):
            return value
        if not isinstance(value, str):
            raise TypeError(f"{expected}. Received: {value!r} of type {type(value).__name__}.")
        return self.named(value).load()()

    def add(self, row: R) -> R:
        """Registers a row and returns it.

        Raises:
            ValueError: The name is taken by another row, or is empty.
        """
        if not row.name:
            raise ValueError(f"A {self.kind} needs a name. Received: {row!r}.")
        if self._rows.setdefault(row.name, row) != row:
            raise ValueError(f"The {self.kind} {row.name!r} is already registered. Choose another name.")
        return row

    def remove(self, name: str) -> None:
        """Removes the row `name`, for tests of extensions.

        Raises:
            KeyError: No such row is registered.
        """
        del self._rows[name]

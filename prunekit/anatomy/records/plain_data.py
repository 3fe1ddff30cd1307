"""Records as plain data: JSON values of any record, and the record from JSON values. Does not import Keras."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

if TYPE_CHECKING:
    from pydantic import TypeAdapter


class _NaNIfNone:
    """Tells pydantic to read null as nan, which JSON lacks."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(
            lambda value: math.nan if value is None else value, handler(source)
        )


# A measured number, which may be nan.
Figure: TypeAlias = Annotated[float, _NaNIfNone]


class Record:
    """Base class of dataclasses that become a JSON object.

    Attributes:
        derived: Names of the properties that the object has before the fields.
    """

    derived: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields and these properties as strict JSON values: nan and infinities become None."""
        return {name: plain(getattr(self, name)) for name in (*self.derived, *_names(self))}


def _names(record: Any) -> list[str]:
    return [item.name for item in fields(record)]


def plain(value: Any) -> Any:
    """Converts the value to strict JSON: NumPy numbers to Python numbers, nan and infinities to None, tuples to lists.

    Raises:
        TypeError: JSON cannot represent the value.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, Record):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in _names(value)}
    if type(value).__module__ == "numpy":
        return plain(value.tolist())
    raise TypeError(f"A report holds plain values that JSON can say. Received: {value!r} ({type(value).__name__}).")


def from_plain(kind: Any, values: Any) -> Any:
    """Returns the record of a dataclass from its JSON values. Unknown keys are ignored.

    Raises:
        ValueError: A field is missing or has a wrong value.
        TypeError: A field is of a wrong type.
    """
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at, *inside = reversed([str(part) for part in first["loc"]]) or [""]
        where = f" of {'.'.join(reversed(inside))}" if inside else ""
        reason = "is missing" if first["type"] == "missing" else f"is wrong: {first['msg']}"
        raise ValueError(f"{at!r}{where} {reason}" if at else f"not a {kind.__name__}: {first['msg']}") from error


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)

"""Criteria, allocations and policies by their names, as recipes give them."""

from typing import Any


def made(rows: Any, given: Any) -> Any:
    """Returns the object of a name, or of {"type": name, option: value}, in a registry."""
    if isinstance(given, str):
        return rows[given].load()()
    options = {name: value for name, value in given.items() if name != "type"}
    return rows[given["type"]].load()(**options)

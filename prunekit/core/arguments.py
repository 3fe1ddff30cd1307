"""Checks of what users pass to training loops: arrays of examples, and counts."""

from typing import Any

import keras

from prunekit.sparsity.arguments import whole


def examples_in(**arrays: Any) -> int:
    """The number of examples in arrays, or structures of them, that lie along their first axes; None counts nothing.

    Raises:
        ValueError: There are no examples, or the lengths differ.
    """
    found = {
        name: sorted({len(leaf) for leaf in keras.tree.flatten(array) if leaf is not None})
        for name, array in arrays.items()
    }
    lengths = {length for each in found.values() for length in each}
    if len(lengths) != 1 or 0 in lengths:
        listed = ", ".join(f"{name} with {' and '.join(map(str, each))}" for name, each in found.items() if each)
        raise ValueError(f"Arrays have one row per example, and at least one. Received: {listed}.")
    return lengths.pop()


def require_positive(**numbers: float | None) -> None:
    """Refuses counts that are not whole numbers above zero; None passes.

    Raises:
        ValueError: A number is not a whole number above zero.
    """
    for name, value in numbers.items():
        if value is not None:
            # A limit of bytes may be written as 1e9.
            number = int(value) if isinstance(value, float) and value.is_integer() else value
            whole(name, number, 1, wrong_type=ValueError)

"""Remembers which weights `pk.quantize` put on integer grids, so that what would take them off can refuse."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from prunekit.sparsity.array_ops import array_of

# Tells whether values lie on a grid.
Holds = Callable[[np.ndarray], bool]
# Model -> name, variable and grid of each weight; neither the model nor its files hold the note.
_QUANTIZED: weakref.WeakKeyDictionary[Any, list[tuple[str, weakref.ref[Any], Holds]]] = weakref.WeakKeyDictionary()
# Most weights that a message names.
_LISTED = 3


def note_grids(model: Any, weights: Iterable[tuple[str, Any, Holds]]) -> None:
    """Remembers the grids of a quantized model's weights.

    Args:
        model: The model.
        weights: Name, variable and grid of each weight.
    """
    _QUANTIZED[model] = [(name, weakref.ref(variable), holds) for name, variable, holds in weights]


def on_grids(model: Any) -> list[str]:
    """Returns the names of the weights that still lie on the grids of the model's last quantization."""
    found = []
    for name, reference, holds in _QUANTIZED.get(model, ()):
        variable = reference()
        value = None if variable is None else array_of(variable).astype("float32")
        # A weight of zeros lies on every grid.
        if value is not None and value.any() and holds(value):
            found.append(name)
    return found


def check_off_grids(model: Any, change: str, remedy: str) -> None:
    """Raises if weights of the model lie on the grids of `pk.quantize`.

    Args:
        model: The model.
        change: What gives the weights other values, as the subject of a sentence.
        remedy: What to do instead, as a sentence.

    Raises:
        ValueError: Weights lie on grids.
    """
    names = on_grids(model)
    if names:
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        raise ValueError(
            f"{change} gives weights values between the steps of integer grids. Received: the model {model.name!r}, in "
            f"which pk.quantize put {', '.join(names[:_LISTED])}{more} on grids. {remedy}"
        )

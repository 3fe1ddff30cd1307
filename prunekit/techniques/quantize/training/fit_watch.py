"""Tells at the end of a `fit` that it moved the weights of a quantized model off their grids."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from prunekit.core.runtime.patching import wrapped
from prunekit.core.training import distribution
from prunekit.techniques.quantize.quantization_state import QuantizationState

# id of a model -> its last quantization, which keeps the model alive.
_LAST: weakref.WeakValueDictionary[int, QuantizationState] = weakref.WeakValueDictionary()
# Most weights that a warning names.
_LISTED = 3


def remember(found: QuantizationState) -> None:
    """Makes a quantization the last one of its model: `warn_after_fit` says nothing of earlier ones any more."""
    _LAST[id(found.model)] = found


def warn_after_fit(found: QuantizationState) -> None:
    """Warns at the end of the next `fit` that moves the weights off their grids, as long as `found` exists.

    `fit` is shadowed on the model's instance until then; nothing of it is saved or copied with the model.
    """
    shadow = contextlib.ExitStack()
    shadow.enter_context(wrapped(found.model, "fit", functools.partial(_watching, weakref.ref(found), shadow)))


def _watching(
    reference: Callable[[], QuantizationState | None], shadow: contextlib.ExitStack, fit: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(fit)
    def watched(*args: Any, **kwargs: Any) -> Any:
        found = reference()
        on_grids = found is not None and not found.moved_weights()
        history = fit(*args, **kwargs)
        # A QuantizationCallback in the same `fit` has put the weights on other grids.
        is_last = found is not None and _LAST.get(id(found.model)) is found
        moved = found.moved_weights() if found is not None and on_grids and is_last else []
        if found is not None and moved and distribution.speaks_for(found.model):
            more = f" and {len(moved) - _LISTED} more" if len(moved) > _LISTED else ""
            warnings.warn(
                f"This training moved weights of {found.model.name!r} off the grids of its quantization: "
                f"{', '.join(moved[:_LISTED])}{more}. Train with pk.QuantizationCallback, or call pk.quantize again "
                "before the export.",
                stacklevel=3,
            )
        if moved or not (on_grids and is_last):
            shadow.close()
        return history

    return watched

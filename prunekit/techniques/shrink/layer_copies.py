"""Makes layers again from their configs, and pairs their variables with those of the former layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
from keras.src.saving.serialization_lib import SafeModeScope

from prunekit.anatomy.layers import sublayers


def from_config(operation: Any, changes: Mapping[str, Any] | None = None) -> Any:
    """Returns a new layer or operation of the same config, apart from changed entries.

    Args:
        operation: A layer or operation.
        changes: Entries of the config that differ.
    """
    # The layer exists in this process already, so a function in its config is not foreign code.
    with SafeModeScope(False):
        return type(operation).from_config({**operation.get_config(), **(changes or {})})


def pairs_of(old: Any, new: Any) -> list[tuple[Any, Any]]:
    """Returns the variables of a layer with those of the layer made again; freezes what was frozen.

    Raises:
        ValueError: The new layer has another number of variables.
    """
    if not isinstance(old, keras.layers.Layer):
        return []
    copy_trainable(old, new)
    variables, others = old.variables, new.variables
    if len(variables) != len(others):
        raise ValueError(
            f"The layer {old.name!r} ({type(old).__name__}) has {len(variables)} variables, and {len(others)} when it "
            "is made again from its config. Leave it out with `exclude`."
        )
    return list(zip(variables, others, strict=True))


def copy_trainable(old: Any, new: Any) -> None:
    """Makes trainable in a new layer, and in the layers inside it, what is trainable in the former one."""
    if old is new:
        return
    new.trainable = old.trainable
    for one, other in zip(sublayers(old), sublayers(new), strict=False):
        copy_trainable(one, other)


def finish(layer: Any) -> None:
    """Lets a layer compute what it derives from its weights, such as the constants of Normalization."""
    if hasattr(layer, "finalize_state"):
        layer.finalize_state()


def takes_a_graph(kind: type) -> bool:
    """Returns True if models of a class are made from inputs and outputs, as keras.Model is."""
    return kind.__name__ == "Functional" or vars(kind).get("__init__") is None

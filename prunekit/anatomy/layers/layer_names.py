"""Looks up a model's layers by name, by path, or by path and number of the call."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import keras

from prunekit.anatomy.layers.model_weights import places
from prunekit.suggestions import did_you_mean


@dataclass(frozen=True, eq=False)
class Site:
    """The outputs of one call of a layer.

    Attributes:
        layer: The layer.
        label: The layer's name as the user wrote it.
        call: Number of the layer's call within a pass, from 0; None if the name gives no number.
    """

    layer: Any
    label: str
    call: int | None


def as_names(names: Any, option: str) -> list[Any]:
    """Returns one layer name, or several, as a list.

    Raises:
        TypeError: `names` is neither a string nor an iterable.
    """
    if isinstance(names, str):
        return [names]
    if not isinstance(names, Iterable):
        raise TypeError(f"`{option}` takes names of layers. Received: {names!r}.")
    return list(names)


def find_site(model: Any, name: Any, option: str) -> Site:
    """Returns the layer with a name or path such as "block/conv_1"; ("conv_1", 2) is its third call in a pass.

    Raises:
        TypeError: `name` is not a layer name.
        ValueError: No layer, or more than one layer, has the name.
    """
    label, call = name if isinstance(name, tuple) and len(name) == 2 else (name, None)
    if not isinstance(label, str) or not (call is None or isinstance(call, int)):
        raise TypeError(f"`{option}` takes a layer's name, or (name, number of the call). Received: {name!r}.")
    below = [place for place in places(model) if place.path and not isinstance(place.layer, keras.layers.InputLayer)]
    # An RNN and its cell have the same path, but different full paths.
    matches = (
        [place for place in below if label == key(place)]
        for key in (lambda place: place.full_path, lambda place: place.path, lambda place: place.names[-1])
    )
    found = {id(place.layer): place for place in next(filter(None, matches), [])}
    if len(found) == 1:
        return Site(next(iter(found.values())).layer, label, call)
    if found:
        listed = ", ".join(repr(place.full_path) for place in found.values())
        raise ValueError(f"Several layers are called {label!r}. Received: {option}={name!r}. Pass one of {listed}.")
    known = list(dict.fromkeys(text for place in below for text in (place.path, place.names[-1])))
    hint = did_you_mean(label, known, most=5) or f" Its layers are {', '.join(known[:8])}."
    raise ValueError(f"No layer of the model {model.name!r} is called {label!r}. Received: {option}={name!r}.{hint}")

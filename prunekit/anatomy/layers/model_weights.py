"""Lists a model's layers and weights, each with its readable name."""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras

from prunekit.anatomy.layers.layers import (
    cell_of,
    leaves_of,
    makes_weights,
    sublayers,
    weight_shape,
    weight_values,
    weights_of,
)
from prunekit.anatomy.layers.weight_spec import WeightSpec
from prunekit.anatomy.records.name_patterns import prefixes
from prunekit.anatomy.records.reports import Skipped


class OneVariable:
    """Base class with the shape and size of `variable`."""

    variable: Any

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the variable."""
        return tuple(self.variable.shape)

    @functools.cached_property
    def size(self) -> int:
        """Number of weights in the variable."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Place:
    """One path from the model down to a layer.

    Attributes:
        layer: The layer.
        path: Layer names from below the model down to the layer, joined by "/"; "" for the model itself. The cell of an
            RNN adds no name: its weights are "lstm/kernel".
        full_path: The same, cells included ("lstm/lstm_cell").
        names: The names of the layers on the path; the layer's own name is last.
    """

    layer: Any
    path: str = ""
    full_path: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Weight(OneVariable):
    """One weight variable of a model, with all places from which it can be reached."""

    variable: Any
    layer: Any
    name: str
    layer_path: str
    attribute: str
    spec: WeightSpec
    paths: tuple[str, ...]
    scopes: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights: the variable's shape, unless the variable packs two weights into each byte (int4)."""
        return weight_shape(self.layer, self.attribute, self.variable)

    @property
    def values(self) -> Any:
        """Returns the weights as a tensor of shape `shape`."""
        return weight_values(self.layer, self.attribute, self.variable)


def join(path: str, name: str) -> str:
    """Returns the path of `name` below `path`, which is "" for the model."""
    return f"{path}/{name}" if path else name


def places(model: Any) -> Iterator[Place]:
    """Yields `model`, then every layer inside it, depth first; a shared layer appears once per place."""
    yield from _below(Place(model), frozenset({id(model)}))


def _below(place: Place, ancestors: frozenset[int]) -> Iterator[Place]:
    yield place
    seen: Counter[str] = Counter()
    for child in sublayers(place.layer):
        if id(child) in ancestors:
            continue
        seen[child.name] += 1
        # In subclassed models two layers under one parent may have the same name.
        name = child.name if seen[child.name] == 1 else f"{child.name}#{seen[child.name]}"
        path = place.path if child is cell_of(place.layer) else join(place.path, name)
        below = Place(child, path, join(place.full_path, name), (*place.names, child.name))
        yield from _below(below, ancestors | {id(child)})


def weights_in(model: Any) -> list[Weight]:
    """Returns every weight of a built model, each variable once, in the order of the layers."""
    found: dict[int, list[tuple[Place, str, WeightSpec]]] = {}
    variables: dict[int, Any] = {}
    for place in places(model):
        for variable, label, spec in weights_of(place.layer):
            variables[id(variable)] = variable
            found.setdefault(id(variable), []).append((place, label, spec))
    return [_weight(variables[key], owners) for key, owners in found.items()]


def _weight(variable: Any, owners: list[tuple[Place, str, WeightSpec]]) -> Weight:
    # A tied variable is assigned to the first owner whose layer type is in the table of layers.
    place, label, spec = next((owner for owner in owners if owner[2].role != "unknown"), owners[0])
    paths = [join(path, name) for at, name, _ in owners for path in (at.path, at.full_path)]
    scopes = [scope for at, _, _ in owners for path in (at.path, at.full_path) for scope in prefixes(path)]
    scopes += [name for at, _, _ in owners for name in at.names]
    return Weight(
        variable=variable,
        layer=place.layer,
        name=join(place.path, label),
        layer_path=place.path,
        attribute=label,
        spec=spec,
        paths=tuple(dict.fromkeys(paths)),
        scopes=tuple(dict.fromkeys(scopes)),
    )


def check_built(model: Any) -> None:
    """Raises for anything but a Keras 3 model that has its weights.

    `model.built` alone is not sufficient: models with a custom `train_step` (autoencoders, GANs, classes that hold a
    network as an attribute) stay unbuilt for Keras, although the layers inside them are built.

    Raises:
        TypeError: `model` is not a Keras 3 model.
        ValueError: `model` has no weights yet.
    """
    if not isinstance(model, keras.layers.Layer):
        if any(base.__module__.split(".")[0] == "tf_keras" for base in type(model).__mro__):
            remedy = "It is a legacy tf_keras model: rebuild it with `import keras`."
        elif isinstance(model, str | os.PathLike):
            remedy = "Load a file first, with keras.models.load_model."
        else:
            remedy = "Pass the model itself."
        raise TypeError(f"prunekit works on Keras 3 models. Received: {type(model)!r}. {remedy}")
    if not model.built and not model.weights:
        raise ValueError(
            f"The model {model.name!r} is not built, so it has no weights yet. Call it once on a batch of data, call "
            "`model.build(input_shape)`, or give it a `keras.Input`. In `fit`, a PruningCallback builds it from the "
            "first batch, a QuantizationCallback or ClusterCallback from its data."
        )


def unbuilt_layers(model: Any) -> Iterator[Place]:
    """Yields the unbuilt layers, possibly including the model itself, that create weights when they are built."""
    for place in places(model):
        if not place.layer.built and makes_weights(place.layer):
            yield place


def quantized_by_keras(model: Any) -> list[str]:
    """Returns the layers on which Keras's `quantize` was called, as "PATH (MODE)"."""
    modes = {place.path: getattr(place.layer, "quantization_mode", None) for place in places(model)}
    return [f"{path or model.name} ({mode})" for path, mode in modes.items() if mode is not None]


def raw_variables_in(model: Any) -> list[Skipped]:
    """Returns the variables in the model's layers that Keras does not track, as skipped weights with that reason."""
    return [
        Skipped(join(place.path, name), "a variable that Keras does not know, and does not train: use add_weight()")
        for place in places(model)
        for name in _raw_variables(place.layer)
    ]


def _raw_variables(layer: Any) -> list[str]:
    """Returns the attributes of `layer` with a `tf.Variable`, a `tf.Module` with variables or a `torch.nn.Parameter`.

    Attributes of sublayers are not included. JAX arrays are values, not variables, and are not included either.
    """
    if keras.backend.backend() == "torch":
        # Keras keeps the parameters of its own variables in a separate module.
        return [name for name, parameter in vars(layer).get("_parameters", {}).items() if parameter is not None]
    return list(_of_tensorflow(layer)) if keras.backend.backend() == "tensorflow" else []


def _of_tensorflow(layer: Any) -> Iterator[str]:
    import tensorflow as tf

    for attribute in [name for name in vars(layer) if not name.startswith("_")]:
        for leaf, suffix in leaves_of(vars(layer)[attribute], tf.Variable | tf.Module):
            if isinstance(leaf, tf.Variable):
                yield attribute + suffix
            # Keras layers, optimizers and metrics are instances of `tf.Module` too.
            elif not type(leaf).__module__.startswith("keras.") and not isinstance(leaf, keras.Layer):
                yield from (f"{attribute}{suffix}/{variable.name.split(':')[0]}" for variable in leaf.variables)

"""Makes layers again from their configs, and pairs their variables with those of the former layers."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import keras
from keras.src.initializers.random_initializers import RandomInitializer

from prunekit.anatomy.layers.counting import einsum_labels
from prunekit.anatomy.layers.keras_hub_layers import PACKAGE
from prunekit.anatomy.layers.layers import sublayers
from prunekit.core.runtime.patching import shadowed

# id of a former variable -> (former variable, new variable).
Variables = dict[int, tuple[Any, Any]]

_NO_ARGUMENTS = ("self", "args", "kwargs")


def made_again(operation: Any, changes: Mapping[str, Any] | None = None, name: str | None = None) -> Any:
    """Returns a new layer or operation of the same config, apart from changed entries.

    A layer or operation without weights that has no config is copied, and so is a preprocessing layer that has learned
    from data, which its config does not say.

    Args:
        operation: A layer or operation.
        changes: Entries of the config that differ.
        name: Another name; None keeps that of the operation.

    Raises:
        ValueError: It has weights, or changes, and cannot be made from its config.
    """
    is_layer = isinstance(operation, keras.layers.Layer)
    if is_layer and "call" in vars(operation):
        raise ValueError(
            f"The new model is made of new layers. Received: {operation.name!r} ({type(operation).__name__}), whose "
            "`call` was replaced on the object, which its config does not say. Remove the replacement first."
        )
    if hasattr(operation, "adapt") and not changes:
        return _copied(operation, name)
    try:
        config = {**_config_of(operation), **(changes or {})}
        config |= {key: "zeros" for key, value in config.items() if _is_array_initializer(key, value)}
        if name is not None and "name" in config:
            config["name"] = name
        made = type(operation).from_config(config)
        made.name = name or operation.name
        return made
    except Exception as error:
        if not getattr(operation, "variables", ()) and not changes:
            return _copied(operation, name)
        raise ValueError(
            f"The new model is made of new layers, from the configs of the present ones. Received: {operation.name!r} "
            f"({type(operation).__name__}), which cannot be made again: {error}. Define get_config and from_config, or "
            "leave the layer out with `exclude`."
        ) from error


@contextlib.contextmanager
def undrawn(layer: Any) -> Iterator[None]:
    """Inside the scope, a layer that is built has zeros where it draws its weights, which get other values anyway."""
    zeros = keras.initializers.Zeros()
    with contextlib.ExitStack() as scope:
        for name, value in list(vars(layer).items()):
            if isinstance(value, RandomInitializer):
                scope.enter_context(shadowed(layer, name, zeros))
        yield


def _config_of(operation: Any) -> dict[str, Any]:
    """Returns the config of a layer or operation.

    Keras writes no config for a layer that got its type policy as an object, and has no get_config of its own. Layers
    of KerasHub keep each argument under its name.
    """
    try:
        return dict(operation.get_config())
    except NotImplementedError:
        if type(operation).__module__.partition(".")[0] != PACKAGE:
            raise
        named = [name for name in inspect.signature(type(operation).__init__).parameters if name not in _NO_ARGUMENTS]
        shared = {"name": operation.name, "trainable": operation.trainable, "dtype": operation.dtype_policy.name}
        return {**shared, **{name: getattr(operation, name) for name in named}}


def can_be_made_again(layer: Any) -> bool:
    """Returns True if a layer can be made from its own config, here and by `keras.models.load_model`."""
    if hasattr(layer, "adapt") or "call" in vars(layer):
        return True
    try:
        type(layer).from_config(_config_of(layer)).get_config()
    except Exception:  # noqa: BLE001  # a class of the user may raise anything
        return False
    return True


def known_lengths(layer: Any, inputs: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Returns changes of an EinsumDense's config, with the lengths of its outputs that its inputs have.

    The layers of an attention leave these lengths open. Around them the attention knows them; without it they would be
    lost, and a Flatten after it would have no length.

    Args:
        layer: A layer or operation.
        inputs: What it is called on.
        changes: Entries of its config that differ; returned as they are for other layers.
    """
    if type(layer) is not keras.layers.EinsumDense or None not in layer.partial_output_shape:
        return changes
    data, _, output = einsum_labels(layer, changes.get("equation"))
    if "..." in data:
        return changes
    lengths, shape = dict(zip(data, inputs.shape, strict=True)), changes.get("output_shape", layer.partial_output_shape)
    known = [
        lengths.get(label) if length is None else length
        for label, length in zip(output[-len(shape) :], shape, strict=True)
    ]
    return {**changes, "output_shape": tuple(known)}


def _is_array_initializer(name: str, value: Any) -> bool:
    """Returns True for an initializer that is an array of the former shape."""
    if not name.endswith("initializer") or not isinstance(value, dict) or not isinstance(value.get("config"), dict):
        return False
    return not isinstance(value["config"].get("value", 0), int | float)


def _copied(operation: Any, name: str | None) -> Any:
    """Returns a copy of a layer or operation without the calls of the former one; variables are shared."""
    found = object.__new__(type(operation))
    vars(found).update(vars(operation))
    found._inbound_nodes, found._outbound_nodes = [], []
    found.name = name or operation.name
    return found


def input_like(tensor: Any, shape: Any) -> Any:
    """Returns the tensor of a new input layer with the names and settings of a former input.

    Args:
        tensor: An input of the former model.
        shape: Shape of the new input, with the batch axis.
    """
    history = getattr(tensor, "_keras_history", None)
    if history is None or not isinstance(history[0], keras.layers.InputLayer):
        return keras.Input(batch_shape=shape, dtype=tensor.dtype, name=tensor.name)
    made = type(history[0]).from_config({**history[0].get_config(), "batch_shape": tuple(shape)}).output
    # Keras names the tensor of an unnamed input otherwise than the layer; files have the tensor's name.
    made.name = tensor.name
    return made


def pairs_of(old: Any, new: Any) -> list[tuple[Any, Any]]:
    """Returns the variables of a layer with those of the layer made again; freezes what was frozen.

    A bias that only the new layer has is left out.

    Raises:
        ValueError: The new layer has another number of variables.
    """
    if not isinstance(old, keras.layers.Layer):
        return []
    copy_trainable(old, new)
    variables, added = old.variables, added_bias(old, new)
    others = [one for one in new.variables if one is not added]
    if len(variables) != len(others):
        raise ValueError(
            f"The layer {old.name!r} ({type(old).__name__}) has {len(variables)} variables, and {len(others)} when it "
            "is made again from its config. Leave it out with `exclude`."
        )
    return list(zip(variables, others, strict=True))


def assign(old: Any, new: Any, value: Any) -> None:
    """Assigns a value to the variable of a layer that was made again, unless both layers share the variable.

    Raises:
        ValueError: The new variable has another shape.
    """
    if tuple(new.shape) != tuple(value.shape):
        raise ValueError(
            f"The weight {old.path!r} has another shape when its layer is made again: {tuple(new.shape)} instead of "
            f"{tuple(value.shape)}. Define get_config and from_config so that the layer is made as it is."
        )
    if new is not old:
        new.assign(value)


def added_bias(old: Any, new: Any) -> Any:
    """Returns the bias that a layer made again has and the former one lacks; None without one."""
    return getattr(new, "bias", None) if getattr(old, "bias", new) is None else None


def copy_trainable(old: Any, new: Any) -> None:
    """Makes trainable in a new layer, and in the layers inside it, what is trainable in the former one."""
    if old is new:
        return
    new.trainable = old.trainable
    for one, other in zip(sublayers(old), sublayers(new), strict=False):
        copy_trainable(one, other)


def takes_a_graph(kind: type) -> bool:
    """Returns True if models of a class are made from inputs and outputs, as keras.Model is."""
    return kind.__name__ == "Functional" or vars(kind).get("__init__") is None

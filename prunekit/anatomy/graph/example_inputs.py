"""Symbolic inputs of a model: from its declared inputs, from example arrays, or from shapes that a user gives."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import keras

from prunekit.suggestions import did_you_mean

# Names that Keras gives to tensors that have none.
_NUMBERED = re.compile(r"keras_tensor(_\d+)?(CLONE)?")
# Stands in messages for an open size.
_SUCH_AS = 128


def declared_inputs(model: Any) -> Any:
    """Returns the declared input tensors in the structure that the model takes (tensor, list, dict); None without."""
    # `_inputs_struct` of a Functional model has the structure (dict, list) of the inputs; `inputs` is flattened.
    declared = getattr(model, "_inputs_struct", getattr(model, "inputs", None))
    # A subclass may have an attribute `inputs` of its own.
    if not all(isinstance(one, keras.KerasTensor) for one in keras.tree.flatten(declared)):
        return None
    return declared[0] if isinstance(declared, list) and len(declared) == 1 else declared


def input_names(model: Any) -> list[str]:
    """Returns the names by which a dictionary of inputs is read, in the order of the tensors; empty if there are none.

    They are the keys of a model that takes a dictionary, and else the names of the declared inputs.
    """
    declared = declared_inputs(model)
    if isinstance(declared, Mapping):
        return sorted(declared)
    return [] if declared is None else [one.name for one in keras.tree.flatten(declared)]


def input_words(declared: Any, number: int) -> str:
    """Returns words for one of `number` declared inputs of a model, for messages: "the input 'image'".

    Keras numbers tensors that were given no name ("keras_tensor_66"): a single one is "the input", and one of several
    has the name of its layer.
    """
    if not _NUMBERED.fullmatch(declared.name):
        return f"the input {declared.name!r}"
    return "the input" if number == 1 else f"the input {declared._keras_history.operation.name!r}"


def fixed_batch(model: Any) -> int | None:
    """Returns the batch size that the model's declared inputs fix, or None if any batch size is accepted."""
    sizes = (tensor.shape[0] for tensor in arrays_in(declared_inputs(model)))
    return next((size for size in sizes if size is not None), None)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def arrays_in(structure: Any) -> list[Any]:
    """Returns the arrays and tensors in a structure, symbolic ones included, in order."""
    return list(filter(_is_tensor, keras.tree.flatten(structure)))


def _is_shape(value: Any) -> bool:
    lengths = isinstance(value, tuple | list) and len(value) > 0
    return lengths and all(length is None or (isinstance(length, int) and type(length) is not bool) for length in value)


# ---------------------------------------------------------------- what a user gives


def example_inputs(model: Any, inputs: Any) -> Any:
    """Returns tensors with shapes and dtypes for the inputs of a model, in the structure that the model takes.

    Args:
        model: A built model or layer.
        inputs: Arrays or tensors, in the structure that the model takes; or shapes with the batch axis, whose length is
            ignored. One shape, such as (1, 128), is that of every input that it fits; {"tokens": (1, 128)} names the
            inputs, of which those of a fixed size may be left out; a list has a shape for each input. The dtypes are
            then those of the declared inputs, or float32 without declared inputs.

    Raises:
        TypeError: `inputs` are neither arrays or tensors nor shapes.
        ValueError: A shape does not fit the declared input; an input is missing, or has another name.
    """
    declared = declared_inputs(model)
    if _is_shape(inputs):
        if declared is None:
            return _tensor(inputs, None, "the input")
        leaves = keras.tree.flatten(declared)
        if len(leaves) == 1 or not any(fits(inputs, leaf) for leaf in leaves):
            return _mapped(lambda name, leaf: _tensor(inputs, leaf, name), declared)
        return _mapped(lambda name, leaf: _tensor(inputs, leaf, name) if fits(inputs, leaf) else leaf, declared)
    if isinstance(inputs, Mapping) and any(map(_is_shape, inputs.values())):
        return _by_name(inputs, declared)
    if isinstance(inputs, list | tuple) and any(map(_is_shape, inputs)):
        leaves = [None] * len(inputs) if declared is None else keras.tree.flatten(declared)
        if len(leaves) != len(inputs):
            raise ValueError(f"Expected a shape for each of {len(leaves)} inputs. Received: {len(inputs)} shapes.")
        found = [_given(value, leaf, f"input {i}") for i, (value, leaf) in enumerate(zip(inputs, leaves, strict=True))]
        return found if declared is None else keras.tree.pack_sequence_as(declared, found)
    return inputs


def _by_name(inputs: Mapping[str, Any], declared: Any) -> Any:
    if declared is None:
        return {name: _given(value, None, repr(name)) for name, value in inputs.items()}
    known: list[str] = []
    _mapped(lambda name, leaf: known.append(name), declared)
    for name in inputs:
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise ValueError(f"The inputs of the model are {', '.join(known)}. Received: {name!r} in `inputs`.{hint}")
    missing: list[str] = []

    def one(name: str, leaf: Any) -> Any:
        if name in inputs:
            return _given(inputs[name], leaf, repr(name))
        if None in tuple(leaf.shape)[1:]:
            missing.append(name)
        return leaf

    found = _mapped(one, declared)
    if missing:
        raise ValueError(f"`inputs` must have the shape of each input of open size. Missing: {', '.join(missing)}.")
    return found


def _mapped(function: Callable[[str, Any], Any], declared: Any) -> Any:
    """Returns the structure with `function(name, tensor)` in the place of each tensor."""
    if isinstance(declared, Mapping):
        return {name: function(name, leaf) for name, leaf in declared.items()}
    return keras.tree.map_structure(lambda leaf: function(leaf.name, leaf), declared)


def _given(value: Any, declared: Any, name: str) -> Any:
    return _tensor(value, declared, name) if _is_shape(value) else value


def fits(shape: Any, declared: Any) -> bool:
    """Returns True if a shape, apart from the batch axis, is one that a declared input accepts."""
    known = tuple(declared.shape)
    return len(shape) == len(known) and all(
        length is None or given == length for given, length in zip(shape[1:], known[1:], strict=True)
    )


def _tensor(shape: Any, declared: Any, name: str) -> Any:
    if any(length is None or length < 1 for length in shape[1:]):
        raise ValueError(f"A shape has positive sizes after the batch axis. Received: {tuple(shape)} for {name}.")
    if declared is None:
        return keras.KerasTensor(tuple(shape), keras.config.floatx())
    if not fits(shape, declared):
        raise ValueError(
            f"The shape of {input_words(declared, 1)} is {tuple(declared.shape)}, with the batch first. "
            f"Received: {tuple(shape)}."
        )
    return keras.KerasTensor(tuple(shape), declared.dtype)


# ---------------------------------------------------------------- the call of a model


def symbolic_call(model: Any, batch_size: int, inputs: Any) -> tuple[tuple, dict, int]:
    """Returns (args, kwargs, times): symbolic arguments for a call of the model, and the calls that make one batch.

    Args:
        model: A built model or layer.
        batch_size: Number of examples.
        inputs: As for `example_inputs`; None means the declared inputs.

    Raises:
        TypeError: As `example_inputs`.
        ValueError: As `example_inputs`; the sizes of the inputs are unknown; the batch size does not fit.
    """
    if inputs is not None:
        return (_with_batch(model, example_inputs(model, inputs), batch_size),), {}, 1
    declared = declared_inputs(model)
    if declared is None:
        return _inputs_from_build(model, batch_size)
    one = fixed_batch(model)
    if one is None:
        return (_with_batch(model, declared, batch_size),), {}, 1
    if batch_size % one:
        raise ValueError(
            f"The model {model.name!r} takes batches of {one}; its cost is counted in multiples of that. "
            f"Received: batch_size={batch_size}."
        )
    return (_with_batch(model, declared, one),), {}, batch_size // one


def _with_batch(model: Any, structure: Any, batch_size: int) -> Any:
    def symbolic(tensor: Any) -> Any:
        if not _is_tensor(tensor):
            raise TypeError(
                "`inputs` is an array or tensor, or a structure of them, or a shape such as (1, 128). "
                f"Received: {tensor!r}."
            )
        shape = (batch_size, *tuple(tensor.shape)[1:])
        if None in shape:
            example = (1, *(length or _SUCH_AS for length in shape[1:]))
            raise ValueError(
                f"The inputs of the model {model.name!r} have no fixed size, so the model has no fixed cost. Received: "
                f"input shape {tuple(tensor.shape)}. Pass an example of the size to count as `inputs`, or its shape, "
                f"such as inputs={example} (--input-shape {','.join(map(str, example))} on the command line)."
            )
        return keras.KerasTensor(shape, keras.backend.standardize_dtype(tensor.dtype))

    return keras.tree.map_structure(symbolic, structure)


def _inputs_from_build(model: Any, batch_size: int) -> tuple[tuple, dict, int]:
    """Returns inputs for a model without declared inputs, from the shapes on which it was built."""
    config = model.get_build_config() or {}
    shapes = config.get("shapes_dict") or {"input_shape": config.get("input_shape")}
    if any(shape is None for shape in shapes.values()):
        raise ValueError(
            f"The model {model.name!r} does not say which inputs it takes. Pass an example, such as a batch of "
            "data or a shape, as `inputs` (--input-shape on the command line)."
        )
    tensors = {
        name.removesuffix("_shape"): keras.tree.map_shape_structure(lambda shape: keras.KerasTensor(shape), shape)
        for name, shape in shapes.items()
    }
    tensors = {name: _with_batch(model, tensor, batch_size) for name, tensor in tensors.items()}
    if len(tensors) == 1:
        return tuple(tensors.values()), {}, 1
    return (), tensors, 1

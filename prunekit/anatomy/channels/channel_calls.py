"""A call whose tensors are described by their axes, and what the rules of layers and operations share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import keras
import numpy as np

from prunekit.anatomy.channels.channel_axes import Axes, Kept, Numbers
from prunekit.anatomy.channels.channel_links import STAYS, Links

Shape = tuple[int | None, ...]


class Walk(Protocol):
    """What a rule may ask for: the links, and the axes that another layer would return."""

    links: Links

    def follow(self, layer: Any, *inputs: Axes) -> list[Axes]:
        """Returns the axes of the outputs of a layer inside the present one."""

    def inside(self, call: ChannelCall) -> list[Axes]:
        """Returns the axes of the outputs of a call from the calls inside its layer, which may replace the layer.

        Raises:
            NotFollowedError: The calls inside cannot be recorded, or cannot replace the layer.
        """

    def through(self, function: Callable[[Any], Any], x: Axes) -> Axes:
        """Returns the axes of the output of a function of `keras.ops`.

        Raises:
            NotFollowedError: The function cannot be called on symbolic tensors.
        """


@dataclass(frozen=True, eq=False)
class ChannelCall:
    """One call of a layer or an operation.

    Attributes:
        operation: The layer or operation.
        args: Positional arguments, with `Axes` in the place of tensors and variables.
        kwargs: Keyword arguments, likewise.
        outputs: Shapes of the output tensors.
        node: The call in a graph; None for the call of a layer that a rule asks for.
    """

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Shape, ...]
    node: Any = None

    @property
    def inputs(self) -> list[Axes]:
        """The axes of all input tensors, in order."""
        return [leaf for leaf in keras.tree.flatten((self.args, self.kwargs)) if isinstance(leaf, Axes)]

    @property
    def x(self) -> Axes:
        """The axes of the first input tensor."""
        return self.inputs[0]

    def argument(self, name: str, position: int, default: Any = None) -> Any:
        """Returns an argument that was given by position or by name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)


Rule = Callable[[Walk, ChannelCall], Sequence[Axes]]


class NotFollowedError(Exception):
    """A call does something with channels that no rule describes; the message is the reason."""


def channel_axis(layer: Any, rank: int) -> int:
    """Returns the axis of the channels of a layer with `data_format`."""
    return 1 if getattr(layer, "data_format", None) == "channels_first" else rank - 1


def keep_other_axes(walk: Walk, x: Axes, axis: int) -> None:
    """Keeps the channels at all axes but one: a layer mixes the entries of the others."""
    for place, numbers in enumerate(x.channels):
        if place != axis % len(x.shape):
            walk.links.keep(numbers, "channels at an axis whose entries the layer mixes")


def maps_zero_to_zero(function: Callable[[Any], Any]) -> bool:
    """Returns True if a function of single numbers is 0 at 0."""
    return bool(np.all(np.asarray(keras.ops.convert_to_numpy(function(keras.ops.zeros((1,))))) == 0))


def elementwise(walk: Walk, inputs: Sequence[Axes], shape: Shape, zero: str) -> Axes:
    """Returns the axes of a result that is computed entry by entry, with NumPy's broadcasting.

    Args:
        walk: Takes the ties.
        inputs: Axes of the tensors.
        shape: Shape of the result.
        zero: Which of the tensors must be zero at a removed channel for the result to be: "all" (a sum), "any" (a
            product), "first" (a quotient), or "none".
    """
    found: list[Numbers] = [None] * len(shape)
    is_zero = zero != "none"
    for axis in range(1, len(shape) + 1):
        present = [one for one in inputs if axis <= len(one.shape)]
        spread = [one for one in present if one.shape[-axis] == 1 and shape[-axis] != 1]
        for one in spread:
            walk.links.keep(one.at(-axis), "one value for all channels")
        full = [one.at(-axis) for one in present if one not in spread]
        if not full:
            continue
        for numbers in full[1:]:
            walk.links.tie(full[0], numbers)
        if all(numbers is not None for numbers in full):
            found[-axis] = full[0]
            zeros = [_is_zero_at(one, axis, shape[-axis]) for one in inputs]
            is_zero = is_zero and {"all": all(zeros), "any": any(zeros), "first": zeros[0], "none": False}[zero]
    return Axes(shape, tuple(found), is_zero)


def _is_zero_at(one: Axes, axis: int, length: int | None) -> bool:
    """Returns True if a tensor is zero at the removed channels of an axis, counted from the end."""
    if not one.labelled and one.shape == ():
        return one.zero
    whole = axis <= len(one.shape) and one.shape[-axis] == length and one.channels[-axis] is not None
    return one.zero and whole


def contracted(walk: Walk, inputs: Sequence[Axes], letters: Sequence[str], output: str, shape: Shape) -> Axes:
    """Returns the axes of a sum of products (einsum).

    Args:
        walk: Takes the ties.
        inputs: Axes of the operands.
        letters: For each operand one letter for each axis.
        output: The letters of the result.
        shape: Shape of the result.
    """
    links = walk.links
    where: dict[str, list[tuple[Axes, Numbers]]] = {}
    for one, labels in zip(inputs, letters, strict=True):
        for axis, letter in enumerate(labels):
            if one.shape[axis] == 1 and one.channels[axis] is None:
                where.setdefault(letter, [])
                continue
            where.setdefault(letter, []).append((one, one.channels[axis]))
    found: dict[str, Numbers] = {}
    zero = True
    for letter, users in where.items():
        found[letter] = users[0][1] if users else None
        for _, numbers in users[1:]:
            found[letter] = links.tie(found[letter], numbers)
        if found[letter] is None:
            continue
        removed_is_zero = any(one.zero for one, _ in users)
        if letter in output:
            zero = zero and removed_is_zero
        elif not removed_is_zero:
            links.keep(found[letter], "summed over, and not zero where a channel is removed")
    return Axes(shape, tuple(found.get(letter) for letter in output), zero)


def concatenated(walk: Walk, inputs: Sequence[Axes], axis: int, shape: Sequence[int | None]) -> Axes:
    """Returns the axes of a concatenation; an input without channels gets channels that stay."""
    links, axis = walk.links, axis % len(shape)
    joined = None
    if any(one.channels[axis] is not None for one in inputs):
        parts = []
        for one in inputs:
            numbers, length = one.channels[axis], one.shape[axis]
            if length is None:
                links.keep_all(inputs, "concatenated with an axis of unknown length")
                return Axes.fixed(shape)
            parts.append(np.full(length, STAYS) if numbers is None else numbers)
        joined = np.concatenate(parts)
    shapes = [one.with_axis(axis, 1, None) for one in inputs]
    rest = elementwise(walk, shapes, (*shape[:axis], 1, *shape[axis + 1 :]), "all")
    return replace(rest.with_axis(axis, shape[axis], joined), zero=rest.zero and all(one.zero for one in inputs))


def sizes(shape: Sequence[Any], channels: Sequence[Numbers]) -> tuple[Any, ...]:
    """Returns a shape in which axes with channels have the number of kept ones; -1 remains."""
    pairs = zip(shape, channels, strict=True)
    return tuple(
        size if numbers is None or not isinstance(size, int) or size < 0 else Kept(numbers) for size, numbers in pairs
    )


def axes_of(layer: Any) -> list[int]:
    """Returns the axes of a layer with one or several."""
    return list(layer.axis) if isinstance(layer.axis, list | tuple) else [layer.axis]


def activated(walk: Walk, function: Any, x: Axes) -> Axes:
    """Returns the axes after an activation function.

    Raises:
        NotFollowedError: The function is not known, and does not consist of `keras.ops`.
    """
    if function is None or function is keras.activations.linear:
        return x
    if isinstance(function, keras.layers.Layer):
        if function.weights or not function.built:
            raise NotFollowedError("its activation is a layer with weights, or is not built")
        return walk.follow(function, x)[0]
    name = getattr(function, "__name__", str(function))
    if name in ("softmax", "log_softmax", "sparsemax"):
        walk.links.keep(x.at(-1), f"{name} over the channels")
        return Axes(x.shape, (*x.channels[:-1], None), False)
    if function not in _ENTRYWISE:
        return walk.through(function, x)
    return Axes(x.shape, x.channels, x.zero and maps_zero_to_zero(function))


_NOT_ENTRYWISE = ("softmax", "log_softmax", "sparsemax", "glu", "get", "serialize", "deserialize")
_ENTRYWISE = {
    getattr(keras.activations, name)
    for name in dir(keras.activations)
    if not name.startswith("_") and name not in _NOT_ENTRYWISE and callable(getattr(keras.activations, name))
}

"""Collects which axes of which weights belong to the same channels while a model's calls are followed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from prunekit.anatomy.channels.channel_axes import Axes, Numbers, blocks, depends_on, split_axis

# The channel that is never removed: tying a channel to it keeps the channel.
STAYS = 0


@dataclass(frozen=True, eq=False)
class WeightAxes:
    """The axes of one weight that have channels.

    Attributes:
        variable: The Keras variable.
        name: Readable name of the weight.
        channels: Axis -> channel of each index. The input axis of a grouped convolution has the channels of all groups,
            shape (groups, length of the axis).
        groups: Groups of output units, each with its own inputs.
    """

    variable: Any
    name: str
    channels: dict[int, np.ndarray] = field(default_factory=dict)
    groups: int = 1


@dataclass(frozen=True)
class Wall:
    """Channels that must stay.

    Attributes:
        place: Path of the layer or operation that keeps them.
        reason: Why.
        numbers: The channels.
    """

    place: str
    reason: str
    numbers: np.ndarray


@dataclass(frozen=True, eq=False)
class Rescale:
    """A weight that is multiplied by (length of the axis / kept indices) ** `power`, after `offset` was added.

    The offset is subtracted again: a layer that multiplies by 1 + weight has the offset 1.
    """

    variable: Any
    channels: np.ndarray
    power: float
    offset: float = 0.0


@dataclass(frozen=True, eq=False)
class Approximated:
    """A normalization over channels that can be removed: afterwards its statistics are those of the kept channels.

    Attributes:
        layer: The normalization.
        place: Path of the layer.
        axis: The axis of the channels.
        channels: The channels.
    """

    layer: Any
    place: str
    axis: int
    channels: np.ndarray


class Links:
    """The channels of a model's weights and tensors, and what ties them together.

    Args:
        approximate: Names of the approximations that are allowed.

    Attributes:
        approximate: The same names.
        approximated: The layers that are approximated.
        size: How many channels were numbered so far.
        edges: Pairs of arrays of channels that are the same channels.
        walls: Channels that must stay, with reasons.
        weights: id of a variable -> its axes.
        resized: id of a layer or operation -> {argument: value with sizes}.
        rescaled: Weights whose values change with the number of kept channels.
        even: Arrays of shape (parts, channels): each part loses as many channels as the others.
        inner: id of a wrapper -> {argument: the layer inside it}.
        titles: First channel of a group -> name of the group.
    """

    def __init__(self, approximate: Sequence[str] = ()) -> None:
        self.approximate = frozenset(approximate)
        self.approximated: list[Approximated] = []
        self.size = 1
        self.edges: list[tuple[np.ndarray, np.ndarray]] = []
        self.walls: list[Wall] = []
        self.weights: dict[int, WeightAxes] = {}
        self.resized: dict[int, dict[str, Any]] = {}
        self.rescaled: list[Rescale] = []
        self.even: list[np.ndarray] = []
        self.inner: dict[int, dict[str, Any]] = {}
        self.titles: dict[int, str] = {}
        self._places: list[str] = []
        self._rigid: list[tuple[str, str]] = []
        self._fixed: list[tuple[Any, int, str]] = []

    # ---- where the walk is -------------------------------------------------------------------------------------------

    @property
    def place(self) -> str:
        """Path of the layer or operation that is followed now."""
        return "/".join(self._places)

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """Adds a name to the path of the present place."""
        self._places.append(name)
        try:
            yield
        finally:
            self._places.pop()

    @contextmanager
    def all_channels_fixed(self, reason: str) -> Iterator[None]:
        """Keeps every channel of the weights and sizes that are met inside the scope."""
        self._rigid.append((self.place, reason))
        try:
            yield
        finally:
            self._rigid.pop()

    # ---- channels ----------------------------------------------------------------------------------------------------

    def weight(self, variable: Any, axis: int) -> np.ndarray:
        """Returns the channels of an axis of a weight, the same ones at each call."""
        axis %= len(variable.shape)
        known = self._axes_of(variable).channels
        if axis not in known:
            known[axis] = self.new(variable.shape[axis])
        return known[axis]

    def new(self, length: int) -> np.ndarray:
        """Returns new channels for an axis."""
        numbers = np.arange(self.size, self.size + length)
        self.size += length
        self._keep_rigid(numbers)
        return numbers

    def bind(self, variable: Any, axis: int, numbers: Numbers) -> None:
        """States that the indices of a weight's axis belong to these channels; without channels, that they stay."""
        if variable is not None and numbers is not None:
            self.tie(self.weight(variable, axis), numbers)
        elif variable is not None:
            self._fixed.append((variable, axis % len(variable.shape), self.place))

    def keep_fixed(self) -> None:
        """Keeps the channels of axes that another call of the layer meets without channels; called at the end."""
        for variable, axis, place in self._fixed:
            axes = self.weights.get(id(variable))
            if axes is not None and axis in axes.channels:
                reason = "another call of the layer has inputs of fixed length"
                self.walls.append(Wall(place, reason, axes.channels[axis].reshape(-1)))

    def bind_groups(self, variable: Any, axis: int, numbers: np.ndarray, groups: int) -> None:
        """States that each group of output units has its own inputs at a weight's axis.

        Args:
            variable: The weight.
            axis: Its input axis.
            numbers: Channels of all inputs, group after group.
            groups: How many groups.
        """
        axes = self._axes_of(variable)
        axis %= len(variable.shape)
        matrix = numbers.reshape(groups, -1)
        if axis in axes.channels:
            self.tie(axes.channels[axis].reshape(-1), numbers)
            return
        self.weights[id(variable)] = replace(axes, channels={**axes.channels, axis: matrix}, groups=groups)
        self._keep_rigid(numbers)

    def _axes_of(self, variable: Any) -> WeightAxes:
        if id(variable) not in self.weights:
            self.weights[id(variable)] = WeightAxes(variable, f"{self.place}/{variable.name}".lstrip("/"))
        return self.weights[id(variable)]

    def tie(self, numbers: Numbers, others: Numbers, reason: str = "joined with an axis of fixed length") -> Numbers:
        """States that two axes have the same channels, and returns them; an axis without channels keeps the other."""
        if numbers is None or others is None:
            self.keep(numbers, reason)
            self.keep(others, reason)
            return None
        self.edges.append((numbers.reshape(-1), others.reshape(-1)))
        return numbers

    def keep(self, numbers: Numbers, reason: str) -> None:
        """States that channels must stay."""
        if numbers is not None and numbers.size:
            self.walls.append(Wall(self.place, reason, numbers.reshape(-1)))

    def _keep_rigid(self, numbers: np.ndarray) -> None:
        """Keeps channels that are met inside such a scope; the outermost layer is the place."""
        if self._rigid and numbers.size:
            self.walls.append(Wall(*self._rigid[0], numbers.reshape(-1)))

    def name(self, numbers: np.ndarray, title: str) -> None:
        """Names a group of channels of the present layer, where a layer has several."""
        self.titles[int(numbers[0])] = f"{self.place} ({title})"

    def stay(self, reason: str) -> None:
        """States why the present layer keeps its size, for the report."""
        self.walls.append(Wall(self.place, reason, np.zeros(0, int)))

    def keep_all(self, axes: Sequence[Axes], reason: str) -> None:
        """States that all channels of some tensors must stay."""
        for one in axes:
            for numbers in one.channels:
                self.keep(numbers, reason)

    def evenly(self, numbers: Numbers, parts: int) -> None:
        """States that each of `parts` equal runs of channels loses as many channels as the others."""
        if numbers is not None and parts > 1:
            self.even.append(numbers.reshape(parts, -1))

    # ---- what else depends on the kept channels ----------------------------------------------------------------------

    def resize(self, operation: Any, **arguments: Any) -> None:
        """States that arguments of a layer or operation depend on the kept channels."""
        self.resized.setdefault(id(operation), {}).update(arguments)
        for numbers in depends_on(arguments) if self._rigid else ():
            self._keep_rigid(numbers)

    def rescale(self, variable: Any, numbers: np.ndarray, power: float, offset: float = 0.0) -> None:
        """States that a weight plus `offset` is multiplied by (length / kept) ** `power`; once for each weight."""
        if variable is not None and all(one.variable is not variable for one in self.rescaled):
            self.rescaled.append(Rescale(variable, numbers, power, offset))

    def approximated_at(self, layer: Any, axis: int, numbers: np.ndarray) -> None:
        """States that a normalization computes its statistics over these channels, of which some may be removed."""
        self.approximated.append(Approximated(layer, self.place, axis, numbers))

    def contain(self, wrapper: Any, **layers: Any) -> None:
        """States which arguments of a wrapper are layers inside it."""
        self.inner.setdefault(id(wrapper), {}).update(layers)

    # ---- shapes ------------------------------------------------------------------------------------------------------

    def reshaped(self, x: Axes, shape: Sequence[int | None]) -> Axes:
        """Returns the axes of a tensor after a reshape (row-major, as in Keras)."""
        shape = tuple(shape)
        found: list[Numbers] = [None] * len(shape)
        known = [math.prod(n for n in one if n is not None) for one in (x.shape, shape)]
        if known[0] != known[1]:
            # An open length takes part: channels become examples, or the other way round.
            self.keep_all([x], "reshaped together with an axis of unknown length")
            return Axes.fixed(shape)
        begin, shorter = 0, min(len(x.shape), len(shape))
        while begin < shorter and x.shape[begin] == shape[begin]:
            found[begin] = x.channels[begin]
            begin += 1
        end = 0
        while end < shorter - begin and x.shape[-1 - end] == shape[-1 - end]:
            found[-1 - end] = x.channels[-1 - end]
            end += 1
        before: Any = x.shape[begin : len(x.shape) - end]
        after: Any = shape[begin : len(shape) - end]
        channels = x.channels[begin : len(x.shape) - end]
        if None in before or None in after:
            self.keep_all([Axes(before, channels)], "reshaped together with an axis of unknown length")
        elif any(numbers is not None for numbers in channels):
            for ones, others in blocks(before, after):
                made = self._block([channels[i] for i in ones], [before[i] for i in ones], [after[i] for i in others])
                for position, numbers in zip(others, made, strict=True):
                    found[begin + position] = numbers
        return Axes(shape, tuple(found), x.zero)

    def _block(self, channels: list[Numbers], before: list[Any], after: list[int]) -> list[Numbers]:
        """Returns the channels of the axes that a block of axes becomes."""
        carrying = [axis for axis, numbers in enumerate(channels) if numbers is not None]
        made: list[Numbers] = [None] * len(after)
        if not carrying:
            return made
        # Of two axes with channels that become one, the longer one can lose channels.
        axis = max(carrying, key=lambda one: before[one])
        for other in carrying:
            if other != axis:
                self.keep(channels[other], "merged with another axis of channels")
        numbers: Any = channels[axis]
        if not after:
            self.keep(numbers, "reshaped away")
            return made
        whole = np.broadcast_to(numbers.reshape([-1 if i == axis else 1 for i in range(len(before))]), before)
        chosen, entries = split_axis(whole.reshape(-1), after)
        if entries.shape[1] > 1:
            self.tie(np.repeat(entries[:, 0], entries.shape[1] - 1), entries[:, 1:].reshape(-1))
        made[chosen] = entries[:, 0]
        return made

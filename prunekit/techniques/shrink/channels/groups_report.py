"""The report of a model's channels: which weights shrink together, what stays and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from prunekit.anatomy.channels.channels import Channels, Group, Stop, find_channels
from prunekit.anatomy.layers.model_weights import weights_in
from prunekit.anatomy.records.display import Displayed, data_frame
from prunekit.anatomy.records.sections import Column, Section, Value
from prunekit.techniques.shrink.channels.options import approximations
from prunekit.techniques.shrink.channels.shrink_report import stop_line, stops_section


@dataclass(frozen=True)
class GroupAxis:
    """One axis of one weight that a group shrinks.

    Attributes:
        weight: Name of the weight.
        axis: The axis.
        shape: Shape of the weight.
    """

    weight: str
    axis: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that are removed from the same axes of the same weights.

    Attributes:
        name: Name of the layer that computes the channels, made unique.
        channels: Number of channels.
        parts: Number of equal runs of channels that lose as many channels each; 1 except for grouped convolutions.
        axes: The axes that shrink when a channel is removed.
    """

    name: str
    channels: int
    parts: int
    axes: tuple[GroupAxis, ...]


@dataclass(frozen=True)
class GroupsReport(Displayed):
    """The channels of a model, as `pk.shrink` removes them.

    Attributes:
        model_name: Name of the model.
        groups: The groups of channels that can be removed.
        skipped: What keeps the other channels, with reasons.
    """

    derived: ClassVar = ("channels",)

    model_name: str
    groups: tuple[ChannelGroup, ...]
    skipped: tuple[Stop, ...] = ()

    @property
    def channels(self) -> int:
        """Number of channels in all groups."""
        return sum(group.channels for group in self.groups)

    def verdict(self) -> str:
        """Returns one sentence: how many channels can be removed."""
        return f"{self.channels:,} channels in {len(self.groups)} groups can be removed."

    def sections(self) -> tuple[Section, ...]:
        """Returns the report as sections: the groups, and the channels that stay."""
        return self._groups_section(), stops_section(self.skipped)

    def _groups_section(self) -> Section:
        parted = any(group.parts > 1 for group in self.groups)
        columns = (
            Column("Group", "name"),
            Column("Channels", "count"),
            *([Column("Parts", "count", keep=4)] if parted else []),
            Column("Axes", "count", keep=3),
            Column("Kernels (axis)", "names", keep=5),
        )
        rows: list[tuple[Value, ...]] = [
            (group.name, group.channels, *([group.parts] if parted else []), len(group.axes), _kernels(group))
            for group in self.groups
        ]
        total = (
            "All groups",
            self.channels,
            *([None] if parted else []),
            sum(len(one.axes) for one in self.groups),
            "",
        )
        notes = () if rows else ("No channels can be removed.",)
        return Section(
            "Groups of channels",
            columns,
            tuple(rows),
            total if rows else (),
            explanation="A group holds channels that occur in the same axes of the same weights: with each channel, "
            "all these axes lose an entry. The last column names the weights that have several axes, with the axis "
            "that shrinks; biases and normalizations are counted as axes only.",
            notes=notes,
        )

    def to_dataframe(self) -> Any:
        """Returns one row for each axis of each group as a `pandas.DataFrame`, indexed by the group's name.

        Raises:
            ImportError: pandas is not installed.
        """
        rows = [
            {"group": group.name, "channels": group.channels, "parts": group.parts, **asdict(axis)}
            for group in self.groups
            for axis in group.axes
        ]
        return data_frame(rows, "group")

    def __str__(self) -> str:
        lines = [f"{self.model_name}: {len(self.groups)} groups with {self.channels:,} channels"]
        for group in self.groups:
            parts = f" in {group.parts} parts" if group.parts > 1 else ""
            lines.append(f"  {group.name}: {group.channels} channels{parts}, {len(group.axes)} axes")
        return "\n".join([*lines, *(f"  stays: {stop_line(stop)}" for stop in self.skipped)])


def _kernels(group: ChannelGroup) -> tuple[str, ...]:
    """Returns the weights with several axes, or all weights of a group without such, each with its axes."""
    axes: dict[str, list[int]] = {}
    kernels = [one for one in group.axes if len(one.shape) > 1]
    for one in kernels or group.axes:
        axes.setdefault(one.weight, []).append(one.axis)
    return tuple(f"{weight} ({' and '.join(map(str, sorted(found)))})" for weight, found in axes.items())


def channel_groups(model: Any, approximate: Sequence[str] | str = ()) -> GroupsReport:
    """Returns the groups of channels that `pk.shrink` can remove from a model, and why other channels stay.

    Args:
        model: A built Keras model; it is not changed.
        approximate: Approximations that are allowed, as for `pk.shrink`.

    Raises:
        TypeError: `model` is not a Keras 3 model.
        ValueError: An approximation is not known; the model is not built; it has no graph, and its `call` cannot be
            followed.
    """
    found = find_channels(model, approximations(approximate))
    shapes = _shapes(found)
    groups = tuple(_described(group, shapes) for group in found.groups)
    return GroupsReport(model.name, groups, found.stops)


def _described(group: Group, shapes: dict[str, tuple[int, ...]]) -> ChannelGroup:
    axes = tuple(GroupAxis(member.weight, member.axis, shapes[member.weight]) for member in group.members)
    return ChannelGroup(group.name, group.channels.size, group.parts, axes)


def _shapes(found: Channels) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each weight by the name that the groups give it."""
    known = {one.name: tuple(one.shape) for one in weights_in(found.model)}
    return {axes.name: tuple(axes.variable.shape) for axes in found.links.weights.values()} | known

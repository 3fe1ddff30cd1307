"""The report of a removal of channels: what shrank, what stayed and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from prunekit.anatomy.channels.channels import Stop
from prunekit.anatomy.records.damage import Damage
from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.reports import Choice, choices_sections
from prunekit.anatomy.records.sections import Column, Picture, Section, Value, largest_by
from prunekit.techniques.shrink.channels.measured_size import Measured
from prunekit.techniques.shrink.channels.repair import RepairError
from prunekit.techniques.shrink.graph.adjustments import Adjustment, adjustments_section

# Place of the stops at the outputs of a model, which have no path.
OUTPUTS = "outputs"
# Title of the section with the bytes or the latency.
MEASURED_SIZE = "Measured size"


@dataclass(frozen=True)
class ShrunkGroup:
    """One group of channels.

    Attributes:
        name: Name of the layer that computes the channels.
        before: Number of channels before.
        after: Number of channels after.
        axes: In how many axes of weights the channels occur.
        kept: Former indices of the kept channels, in their order in the layer that computes them.
        reason: Why all channels stayed; "" for a group that may shrink.
    """

    name: str
    before: int
    after: int
    axes: int
    kept: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True)
class ShrinkReport(Displayed):
    """What `pk.shrink` did.

    Attributes:
        model_name: Name of the model.
        parameters: Number of parameters (before, after).
        macs: Multiply-accumulates of one example (before, after); None where they are not known.
        groups: The groups of channels.
        skipped: What keeps channels that no group has, with reasons.
        errors: Error of each layer's outputs on the calibration data, before and after the repair.
        adjustments: Changes of layers that keep the outputs as they are, exact and approximate.
        notes: Remarks.
        kept: Weight name -> {axis: former indices of the kept entries}, for every weight that lost entries; at the
            input axis of a grouped convolution one row of indices for each group.
        measured: Bytes or latency before and after, for a target in one of them.
        choices: Options that were "auto".
        damage: What the removal did to metrics and outputs on the data; None without data.
    """

    main_items: ClassVar = "groups"

    model_name: str
    parameters: tuple[int, int]
    macs: tuple[int | None, int | None]
    groups: tuple[ShrunkGroup, ...]
    skipped: tuple[Stop, ...] = ()
    errors: tuple[RepairError, ...] = ()
    adjustments: tuple[Adjustment, ...] = ()
    notes: tuple[str, ...] = ()
    kept: Mapping[str, Mapping[int, np.ndarray]] = field(default_factory=dict)
    measured: Measured | None = None
    choices: tuple[Choice, ...] = ()
    damage: Damage | None = None

    @property
    def channels(self) -> tuple[int, int]:
        """Number of channels in all groups (before, after)."""
        return sum(group.before for group in self.groups), sum(group.after for group in self.groups)

    @property
    def approximations(self) -> tuple[Adjustment, ...]:
        """The adjustments that are not exact."""
        return tuple(one for one in self.adjustments if one.error is not None)

    def sections(self) -> tuple[Section, ...]:
        """Returns the report as sections: groups, what stays, adjustments, the measured size, errors of the repair."""
        found = [groups_section(self.groups), stops_section(self.skipped), *choices_sections(self.choices)]
        if self.damage is not None:
            found.append(self.damage.section())
        if self.adjustments:
            found.append(adjustments_section(self.adjustments))
        if self.measured is not None:
            found.append(_measured_section(self.measured))
        if self.errors:
            found.append(_errors_section(self.errors))
        return tuple(found)

    def verdict(self) -> str:
        """Returns one sentence: parameters, multiply-accumulates, channels and the measured size that are left."""
        left = [_left("parameters", self.parameters), _left("MACs", self.macs)]
        left += [f"{self.channels[1]:,} of {self.channels[0]:,} channels"]
        left += [] if self.measured is None else [str(self.measured)]
        return f"{', '.join(left)} are left."

    def __str__(self) -> str:
        lines = [f"{self.model_name}: {self.verdict()}"]
        lines += [f"  {group.name}: {group.before} -> {group.after} channels" for group in self.groups]
        lines += [f"  stays: {stop_line(stop)}" for stop in self.skipped]
        lines += [f"  adjusted: {adjustment}" for adjustment in self.adjustments]
        lines += [f"  {choice}" for choice in self.choices]
        if self.damage is not None:
            lines.append(f"  on {self.damage.examples:,} examples of the data: {self.damage}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def _left(name: str, pair: Sequence[int | None]) -> str:
    before, after = pair
    if not before or after is None:
        return f"an unknown number of {name}"
    return f"{after:,} of {before:,} {name} ({after / before:.3f})"


def stop_line(stop: Stop) -> str:
    """Returns a stop as a line: place, reason and number of channels."""
    return f"{stop.name or OUTPUTS}: {stop.reason} ({stop.channels:,} channels)"


def groups_section(groups: Sequence[ShrunkGroup]) -> Section:
    """Returns a table of the groups with their sizes before and after, and a picture."""
    limited = any(group.reason for group in groups)
    columns = (
        Column("Group", "name"),
        Column("before", "count", group="Channels"),
        Column("after", "count", group="Channels"),
        Column("Axes", "count", keep=3),
        *([Column("Stays whole because", "text", keep=5)] if limited else []),
    )
    rows: list[tuple[Value, ...]] = [
        (group.name, group.before, group.after, group.axes, *([group.reason] if limited else [])) for group in groups
    ]
    before, after = sum(group.before for group in groups), sum(group.after for group in groups)
    total: tuple[Value, ...] = (
        "All groups",
        before,
        after,
        sum(group.axes for group in groups),
        *([""] if limited else []),
    )
    return Section(
        "Groups of channels",
        columns,
        tuple(rows),
        total if rows else (),
        explanation="A group holds channels that occur in the same axes of the same weights. It has the name of the "
        "layer that computes them; with each channel, all these axes lose an entry.",
        pictures=(_groups_picture(groups),) if groups else (),
    )


def _groups_picture(groups: Sequence[ShrunkGroup]) -> Picture:
    """Returns a picture with a bar for each group, or for each of the largest groups, in the model's order."""
    shown = largest_by(groups, lambda group: group.before)
    which = f"The {len(shown)} largest of {len(groups)} groups" if len(shown) < len(groups) else "All groups"
    before, after = sum(group.before for group in groups), sum(group.after for group in groups)
    return Picture(
        "Channels before and after",
        f"{which}, in the model's order. Grey: before; blue: after.",
        f"Bars of {len(shown)} groups: {before} channels before, {after} after; the table has the figures.",
        "channels",
        {"groups": [{"name": one.name, "before": one.before, "after": one.after} for one in shown]},
        wide=True,
    )


def stops_section(stops: Sequence[Stop]) -> Section:
    """Returns a table of what keeps channels, with reasons."""
    rows = [(stop.name or OUTPUTS, stop.channels, stop.reason, stop.layers) for stop in stops]
    columns = (
        Column("At", "name"),
        Column("Channels", "count"),
        Column("Reason", "text"),
        Column("Channels of", "names", keep=3),
    )
    return Section(
        "Channels that stay",
        columns,
        tuple(rows),
        explanation="Where channels stop: what keeps them, how many, and the layers that compute them. The other "
        "channels of these layers may be in a group.",
        notes=() if rows else ("No channels stay.",),
    )


def _measured_section(measured: Measured) -> Section:
    """Returns a table of the measured size before and after; of a noisy one also the interval of the share."""
    sizes = (Column("before", "number", group="Size"), Column("after", "number", group="Size"))
    columns = [Column("Measured", "label"), Column("Unit", "label"), *sizes, Column("left", "number", group="Share")]
    row: list[Value] = [measured.name, measured.unit, measured.before, measured.after, round(measured.share, 4)]
    bounds = ""
    if measured.noise:
        columns += [Column("from", "number", group="Share"), Column("to", "number", group="Share")]
        row += [round(bound, 4) for bound in measured.interval]
        bounds = "The share lies between its two bounds with a confidence of 95 %. "
    models = f"Smaller models that were measured for the target: {measured.models}."
    return Section(MEASURED_SIZE, tuple(columns), (tuple(row),), explanation=f"{measured.setting}. {bounds}{models}")


def _errors_section(errors: Sequence[RepairError]) -> Section:
    columns = (
        Column("Weight", "name"),
        Column("before the repair", "number", group="Error"),
        Column("after", "number", group="Error"),
    )
    rows = tuple((error.weight, error.before, error.after) for error in errors)
    return Section(
        "Errors of the layers",
        columns,
        rows,
        explanation="Squared change of a layer's outputs on the calibration data, relative to the squared outputs: "
        "with the kept weights as they were, and with the repaired ones.",
    )

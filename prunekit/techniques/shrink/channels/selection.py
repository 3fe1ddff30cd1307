"""Selects the channels that are removed: importances, the order of removal, and how far it goes to reach a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from prunekit.anatomy.channels.channel_order import Order
from prunekit.anatomy.channels.channels import Channels, Group, Member
from prunekit.anatomy.channels.weight_entries import by_channel
from prunekit.anatomy.layers.model_weights import weights_in
from prunekit.anatomy.layers.targets import find_targets
from prunekit.core.layerwise.layerwise import Progress
from prunekit.core.statistics.channel_importance import GroupImportance, entry_scores, reasons_to_stay
from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.scores import Criterion, get_criterion
from prunekit.techniques.shrink.channels.budget import SizeModel
from prunekit.techniques.shrink.channels.measured_size import Measure, Measured, Search, slack
from prunekit.techniques.shrink.channels.options import ShrinkOptions, SizeTarget
from prunekit.techniques.shrink.graph.rebuild import without_channels

# Weights with several axes that only scale, shift or filter a channel by itself.
_WITHIN_CHANNEL = ("depthwise_kernel", "bias", "normalization", "other")


@dataclass(frozen=True, eq=False)
class Selection:
    """Channels that are removed.

    Attributes:
        order: The order of removal.
        counts: How many units each group loses, before they are rounded to the multiple.
        measured: The measured size, for a target that is measured.
    """

    order: Order
    counts: np.ndarray
    measured: Measured | None = None

    @cached_property
    def removed(self) -> np.ndarray:
        """The channels that are removed."""
        return self.order.removed(self.counts)


class Selector:
    """Selects channels of a model.

    Args:
        found: The channels of the model.
        options: Which channels may be removed; criterion and allocation are those of `select`.
        data: Calibration data for criteria that read them, or None.
        inputs: As for `pk.shrink`.
        measure: How models are measured, for a target that is not calculated.
        progress: Told of each measured model.

    Attributes:
        budget: What the model costs without some channels.
        reasons: For each group why all its channels stay, or "".
        zero: The channels whose kernels are zero.

    Raises:
        ValueError: All channels stay.
    """

    def __init__(
        self,
        found: Channels,
        options: ShrinkOptions,
        data: Any,
        *,
        inputs: Any = None,
        measure: Measure | None = None,
        progress: Progress | None = None,
    ):
        self._found, self._options, self._data = found, options, data
        self._measure, self._progress = measure, progress or (lambda done, total, text: None)
        self.budget = SizeModel(found, inputs)
        self.reasons = reasons_to_stay(found, options.include, options.exclude)
        self.zero = zero_channels(found)
        self._importances: dict[str, list[np.ndarray]] = {}

    def zero_channels(self) -> Selection:
        """Returns the channels whose kernels are zero."""
        order = self._order([~np.isin(group.channels, self.zero) for group in self._found.groups], "uniform")
        return Selection(order, order.unimportant())

    def keeping(self, counts: Mapping[str, int], criterion: str | Criterion) -> Selection:
        """Returns the selection by a criterion that leaves each group so many units; other groups stay whole."""
        order = self._order(self._importance(get_criterion(criterion)), "uniform")
        sizes = order.sizes
        free = [group for group, reason in zip(self._found.groups, self.reasons, strict=True) if not reason]
        lost = [size - counts.get(group.name, size) for group, size in zip(free, sizes, strict=True)]
        return Selection(order, np.array(lost, int))

    def select(self, target: SizeTarget, criterion: str | Criterion, allocation: str) -> Selection:
        """Returns the selection by a criterion and an allocation of which the target's share is left.

        Raises:
            ValueError: The target cannot be reached: the message has the reachable range.
        """
        key = str(criterion)
        if key not in self._importances:
            self._importances[key] = self._importance(get_criterion(criterion))
        order = self._order(self._importances[key], allocation)
        if self._measure is None:
            return Selection(order, _counts(order, self.budget, target, self._options))
        return Selection(order, *self._nearest(order, target, self._measure))

    def _importance(self, criterion: Criterion) -> list[np.ndarray]:
        scores = entry_scores(self._found, criterion, self._data if criterion.needs else None)
        return GroupImportance(self._options.reduction, self._options.normalize).of(self._found, scores)

    def _order(self, values: Sequence[np.ndarray], allocation: str) -> Order:
        free = [index for index, reason in enumerate(self.reasons) if not reason]
        groups: list[Group] = [self._found.groups[i] for i in free]
        given = [np.asarray(values[i], "float64") for i in free]
        options = self._options
        return Order(groups, given, allocation, minimum=options.minimum, multiple=options.multiple)

    def _nearest(self, order: Order, target: SizeTarget, measure: Measure) -> tuple[np.ndarray, Measured]:
        """Returns how many units each group loses, and the measured size."""
        return Search(
            order,
            target,
            self._options.tolerance,
            _predicted(self.budget, measure),
            lambda removed: measure.compare(without_channels(self._found, removed)[0]),
            self._progress,
        ).nearest()


def _predicted(budget: SizeModel, measure: Measure) -> Callable[[np.ndarray], float]:
    """Returns the calculated size that the measured one follows."""
    if measure.follows == "macs" and budget.macs(np.zeros(0, int)) is not None:
        return budget.macs_without
    return budget.parameters_without


def _counts(order: Order, budget: SizeModel, target: SizeTarget, options: ShrinkOptions) -> np.ndarray:
    """Returns how many units each group loses."""
    name, share = target.measure, target.share
    if not order.length and share < 1 and options.tolerance is not None:
        raise ValueError(
            f"With minimum={options.minimum} and multiple={options.multiple}, no channel can be removed. Received: "
            f"{name}={share:g}. Pass smaller ones."
        )
    if name == "channels":
        asked = round((1 - share) * order.total)
        if asked > order.length and options.tolerance is not None:
            raise ValueError(
                f"The groups have {order.total} channels, and {order.total - order.length} of them stay at least "
                f"(minimum={options.minimum}). Received: channels={share:g}. The reachable range is "
                f"{1 - order.length / order.total:.3f} to 1."
            )
        return order.first(min(asked, order.length))
    measure = {"parameters": budget.parameters_without, "macs": budget.macs_without}[name]
    whole = measure(np.zeros(0, int))
    tolerance = options.tolerance
    counts = order.nearest(measure, share * whole, slack(tolerance) * share * whole)
    reached = measure(order.removed(counts)) / whole
    # Rounded up to a multiple, the steps may be larger than the tolerance.
    coarse = options.multiple > 1 and counts.sum() < order.length
    if tolerance is not None and abs(reached - share) > tolerance * share and not coarse:
        least = measure(order.removed(order.first(order.length))) / whole
        raise ValueError(
            f"{name}={share:g} cannot be reached within {tolerance:.0%}. Received: a model of which {reached:.3f} is "
            f"left at the nearest: pass {name}={reached:.3f}. The reachable range is "
            f"{least:.3f} to 1; channels that cannot be removed are in `prunekit inspect --groups` (pk.channel_groups)."
        )
    return counts


def zero_channels(channels: Channels) -> np.ndarray:
    """Returns the channels of all groups whose producing kernels are entirely zero.

    Such a channel has the same value for every input: 0, or a constant from biases and normalizations. Where several
    layers compute a channel together, as in a residual sum, the kernels of all of them must be zero. A depthwise kernel
    reads the channel itself, and may have any values.
    """
    axes = {target.name: target.out_axes for target in find_targets(channels.model)[0]}
    named = {weight.name: weight for weight in weights_in(channels.model)}
    found = [
        _zero_in(group, [_producing(member, axes, named) for member in group.members]) for group in channels.groups
    ]
    return np.concatenate(found) if found else np.zeros(0, int)


def _producing(member: Member, axes: dict[str, tuple[int, ...]], named: dict[str, Any]) -> Any:
    """Returns the variable if the weight may compute the channels at this axis; else None."""
    weight = named.get(member.weight)
    if weight is None:
        return None
    if member.weight in axes:
        return weight.variable if member.axis in axes[member.weight] else None
    # How a layer that prunekit does not know uses a weight is not known.
    known = weight.spec is not None and weight.spec.role in _WITHIN_CHANNEL
    return None if known or len(weight.variable.shape) < 2 else weight.variable


def _zero_in(group: Group, producers: Sequence[Any]) -> np.ndarray:
    if all(variable is None for variable in producers):
        return np.zeros(0, int)
    nonzero = [
        member.channels.reshape(-1)[(by_channel(array_of(variable), member.axis, member.channels) != 0).any(axis=1)]
        for member, variable in zip(group.members, producers, strict=True)
        if variable is not None
    ]
    return group.channels[~np.isin(group.channels, np.concatenate(nonzero))]

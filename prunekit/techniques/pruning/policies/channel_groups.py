"""ChannelGroups: the policy that masks whole channels, in every weight in which they occur."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from keras import ops

from prunekit.anatomy.channels.channel_order import Order
from prunekit.anatomy.channels.channels import Channels, find_channels
from prunekit.anatomy.channels.weight_entries import by_channel, masked
from prunekit.anatomy.layers.targets import Target, find_targets, targets_named
from prunekit.anatomy.records.reports import Skipped
from prunekit.core.runtime import backend
from prunekit.core.statistics.channel_importance import GroupImportance, ranked_weights, reasons_to_stay, scores_of
from prunekit.sparsity.allocation import Global, Uniform
from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.patterns import Unstructured
from prunekit.sparsity.schedules import Schedule
from prunekit.sparsity.scores import get_criterion
from prunekit.sparsity.shorthands import sources_of
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.masks.policy import MaskPolicy, MaskRequest, MaskUpdate


@dataclass(frozen=True)
class ChannelGroups(MaskPolicy):
    """Masks the least important channels in every weight in which they occur; masked channels stay masked.

    Kernels that compute a channel, their biases, the normalizations after them and the kernels that read the channel
    become zero together, in all layers that must have the same channels (docs/shrinking.md). The channel is then zero
    in training and in inference, and `pk.shrink(model, channels="nonzero")` removes it without a change of the outputs.

    The sparsity is that of all masked weights, reached to the nearest whole channel. With the allocation "uniform" each
    group loses the same share of its channels, with "global" all groups compete.

    Args:
        reduction: How the weights that a channel occurs in are reduced to one importance: "mean", "sum" or "max".
        normalize: Whether each weight of a group counts alike.
    """

    reduction: str = "mean"
    normalize: bool = True

    # Single zeros of biases and normalizations are no masks. Channels that are zero throughout stay masked.
    keeps_zeros: ClassVar[bool] = False

    def __post_init__(self) -> None:
        GroupImportance(self.reduction, self.normalize)

    def check(self, schedule: Schedule, options: PruningOptions) -> Schedule:
        """Returns the schedule unchanged.

        Raises:
            ValueError: An option belongs to masks of single weights, or the criterion reads updates or changes weights.
        """
        criterion = get_criterion(options.criterion)
        refused = {
            f"pattern={options.pattern}": not isinstance(options.pattern, Unstructured),
            f"allocation={options.allocation}": options.allocation not in (Uniform(), Global()),
            "overrides": bool(options.overrides),
            "bounds": bool(options.bounds),
            "keep_zeros=True": options.keep_zeros,
            "keep_one=False": not options.keep_one,
            f"criterion={criterion}": "training" in sources_of(criterion.needs)
            or criterion.reconstructs
            or criterion.rounds > 1,
        }
        received = [name for name, wrong in refused.items() if wrong]
        if received:
            raise ValueError(
                "The policy channel_groups masks whole channels, with the allocations uniform and global, and ranks "
                f"them by a criterion of weights or data. Received: {', '.join(received)}. Leave it out, or choose "
                "another policy."
            )
        return schedule

    def select(
        self, model: Any, options: PruningOptions, *, training: bool = False
    ) -> tuple[list[Target], list[Skipped]]:
        """Returns (every weight that channels can be removed from, the other weights with reasons)."""
        channels = find_channels(model)
        reasons = _reasons(channels, options)
        free = [group for group, reason in zip(channels.groups, reasons, strict=True) if not reason]
        names = {member.weight for group in free for member in group.members}
        targets = targets_named(model, names)
        others, skipped = find_targets(model, also=("depthwise_kernel",), training=True)
        whole = [Skipped(one.name, "no channel of it can be removed") for one in others]
        return targets, [one for one in (*whole, *skipped) if one.name not in names]

    def calculator(
        self, model: Any, targets: Sequence[Target], options: PruningOptions, final_sparsity: float
    ) -> "GroupCalculator":
        """Returns the calculator of masks of whole channels.

        Raises:
            ValueError: The channels that can be removed have fewer entries.
        """
        return GroupCalculator(self, model, targets, options, final_sparsity)

    def update(self, request: MaskRequest) -> MaskUpdate:
        """Returns masks that are subsets of the current masks."""
        found: MaskUpdate = request.calculator.choose(request.sparsity, request.masks, request.statistics)
        return found


class GroupCalculator:
    """Calculates masks of whole channels for a given sparsity; changes no variable.

    Args:
        policy: The policy, with its options.
        model: The model.
        targets: Every weight that channels can be removed from.
        options: Pruning options.
        final_sparsity: Final sparsity of the schedule.

    Attributes:
        targets: The weights.
        scored: The kernels among them, which the criterion ranks.
        pattern: The pattern of the options.
        shares_known: False: the sparsity of each weight follows from the importances.
        once: Has no effect: masks are calculated by NumPy.

    Raises:
        ValueError: The channels that can be removed have fewer entries than the sparsity removes.
    """

    shares_known = False
    once = False

    def __init__(
        self,
        policy: ChannelGroups,
        model: Any,
        targets: Sequence[Target],
        options: PruningOptions,
        final_sparsity: float,
    ):
        self.targets = tuple(targets)
        self.criterion, self.pattern = get_criterion(options.criterion), options.pattern
        self._importance = GroupImportance(policy.reduction, policy.normalize)
        self._allocation = "global" if options.allocation == Global() else "uniform"
        self._channels = channels = find_channels(model)
        self._free = [i for i, reason in enumerate(_reasons(channels, options)) if not reason]
        ranked = {target.name for target in ranked_weights(model)[0]}
        self.scored = tuple(target for target in targets if target.name in ranked)
        self._size = sum(target.size for target in targets)
        order = self._order([np.zeros(group.channels.size) for group in channels.groups])
        most = 1 - self._kept(order.removed(order.first(order.length))) / self._size
        if final_sparsity > most:
            raise ValueError(
                f"Whole channels can be removed up to a sparsity of {most:.3f}, where one of each group is left. "
                f"Received: final sparsity {final_sparsity:g}. Ask for less, or choose another policy."
            )

    def fractions(self, sparsity: float, *_: Any) -> list[float]:
        """Returns the overall sparsity for each target."""
        return [sparsity] * len(self.targets)

    def only_kept_by_keep_one(self, sparsity: float, kept: np.ndarray) -> np.ndarray:
        """Returns False for each target: every group keeps a channel by itself."""
        return np.zeros(len(self.targets), bool)

    def choose(self, sparsity: float, masks: Sequence[Any], statistics: Sequence[Any] | None = None) -> MaskUpdate:
        """Returns the masks for an overall sparsity; channels removed by `masks` stay removed.

        Args:
            sparsity: Fraction of the targets' entries to remove, in [0, 1).
            masks: Current masks, one boolean tensor per target, True = kept.
            statistics: Statistics that the criterion needs, one entry per target of `scored`; None if it needs none.
        """
        weights = [array_of(backend.value_now(target.variable)) for target in self.targets]
        arrays = [array_of(mask) for mask in masks]
        scores = scores_of(self.criterion, self.scored, statistics)
        importances = self._importance.of(self._channels, scores)
        gone = self._gone(arrays) | self._gone([weight != 0 for weight in weights])
        for group, values in zip(self._channels.groups, importances, strict=True):
            values[gone[group.channels]] = -np.inf
        order = self._order(importances)
        counts = order.nearest(self._kept, (1 - sparsity) * self._size, 0.0)
        kept = self._channels.kept_numbers(order.removed(np.maximum(counts, self._units_gone(gone))))
        chosen = [self._mask(target, kept) for target in self.targets]
        leaks = [np.count_nonzero(weight[~mask]) for weight, mask in zip(weights, arrays, strict=True)]
        nans = [np.count_nonzero(np.isnan(scores[t.name])) if t.name in scores else 0 for t in self.targets]
        left = [np.count_nonzero(mask) for mask in chosen]
        return MaskUpdate(
            [ops.convert_to_tensor(mask) for mask in chosen], np.array(nans), np.array(leaks), np.array(left)
        )

    def _order(self, importances: Sequence[np.ndarray]) -> Order:
        groups = [self._channels.groups[i] for i in self._free]
        return Order(groups, [importances[i] for i in self._free], self._allocation)

    def _units_gone(self, gone: np.ndarray) -> list[int]:
        """Returns how many units each group has lost; one is left, even of a group that is zero throughout."""
        groups = (self._channels.groups[i] for i in self._free)
        return [min(int(gone[one.channels].sum()), one.channels.size - one.parts) // one.parts for one in groups]

    def _kept(self, removed: np.ndarray) -> int:
        """Returns the number of entries of the targets without some channels."""
        sizes = self._channels.sizes(self._channels.kept_numbers(removed))
        return sum(sizes[id(target.variable)] for target in self.targets)

    def _mask(self, target: Target, kept: np.ndarray) -> np.ndarray:
        return masked(np.ones(target.shape, bool), self._channels.links.weights[id(target.variable)], kept)

    def _gone(self, kept: Sequence[np.ndarray]) -> np.ndarray:
        """Returns True for each channel of which every entry of every target is False in `kept`."""
        present = np.zeros(self._channels.channel_of.size, bool)
        members = {target.name: array for target, array in zip(self.targets, kept, strict=True)}
        for i in self._free:
            for member in self._channels.groups[i].members:
                rows = by_channel(members[member.weight], member.axis, member.channels)
                present[member.channels.reshape(-1)[rows.any(axis=1)]] = True
        return ~present


def _reasons(channels: Channels, options: PruningOptions) -> list[str]:
    return reasons_to_stay(channels, options.include, options.exclude, training=True)

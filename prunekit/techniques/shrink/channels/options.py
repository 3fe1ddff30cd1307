"""Options of the removal of channels, shared by `shrink` and the recipe step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, TypedDict, get_args

from prunekit.anatomy.channels.channel_normalization import APPROXIMATIONS
from prunekit.anatomy.channels.channel_order import ALLOCATIONS
from prunekit.core.statistics.channel_importance import GroupImportance
from prunekit.sparsity.arguments import positive, whole
from prunekit.sparsity.automatic import AutomaticCriterion
from prunekit.sparsity.scores import Criterion, get_criterion
from prunekit.sparsity.shorthands import ChannelAllocation, CriterionName, Reduction, Repair, sources_of

REPAIRS = get_args(Repair)


class ShrinkKeywords(TypedDict, total=False):
    """Types of the keyword options of `shrink`; see `ShrinkOptions`."""

    criterion: CriterionName | Criterion | Callable[..., Any]
    reduction: Reduction
    normalize: bool
    allocation: Literal["auto"] | ChannelAllocation
    minimum: int
    multiple: int
    include: Sequence[str] | str
    exclude: Sequence[str] | str
    repair: Repair | None
    tolerance: float | None
    approximate: Sequence[str] | str


def approximations(given: Sequence[str] | str) -> tuple[str, ...]:
    """Returns the names of allowed approximations as a tuple.

    Raises:
        ValueError: A name is not known.
    """
    names = (given,) if isinstance(given, str) else tuple(given)
    for name in names:
        if name not in APPROXIMATIONS:
            raise ValueError(f"`approximate` takes names of {', '.join(APPROXIMATIONS)}. Received: {name!r}.")
    return names


@dataclass(frozen=True)
class SizeTarget:
    """How much of the model is left.

    Attributes:
        measure: One of `MEASURES`.
        share: Share of the measure that is left, in (0, 1].
    """

    measure: str
    share: float

    def __post_init__(self) -> None:
        share = float(positive(self.measure, self.share))
        if share > 1:
            counted = f"; for a count, pass its share of all {self.measure}" if isinstance(self.share, Integral) else ""
            hint = f" For {share:g} %, pass {share / 100:g}{counted}." if share <= 100 else ""
            raise ValueError(
                f"{self.measure} is the share that is left, in (0, 1]. Received: {self.measure}={self.share}.{hint}"
            )


@dataclass(frozen=True)
class KeptChannels:
    """How many channels of each group are left, as a search has chosen them.

    Attributes:
        counts: Name of a group -> number of its units that are left; other groups stay whole.
    """

    counts: Mapping[str, int]


@dataclass(frozen=True)
class ShrinkOptions:
    """Selection of the removed channels, and the repair.

    Args:
        criterion: Importance of single weights, as in `pk.prune`; a channel's is the mean over its entries. "auto":
            "l2" or "output_error".
        reduction: How the axes that a channel occurs in are reduced to one importance: "mean", "sum" or "max".
        normalize: True divides the importances of each axis by their mean over the group before the reduction, so that
            each weight counts alike, and large weights do not decide alone.
        allocation: "uniform": each group loses the same share; "per_kind": groups of the same kind compete; "global":
            all groups compete. "auto": "uniform" or "global". For criteria and allocations that are "auto", each is
            tried with the repair, and those are taken whose outputs are nearest to the model's; where nothing is
            repaired, for sizes that are measured, and for models of more than 5 million parameters: "l2" and "uniform".
        minimum: Smallest number of channels that a group keeps, in each part of a grouped convolution.
        multiple: Rounds the kept channels of each group up to a multiple, such as 8. A group of fewer channels stays
            whole.
        include: Names, globs or `re:` patterns of layers whose channels may be removed; empty = all.
        exclude: Names, globs or `re:` patterns of layers whose channels stay; overrides `include`.
        repair: "weights" fits the kept weights of each layer to its former outputs, "outputs" a scale and a bias for
            each output; both update moving statistics, and read synthetic inputs (random signals) without data. "none"
            changes nothing. None = "weights" with data or criterion="auto", "none" for criteria of untrained models,
            and for models of more than 50 million weights without data.
        tolerance: Largest difference from the share of parameters, multiply-accumulates, bytes or latency, relative to
            the share, that is not refused; more than 2 % is noted. None takes the nearest model.
        approximate: "layer_normalization" also removes channels of layer normalizations, which changes their
            statistics.
    """

    criterion: str | Criterion | Callable[..., Any] = "auto"
    reduction: str = "mean"
    normalize: bool = True
    allocation: str = "auto"
    minimum: int = 1
    multiple: int = 1
    include: Sequence[str] | str = ()
    exclude: Sequence[str] | str = ()
    repair: str | None = None
    tolerance: float | None = 0.1
    approximate: Sequence[str] | str = ()

    def __post_init__(self) -> None:
        for name, known in (("allocation", ("auto", *ALLOCATIONS)), ("repair", (None, *REPAIRS))):
            if getattr(self, name) not in known:
                listed = ", ".join(filter(None, known))
                hint = " It is now 'per_kind'." if getattr(self, name) == "alike" else ""
                raise ValueError(f"`{name}` is one of {listed}. Received: {getattr(self, name)!r}.{hint}")
        GroupImportance(self.reduction, self.normalize)
        object.__setattr__(self, "approximate", approximations(self.approximate))
        whole("minimum", self.minimum, 1)
        whole("multiple", self.multiple, 1)
        if self.tolerance is not None:
            positive("tolerance", self.tolerance)
        criterion = get_criterion(self.criterion)
        if "training" in sources_of(criterion.needs):
            raise ValueError(
                f"The criterion {criterion} needs a training, and channels are removed without one. Choose another "
                "criterion."
            )
        if criterion.rounds > 1:
            raise ValueError(
                f"Channels are selected once. Received: the criterion {criterion}, which selects in {criterion.rounds} "
                "rounds. Choose another criterion."
            )
        object.__setattr__(self, "criterion", criterion)

    @property
    def may_stand_in(self) -> bool:
        """True if synthetic inputs are read where no data were given."""
        return self.repair != "none" and (self.repair is not None or self.criterion == AutomaticCriterion())

    def repair_with(self, data: Any) -> str:
        """Returns the repair on these calibration data: one of `REPAIRS`.

        Raises:
            ValueError: A repair is asked for, and there are no data.
        """
        if data is None and self.repair in (None, "none"):
            return "none"
        if data is None:
            raise ValueError(
                f"A repair reads calibration data. Received: repair={self.repair!r} without data. Pass `data`."
            )
        return self.repair or ("none" if get_criterion(self.criterion).before_training else "weights")

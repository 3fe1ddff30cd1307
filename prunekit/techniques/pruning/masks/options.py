"""Pruning options shared by `PruningCallback`, `Pruner` and `prune`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral
from types import MappingProxyType
from typing import Any, TypedDict, cast

from prunekit.anatomy.records.name_patterns import listed_patterns
from prunekit.anatomy.records.reports import Choice
from prunekit.sparsity.allocation import Allocation, Uniform, get_allocation
from prunekit.sparsity.arguments import fraction
from prunekit.sparsity.automatic import AutomaticAllocation, AutomaticCriterion
from prunekit.sparsity.bounds import as_bounds
from prunekit.sparsity.patterns import NM, Pattern, get_pattern
from prunekit.sparsity.scores import Criterion, get_criterion
from prunekit.sparsity.shorthands import AllocationName, CriterionName, Misfits, PatternName, PolicyName
from prunekit.techniques.pruning.masks.policy import MaskPolicy, get_policy

# Former names of options, for messages.
FORMER = {"compat": 'policy="tfmot"'}


class CallbackKeywords(TypedDict, total=False):
    """Types of the options that `PruningCallback` takes by keyword alone; see `PruningOptions`."""

    keep_zeros: bool | None
    keep_one: bool
    origin: int | None
    overrides: Mapping[str, float]
    bounds: Mapping[str, Any]
    policy: PolicyName | MaskPolicy
    misfits: Misfits


class PruningKeywords(CallbackKeywords, total=False):
    """Types of the keyword options of `Pruner`, `prune` and `prune_in_rounds`; see `PruningOptions`."""

    criterion: CriterionName | Criterion | Callable[..., Any]
    pattern: PatternName | Pattern
    allocation: AllocationName | Allocation
    include: Sequence[str] | str
    exclude: Sequence[str] | str


@dataclass(frozen=True)
class PruningOptions:
    """Selection of the pruned weights and of the pruning method; string shorthands are converted to objects.

    Args:
        criterion: Importance criterion: "auto" (the best of what was measured: docs/criteria.md), "magnitude" (= "l1"),
            "l2", "movement", "random"; "wanda", "output_error", "sparsegpt"; "snip", "grasp", "synflow", "taylor",
            "fisher", "optimal_brain_damage"; "batch_normalization_scale", "geometric_median", "apoz",
            "mean_activation"; a `Criterion`; or a function weight -> importance of the same shape, higher = keep.
            docs/criteria.md has a table of them.
        pattern: Sparsity pattern: "unstructured", "2:4", "block:4x1", "channel", or a `Pattern`.
        allocation: Distribution of the sparsity over the weights: "auto" (likewise: docs/allocations.md), "uniform",
            "global", "erk", "lamp", "layer_error" (needs data), or an `Allocation`.
        include: Names, globs or `re:` patterns of layers and weights to prune; empty = all weights pruned by default.
            Training with a Keras optimizer skips frozen weights, unless `include` names them or their layers.
        exclude: Names, globs or `re:` patterns of layers and weights to skip; overrides `include`.
        keep_zeros: Whether entries that are zero when pruning starts stay pruned, so that a sparse model stays sparse
            and a resumed run keeps its masks. A weight whose entries are all zero is treated as untrained, not as
            pruned. None = the default of the policy: True, but False with policy="tfmot".
        keep_one: Whether at least one unit (an entry, a block or a channel) of each weight is kept, even where the
            sparsity would remove all units. With False, a weight can become entirely zero.
        origin: Optimizer step from which the schedule counts; None = the optimizer's step when pruning starts.
        overrides: Final sparsity of single weights: name, glob or `re:` pattern -> sparsity. It rises in proportion to
            the schedule's sparsity. The allocation distributes the rest over the other weights, so that the overall
            sparsity stays as asked.
        bounds: Least and greatest final sparsity of single weights: name, glob or `re:` pattern -> {"min": 0.2, "max":
            0.8}, or one of both. The allocation distributes what a bound leaves over the other weights. During a
            schedule, minima rise in proportion to its sparsity, and maxima hold at every step.
        policy: Rules by which masks change: "gradual" (pruned units stay pruned), "structure_decay" (the same, for N:M,
            with the same number in every group), "channel_groups" (whole channels in every weight), "rigl", "set",
            "ac_dc", "straight_through", or a `MaskPolicy`. "tfmot" prunes by the rules of
            tensorflow-model-optimization 0.8, leaks included (see docs/coming-from-tfmot.md); steps are then forward
            passes, and `origin` is minus the number of forward passes made before.
        misfits: Weights that the pattern does not fit, such as 2:4 on a convolution of three channels: "error" refuses
            them, "skip" leaves them out, with the reason in the report.
        choices: What was chosen for "auto" so far; no option of a call.
    """

    criterion: Criterion | str | Callable[..., Any] = "auto"
    pattern: Pattern | str = "unstructured"
    allocation: Allocation | str = "auto"
    include: Sequence[str] | str = ()
    exclude: Sequence[str] | str = ()
    keep_zeros: bool | None = None
    keep_one: bool = True
    origin: int | None = None
    overrides: Mapping[str, float] = field(default_factory=dict, hash=False)
    bounds: Mapping[str, Any] = field(default_factory=dict, hash=False)
    policy: MaskPolicy | str = "gradual"
    misfits: str = "error"
    choices: tuple[Choice, ...] = field(default=(), compare=False)

    def __post_init__(self):
        pattern, policy = get_pattern(self.pattern), get_policy(self.policy)
        self._choose_usual(pattern, policy)
        allocation = get_allocation(self.allocation)
        if self.keep_zeros is None:
            _set(self, "keep_zeros", policy.keeps_zeros)
        _set(self, "criterion", get_criterion(self.criterion))
        _set(self, "pattern", pattern)
        _set(self, "allocation", allocation)
        _set(self, "policy", policy)
        for name in ("include", "exclude"):
            _set(self, name, listed_patterns(getattr(self, name), name))
        for name in ("keep_zeros", "keep_one"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"`{name}` is True or False. Received: {getattr(self, name)!r}.")
        if self.misfits not in ("error", "skip"):
            raise ValueError(f'`misfits` is "error" or "skip". Received: {self.misfits!r}.')
        if self.origin is not None and (isinstance(self.origin, bool) or not isinstance(self.origin, Integral)):
            raise TypeError(f"`origin` must be an int, a step of the optimizer, or None. Received: {self.origin!r}.")
        self._check_overrides(pattern)
        if isinstance(pattern, NM) and not isinstance(allocation, Uniform):
            raise ValueError(
                f"{pattern} removes the same fraction of every weight, so it cannot be combined with the "
                f'allocation {allocation}. Pass allocation="uniform", or pattern="unstructured".'
            )

    def _choose_usual(self, pattern: Pattern, policy: MaskPolicy) -> None:
        """Replaces "auto" where neither model nor data decide."""
        usual, made = policy.usual_allocation, list(self.choices)
        if get_criterion(self.criterion) == AutomaticCriterion() and usual != "auto":
            made.append(Choice("criterion", "magnitude", f"the usual one of the policy {policy}"))
            _set(self, "criterion", "magnitude")
        if get_allocation(self.allocation) == AutomaticAllocation() and (usual != "auto" or isinstance(pattern, NM)):
            even = isinstance(pattern, NM)
            reason = f"since {pattern} gives every weight the same" if even else f"the usual one of the policy {policy}"
            made.append(Choice("allocation", "uniform" if even else usual, reason))
            _set(self, "allocation", made[-1].value)
        _set(self, "choices", tuple(made))

    def _check_overrides(self, pattern: Pattern) -> None:
        for option, kind, check in (("overrides", "sparsities", fraction), ("bounds", "bounds", as_bounds)):
            given = getattr(self, option)
            if not isinstance(given, Mapping):
                raise TypeError(f"`{option}` maps patterns of weights to {kind}. Received: {given!r}.")
            checked = {name: check(f"{option}[{name!r}]", value) for name, value in given.items()}
            _set(self, option, MappingProxyType(checked))
            if checked and isinstance(pattern, NM):
                raise ValueError(
                    f"`{option}` is about the sparsity of single weights, but {pattern} gives every weight the "
                    f"sparsity. Received: {option} for {', '.join(checked)}. Leave `{option}` out, or choose another "
                    "pattern."
                )

    @property
    def arguments(self) -> PruningKeywords:
        """The keyword options of a call that makes these options."""
        return cast(
            PruningKeywords, {item.name: getattr(self, item.name) for item in fields(self) if item.name != "choices"}
        )

    @property
    def needs(self) -> frozenset[str]:
        """Names of the statistics that criterion, allocation and policy need."""
        return (
            get_criterion(self.criterion).needs | get_allocation(self.allocation).needs | get_policy(self.policy).needs
        )


def _set(options: PruningOptions, name: str, value: Any) -> None:
    object.__setattr__(options, name, value)

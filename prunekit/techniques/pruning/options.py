"""Pruning options shared by `PruningCallback`, `Pruner` and `prune`."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, TypedDict

from prunekit.sparsity.allocation import Allocation, get_allocation
from prunekit.sparsity.patterns import NM, Pattern, get_pattern
from prunekit.sparsity.scores import Criterion, get_criterion


class Options(TypedDict, total=False):
    """Types of the keyword options of `PruningCallback`, `Pruner` and `prune`; see `PruningOptions`."""

    criterion: str | Criterion | Callable[..., Any]
    pattern: str | Pattern
    allocation: str | Allocation
    include: Sequence[str]
    exclude: Sequence[str]
    keep_zeros: bool | None
    keep_one: bool
    origin: int | None
    compat: str | None


@dataclass(frozen=True)
class PruningOptions:
    """Selection of the pruned weights and of the pruning method; string shorthands are converted to objects.

    Args:
        criterion: Importance criterion: "magnitude" (= "l1"), "l2", "movement", "random", a `Criterion`, or a
            function weight -> importance of the same shape, higher = keep.
        pattern: Sparsity pattern: "unstructured", "2:4", "block:4x1", "channel", or a `Pattern`.
        allocation: Distribution of the sparsity over the weights: "uniform", "global", "erk", or an `Allocation`.
        include: Names, globs or `re:` patterns of layers and weights to prune; empty = all weights pruned by default.
            Training with a Keras optimizer skips frozen weights, unless `include` names them or their layers.
        exclude: Names, globs or `re:` patterns of layers and weights to skip; overrides `include`.
        keep_zeros: Whether entries that are zero when pruning starts stay pruned, so that a sparse model stays sparse
            and a resumed run keeps its masks. A weight whose entries are all zero is treated as untrained, not as
            pruned. None = True; False with compat="tfmot".
        keep_one: Whether at least one unit (an entry, a block or a channel) of each weight is kept, even where the
            sparsity would remove all units. With False, a weight can become entirely zero.
        origin: Optimizer step from which the schedule counts; None = the optimizer's step when pruning starts.
        compat: "tfmot" prunes by the rules of tensorflow-model-optimization 0.8, leaks included (see
            docs/coming-from-tfmot.md); steps are then forward passes, and `origin` is minus the number of forward
            passes made before. None = prunekit's own rules.
    """

    criterion: Criterion | str | Callable[..., Any] = "magnitude"
    pattern: Pattern | str = "unstructured"
    allocation: Allocation | str = "uniform"
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    keep_zeros: bool | None = None
    keep_one: bool = True
    origin: int | None = None
    compat: str | None = None

    def __post_init__(self):
        pattern, allocation = get_pattern(self.pattern), get_allocation(self.allocation)
        if self.compat not in (None, "tfmot"):
            raise ValueError(f'`compat` is "tfmot", or None for prunekit\'s own rules. Received: {self.compat!r}.')
        if self.keep_zeros is None:
            object.__setattr__(self, "keep_zeros", self.compat is None)
        object.__setattr__(self, "criterion", get_criterion(self.criterion))
        object.__setattr__(self, "pattern", pattern)
        object.__setattr__(self, "allocation", allocation)
        for name in ("include", "exclude"):
            patterns = getattr(self, name)
            if not isinstance(patterns, str | Sequence):
                raise TypeError(f"`{name}` takes a pattern or a list of patterns. Received: {patterns!r}.")
            patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
            object.__setattr__(self, name, patterns)
        for name in ("keep_zeros", "keep_one"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"`{name}` is True or False. Received: {getattr(self, name)!r}.")
        if self.origin is not None and (isinstance(self.origin, bool) or not isinstance(self.origin, Integral)):
            raise TypeError(f"`origin` is a step of the optimizer, an int, or None. Received: {self.origin!r}.")
        if isinstance(pattern, NM) and allocation.joint:
            raise ValueError(
                f"{pattern} removes the same fraction of every weight, so it cannot be combined with the "
                f'allocation {allocation}. Pass allocation="uniform", or pattern="unstructured".'
            )


def as_options(options: Mapping[str, Any]) -> PruningOptions:
    """Returns `PruningOptions` from the keyword options of a call.

    Raises:
        TypeError: A name is not a pruning option.
        ValueError: As `PruningOptions`.
    """
    known = [option.name for option in fields(PruningOptions)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"Unknown option. Received: {name!r}. Valid are: {', '.join(known)}.{hint}")
    return PruningOptions(**options)

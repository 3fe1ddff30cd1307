"""What is pruned and how: the options that the callback, the pruner and `prune` share."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, TypedDict

from prunekit.sparsity.allocation import Allocation, get_allocation
from prunekit.sparsity.patterns import NM, Pattern, get_pattern
from prunekit.sparsity.scores import Criterion, get_criterion


class Options(TypedDict, total=False):
    """Keyword options that the callback, the pruner and `prune` share; `PruningOptions` holds their meaning."""

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
    """What is pruned and how; strings are shorthands and become the objects they stand for.

    Args:
        criterion: Which weights matter: "magnitude" (= "l1"), "l2", "movement", "random", a `Criterion`, or a
            function weight -> importance of the same shape, higher = keep.
        pattern: The shape of the zeros: "unstructured", "2:4", "block:4x1", "channel", or a `Pattern`.
        allocation: How the sparsity is shared between weights: "uniform", "global", "erk", or an `Allocation`.
        include: Names, globs or `re:` patterns of layers and weights; empty means every weight pruned by default. A
            training with a Keras optimizer leaves frozen weights out, unless they or their layers are named here.
        exclude: The same, left out; stronger than `include`.
        keep_zeros: Weights that are zero when pruning starts stay pruned (a weight that is zero throughout has learned
            nothing yet, and is not taken for pruned). So a sparse model is never densified, and a run that was
            interrupted goes on with the masks it had. None = yes, unless `compat` says otherwise.
        keep_one: Of each weight at least one unit (a single entry, a block, a channel) is kept, where the sparsity
            would remove all of it. False lets a weight become zero throughout.
        origin: The optimizer's step that the schedule counts from; None = where it stands when pruning starts.
        compat: "tfmot" prunes by the rules of tensorflow-model-optimization 0.8, leaks included (see
            docs/coming-from-tfmot.md); steps are forward passes, and `origin` is minus those made before. None =
            prunekit's own rules.
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
    """The options of a call, by keyword.

    Raises:
        TypeError: One of them is none.
        ValueError: As `PruningOptions`.
    """
    known = [option.name for option in fields(PruningOptions)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"Unknown option. Received: {name!r}. Valid are: {', '.join(known)}.{hint}")
    return PruningOptions(**options)

"""Hands the traced train function of one PruningCallback to the next callback that prunes the same model.

Masks are variables, so a trace that contains them serves any masks of the same weights. Only what is certainly the same
is handed on: see `ScopedFunction.keep`.
"""

import functools
import weakref
from dataclasses import dataclass
from typing import Any

from prunekit.core.training import train_function
from prunekit.techniques.pruning.masks.mask_store import MaskStore
from prunekit.techniques.pruning.training.pruner import Pruner

_MASKS = "masks"


@dataclass(frozen=True, eq=False)
class _Kept:
    """What a kept train function belongs to: its masks, its optimizers, and the pruner that used it last."""

    store: MaskStore
    optimizers: tuple[Any, ...]
    pruner: Any


def keep(function: train_function.ScopedFunction, pruner: Pruner) -> None:
    """Keeps the train function that was traced with the pruner's masks for the next callback."""
    if pruner.enforces_masks_only:
        scope = functools.partial(pruner.store.enforcing, pruner.optimizers)
        function.keep(scope, _Kept(pruner.store, tuple(pruner.optimizers), weakref.ref(pruner)), _MASKS)


def take_over(pruner: Pruner) -> Any:
    """Returns the train function kept with the model, whose masks become those of `pruner`; None if it does not fit.

    A former pruner that is still in use gets a copy of its masks.
    """
    function, kept = train_function.kept(pruner.model, _MASKS)
    if function is None or not pruner.enforces_masks_only or not _fits(kept, pruner):
        return None
    former = kept.pruner()
    if former is not None:
        former.use_store(kept.store.copy(pruner.model))
    kept.store.reset()
    pruner.use_store(kept.store)
    return function


def _fits(kept: _Kept, pruner: Pruner) -> bool:
    pairs = [(kept.store.targets, pruner.targets), (kept.optimizers, pruner.optimizers)]
    if any(len(first) != len(second) for first, second in pairs):
        return False
    same = all(one.variable is other.variable for one, other in zip(*pairs[0], strict=True))
    return same and all(one is other for one, other in zip(*pairs[1], strict=True))

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
from prunekit.techniques.pruning.training.pruner_run import PrunerRun

_MASKS = "masks"


@dataclass(frozen=True, eq=False)
class _Kept:
    """What a kept train function belongs to: its masks, its optimizers, and the run that used it last."""

    store: MaskStore
    optimizers: tuple[Any, ...]
    run: Any


def keep(function: train_function.ScopedFunction, run: PrunerRun) -> None:
    """Keeps the train function that was traced with the run's masks for the next callback."""
    if run.enforces_masks_only:
        scope = functools.partial(run.store.enforcing, run.counter.optimizers)
        function.keep(scope, _Kept(run.store, tuple(run.counter.optimizers), weakref.ref(run)), _MASKS)


def take_over(run: PrunerRun) -> Any:
    """Returns the train function kept with the model, whose masks become those of `run`; None if it does not fit.

    A former run that is still in use gets a copy of its masks.
    """
    function, kept = train_function.kept(run.model, _MASKS)
    if function is None or not run.enforces_masks_only or not _fits(kept, run):
        return None
    former = kept.run()
    if former is not None:
        former.use_store(kept.store.copy(run.model))
    kept.store.reset()
    run.use_store(kept.store)
    return function


def _fits(kept: _Kept, run: PrunerRun) -> bool:
    pairs = [(kept.store.targets, run.targets), (kept.optimizers, run.counter.optimizers)]
    if any(len(first) != len(second) for first, second in pairs):
        return False
    same = all(one.variable is other.variable for one, other in zip(*pairs[0], strict=True))
    return same and all(one is other for one, other in zip(*pairs[1], strict=True))

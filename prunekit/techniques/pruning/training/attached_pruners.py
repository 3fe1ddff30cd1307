"""The Pruners that are attached to models, so that no weight is pruned by two of them at once."""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

from prunekit.anatomy.layers.targets import Target
from prunekit.core.runtime import backend
from prunekit.core.runtime.optimizers import optimizers_of

# Pruner -> whether it is attached to its model's optimizers. Weak references: a Pruner lives as long as the user or the
# optimizer that it is attached to.
_ATTACHED: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def note_attached(pruner: Any) -> None:
    """Records that a Pruner was attached."""
    _ATTACHED[pruner] = _shares_optimizer(pruner)


def note_detached(pruner: Any) -> None:
    """Records that a Pruner was detached; does nothing if it was not attached."""
    _ATTACHED.pop(pruner, None)


def attached_to(variables: Sequence[Any]) -> list[Any]:
    """Returns the attached Pruners that prune any of the variables.

    A Pruner of a model's optimizer is left out after the model was compiled with another optimizer: it takes no part
    in further updates.
    """
    if not _ATTACHED:
        return []
    wanted = {id(backend.native(variable)) for variable in variables}
    found = [one for one in _ATTACHED if any(id(backend.native(t.variable)) in wanted for t in one.targets)]
    return [one for one in found if not _ATTACHED[one] or _shares_optimizer(one)]


def attached_to_model(model: Any) -> list[Any]:
    """Returns the attached Pruners that prune any weight of the model."""
    return attached_to(model.weights) if _ATTACHED else []


def _shares_optimizer(pruner: Any) -> bool:
    now = {id(optimizer) for optimizer in optimizers_of(pruner.model)}
    return any(id(optimizer) in now for optimizer in pruner.optimizers)


def refuse_pruned_weights(targets: Sequence[Target]) -> None:
    """Checks that no attached Pruner prunes one of the targets.

    Raises:
        ValueError: An attached Pruner prunes one of the targets.
    """
    if not _pruned_of(targets):
        return
    # A Pruner that nobody can reach any more is part of a reference cycle with its optimizer.
    gc.collect()
    names = _pruned_of(targets)
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ValueError(
            "A weight is pruned by one Pruner or PruningCallback at a time. Received: "
            f"{', '.join(names[:3])}{more}, pruned by another Pruner until its finish(). Call finish() of that Pruner "
            "first (if it is out of reach, compile the model again), or separate the weights with `include` or "
            "`exclude`."
        )


def _pruned_of(targets: Sequence[Target]) -> list[str]:
    pruned = {id(backend.native(t.variable)) for one in attached_to([t.variable for t in targets]) for t in one.targets}
    return [target.name for target in targets if id(backend.native(target.variable)) in pruned]

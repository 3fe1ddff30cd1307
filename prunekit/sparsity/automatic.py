"""Stand-ins for the criterion and the allocation that are chosen when model and data are known."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prunekit.sparsity.allocation import Allocation, Weight
from prunekit.sparsity.scores import Criterion

_UNRESOLVED = 'The {} "auto" is chosen by pk.prune, Pruner and PruningCallback. Received: a call of "auto" itself.'


@dataclass(frozen=True)
class AutomaticCriterion(Criterion):
    """Stands for the criterion that `prunekit.techniques.pruning.policies.choices` chooses."""

    def __call__(self, weight, *, target: Any = None, seed_offset: int = 0, statistics: Any = None):
        """Raises TypeError: the criterion is chosen before importances are calculated."""
        raise TypeError(_UNRESOLVED.format("criterion"))

    def __str__(self) -> str:
        return "auto"


@dataclass(frozen=True)
class AutomaticAllocation(Allocation):
    """Stands for the allocation that `prunekit.techniques.pruning.policies.choices` chooses."""

    def sparsities(
        self, sparsity: float, targets: Sequence[Weight], scores: Sequence[Any] | None = None
    ) -> list[float]:
        """Raises TypeError: the allocation is chosen before sparsities are calculated."""
        raise TypeError(_UNRESOLVED.format("allocation"))

    def __str__(self) -> str:
        return "auto"

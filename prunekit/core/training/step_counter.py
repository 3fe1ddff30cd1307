"""StepCounter: counts the steps of a schedule from the optimizers' update counts."""

from collections.abc import Sequence
from typing import Any

from prunekit.core.runtime import backend, jax_state


class StepCounter:
    """Counts optimizer updates since the origin of a schedule; without an optimizer, calls of its owner's `step`.

    Args:
        model: The trained model.
        optimizers: Optimizers whose updates count.
        origin: Update from which steps count; None = the present one.

    Attributes:
        origin: Update from which steps count.
        calls: Number of calls of the owner's `step`.
        done: Step at the last of these calls.
        unseen: Upper bound of the number of updates since that call.
    """

    def __init__(self, model: Any, optimizers: Sequence[Any], origin: int | None = None):
        self._model = model
        self.optimizers = list(optimizers)
        self.calls = self.done = self.unseen = 0
        self.origin = self._iterations() if origin is None else origin

    @property
    def now(self) -> int:
        """The current step."""
        return self._iterations() - self.origin

    def mark_all_seen(self) -> None:
        """Counts all updates so far as seen."""
        self.done, self.unseen = self.now, 0

    def resume(self, optimizers: Sequence[Any]) -> None:
        """Continues the count of the last training, even if the model has a new optimizer."""
        former, self.optimizers = self.optimizers, list(optimizers)
        if not self.optimizers:
            # Without an optimizer, the calls of `step()` are the steps.
            return
        if former == self.optimizers:
            # An interrupted training made updates that `step()` has not counted yet.
            self.done += min(max(self.now - self.done, 0), self.unseen)
        self.unseen = 0
        self.origin = self._iterations() - self.done

    def _iterations(self) -> int:
        if not self.optimizers:
            return self.calls
        jax_state.sync_model_state(self._model)
        # The maximum: a GAN's model may also hold the unused default optimizer that `compile()` creates.
        return max(int(backend.number(optimizer.iterations)) for optimizer in self.optimizers)

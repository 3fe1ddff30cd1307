"""EnforcementCheck: detects training loops whose updates do not pass through the masks."""

from typing import Any

import numpy as np

from prunekit.core.runtime import jax_state
from prunekit.core.training.step_counter import StepCounter
from prunekit.techniques.pruning.masks.mask_store import LeakError, MaskStore

# Steps between two leak checks while the masks do not change: a check reads every target and its mask.
CHECK_EVERY = 100


class EnforcementCheck:
    """Checks that updates pass through the optimizers, and that no pruned weight is non-zero.

    Args:
        model: The trained model.
        store: The masks.
        counter: The steps, and the optimizers whose updates are enforced.

    Attributes:
        store: The masks.
        due: Whether the next `verify` checks all targets: weights that were written without passing through the
            optimizer are non-zero after the first update with new masks.
    """

    def __init__(self, model: Any, store: MaskStore, counter: StepCounter):
        self._model, self.store, self._counter = model, store, counter
        self._seen: Any = 0
        self._checked = 0
        self.due = False

    def note_progress(self) -> None:
        """Records the updates so far, which `verify` does not expect again."""
        self._seen = self._updates()
        self._checked = self._counter.done

    def verify(self) -> None:
        """Checks that the last update was enforced; without an optimizer, re-imposes the masks.

        Raises:
            LeakError: The update did not pass through the optimizer, or pruned weights became non-zero.
        """
        if self._counter.optimizers:
            self._check_progress()
        else:
            self.store.enforce()
        self._counter.done = self._counter.now
        if self.due or not 0 <= self._counter.done - self._checked < CHECK_EVERY:
            self.check()

    def check(self) -> None:
        """Checks all targets for leaks immediately; reads every target and its mask once.

        Raises:
            LeakError: Pruned weights are non-zero; the masks were re-imposed.
        """
        self.due, self._checked = False, self._counter.done
        jax_state.sync_model_state(self._model)
        self.refuse(np.array(list(self.store.audit().values())))

    def refuse(self, leaks: np.ndarray) -> None:
        """Re-imposes the masks and raises if there are leaks.

        Args:
            leaks: Number of leaks of each target, shape (targets,).

        Raises:
            LeakError: A number is not 0.
        """
        if leaks.any():
            self.store.enforce(self._counter.optimizers)
            raise LeakError(
                f"Pruned weights became non-zero since the last update: {self.store.named(leaks)}. "
                "Code in the loop writes weights without the optimizer: assign weights "
                "before the optimizer update, or call pruner.enforce() after writing them. The masks were re-imposed."
            )

    def _updates(self) -> Any:
        return jax_state.progress(self._counter.optimizers) if jax_state.steps_are_pure() else self.store.updates

    def _check_progress(self) -> None:
        jax_state.sync_model_state(self._model)
        updates = self._updates()
        if updates == self._seen:
            self.store.enforce(self._counter.optimizers)
            raise LeakError(
                "Pruner.step() was called, but no update passed through "
                f"{', '.join(type(optimizer).__name__ for optimizer in self._counter.optimizers)} since the last call, "
                "so pruned weights may have grown back. Pass the optimizer that your loop uses, as "
                "Pruner(model, schedule, optimizer=...), build the Pruner before your tf.function is first called, "
                "or, for a loop without a Keras optimizer, use pruner.mask_gradients on a model without one. "
                "The masks were re-imposed."
            )
        self._seen = updates

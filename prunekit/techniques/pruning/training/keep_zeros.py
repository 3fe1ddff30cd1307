"""KeepZeros: holds the zeros that a model already has while it trains on, without a schedule."""

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import keras
import numpy as np

from prunekit.anatomy.cost.inspection import SparsityReport
from prunekit.anatomy.layers.targets import Target, find_targets
from prunekit.core.runtime import jax_state
from prunekit.core.training import distribution
from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.schedules import OneShot
from prunekit.techniques.pruning.masks.mask_store import LeakError, MaskStore
from prunekit.techniques.pruning.training.callbacks import PruningCallback
from prunekit.techniques.pruning.training.held_masks import holding, masks_of_zeros


class KeepZeros(PruningCallback):
    """Keeps every weight that is exactly zero at zero while a pruned model trains on.

    As a callback: `model.fit(x, y, callbacks=[pk.KeepZeros()])`. In a loop of your own, around the loop:
    `with pk.KeepZeros(model, optimizer): ...`, before its `tf.function` runs for the first time.

    Held are the zeros, -0.0 included, of the weights that are pruned by default, or that `include` names. A weight that
    is zero throughout is not trained yet, and is not held. Gradients are masked before clipping, and the optimizer's
    slots are zero at these positions, as with `PruningCallback`. Zeros that training produces later are not held. Each
    `fit` holds the zeros that the weights have at its start, also if the callback is used again.

    In one `fit` with a `PruningCallback`, which keeps the zeros of the weights that it prunes, the weights must differ:
    give `KeepZeros` the others by `include` or `exclude`. A `with` block around a `PruningCallback` or a `Pruner` holds
    the zeros of the block's begin beside theirs.

    Args:
        model: A built Keras model, for a loop of your own; None for a callback, which Keras gives the model.
        optimizer: Keras optimizer of the loop, or a list of optimizers; None uses those of the model. A loop without a
            Keras optimizer passes its gradients through `mask_gradients`.
        include: Names, globs or `re:` patterns of layers and weights; empty means every weight pruned by default.
        exclude: Names, globs or `re:` patterns of layers and weights to leave out.

    Attributes:
        notes: Messages of the last `fit` or `with` block.

    Raises:
        ValueError: No such weight, or none that is pruned by default; in `fit`, as for `PruningCallback`, or another
            model was given.
        TypeError: `model` is not a Keras model; as a context manager, no model was given, or `optimizer` is not a Keras
            optimizer.
        LeakError: In `fit`, as for `PruningCallback`; at the end of the `with` block, held weights are not zero.
    """

    _if_frozen = "Its zeros stay without KeepZeros: leave the callback out, or make layers trainable before compile()."

    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        *,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
    ):
        if model is not None and not isinstance(model, keras.Model):
            raise TypeError(
                f"`model` of KeepZeros must be a Keras model, or None for a callback. Received: {model!r}. Names of "
                "layers and weights are passed as `include=` or `exclude=`."
            )
        super().__init__(OneShot(sparsity=0.0), include=include, exclude=exclude, keep_zeros=True)
        self._loop: tuple[Any, Any] = (model, optimizer)
        self._block: contextlib.ExitStack | None = None
        self._held: MaskStore | None = None

    @property
    def masks(self) -> dict[str, np.ndarray]:
        """Weight name -> boolean array, False where a zero is held; of the weights that have zeros."""
        if self._in_a_loop:
            return {} if self._held is None else self._held.masks
        return {name: mask for name, mask in self.pruner.masks.items() if not mask.all()}

    @property
    def report(self) -> SparsityReport:
        """The `SparsityReport` of the last `fit`, computed at each access."""
        return self.pruner.report_since(notes=self.notes)

    def audit(self) -> dict[str, int]:
        """Returns {weight name: number of held positions that are not exactly zero}."""
        if not self._in_a_loop:
            return self.pruner.audit()
        jax_state.sync_model_state(self._loop[0])
        return {} if self._held is None else self._held.audit()

    @property
    def _in_a_loop(self) -> bool:
        """True if this is a context manager and no callback."""
        return self._loop[0] is not None and self._pruner is None

    # ---- in `fit` ----------------------------------------------------------------------------------------------------

    def set_model(self, model) -> None:
        given = self._loop[0]
        if given is not None and given is not model:
            raise ValueError(
                f"This KeepZeros was created for the model {given.name!r}. Received: a `fit` of {model.name!r}. Use "
                "pk.KeepZeros() without a model as a callback."
            )
        super().set_model(model)

    def _begin(self) -> None:
        # With the masks of an earlier `fit`, weights that were replaced since then would be set to zero.
        self.pruner.run.updater.keep_all()
        super()._begin()
        kept = self.pruner.masks
        self.announce(_notes({name: mask for name, mask in kept.items() if not mask.all()}, self.pruner.targets))

    # ---- in a loop of one's own --------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Starts to hold the zeros of the model.

        Raises:
            TypeError: No model was given.
            RuntimeError: The block was entered already.
        """
        model, optimizer = self._loop
        if model is None:
            raise TypeError("KeepZeros holds the zeros of a model: write `with pk.KeepZeros(model, optimizer):`.")
        if self._block is not None:
            raise RuntimeError("This KeepZeros is entered already. Create another one.")
        targets, _ = find_targets(model, self.options.include, self.options.exclude)
        masks = masks_of_zeros(targets)
        self.notes = _notes(masks, targets)
        if distribution.speaks_for(model):
            for note in self.notes:
                warnings.warn(note, stacklevel=2)
        with contextlib.ExitStack() as undo:
            self._held = undo.enter_context(holding(model, masks, optimizer)) if masks else None
            self._block = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Holds the zeros once more and gives the optimizer back as it was; the zeros stay.

        Raises:
            LeakError: Held weights are not zero; they are zero again. Not raised if the block ended with an exception.
        """
        block, self._block = self._block, None
        if block is None:
            return
        leak = self._leak() if kind is None else None
        if leak is None:
            block.__exit__(kind, error, where)
            return
        # Leaving with an exception sets the weights to zero without the warning of a normal end.
        block.__exit__(type(leak), leak, None)
        raise leak

    def _leak(self) -> LeakError | None:
        leaks = self.audit()
        if self._held is None or not any(leaks.values()):
            return None
        return LeakError(
            "KeepZeros holds zeros in updates of a Keras optimizer. Received: weights that are not zero at the end of "
            f"the `with` block: {self._held.named(leaks.values())}. Pass the optimizer of your loop to "
            "pk.KeepZeros(model, optimizer), enter the block before the loop's tf.function runs for the first time, "
            "pass gradients through mask_gradients in a loop without a Keras optimizer, and write no weights directly. "
            "The zeros were restored."
        )

    def mask_gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns `gradients`, aligned with `model.trainable_variables`, set to zero where zeros are held."""
        if not self._in_a_loop:
            if self._pruner is None:
                raise RuntimeError(
                    "mask_gradients needs a model: write `with pk.KeepZeros(model, optimizer):` around the loop."
                )
            return self.pruner.mask_gradients(gradients)
        if self._held is None:
            return list(gradients)
        return self._held.mask_gradients(gradients, self._loop[0].trainable_variables)


def _notes(masks: Mapping[str, np.ndarray], targets: Sequence[Target]) -> list[str]:
    """Returns messages about targets that are zero throughout, and about a model without zeros to hold."""
    others = [target for target in targets if target.name not in masks]
    empty = [target.name for target in others if not np.any(array_of(target.variable.value))]
    notes = []
    if empty:
        notes.append(
            f"KeepZeros does not hold weights that are zero throughout, which are not trained yet: {', '.join(empty)}."
        )
    if not masks:
        notes.append(
            f"KeepZeros found no zero in {len(targets)} weights, so it holds none. To make weights zero, use "
            "pk.PruningCallback or pk.prune."
        )
    return notes

"""Enforces given masks in any training loop, without a schedule: `holding`, and the masks of existing zeros."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.layers.targets import Target, targets_named
from prunekit.core.runtime import backend, jax_state
from prunekit.core.runtime.optimizers import optimizers_for
from prunekit.core.training import distribution, train_function
from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.selection import count_true
from prunekit.techniques.pruning.masks.mask_store import MaskStore
from prunekit.techniques.pruning.training.pruning_notes import LateWeights, masks_written_back


@contextlib.contextmanager
def holding(model: Any, masks: Mapping[str, Any], optimizer: Any = None) -> Iterator[MaskStore]:
    """Context manager in which every optimizer update keeps pruned weights at zero.

    At the start and at the end, the masks are imposed on the weights and on the optimizers' slots, whatever a callback
    or Keras wrote last: weight averages, or the best weights of an earlier epoch. Enter it before the loop's
    `tf.function` runs for the first time. A loop without a Keras optimizer passes its gradients through
    `mask_gradients` of the store.

    Args:
        model: A built Keras model; only its weights are changed, in place.
        masks: Exact weight name -> boolean array, True = kept.
        optimizer: Keras optimizer of the loop, or a list of optimizers. None uses those of the model.

    Yields:
        The store of the masks.

    Warns:
        UserWarning: At the end, pruned weights were not zero, or the model has weights that it did not have before.

    Raises:
        ValueError: The model has no weight of that name, or the weight has another shape than its mask.
        TypeError: `optimizer` is not a Keras optimizer.
    """
    targets = targets_named(model, masks)
    optimizers = optimizers_for(model, optimizer)
    store, late = MaskStore(targets, model), LateWeights(model)
    with train_function.fresh_train_function(model), store.enforcing(optimizers):
        jax_state.sync_model_state(model)
        jax_state.unshare_ema_arrays(optimizers)
        store.replace([np.asarray(masks[target.name], bool) for target in targets], optimizers)
        try:
            yield store
        except GeneratorExit:
            # The scope was garbage-collected, which may happen at any moment: do not write weights here.
            raise
        except BaseException:
            # `enforcing` imposes the masks; on JAX, the variables hold the values of the last step only then.
            jax_state.sync_model_state(model)
            raise
        jax_state.sync_model_state(model)
        restored = sum(store.audit().values())
        store.enforce(optimizers)
        jax_state.unshare_ema_arrays(optimizers)
    if distribution.speaks_for(model):
        for note in [*masks_written_back(restored), *late.found(())[0]]:
            warnings.warn(note, stacklevel=3)


def without_zeros(masks: Sequence[Any], targets: Sequence[Target]) -> tuple[list[Any], np.ndarray]:
    """Returns the masks with the targets' zero entries removed, and the number of entries that each mask keeps.

    A mask that would be empty is unchanged: a weight whose entries are all zero is untrained, not pruned.

    Args:
        masks: One boolean tensor per target, True = kept.
        targets: The weights.
    """
    weights = [backend.value_now(target.variable) for target in targets]
    found = [nonzero_within(mask, weight) for mask, weight in zip(masks, weights, strict=True)]
    rows = [row if row[1] else (mask, int(count_true(mask))) for row, mask in zip(found, masks, strict=True)]
    return [mask for mask, _ in rows], np.array([count for _, count in rows])


def nonzero_within(mask: Any, weight: Any) -> tuple[Any, int]:
    """Returns the mask without the positions at which the weight is zero, and how many positions it keeps.

    Args:
        mask: Boolean tensor.
        weight: Tensor of the same shape.
    """
    if keras.backend.backend() == "tensorflow" and backend.is_on_cpu(weight):
        mask, weight = array_of(mask), array_of(weight)
        new = mask if np.count_nonzero(weight) == weight.size else np.logical_and(mask, weight != 0)
        return new, int(np.count_nonzero(new))
    new = ops.logical_and(mask, ops.not_equal(weight, 0))
    return new, int(count_true(new, expect_any=True))


def masks_of_zeros(targets: Sequence[Target]) -> dict[str, np.ndarray]:
    """Returns the mask of the non-zero entries of each target that contains zeros: name -> array, True = kept.

    Targets whose entries are all zero are left out.
    """
    masks, _ = without_zeros([ops.ones(target.shape, "bool") for target in targets], targets)
    arrays = {target.name: array_of(mask) for target, mask in zip(targets, masks, strict=True)}
    return {name: mask for name, mask in arrays.items() if not mask.all()}

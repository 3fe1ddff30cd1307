"""Enforces given masks in any training loop, without a schedule: `holding`, and the masks of existing zeros."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from keras import ops

from prunekit.anatomy.targets import Target, targets_named
from prunekit.core import distribution, jax_state, train_function
from prunekit.core.optimizers import optimizers_for
from prunekit.sparsity.selection import count_true
from prunekit.techniques.pruning.mask_store import MaskStore
from prunekit.techniques.pruning.pruning_notes import LateWeights, masks_written_back


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


def without_zeros(masks: Sequence[Any], targets: Sequence[Target]) -> list[Any]:
    """Returns the masks with the targets' zero entries removed, as tensors; a mask that would be empty is unchanged.

    A weight whose entries are all zero is untrained, not pruned.

    Args:
        masks: One boolean tensor per target, True = kept.
        targets: The weights.
    """
    found = [
        ops.logical_and(mask, ops.not_equal(ops.convert_to_tensor(target.variable), 0))
        for mask, target in zip(masks, targets, strict=True)
    ]
    counts = [int(count_true(mask, expect_any=True)) for mask in found]
    return [new if n else old for new, old, n in zip(found, masks, counts, strict=True)]


def masks_of_zeros(targets: Sequence[Target]) -> dict[str, np.ndarray]:
    """Returns the mask of the non-zero entries of each target that contains zeros: name -> array, True = kept.

    Targets whose entries are all zero are left out.
    """
    masks = without_zeros([ops.ones(target.shape, "bool") for target in targets], targets)
    arrays = {target.name: ops.convert_to_numpy(mask) for target, mask in zip(targets, masks, strict=True)}
    return {name: mask for name, mask in arrays.items() if not mask.all()}

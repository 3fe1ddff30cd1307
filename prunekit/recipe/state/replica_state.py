"""Gathers and restores the state that each replica of a `tf.distribute` strategy has separately."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def gathered(strategy: Any, rows: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the rows of all replicas, shape (replicas, numbers), after every process has called this function.

    Args:
        strategy: `tf.distribute` strategy of all replicas.
        rows: One int64 array per replica of this process, each of shape (numbers,).
    """
    import tensorflow as tf

    by_replica = dict(zip(replicas_here(strategy), rows, strict=True))
    if len(by_replica) == strategy.num_replicas_in_sync:
        # Avoid collectives: a second MirroredStrategy in a process gets the collective keys of the first strategy.
        return np.stack([by_replica[replica] for replica in sorted(by_replica)])
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(by_replica[context.replica_id_in_sync_group][None], tf.int64)
    )
    return np.asarray(_gather(strategy)(values))


@functools.cache
def _gather(strategy: Any) -> Callable[[Any], Any]:
    """Returns the gather function, cached by strategy: TensorFlow warns if each call creates a new function."""
    import tensorflow as tf

    return tf.function(functools.partial(strategy.gather, axis=0))


def replicas_here(strategy: Any) -> list[int]:
    """Returns the indices of this process's replicas among all replicas."""
    numbers = strategy.experimental_distribute_values_from_function(
        lambda context: np.array(context.replica_id_in_sync_group)
    )
    return [int(number) for number in strategy.experimental_local_results(numbers)]


def own_state(strategy: Any, model: Any) -> np.ndarray | None:
    """Returns each replica's non-trained state, such as batch normalization statistics: (replicas, numbers), int64.

    None if the model has no such state. Waits until every process has called this function.
    """
    parts = _parts(strategy, model)
    if not parts:
        return None
    columns = zip(*([_words(one) for one in copies] for copies in parts), strict=True)
    return gathered(strategy, [np.concatenate(column) for column in columns])


def restore_own_state(strategy: Any, model: Any, state: np.ndarray) -> None:
    """Writes the state from `own_state` back to the replicas of this process."""
    here, start = replicas_here(strategy), 0
    for copies in _parts(strategy, model):
        words = _words(copies[0]).size
        for replica, copy in zip(here, copies, strict=True):
            value = copy.numpy()
            raw = np.ascontiguousarray(state[replica, start : start + words]).tobytes()[: value.nbytes]
            copy.assign(np.frombuffer(raw, value.dtype).reshape(value.shape))
        start += words


def _parts(strategy: Any, model: Any) -> list[tuple[Any, ...]]:
    """Returns the copies on this process's replicas of each variable that is not trained."""
    trained, here = {id(variable) for variable in model.trainable_variables}, len(replicas_here(strategy))
    found = [
        strategy.experimental_local_results(variable._value)
        for variable in model.variables
        if id(variable) not in trained
    ]
    # A variable created outside the strategy's scope has no copy per replica.
    return [copies for copies in found if len(copies) == here]


def _words(copy: Any) -> np.ndarray:
    raw = np.ascontiguousarray(copy.numpy()).tobytes()
    return np.frombuffer(raw + bytes(-len(raw) % 8), np.int64)

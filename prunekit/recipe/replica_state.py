"""What replicas of a `tf.distribute` strategy hold apart from one another: gathered in every process, and put back."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def gathered(strategy: Any, rows: Sequence[np.ndarray]) -> np.ndarray:
    """The rows of all replicas, shape (replicas, numbers); waits until every process is here.

    Args:
        strategy: Of all of them.
        rows: For each replica of this process, so many int64 numbers, shape (numbers,).
    """
    import tensorflow as tf

    by_replica = dict(zip(replicas_here(strategy), rows, strict=True))
    if len(by_replica) == strategy.num_replicas_in_sync:
        # Nothing is sent: a second MirroredStrategy of a process gets the keys of the first one's collectives.
        return np.stack([by_replica[replica] for replica in sorted(by_replica)])
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(by_replica[context.replica_id_in_sync_group][None], tf.int64)
    )
    return np.asarray(_gather(strategy)(values))


@functools.cache
def _gather(strategy: Any) -> Callable[[Any], Any]:
    """One function for all calls: TensorFlow makes a new one each time, and warns that it does."""
    import tensorflow as tf

    return tf.function(functools.partial(strategy.gather, axis=0))


def replicas_here(strategy: Any) -> list[int]:
    """The numbers of this process's replicas among all."""
    numbers = strategy.experimental_distribute_values_from_function(
        lambda context: np.array(context.replica_id_in_sync_group)
    )
    return [int(number) for number in strategy.experimental_local_results(numbers)]


def own_state(strategy: Any, model: Any) -> np.ndarray | None:
    """What each replica has of its own, such as statistics of batch normalization: shape (replicas, numbers), int64.

    None where the model has nothing that is not trained. Waits until every process is here.
    """
    parts = _parts(strategy, model)
    if not parts:
        return None
    columns = zip(*([_words(one) for one in copies] for copies in parts), strict=True)
    return gathered(strategy, [np.concatenate(column) for column in columns])


def restore_own_state(strategy: Any, model: Any, state: np.ndarray) -> None:
    """Gives the replicas of this process what `own_state` found."""
    here, start = replicas_here(strategy), 0
    for copies in _parts(strategy, model):
        words = _words(copies[0]).size
        for replica, copy in zip(here, copies, strict=True):
            value = copy.numpy()
            raw = np.ascontiguousarray(state[replica, start : start + words]).tobytes()[: value.nbytes]
            copy.assign(np.frombuffer(raw, value.dtype).reshape(value.shape))
        start += words


def _parts(strategy: Any, model: Any) -> list[tuple[Any, ...]]:
    """Of each variable that is not trained, the copies of this process's replicas."""
    trained, here = {id(variable) for variable in model.trainable_variables}, len(replicas_here(strategy))
    found = [
        strategy.experimental_local_results(variable._value)
        for variable in model.variables
        if id(variable) not in trained
    ]
    # What was made outside of the scope has no copies.
    return [copies for copies in found if len(copies) == here]


def _words(copy: Any) -> np.ndarray:
    raw = np.ascontiguousarray(copy.numpy()).tobytes()
    return np.frombuffer(raw + bytes(-len(raw) % 8), np.int64)

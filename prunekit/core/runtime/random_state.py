"""Saves and restores the random generators that a training may use, as JSON-compatible values."""

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from prunekit.core.runtime import jax_state
from prunekit.sparsity.array_ops import array_of


def random_state(model: Any) -> dict[str, Any]:
    """Returns the states of the generators of Python, NumPy, Keras, the model's layers and, as a backend, PyTorch.

    TensorFlow's generators are not included, because the counters of stateful operations such as `tf.random.normal`
    cannot be read.
    """
    jax_state.sync_model_state(model)
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    seeds = _global_seeds()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "keras": None if seeds is None else _listed(seeds.state),
        "layers": [_listed(variable) for variable in _layer_seeds(model)],
        "torch": _torch_state(),
    }


def restore_random_state(model: Any, state: Mapping[str, Any]) -> None:
    """Restores the generators from the result of `random_state`."""
    if state["keras"] is not None:
        from keras.src.random.seed_generator import global_seed_generator

        global_seed_generator().state.assign(state["keras"])
    for variable, value in zip(_layer_seeds(model), state["layers"], strict=True):
        variable.assign(value)
    # Restore last: creating Keras's generator draws a number from Python's generator.
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    if state.get("torch") is not None:
        import torch

        torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))


@contextlib.contextmanager
def kept_random_state(model: Any) -> Iterator[None]:
    """Restores the generators of `random_state` at the end: a run in another such scope draws the same numbers."""
    state = random_state(model)
    try:
        yield
    finally:
        restore_random_state(model, state)


def _torch_state() -> list[int] | None:
    # On PyTorch, Keras shuffles the examples of `fit` with this generator.
    if keras.backend.backend() != "torch":
        return None
    import torch

    return torch.get_rng_state().tolist()


def _layer_seeds(model: Any) -> list[Any]:
    """Returns the seed variables of dropout and noise layers, which `weights` and `save_weights` do not include."""
    weights = {id(variable) for variable in model.weights}
    return [variable for variable in model.variables if id(variable) not in weights]


def _listed(variable: Any) -> list[int]:
    return array_of(variable).tolist()


def _global_seeds() -> Any:
    # The default generator of `keras.random` has no public name.
    from keras.src.backend.common import global_state
    from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

    return global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)

"""Copies of models, with weights of their own."""

from __future__ import annotations

import tempfile
from typing import Any

import keras

from prunekit.core.runtime import backend, jax_state, patching
from prunekit.core.runtime.random_state import kept_random_state


def copied_model(model: Any) -> Any:
    """Returns a copy of a built model with weights of its own, not compiled; draws no random numbers.

    Its random layers begin with the seeds of their configs. Whatever Keras raises where a class cannot be made again is
    raised.
    """
    jax_state.sync_model_state(model)
    with kept_random_state(model), backend.variable_scope(model):
        # Not compiled by Keras, which fails where the loss is a function of the user's.
        with patching.shadowed(model, "compiled", False):
            copy = keras.models.clone_model(model)
        if not copy.built:
            copy.build_from_config(model.get_build_config())
        copy.set_weights(model.get_weights())
        copy_assets(model, copy)
        finalize_layers(copy)
    return copy


def finalize_layers(model: Any) -> None:
    """Derives what layers keep beside their weights, after the weights were assigned.

    Keras does so only where it loads a file. Normalization computes with tensors of its own: without this, a copy has
    the mean 0 and the variance 1.
    """
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()


def copy_assets(source: Any, target: Any) -> None:
    """Copies what layers learned in `adapt` and do not have as weights, such as words, by the names of the layers."""
    learned: dict[str, list[Any]] = {}
    for layer in source._flatten_layers(include_self=False):
        if hasattr(layer, "save_assets"):
            learned.setdefault(layer.name, []).append(layer)
    for layer in target._flatten_layers(include_self=False):
        if learned.get(layer.name):
            # Layers of nested models may have a name in common.
            found = learned[layer.name].pop(0)
            with tempfile.TemporaryDirectory() as folder:
                found.save_assets(folder)
                layer.load_assets(folder)

"""Functions that run a model on a batch, compiled for the backend."""

from collections.abc import Callable
from typing import Any

import keras

from prunekit.core.runtime.compilation import compiled, compiled_reader


class ModelFunction:
    """A function that runs a model and is compiled, as the model's own training step is.

    It is compiled again after a call of the model's `compile`, and after a layer was frozen or released. A model that
    was compiled with `run_eagerly=True` runs eagerly.

    Args:
        model: A built Keras model.
        function: Takes and returns structures of tensors; reads the model's variables and assigns none.
        static_batch: On TensorFlow, `function` sees the number of examples, and is traced once for each; by default
            one trace serves batches of all sizes.
    """

    def __init__(self, model: Any, function: Callable[..., Any], *, static_batch: bool = False):
        self._model, self._function, self._static_batch = model, function, static_batch
        self._key: Any = None
        self._compiled = function

    def __call__(self, *arguments: Any) -> Any:
        if getattr(self._model, "run_eagerly", False):
            return self._function(*arguments)
        # Objects, not their ids: an id is used again once its object is gone.
        trainable = [layer.trainable for layer in self._model._flatten_layers()]
        key = getattr(self._model, "_compile_loss", None), trainable
        if self._key != key:
            self._key = key
            self._compiled = self._traced()
        return self._compiled(*arguments)

    def _traced(self) -> Callable[..., Any]:
        if self._static_batch and keras.backend.backend() == "tensorflow":
            return compiled(self._function)
        return compiled_reader(self._function, self._model.variables)

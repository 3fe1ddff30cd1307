"""Measures the loss and the compiled metrics of a model from outputs that were computed elsewhere."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np

from prunekit.core.runtime.compilation import OpenFunction
from prunekit.core.runtime.losses import check_classes

# (inputs, labels, sample weights); None for a part that the data lack.
Batch = tuple[Any, Any, Any]


class OutputMetrics:
    """The loss and the compiled metrics of a model, as `evaluate` gives them.

    A model whose `test_step`, `compute_loss` or `compute_metrics` is its own, and a model with layers that add losses,
    is evaluated whole, by `evaluate`: these are the metrics of the model, whatever outputs are given.

    Args:
        model: A compiled model; a model that is not compiled has no metrics.
        batches: The data; the model runs on the first batch, so that Keras makes the metrics.
        of_outputs: True evaluates no model whole, but measures its compiled metrics alone, without the loss: outputs
            are those of another program, such as a LiteRT file.

    Attributes:
        needed: False if there is nothing to measure: the model is not compiled, or the data have no labels.
        whole: Reason why the model is evaluated whole; "" if the outputs are enough.
    """

    def __init__(self, model: Any, batches: Sequence[Batch], *, of_outputs: bool = False):
        self._model, self._batches = model, batches
        self.needed = bool(model.compiled) and all(labels is not None for _, labels, _ in batches)
        self.whole = ""
        if not self.needed:
            return
        for _, labels, _ in batches:
            check_classes(model, labels)
        inputs, labels, weights = batches[0]
        outputs = model(inputs, training=False)
        reason, self._of_outputs = _reason_for_whole(model), of_outputs
        self.whole, self._has_loss = "" if of_outputs else reason, not reason
        self._measured: Callable[..., Any] = self._step
        if keras.backend.backend() == "tensorflow" and not self.whole and not model.run_eagerly:
            # Metrics make their variables in the first call, which a compiled function cannot do.
            self._step(labels, outputs, weights)
            self._measured = OpenFunction(self._step)
        self.end()

    def __call__(self, outputs: Iterable[Any]) -> dict[str, float]:
        """Returns the metrics and the loss by name; {} if there are none.

        Args:
            outputs: The model's outputs for each batch of the data; read even if the model is evaluated whole.
        """
        if not self.needed or self.whole:
            for _ in outputs:
                pass
            return self._evaluated() if self.needed else {}
        self._reset()
        total, examples = 0.0, 0
        for (_, labels, weights), found in zip(self._batches, outputs, strict=True):
            count = len(keras.tree.flatten(labels)[0])
            total += count * float(keras.ops.convert_to_numpy(self._measured(labels, found, weights)))
            examples += count
        loss = {"loss": total / examples} if self._has_loss else {}
        results = {**self._results(), **loss}
        return {name: _number(name, value) for name, value in results.items()}

    def _results(self) -> dict[str, Any]:
        if not self._of_outputs:
            return self._model.get_metrics_result()
        # Others, such as those that a `test_step` updates, have no value here.
        compiled = self._model._compile_metrics
        return {} if compiled is None else compiled.result()

    def _evaluated(self) -> dict[str, float]:
        results = self._model.evaluate(Batches(self._batches), verbose=0, return_dict=True)
        return {name: _number(name, value) for name, value in results.items()}

    def end(self) -> None:
        """Resets the model's metrics."""
        self._reset()

    def _reset(self) -> None:
        if self.needed:
            self._model.reset_metrics()

    def _step(self, labels: Any, outputs: Any, weights: Any) -> Any:
        if not self._has_loss:
            keras.Model.compute_metrics(self._model, None, labels, outputs, weights)
            return keras.ops.zeros(())
        loss = self._model.compute_loss(y=labels, y_pred=outputs, sample_weight=weights, training=False)
        self._model.compute_metrics(None, labels, outputs, weights)
        return loss


def compiled_metrics(model: Any) -> dict[str, Any]:
    """Returns the Keras metrics that a model was compiled with, by their names in the results.

    {} before Keras made them, which it does in the first evaluation.
    """
    lists = getattr(model._compile_metrics, "_flat_metrics", None) or ()
    return {
        f"{each.output_name}_{metric.name}" if each.output_name else metric.name: metric
        for each in lists
        if each is not None
        for metric in each.metrics
    }


class Batches(keras.utils.PyDataset):
    """The batches as Keras reads them, without the parts that the data lack."""

    def __init__(self, batches: Sequence[Batch]):
        super().__init__()
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        inputs, labels, weights = self._batches[index]
        return (inputs, labels) if weights is None else (inputs, labels, weights)


def _reason_for_whole(model: Any) -> str:
    for name in ("test_step", "compute_loss", "compute_metrics"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            return f"the model has a {name} of its own"
    adding = [layer.name for layer in model._flatten_layers() if getattr(layer, "_losses", None)]
    regularized = [one.name for one in model._flatten_layers() if getattr(one, "activity_regularizer", None)]
    return next((f"the layer {name!r} adds a loss" for name in (*adding, *regularized)), "")


def _number(name: str, value: Any) -> float:
    array = np.asarray(keras.ops.convert_to_numpy(value))
    if array.ndim:
        raise ValueError(
            f"A metric is one number. Received: {name!r} with values of shape {array.shape}. Compile the model with an "
            "average over the classes, or without this metric."
        )
    return float(array)

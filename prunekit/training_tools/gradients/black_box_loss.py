"""Losses measured outside TensorFlow (by a program, a simulator, a device), with a given or an estimated gradient."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from prunekit.core.runtime import backend
from prunekit.training_tools.gradients.layer_capture import graph_in_scope
from prunekit.training_tools.gradients.zeroth_order import SPSA, CentralDifferences


class MeasuredLoss(keras.losses.Loss):
    """A loss whose value comes from outside TensorFlow, for `model.compile`, `TapeLoop` or a tape.

    The training step stays a compiled graph; only the calls of `measure` run on the host: one call per forward pass,
    and in each backward pass as many as the gradient estimate needs. XLA cannot compile such a step. Keras uses XLA by
    default on a GPU, so pass `model.compile(..., jit_compile=False)`.

    Args:
        measure: (labels, outputs) -> one number for the batch or one number per example, to be minimised. Receives
            copies as NumPy arrays: outputs of shape (batch, ...), and labels as passed to Keras losses, in floating
            point. With gradient="given", `measure` returns (numbers, gradient): the gradient of the batch's number, or
            of each example's number, in the outputs' shape.
        gradient: `CentralDifferences(size)`, `SPSA(size, ...)`, or "given".
        per_example: Whether `measure` returns an array of shape (batch,), in which each number depends on its example
            only. The loss is then the mean, weighted by sample weights if given. Gradient estimates have much less
            noise: one evaluation measures all examples, and examples do not add noise to each other.
        name: Name of the loss.

    Raises:
        RuntimeError: Keras does not run on TensorFlow; at the call: XLA compiles the step, or a distribution strategy
            has several replicas. In the step: `measure` raises; in a compiled step, too, as a tf.errors.OpError.
        TypeError: `measure` is not callable; `gradient` is not one of the three options; at the call: several outputs.
            (With `compile`, Keras calls the loss for each output of a model separately.)
        ValueError: At the call: sample weights without `per_example`; outputs without examples.
            In the step: the return value of `measure` is not finite or has the wrong shape. In a compiled step
            TensorFlow raises a tf.errors.OpError whose text ends with that message. The step changes no weights.
    """

    def __init__(
        self,
        measure: Callable[[Any, np.ndarray], Any],
        gradient: CentralDifferences | SPSA | str,
        *,
        per_example: bool = False,
        name: str = "measured_loss",
    ):
        backend.require_tensorflow("MeasuredLoss")
        if not callable(measure):
            raise TypeError(f"`measure` is a function (labels, outputs) -> numbers. Received: {measure!r}.")
        if gradient != "given" and not isinstance(gradient, CentralDifferences | SPSA):
            raise TypeError(
                '`gradient` is pk.gradients.CentralDifferences(size), pk.gradients.SPSA(size) or "given". Received: '
                f"{gradient!r}."
            )
        super().__init__(name=name)
        self._measure = measure
        self._estimator = None if isinstance(gradient, str) else gradient.estimator()
        self._per_example = per_example
        self._evaluations = 0

    @property
    def evaluations(self) -> int:
        """Number of calls of `measure` so far."""
        return self._evaluations

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """The loss after Keras's reduction and sample weighting."""
        if sample_weight is not None and not self._per_example:
            raise ValueError(
                "One number for a batch cannot be weighted by example. Received: sample weights, and a MeasuredLoss "
                "with per_example=False. Pass the weights to `measure` with the labels, or measure each example."
            )
        if isinstance(y_pred, list | tuple | dict):
            raise TypeError(
                f"A MeasuredLoss measures one tensor of outputs. Received: {len(y_pred)} outputs. Concatenate them."
            )
        # tf.identity removes Keras's mask: `measure` alone decides which outputs count.
        return super().__call__(y_true, tf.identity(y_pred), sample_weight)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """The batch's number, of shape (), or one number per example, of shape (batch,)."""
        _check_place()
        outputs = tf.convert_to_tensor(y_pred)
        if not outputs.shape.rank:
            raise ValueError(f"Outputs have one row per example. Received: shape {outputs.shape}.")
        labels = [tf.convert_to_tensor(leaf) for leaf in keras.tree.flatten(y_true)]

        def outside(function: Callable[..., Any], kinds: Any) -> Any:
            def called(outputs: np.ndarray, *leaves: np.ndarray) -> Any:
                return function(keras.tree.pack_sequence_as(y_true, leaves), outputs)

            return tf.numpy_function(called, [outputs, *labels], kinds)

        @tf.custom_gradient
        def measured(outputs: Any) -> Any:
            given = None
            if self._estimator is None:
                numbers, given = outside(self._numbers_and_gradient, [outputs.dtype, outputs.dtype])
            else:
                numbers = outside(self._numbers, outputs.dtype)
            numbers.set_shape(outputs.shape[:1] if self._per_example else ())

            def backward(upstream: Any) -> Any:
                gradient = outside(self._estimate, outputs.dtype) if given is None else given
                gradient.set_shape(outputs.shape)
                axes = [1] * (outputs.shape.rank - 1)
                return gradient * (tf.reshape(upstream, [-1, *axes]) if self._per_example else upstream)

            return numbers, backward

        return measured(outputs)

    def get_config(self) -> dict[str, Any]:
        """The config for a saved model: only the loss's name."""
        return super().get_config()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "MeasuredLoss":
        """Raises ValueError: a saved model does not contain the function `measure`.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "A MeasuredLoss is not saved with the model that was compiled with it. Load with "
            "keras.models.load_model(path, compile=False), and compile again."
        )

    # Outside TensorFlow -------------------------------------------------------------------------------------------

    def _numbers(self, labels: Any, outputs: np.ndarray) -> np.ndarray:
        return self._checked(self._called(labels, outputs), "a number", self._shape(outputs)).astype(outputs.dtype)

    def _numbers_and_gradient(self, labels: Any, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = self._called(labels, outputs)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise ValueError(
                f'With gradient="given", `measure` returns (numbers, gradient). Received: {_brief(found)}.'
            )
        numbers = self._checked(found[0], "a number", self._shape(outputs))
        gradient = self._checked(found[1], "a gradient", outputs.shape)
        return numbers.astype(outputs.dtype), gradient.astype(outputs.dtype)

    def _estimate(self, labels: Any, outputs: np.ndarray) -> np.ndarray:
        def evaluate(moved: np.ndarray) -> np.ndarray:
            return self._checked(self._called(labels, moved), "a number", self._shape(outputs))

        gradient = self._estimator(evaluate, labels, outputs, per_example=self._per_example)  # type: ignore[misc]
        return gradient.astype(outputs.dtype)

    def _shape(self, outputs: np.ndarray) -> tuple[int, ...]:
        return outputs.shape[:1] if self._per_example else ()

    def _called(self, labels: Any, outputs: np.ndarray) -> Any:
        self._evaluations += 1
        try:
            # Copies: the arrays share memory with TensorFlow tensors that are used after this call.
            return self._measure(keras.tree.map_structure(np.array, labels), np.array(outputs))
        except Exception as error:
            # Keras would treat a StopIteration as the end of the data.
            raise RuntimeError(f"`measure` raised {type(error).__name__}: {error}") from error

    def _checked(self, found: Any, what: str, shape: tuple[int, ...]) -> np.ndarray:
        whose = "for each example" if self._per_example else "for the batch"
        try:
            # np.asarray would convert None to NaN.
            array = np.asarray(found if found is not None else "None", "float64")
        except (TypeError, ValueError) as error:
            raise ValueError(f"`measure` returns {what} {whose}. Received: {_brief(found)}.") from error
        if array.shape != shape:
            remedy = " See `per_example`." if what == "a number" else ""
            raise ValueError(
                f"`measure` returns {what} {whose}, of shape {shape}. Received: shape {array.shape}.{remedy}"
            )
        if not np.isfinite(array).all():
            wrong = array[~np.isfinite(array)]
            raise ValueError(
                f"`measure` returns {what} {whose}, all finite. Received: {wrong.flat[0]}, {wrong.size} of "
                f"{array.size} not finite."
            )
        return array


def _brief(found: Any) -> str:
    text = " ".join(repr(found).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_place() -> None:
    backend.require_one_replica("A MeasuredLoss", "It is measured in one place, in order: train on one device.")
    graph = graph_in_scope()
    while graph is not None:
        # TensorFlow has no public API to detect XLA; without this check the first step fails with a list of operations.
        context = getattr(graph, "_get_control_flow_context", lambda: None)()
        if context is not None and context.IsXLAContext():
            raise RuntimeError(
                "XLA cannot compile a step that calls Python. Received: a MeasuredLoss in a step compiled by XLA. "
                "Pass jit_compile=False, to model.compile too: on a GPU Keras chooses XLA by itself."
            )
        graph = getattr(graph, "outer_graph", None)

"""Statistics of criteria from the gradients of single examples: the diagonals of Fisher and Gauss-Newton matrices."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from prunekit.core.runtime.losses import loss_of
from prunekit.core.runtime.model_function import ModelFunction
from prunekit.core.statistics.statistics import DataCollector
from prunekit.training_tools.gradients.layer_capture import run, tensors
from prunekit.training_tools.gradients.per_example_gradients import sum_of_squares
from prunekit.training_tools.gradients.per_example_pass import ExamplePass
from prunekit.training_tools.gradients.score_statistics import check_labelled, in_full_precision

# The curvature of the loss takes the square of this number for each example, and a backward pass for each output.
_OUTPUT_LIMIT = 1024


class _ExampleSum(DataCollector):
    """Sums a statistic of single examples, in inference mode; its mean over all examples is the value.

    Attributes:
        name: Name of the statistic, for messages.
    """

    name: str

    def reset(self) -> None:
        """Forgets all batches."""
        self._sums: list[Any] = [0.0] * len(self.targets)
        self._examples = 0

    def observe(self, inputs: Any, labels: Any) -> None:
        """Adds a batch.

        Raises:
            ValueError: The model has no loss, the data have no labels, or the loss has weights.
        """
        check_labelled(self.model, labels, self.name)
        self._check_loss()
        found = self.of(tensors(self.model, inputs), tensors(self.model, labels))
        by_variable = dict(zip(map(id, self.model.trainable_variables), found, strict=True))
        self._sums = [
            total + by_variable[id(target.variable)] for total, target in zip(self._sums, self.targets, strict=True)
        ]
        self._examples += len(keras.tree.flatten(inputs)[0])

    def _check_loss(self) -> None:
        if self.model.loss is None or getattr(self.model._compile_loss, "_user_loss_weights", None) is not None:
            raise ValueError(
                f"The statistic {self.name!r} is taken from a loss given to `compile`, without `loss_weights`. "
                f"Received: the model {self.model.name!r} with another loss. Choose another criterion, such as "
                '"taylor".'
            )

    def check(self) -> None:
        """Raises for a target that is frozen."""
        trained = {id(variable) for variable in self.model.trainable_variables}
        for target in self.targets:
            if id(target.variable) not in trained:
                raise ValueError(
                    f"The statistic {self.name!r} exists for trainable weights. Received: {target.name}, which is "
                    "frozen. Leave it out with `exclude`, or set trainable=True while it is pruned."
                )

    def of(self, inputs: Any, labels: Any) -> list[Any]:
        """Returns the statistic summed over the examples: one tensor per trainable variable."""
        raise NotImplementedError

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def precise(*arguments: Any) -> Any:
            with in_full_precision(self.model):
                return function(*arguments)

        return ModelFunction(self.model, precise, static_batch=True)

    def values(self) -> list[Any]:
        """Returns the mean over all examples: one tensor of the weight's shape per target."""
        return [total / self._examples for total in self._sums]


def _added(left: list[Any], right: list[Any]) -> list[Any]:
    return [one + more for one, more in zip(left, right, strict=True)]


def _plain(losses: Any) -> Any:
    """Returns the losses of `compile` in lists and dictionaries of Python: TensorFlow keeps them in its own types."""
    if isinstance(losses, Mapping):
        return {name: _plain(one) for name, one in losses.items()}
    if isinstance(losses, list | tuple):
        return _plain(losses[0]) if len(losses) == 1 else [_plain(one) for one in losses]
    return losses


class SquareGradient(_ExampleSum):
    """Collects the mean of squared per-example gradients: the diagonal of the empirical Fisher matrix."""

    name = "square_gradient"

    def of(self, inputs: Any, labels: Any) -> list[Any]:
        """Returns the squared gradients of the examples' losses, summed."""
        return self._squares(inputs, labels)

    @functools.cached_property
    def _squares(self) -> Callable[..., list[Any]]:
        def squares(inputs: Any, labels: Any) -> list[Any]:
            return sum_of_squares(self.model, _plain(self.model.loss), inputs, labels)

        return self._compiled(squares)


class GaussNewton(_ExampleSum):
    """Collects the diagonal of the Gauss-Newton matrix, the mean over examples of J^T H J.

    J is the Jacobian of an example's outputs with respect to the weights, and H the Hessian of its loss with respect to
    the outputs, without its negative eigenvalues. The outputs are the logits before the model's softmax or sigmoid
    where the loss computes with them, as Keras's cross-entropies do. One backward pass per output.

    Source: Schraudolph 2002, Neural Computation 14(7).
    """

    name = "gauss_newton"

    def of(self, inputs: Any, labels: Any) -> list[Any]:
        """Returns the sum over examples and over the columns s of S, where H = S S^T, of (J^T s)**2."""
        roots = self._roots(inputs, labels)
        columns = (tf.reshape(column, roots.shape[:-1]) for column in tf.unstack(roots, axis=-1))
        found = (self._squares(inputs, labels, column) for column in columns)
        return functools.reduce(_added, found)

    @functools.cached_property
    def _roots(self) -> Callable[..., Any]:
        """Function of a batch; returns S."""

        def roots(inputs: Any, labels: Any) -> Any:
            on_logits = self._reads_logits(inputs, labels)
            z = self._outputs(inputs, on_logits=on_logits)
            return _curvature_roots(lambda outputs: self._losses(outputs, labels, on_logits=on_logits), z)

        return self._compiled(roots)

    # One column at a time, and the outputs computed again for each: a graph with a backward pass per output would grow
    # with their number.
    @functools.cached_property
    def _squares(self) -> Callable[..., list[Any]]:
        """Function of a batch and a column s; returns the sums of (J^T s)**2."""

        def squares(inputs: Any, labels: Any, column: Any) -> list[Any]:
            on_logits = self._reads_logits(inputs, labels)
            passed = ExamplePass(lambda x: self._outputs(x, on_logits=on_logits), self.model, inputs, training=False)
            pulled = passed.pull(tf.reshape(column, tf.shape(passed.target)))
            return [each.squares(variable.shape) for variable, each in zip(passed.variables, pulled, strict=True)]

        return self._compiled(squares)

    def _outputs(self, inputs: Any, *, on_logits: bool) -> Any:
        found = run(self.model, inputs)
        return found._keras_logits if on_logits else found

    def _reads_logits(self, inputs: Any, labels: Any) -> bool:
        prediction = run(self.model, inputs)
        self._check_one_output(keras.tree.flatten(prediction))
        logits = getattr(prediction, "_keras_logits", None)
        if logits is None:
            return False
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(logits)
            losses = self._losses(logits, labels, on_logits=True)
        return tape.gradient(losses, logits) is not None

    def _losses(self, z: Any, labels: Any, *, on_logits: bool) -> Any:
        """Returns each example's loss as a function of its outputs."""
        prediction = tf.identity(z)
        if on_logits:
            # The loss reads the logits alone, so that the prediction's own values do not matter.
            prediction = tf.stop_gradient(z)
            prediction._keras_logits = z
        (loss,) = keras.tree.flatten(self.model.loss)
        return loss_of(loss, labels, prediction, per_example=True)

    def check(self) -> None:
        """Raises for a frozen target, and for a model that declares several outputs or too many."""
        super().check()
        declared = getattr(self.model, "outputs", None)
        if declared:
            self._check_one_output(declared)

    def _check_one_output(self, outputs: Sequence[Any]) -> None:
        if len(outputs) != 1 or math.prod(size or 1 for size in outputs[0].shape[1:]) > _OUTPUT_LIMIT:
            shapes = ", ".join(str(tuple(each.shape)) for each in outputs)
            raise ValueError(
                f"The statistic {self.name!r} needs a model with one output of at most {_OUTPUT_LIMIT} numbers per "
                f'example. Received: outputs of shape {shapes}. Choose another criterion, such as "fisher".'
            )


def _curvature_roots(losses: Any, z: Any) -> Any:
    """Returns S of shape (batch, outputs, outputs): S S^T is the Hessian of each example's loss in its outputs."""
    with tf.GradientTape(watch_accessed_variables=False) as outer:
        outer.watch(z)
        with tf.GradientTape(watch_accessed_variables=False) as inner:
            inner.watch(z)
            value = losses(z)
        slope = inner.gradient(value, z, unconnected_gradients="zero")
    hessian = outer.batch_jacobian(slope, z, unconnected_gradients="zero")
    count = z.shape[1:].num_elements()
    hessian = tf.reshape(hessian, (-1, count, count))
    values, vectors = tf.linalg.eigh((hessian + tf.linalg.matrix_transpose(hessian)) / 2)
    return vectors * tf.sqrt(tf.maximum(values, 0))[:, None, :]

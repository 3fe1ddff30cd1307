"""Levenberg-Marquardt training of Keras models: second-order steps for residual losses and small models."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.layers.model_weights import check_built
from prunekit.core.runtime import backend, compilation
from prunekit.core.runtime.arguments import examples_in, require_positive
from prunekit.core.runtime.environment import main_memory
from prunekit.techniques.pruning.training.pruner import Pruner, check_loop_steps_after_updates

_TAU, _LEAST, _MOST = 1e-3, 1e-15, 1e15


def difference(y_true: Any, y_pred: Any) -> Any:
    """Returns y_pred - y_true, the residuals of least squares."""
    return y_pred - ops.reshape(ops.cast(y_true, y_pred.dtype), ops.shape(y_pred))


def classes(y_true: Any, y_pred: Any) -> Any:
    """Returns softmax(logits) - one-hot labels, the residuals of the Brier score of a classifier with logit outputs.

    Source: Brier 1950, "Verification of forecasts expressed in terms of probability", Monthly Weather Review 78.
    """
    truth = ops.reshape(ops.cast(y_true, "int32"), (-1, *y_pred.shape[1:-1]))
    return ops.softmax(y_pred) - ops.one_hot(truth, y_pred.shape[-1], dtype=y_pred.dtype)


class LevenbergMarquardt:
    """Minimises half the sum of squared residuals by damped Gauss-Newton steps.

    A step solves (J^T J + d I) h = -J^T r for the kept weights, by float64 Cholesky factorisation of the smaller of
    J^T J and J J^T, and applies h only if the loss decreases; the gain ratio adapts the damping d. Pruned weights are
    excluded, so the system shrinks as the model is pruned. Layers run in inference mode, because dropout and batch
    statistics would make the losses of two trials incomparable.

    Args:
        model: A built Keras model with one output.
        residuals: "difference" (y_pred - y_true), "classes" (softmax of logits - one-hot labels), or a function
            (y_true, y_pred) -> residuals of shape (batch, ...).
        pruner: A `Pruner` of this model, built without an optimizer; `pruner.step()` is called after each step.
        damping: Initial d; None uses 1e-3 times the largest diagonal entry of J^T J.
        attempts: Maximum number of trials of a step, with damping increased after each failed trial.
        memory_limit: Bytes for the Jacobian, the Gram matrix and their computation; None = half of the available
            memory.

    Source: Marquardt 1963, "An algorithm for least-squares estimation of nonlinear parameters", J. SIAM 11; damping
        rule of Nielsen 1999, "Damping parameter in Marquardt's method", IMM-REP-1999-05, eq. 2.4.

    Raises:
        RuntimeError: Keras does not run on TensorFlow.
        ValueError: The model is not built or has several outputs; an option is out of range.
        TypeError: `pruner` is not a `Pruner`.
    """

    def __init__(
        self,
        model: Any,
        residuals: str | Callable[[Any, Any], Any] = "difference",
        pruner: Pruner | None = None,
        *,
        damping: float | None = None,
        attempts: int = 10,
        memory_limit: int | None = None,
    ):
        backend.require_tensorflow("LevenbergMarquardt")
        check_built(model)
        if damping is not None and not damping > 0:
            raise ValueError(f"The damping is above zero. Received: damping={damping!r}.")
        if attempts < 1:
            raise ValueError(f"A step is tried at least once. Received: attempts={attempts!r}.")
        self.model = model
        self.pruner = _without_optimizer(pruner, model)
        self.damping = damping
        self._residuals = _as_residuals(residuals)
        self._growth = 2.0
        self._attempts = attempts
        self._limit = memory_limit
        self._variables = [backend.native(variable) for variable in model.trainable_variables]
        self._kept = self._kept_positions()
        self._linear = compilation.OpenFunction(self._linearise)
        self._half_square = compilation.OpenFunction(self._loss)

    @property
    def size(self) -> int:
        """Number of optimised weights: trainable and not pruned."""
        return sum(len(kept) for kept in self._kept)

    def step(self, x: Any, y: Any) -> dict[str, float]:
        """Runs one optimisation step on one batch, then calls `pruner.step()`.

        Args:
            x: Inputs of shape (batch, ...), or a structure of arrays.
            y: Targets of the residuals, shape (batch, ...).

        Returns:
            loss: Half the sum of squared residuals after the step.
            damping: d for the next step.
            gain: Decrease of the loss divided by the decrease that the linear model predicts; 0 if no trial succeeded.
            gradient: Largest magnitude in J^T r before the step.

        Raises:
            ValueError: The matrices need more than `memory_limit`; the residuals are not finite.
        """
        examples_in(x=x, y=y)
        x, y = (keras.tree.map_structure(_in_floatx, each) for each in (x, y))
        residuals = self._checked(x, y)
        found = self._attempt(x, y, *self._whole_jacobian(x, y, residuals))
        if self.pruner is not None and self.pruner.step():
            self._kept = self._kept_positions()
        return found

    def fit(self, x: Any, y: Any, epochs: int = 1, batch_size: int | None = None) -> dict[str, list[float]]:
        """Runs `step` on each batch of each epoch; returns one list of values per key of `step`'s result.

        With `batch_size=None`, training stops early after a step that did not decrease the loss.

        Args:
            x: Array of shape (examples, ...), or a structure of arrays.
            y: Array of shape (examples, ...).
            epochs: Number of passes over the data.
            batch_size: Examples per step, taken in the given order; None uses all examples in one step.
        """
        require_positive(epochs=epochs, batch_size=batch_size)
        examples_in(x=x, y=y)
        history: dict[str, list[float]] = {}
        for _ in range(epochs):
            for batch in _batches(x, y, batch_size):
                figures = self.step(*batch)
                for name, value in figures.items():
                    history.setdefault(name, []).append(value)
            if batch_size is None and not figures["gain"] > 0:
                break
        return history

    # The Jacobian ---------------------------------------------------------------------------------------------------

    def _kept_positions(self) -> list[np.ndarray]:
        """Returns the flat positions of the kept weights, one array per trainable variable."""
        masks = {} if self.pruner is None else self.pruner.masks
        names = {} if self.pruner is None else {
            id(backend.native(target.variable)): target.name for target in self.pruner.targets
        }  # fmt: skip
        kept = [masks.get(names.get(id(variable), "")) for variable in self._variables]
        return [
            np.arange(int(np.prod(variable.shape))) if mask is None else np.flatnonzero(mask)
            for variable, mask in zip(self._variables, kept, strict=True)
        ]

    def _checked(self, x: Any, y: Any) -> Any:
        """Returns the residuals of the batch, after checking the memory limit and that all residuals are finite."""
        output = self.model(x, training=False)
        if self._residuals is difference and y.shape.num_elements() != output.shape.num_elements():
            raise ValueError(
                f"y holds what the model returns. Received: y of shape {tuple(y.shape)} for outputs of shape "
                f"{tuple(output.shape)}."
            )
        residuals = self._residuals(y, output)
        rows, columns, dense = (
            int(np.prod(residuals.shape)),
            self.size,
            sum(int(np.prod(v.shape)) for v in self._variables),
        )
        needed = 8 * (rows * columns + 3 * min(rows, columns) ** 2) + 8 * self._rows_at_once(rows, dense) * dense
        limit = self._limit or (main_memory()[1] or 1 << 34) // 2
        if needed > limit:
            raise ValueError(
                f"{rows:,} residuals x {columns:,} weights need {needed / 1e9:.2f} GB for the Jacobian and its "
                f"Gram matrix. Received: a limit of {limit / 1e9:.2f} GB. Pass a smaller batch_size, prune "
                "further, or raise memory_limit."
            )
        if not np.isfinite(float(ops.sum(ops.square(residuals)))):
            raise ValueError("The residuals are not finite. Received: NaN or infinity, from the model, x or y.")
        return residuals

    @staticmethod
    def _rows_at_once(rows: int, dense: int) -> int:
        """Returns how many Jacobian rows (pruned weights included) are computed at once: 64 MB, at least one row."""
        return min(rows, max(1, (1 << 23) // max(dense, 1)))

    def _whole_jacobian(self, x: Any, y: Any, residuals: Any) -> tuple[Any, Any]:
        """Returns float64 (residuals, Jacobian without pruned weights), of shapes (rows,) and (rows, weights)."""
        import tensorflow as tf

        each = int(np.prod(residuals.shape[1:]))
        dense = sum(int(np.prod(variable.shape)) for variable in self._variables)
        examples = max(1, self._rows_at_once(residuals.shape[0] * each, dense) // each)
        kept = [tf.constant(positions, "int32") for positions in self._kept]
        parts = [
            self._linear(*keras.tree.map_structure(lambda a, at=at: a[at : at + examples], (x, y)), *kept)
            for at in range(0, residuals.shape[0], examples)
        ]
        return tf.concat([part[0] for part in parts], 0), tf.concat([part[1] for part in parts], 0)

    def _linearise(self, x: Any, y: Any, *kept: Any) -> tuple[Any, Any]:
        import tensorflow as tf

        def one(row):
            example, truth, chosen = row
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(self._variables)
                output = self.model(keras.tree.map_structure(lambda a: a[None], example), training=False)
                residual = tf.reduce_sum(chosen * tf.reshape(self._residuals(truth[None], output), (-1,)))
            gradients = tape.gradient(residual, self._variables, unconnected_gradients="zero")
            return residual, [tf.reshape(tf.convert_to_tensor(gradient), (-1,)) for gradient in gradients]

        # One row per residual and example: differentiates single examples, not the whole batch once per residual.
        first = keras.tree.map_structure(lambda a: a[:1], (x, y))
        sample = self._residuals(first[1], self.model(first[0], training=False))
        each = tf.size(sample)
        examples = tf.shape(keras.tree.flatten(x)[0])[0]
        chosen = tf.tile(tf.eye(each, dtype=sample.dtype), (examples, 1))
        repeated = keras.tree.map_structure(lambda a: tf.repeat(a, each, axis=0), (x, y))
        residuals, rows = tf.vectorized_map(one, (*repeated, chosen))
        columns = [tf.cast(tf.gather(part, places, axis=1), "float64") for part, places in zip(rows, kept, strict=True)]
        return tf.cast(residuals, "float64"), tf.concat(columns, axis=1)

    # The step -------------------------------------------------------------------------------------------------------

    def _attempt(self, x: Any, y: Any, residuals: Any, jacobian: Any) -> dict[str, float]:
        import tensorflow as tf

        wide = jacobian.shape[0] < jacobian.shape[1]
        gram = tf.linalg.matmul(jacobian, jacobian, transpose_a=not wide, transpose_b=wide)
        gradient = tf.linalg.matvec(jacobian, residuals, transpose_a=True)
        largest = float(tf.reduce_max(tf.abs(gradient))) if self.size else 0.0
        if self.damping is None:
            self.damping = _TAU * float(tf.reduce_max(tf.reduce_sum(jacobian**2, axis=0)))
        loss = float(tf.reduce_sum(residuals**2)) / 2
        before = [variable.numpy() for variable in self._variables]
        for _ in range(self._attempts if largest else 0):
            self.damping = min(max(self.damping, _LEAST), _MOST)
            change = _solution(gram, gradient, residuals, jacobian, self.damping)
            if change is None:
                self._damp_more()
                continue
            self._move(before, change.numpy())
            after = float(self._half_square(x, y))
            promised = float(tf.tensordot(change, self.damping * change - gradient, 1)) / 2
            gain = (loss - after) / promised if promised > 0 else 0.0
            if np.isfinite(after) and gain > 0:
                self.damping *= max(1 / 3, 1 - (2 * gain - 1) ** 3)
                self._growth = 2.0
                return {"loss": after, "damping": self.damping, "gain": gain, "gradient": largest}
            self._damp_more()
        for variable, value in zip(self._variables, before, strict=True):
            variable.assign(value)
        return {"loss": loss, "damping": self.damping, "gain": 0.0, "gradient": largest}

    def _damp_more(self) -> None:
        self.damping *= self._growth  # type: ignore[operator]
        self._growth *= 2.0

    def _move(self, before: list[np.ndarray], change: np.ndarray) -> None:
        """Assigns `before` plus the change to the kept weights; pruned weights keep their exact value."""
        begin = 0
        for variable, value, kept in zip(self._variables, before, self._kept, strict=True):
            moved = value.copy().reshape(-1)
            moved[kept] += change[begin : begin + len(kept)].astype(value.dtype)
            variable.assign(moved.reshape(value.shape))
            begin += len(kept)

    def _loss(self, x: Any, y: Any) -> Any:
        residuals = ops.cast(self._residuals(y, self.model(x, training=False)), "float64")
        return ops.sum(ops.square(residuals)) / 2


def _solution(gram: Any, gradient: Any, residuals: Any, jacobian: Any, damping: float) -> Any:
    """Returns h of (J^T J + d I) h = -J^T r; None if rounding makes the matrix indefinite."""
    import tensorflow as tf

    damped = gram + damping * tf.eye(gram.shape[0], dtype=gram.dtype)
    try:
        factor = tf.linalg.cholesky(damped)
    except tf.errors.InvalidArgumentError:
        return None
    if gram.shape[0] == gradient.shape[0]:
        return -tf.linalg.cholesky_solve(factor, gradient[:, None])[:, 0]
    # (J^T J + d I)^-1 J^T = J^T (J J^T + d I)^-1
    return -tf.linalg.matvec(jacobian, tf.linalg.cholesky_solve(factor, residuals[:, None])[:, 0], transpose_a=True)


def _as_residuals(residuals: Any) -> Callable[[Any, Any], Any]:
    known: dict[str, Callable[[Any, Any], Any]] = {"difference": difference, "classes": classes}
    if isinstance(residuals, str) and residuals in known:
        return known[residuals]
    if isinstance(residuals, str) or not callable(residuals):
        raise ValueError(
            f"Residuals are {', '.join(map(repr, known))}, or a function (y_true, y_pred). Received: {residuals!r}."
        )
    return residuals


def _without_optimizer(pruner: Any, model: Any) -> Pruner | None:
    if pruner is None:
        return None
    if not isinstance(pruner, Pruner):
        raise TypeError(f"`pruner` is a pk.Pruner(model, schedule). Received: {pruner!r}.")
    if pruner.model is not model:
        raise ValueError(f"The pruner prunes another model ({pruner.model.name!r}) than this trainer trains.")
    check_loop_steps_after_updates(pruner, "LevenbergMarquardt")
    if pruner.optimizers:
        raise ValueError(
            "LevenbergMarquardt uses no Keras optimizer, so the pruner must have none. Received: a pruner with "
            f"{', '.join(type(one).__name__ for one in pruner.optimizers)}. Build it on a model that is not compiled, "
            "without `optimizer`."
        )
    return pruner


def _in_floatx(array: Any) -> Any:
    tensor = ops.convert_to_tensor(array)
    floating = "float" in keras.backend.standardize_dtype(tensor.dtype)
    return ops.cast(tensor, keras.config.floatx()) if floating else tensor


def _batches(x: Any, y: Any, batch_size: int | None) -> Iterator[tuple[Any, Any]]:
    examples = len(keras.tree.flatten(y)[0])
    for at in range(0, examples, batch_size or examples):
        rows = slice(at, at + (batch_size or examples))
        yield keras.tree.map_structure(lambda a, rows=rows: a[rows], x), y[rows]

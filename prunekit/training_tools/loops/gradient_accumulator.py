"""Averages gradients of several micro-batches or workers, and drops contributions that are too old."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from prunekit.core.runtime import backend


class GradientAccumulator:
    """Accumulates gradients and returns their mean; drops and counts contributions computed at an older step.

    `add` and `take` also work inside a `tf.function`, where they return tensors. Gradients of embeddings stay sparse:
    `take` reads, returns and clears only the rows that contributions touched.

    Args:
        variables: The variables of the gradients, in the order of the gradients.
        row_average: Divisor of rows of sparse gradients: "contributions" (the weight of all contributions, so that
            micro-batches give the gradient of the large batch) or "rows" (the weight of the contributions that touched
            the row, as in `tf.compat.v1.SparseConditionalAccumulator`).

    Source: `tf.compat.v1.ConditionalAccumulator` and `SparseConditionalAccumulator`, for the rules of dropping and of
        counting steps.

    Raises:
        RuntimeError: Keras does not run on TensorFlow.
        ValueError: `row_average` is neither "contributions" nor "rows".
    """

    def __init__(self, variables: Sequence[Any], *, row_average: str = "contributions"):
        backend.require_tensorflow("GradientAccumulator")
        import tensorflow as tf

        if row_average not in ("contributions", "rows"):
            raise ValueError(f'row_average is "contributions" or "rows". Received: row_average={row_average!r}.')
        self._by_row = row_average == "rows"
        self._variables = [backend.native(variable) for variable in variables]
        self._sums: list[_Sum | None] = [None] * len(self._variables)
        self._weight = tf.Variable(0.0, trainable=False, dtype="float64", name="weight")
        self._count, self._step, self._dropped = (
            tf.Variable(0, trainable=False, dtype="int64", name=name) for name in ("count", "step", "dropped")
        )

    @property
    def step(self) -> int:
        """The accumulator's step: contributions with a smaller `local_step` are dropped. `take` increments it by 1."""
        return int(self._step.numpy())

    @property
    def count(self) -> int:
        """Number of contributions added since the last `take`."""
        return int(self._count.numpy())

    @property
    def dropped(self) -> int:
        """Number of contributions dropped so far because they were too old."""
        return int(self._dropped.numpy())

    def set_step(self, step: int) -> None:
        """Sets the accumulator's step, for example when it joins a running training.

        Raises:
            ValueError: `step` is smaller than the current step.
        """
        if step < self.step:
            raise ValueError(
                f"An accumulator's step never decreases. Received: step={step}, and the current step is {self.step}."
            )
        self._step.assign(step)

    def add(self, gradients: Sequence[Any], local_step: Any = None, *, weight: Any = 1.0) -> Any:
        """Adds one contribution; returns True if it was added, False if it was dropped.

        Args:
            gradients: Aligned with the variables: tensors, `tf.IndexedSlices`, or None.
            local_step: Step at which the gradients were computed; None = the accumulator's current step.
            weight: Weight of the contribution in the mean, such as the number of examples of the micro-batch.

        Raises:
            ValueError: Number or shapes of the gradients differ from the variables'; `weight` is not positive.
        """
        import tensorflow as tf

        gradients = self._checked(gradients)
        if not tf.is_tensor(weight) and not weight > 0:
            raise ValueError(f"The weight of a contribution is above zero. Received: weight={weight!r}.")
        sums = self._sums_for(gradients)
        fresh = self._step <= (self._step if local_step is None else tf.cast(local_step, "int64"))

        def take_in():
            for total, gradient in zip(sums, gradients, strict=True):
                if gradient is not None:
                    total.add(gradient, weight)
            self._count.assign_add(1)
            self._weight.assign_add(tf.cast(weight, "float64"))
            return tf.constant(True)

        def drop():
            self._dropped.assign_add(1)
            return tf.constant(False)

        taken = tf.cond(fresh, take_in, drop)
        return bool(taken) if tf.executing_eagerly() else taken

    def take(self) -> list[Any]:
        """Returns the mean gradients, aligned with the variables; clears the accumulator and increments its step.

        The entry of a variable is None if no contribution ever had a gradient for it.

        Raises:
            ValueError: No contribution was added (inside a `tf.function`: tf.errors.InvalidArgumentError).
        """
        import tensorflow as tf

        if not tf.executing_eagerly():
            tf.debugging.assert_positive(self._count, "Nothing to take: no contribution was added since the last take.")
        elif self.count == 0:
            raise ValueError(
                f"Nothing to take: no contribution was added since the last take, and {self.dropped} were dropped as "
                f"older than step {self.step}. Call add() first."
            )
        means = [None if total is None else total.take(self._weight, self._by_row) for total in self._sums]
        self._weight.assign(0.0)
        self._count.assign(0)
        self._step.assign_add(1)
        return means

    def _checked(self, gradients: Sequence[Any]) -> list[Any]:
        import tensorflow as tf

        ready = (type(None), tf.IndexedSlices)
        gradients = [one if isinstance(one, ready) else tf.convert_to_tensor(one) for one in gradients]
        if len(gradients) != len(self._variables):
            raise ValueError(
                f"One gradient per variable is needed. Received: {len(gradients)} gradients for "
                f"{len(self._variables)} variables."
            )
        for gradient, variable in zip(gradients, self._variables, strict=True):
            if gradient is not None and not gradient.shape.is_compatible_with(variable.shape):
                raise ValueError(
                    f"A gradient has the shape of its variable. Received: shape {tuple(gradient.shape)} for "
                    f"{variable.name} of shape {tuple(variable.shape)}."
                )
        return gradients

    def _sums_for(self, gradients: list[Any]) -> list[Any]:
        """Creates missing sums; only a contribution shows which gradients are sparse and which are None."""
        import tensorflow as tf

        # init_scope lifts the variable's creation out of a `tf.function` that is being traced.
        with tf.init_scope():
            for place, gradient in enumerate(gradients):
                if gradient is not None and self._sums[place] is None:
                    self._sums[place] = _Sum(self._variables[place], isinstance(gradient, tf.IndexedSlices))
        return self._sums


class _Sum:
    """Weighted sum of one variable's gradients; for sparse gradients also the sum of weights per row."""

    def __init__(self, variable: Any, sparse: bool):
        import tensorflow as tf

        self._total = tf.Variable(np.zeros(variable.shape, variable.dtype.as_numpy_dtype), trainable=False)
        self._rows = tf.Variable(np.zeros(variable.shape[0], "float64"), trainable=False) if sparse else None

    def add(self, gradient: Any, weight: Any) -> None:
        import tensorflow as tf

        dtype = self._total.dtype
        if not isinstance(gradient, tf.IndexedSlices):
            self._total.assign_add(tf.cast(gradient, dtype) * tf.cast(weight, dtype))
            if self._rows is not None:
                self._rows.assign_add(tf.fill(self._rows.shape, tf.cast(weight, "float64")))
            return
        self._total.scatter_add(
            tf.IndexedSlices(tf.cast(gradient.values, dtype) * tf.cast(weight, dtype), gradient.indices)
        )
        if self._rows is not None:
            # A row index that occurs twice in one contribution counts once.
            once, _ = tf.unique(gradient.indices)
            self._rows.scatter_add(tf.IndexedSlices(tf.fill(tf.shape(once), tf.cast(weight, "float64")), once))

    def take(self, weight: Any, by_row: bool) -> Any:
        """Returns the mean and resets the sum to zero."""
        import tensorflow as tf

        dtype = self._total.dtype
        if self._rows is None:
            mean = self._total / tf.cast(weight, dtype)
            self._total.assign(tf.zeros_like(self._total))
            return mean
        touched = tf.reshape(tf.where(self._rows > 0), (-1,))
        divisor = tf.cast(tf.gather(self._rows, touched) if by_row else weight, dtype)
        rows = tf.gather(self._total, touched)
        if by_row:
            divisor = tf.reshape(divisor, [-1] + [1] * (len(self._total.shape) - 1))
        mean = rows / divisor
        self._total.scatter_update(tf.IndexedSlices(tf.zeros_like(rows), touched))
        self._rows.scatter_update(tf.IndexedSlices(tf.zeros(tf.shape(touched), "float64"), touched))
        return tf.IndexedSlices(mean, touched, tf.shape(self._total, out_type="int64"))

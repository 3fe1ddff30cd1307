"""What one weight's per-example gradients are made of: factors that give their norms without multiplying them out.

Every class has `gradient(shape)`, of shape (batch, *shape); `square_sum(shape)`, the squared L2 norm of each example's
gradient, of shape (batch,); and `squares(shape)`, the squares summed over examples, of the weight's shape.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True)
class Products:
    """sum over t of a[:, t, :, None] * g[:, t, None, :]: the gradient of a kernel that is multiplied with `a`.

    Attributes:
        a: What the kernel multiplies, of shape (batch, uses, inputs).
        g: Gradients of what comes out, of shape (batch, uses, outputs).

    Source: Goodfellow 2015, arXiv:1510.01799; for several uses Rochette et al. 2019, arXiv:1912.06015.
    """

    a: Any
    g: Any

    def gradient(self, shape: Sequence[int]) -> Any:
        """The factors multiplied out."""
        if self._once:
            # An outer product: a batch of matrix products with one term each takes several times as long.
            product = tf.transpose(self.a, (0, 2, 1)) * self.g
        else:
            product = tf.matmul(self.a, self.g, transpose_a=True)
        return tf.reshape(product, (-1, *shape))

    def square_sum(self, shape: Sequence[int]) -> Any:
        """The squared norms, from the Gram matrices of both factors where these are smaller than the gradients."""
        if self._once:
            return _square_sum(self.a) * _square_sum(self.g)
        if 2 * (self.a.shape[1] or math.inf) ** 2 <= math.prod(shape):
            return tf.reduce_sum(
                tf.matmul(self.a, self.a, transpose_b=True) * tf.matmul(self.g, self.g, transpose_b=True), (1, 2)
            )
        return _square_sum(self.gradient(shape))

    def squares(self, shape: Sequence[int]) -> Any:
        """The squares: one product of squared factors where each example uses the kernel once."""
        if self._once:
            product = tf.matmul(tf.square(self.a[:, 0]), tf.square(self.g[:, 0]), transpose_a=True)
            return tf.reshape(product, tuple(shape))
        return tf.reduce_sum(tf.square(self.gradient(shape)), 0)

    @property
    def _once(self) -> bool:
        return self.a.shape[1] == 1

    def merged(self, other: "Products") -> "Products":
        """Both together: a second call of a shared layer is only more uses, so that cross terms are in."""
        return Products(tf.concat([self.a, other.a], 1), tf.concat([self.g, other.g], 1))


@dataclass(frozen=True)
class Lookups:
    """Row `indices[b, t]` of an embedding has g[b, t] added to its gradient.

    Attributes:
        indices: Rows, integers of shape (batch, uses).
        g: Gradients of the rows looked up, of shape (batch, uses, features).
    """

    indices: Any
    g: Any

    def gradient(self, shape: Sequence[int]) -> Any:
        """Dense, however few rows were touched."""
        batch = tf.shape(self.g)[0]
        rows, _ = self._flat(shape[0])
        total = tf.math.unsorted_segment_sum(tf.reshape(self.g, (-1, shape[1])), rows, batch * shape[0])
        return tf.reshape(total, (-1, *shape))

    def square_sum(self, shape: Sequence[int]) -> Any:
        """From the rows that were touched alone: a row met twice is summed before it is squared."""
        rows, batch = self._flat(shape[0])
        touched, place = tf.unique(rows)
        sums = tf.math.unsorted_segment_sum(tf.reshape(self.g, (-1, shape[1])), place, tf.size(touched))
        return tf.math.unsorted_segment_sum(tf.reduce_sum(tf.square(sums), 1), touched // shape[0], batch)

    def squares(self, shape: Sequence[int]) -> Any:
        """As `square_sum`, gathered by row instead of by example."""
        rows, _ = self._flat(shape[0])
        touched, place = tf.unique(rows)
        sums = tf.math.unsorted_segment_sum(tf.reshape(self.g, (-1, shape[1])), place, tf.size(touched))
        return tf.math.unsorted_segment_sum(tf.square(sums), touched % shape[0], shape[0])

    def merged(self, other: "Lookups") -> "Lookups":
        """Both together."""
        return Lookups(tf.concat([self.indices, other.indices], 1), tf.concat([self.g, other.g], 1))

    def _flat(self, rows: int) -> tuple[Any, Any]:
        """One number per (example, row), in the order of the lookups; and the number of examples."""
        batch = tf.shape(self.indices, out_type="int64")[0]
        first = tf.range(batch, dtype="int64")[:, None] * rows
        return tf.reshape(tf.cast(self.indices, "int64") + first, (-1,)), batch


@dataclass(frozen=True)
class Whole:
    """Gradients that are multiplied out already, of shape (batch, *shape): biases, and layers without a formula."""

    each: Any

    def gradient(self, shape: Sequence[int]) -> Any:
        """As they are."""
        return tf.reshape(self.each, (-1, *shape))

    def square_sum(self, shape: Sequence[int]) -> Any:
        """Squared and summed."""
        return _square_sum(self.each)

    def squares(self, shape: Sequence[int]) -> Any:
        """Squared and summed over examples."""
        return tf.reduce_sum(tf.square(self.gradient(shape)), 0)

    def merged(self, other: "Whole") -> "Whole":
        """The sum: the gradients of two calls of a shared layer add up."""
        return Whole(self.each + other.each)


Contribution = Products | Lookups | Whole


def together(parts: Sequence[Contribution], shape: Sequence[int]) -> Contribution:
    """One contribution out of those of all calls that use a weight; multiplied out only where kinds differ."""
    total: Any = parts[0]
    for part in parts[1:]:
        if type(part) is not type(total):
            total, part = Whole(total.gradient(shape)), Whole(part.gradient(shape))
        total = total.merged(part)
    return total


def _square_sum(tensor: Any) -> Any:
    return tf.reduce_sum(tf.square(tensor), tuple(range(1, tensor.shape.rank)))

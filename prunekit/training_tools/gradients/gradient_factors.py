"""Factored per-example gradients of one weight, whose norms are computed without forming the gradients.

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
    """sum over t of a[:, t, :, None] * g[:, t, None, :]: the gradient of a kernel that multiplies `a`.

    Attributes:
        a: Inputs of the kernel, of shape (batch, uses, inputs).
        g: Gradients of the outputs, of shape (batch, uses, outputs).

    Source: Goodfellow 2015, arXiv:1510.01799; for several uses Rochette et al. 2019, arXiv:1912.06015.
    """

    a: Any
    g: Any

    def gradient(self, shape: Sequence[int]) -> Any:
        """Returns the gradients, formed from the factors."""
        if self._once:
            # An outer product: a batched matrix product with one term each takes several times as long.
            product = tf.transpose(self.a, (0, 2, 1)) * self.g
        else:
            product = tf.matmul(self.a, self.g, transpose_a=True)
        return tf.reshape(product, (-1, *shape))

    def square_sum(self, shape: Sequence[int]) -> Any:
        """Returns the squared norms, from both factors' Gram matrices if these are smaller than the gradients."""
        if self._once:
            return _square_sum(self.a) * _square_sum(self.g)
        if 2 * (self.a.shape[1] or math.inf) ** 2 <= math.prod(shape):
            return tf.reduce_sum(
                tf.matmul(self.a, self.a, transpose_b=True) * tf.matmul(self.g, self.g, transpose_b=True), (1, 2)
            )
        return _square_sum(self.gradient(shape))

    def squares(self, shape: Sequence[int]) -> Any:
        """Returns the summed squares: one product of squared factors if each example uses the kernel once."""
        if self._once:
            product = tf.matmul(tf.square(self.a[:, 0]), tf.square(self.g[:, 0]), transpose_a=True)
            return tf.reshape(product, tuple(shape))
        return tf.reduce_sum(tf.square(self.gradient(shape)), 0)

    @property
    def _once(self) -> bool:
        return self.a.shape[1] == 1

    def merged(self, other: "Products") -> "Products":
        """Returns the sum of both: a second call of a shared layer adds uses, so cross terms are included."""
        return Products(tf.concat([self.a, other.a], 1), tf.concat([self.g, other.g], 1))


@dataclass(frozen=True)
class Lookups:
    """Gradient of an embedding: g[b, t] is added to row `indices[b, t]` for example b.

    Attributes:
        indices: Rows, integers of shape (batch, uses).
        g: Gradients of the rows looked up, of shape (batch, uses, features).
    """

    indices: Any
    g: Any

    def gradient(self, shape: Sequence[int]) -> Any:
        """Returns dense gradients, even if few rows were looked up."""
        batch = tf.shape(self.g)[0]
        rows, _ = self._flat(shape[0])
        total = tf.math.unsorted_segment_sum(tf.reshape(self.g, (-1, shape[1])), rows, batch * shape[0])
        return tf.reshape(total, (-1, *shape))

    def square_sum(self, shape: Sequence[int]) -> Any:
        """Returns the squared norms, from the looked-up rows only; repeated rows are summed before squaring."""
        rows, batch = self._flat(shape[0])
        touched, place = tf.unique(rows)
        sums = tf.math.unsorted_segment_sum(tf.reshape(self.g, (-1, shape[1])), place, tf.size(touched))
        return tf.math.unsorted_segment_sum(tf.reduce_sum(tf.square(sums), 1), touched // shape[0], batch)

    def squares(self, shape: Sequence[int]) -> Any:
        """Returns the summed squares as `square_sum` does, but gathered by row instead of by example."""
        rows, _ = self._flat(shape[0])
        touched, place = tf.unique(rows)
        sums = tf.math.unsorted_segment_sum(tf.reshape(self.g, (-1, shape[1])), place, tf.size(touched))
        return tf.math.unsorted_segment_sum(tf.square(sums), touched % shape[0], shape[0])

    def merged(self, other: "Lookups") -> "Lookups":
        """Returns the sum of both."""
        return Lookups(tf.concat([self.indices, other.indices], 1), tf.concat([self.g, other.g], 1))

    def _flat(self, rows: int) -> tuple[Any, Any]:
        """Returns one number per (example, row), in the order of the lookups, and the number of examples."""
        batch = tf.shape(self.indices, out_type="int64")[0]
        first = tf.range(batch, dtype="int64")[:, None] * rows
        return tf.reshape(tf.cast(self.indices, "int64") + first, (-1,)), batch


@dataclass(frozen=True)
class Whole:
    """Gradients that are already formed, of shape (batch, *shape): biases, and layers without a formula."""

    each: Any

    def gradient(self, shape: Sequence[int]) -> Any:
        """Returns the gradients unchanged."""
        return tf.reshape(self.each, (-1, *shape))

    def square_sum(self, shape: Sequence[int]) -> Any:
        """Returns the squares, summed per example."""
        return _square_sum(self.each)

    def squares(self, shape: Sequence[int]) -> Any:
        """Returns the squares, summed over examples."""
        return tf.reduce_sum(tf.square(self.gradient(shape)), 0)

    def merged(self, other: "Whole") -> "Whole":
        """Returns the sum: the gradients of two calls of a shared layer add up."""
        return Whole(self.each + other.each)


Contribution = Products | Lookups | Whole


def together(parts: Sequence[Contribution], shape: Sequence[int]) -> Contribution:
    """Merges the contributions of all calls that use a weight; forms gradients only if the kinds differ."""
    total: Any = parts[0]
    for part in parts[1:]:
        if type(part) is not type(total):
            total, part = Whole(total.gradient(shape)), Whole(part.gradient(shape))
        total = total.merged(part)
    return total


def _square_sum(tensor: Any) -> Any:
    return tf.reduce_sum(tf.square(tensor), tuple(range(1, tensor.shape.rank)))

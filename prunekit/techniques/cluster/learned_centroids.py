"""Centroids that are trained with the weights of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.core.runtime import backend
from prunekit.core.runtime.compilation import shared_in_traces
from prunekit.core.runtime.variable_values import full_value
from prunekit.core.training.joined_variables import exchange
from prunekit.sparsity.array_ops import array_of, split_at
from prunekit.techniques.cluster.codebooks import Codebooks, without_zeros

# In the place of a missing centroid: infinities would become NaN where they are subtracted.
_FAR = np.float32(1e37)


class LearnedCentroids:
    """The centroids of all weights, in one variable that is trained.

    One variable, because an optimizer takes as many operations to update one as to update all.

    Args:
        weights: The weights.
        codebooks: The centroids of each at the start.
        averages: True: the gradient of a centroid is the mean of those of its entries; False: their sum.

    Attributes:
        starts: The centroids at the start.
        trainer: The optimizer of the variables, which the owner of this object sets.
        temperature: Of the soft assignment, above 0; 0 = each entry has the value of its nearest centroid.

    Source: tensorflow-model-optimization (`clustering_algorithm.py`: the weight and its centroid both receive the
        gradient of an entry); Cho et al. 2022, arXiv:2108.12659, section 3 (DKM: soft assignment), here to the nearest
        two centroids, with distances relative to that between the two.
    """

    def __init__(self, weights: Sequence[Any], codebooks: Sequence[Codebooks], *, averages: bool):
        self._weights, self.starts, self._averages = list(weights), list(codebooks), averages
        self.temperature = 0.0
        self.trainer: Any = None
        self._ends = np.cumsum([one.table.size for one in codebooks]).tolist()
        tables = [np.where(np.isfinite(one.table), one.table, _FAR).ravel() for one in codebooks]
        self._tables = keras.Variable(np.concatenate(tables), dtype="float32", name="centroids")
        # A trained one, without a gradient: JAX takes all others that change for constants.
        self._warmth = keras.Variable(0.0, dtype="float32", name="temperature")

    @property
    def variables(self) -> list[Any]:
        """The variables that a training step has to know."""
        return [self._tables, self._warmth]

    def warm(self, temperature: float) -> None:
        """Sets the temperature for the next steps."""
        self.temperature = temperature
        self._warmth.assign(temperature)

    def exchange_variables(self, other: LearnedCentroids) -> None:
        """Gives this object and another one the variables of each other, trainers included; values stay in place.

        So what was traced with the variables of one serves the other.

        Args:
            other: Centroids of the same weights and numbers, with a trainer of the same kind.
        """
        exchange(self, other, ("_tables", "_warmth"))

    def serves(self, other: LearnedCentroids) -> bool:
        """Returns True if a trace of one is a trace of the other, given its variables."""
        mine, theirs = self._weights, other._weights
        same = len(mine) == len(theirs) and all(one is two for one, two in zip(mine, theirs, strict=True))
        rows = zip(self.starts, other.starts, strict=False)
        same = same and all(_layout(one) == _layout(two) for one, two in rows)
        return same and self._averages == other._averages

    def for_pass(self, keys: set[int] | None = None) -> list[tuple[Any, Any]]:
        """Returns weights with the values that one forward pass computes with.

        Args:
            keys: ids of the weights; None = all.
        """
        tables = split_at(ops.convert_to_tensor(full_value(self._tables)), self._ends)
        soft = self.temperature > 0
        warmth = ops.stop_gradient(ops.convert_to_tensor(full_value(self._warmth)))
        pairs = []
        for weight, books, flat in zip(self._weights, self.starts, tables, strict=True):
            if keys is not None and id(weight) not in keys:
                continue
            table = ops.sort(ops.reshape(flat, books.table.shape), axis=-1)
            numbers = ops.convert_to_tensor(books.channels.of_axes.astype("float32"))
            value = ops.cast(full_value(weight), "float32")
            centroids, one_book = int(books.table.shape[1]), len(books.table) == 1
            if soft:
                found = softly_assigned(value, table, numbers, warmth)
            else:
                found = _nearest(centroids, averages=self._averages, one_book=one_book)(value, table, numbers)
            pairs.append((weight, ops.cast(found, weight.dtype)))
        return pairs

    def codebooks(self) -> list[Codebooks]:
        """Returns the present centroids of each weight."""
        found = []
        for flat, books in zip(np.split(array_of(self._tables), self._ends[:-1]), self.starts, strict=True):
            table = np.sort(flat.reshape(books.table.shape), axis=1)
            # One of the entries for missing centroids may have been sorted between others by a diverged training.
            table = np.where(table < _FAR / 2, without_zeros(table), np.float32(np.inf))
            found.append(replace(books, table=table))
        return found


def _layout(books: Codebooks) -> tuple[Any, ...]:
    return books.channels.out_axes, books.channels.run, books.table.shape


def places_of(values: Any, table: Any, numbers: Any, centroids: int, *, one_book: bool) -> Any:
    """Returns the place of each value's nearest centroid in the flat table, int32, the lower one halfway.

    Args:
        values: Tensor.
        table: Centroids, ascending in each row, shape (codebooks, centroids).
        numbers: Numbers of the codebooks of the values, float32, which broadcast against them.
        centroids: Number of centroids of a codebook.
        one_book: True = all values share a codebook.
    """
    borders = (table[:, 1:] + table[:, :-1]) / 2
    if one_book:
        found = ops.searchsorted(borders[0], ops.reshape(values, (-1,)))
        return ops.reshape(ops.cast(found, "int32"), ops.shape(values))
    # By halving: an array of values x centroids would take the memory of so many models.
    levels = (centroids - 1).bit_length()
    borders = ops.pad(borders, [[0, 0], [0, 2**levels - centroids]], constant_values=float(_FAR))
    flat, width = ops.reshape(borders, (-1,)), 2**levels - 1
    books = ops.cast(numbers, "int32")
    found = ops.zeros_like(ops.cast(values, "int32"))
    for level in reversed(range(levels)):
        half = 2**level
        above = ops.take(flat, books * width + found + (half - 1))
        found = ops.where(values > above, found + half, found)
    return books * centroids + found


@functools.cache
def _nearest(centroids: int, *, averages: bool, one_book: bool) -> Callable[..., Any]:
    """Returns a function (values, table, numbers) -> the nearest centroids; zeros stay zero.

    Gradients: a value receives that of its result, and a centroid the sum or the mean of those of its entries.
    """

    def nearest(values: Any, table: Any, numbers: Any) -> tuple[Any, Callable[..., Any]]:
        places = places_of(values, table, numbers, centroids, one_book=one_book)
        kept = values != 0
        result = ops.where(kept, ops.take(ops.reshape(table, (-1,)), places), ops.zeros_like(values))

        def gradients(*args: Any, upstream: Any = None) -> tuple[Any, Any, Any]:
            if upstream is None:
                # On PyTorch, the arguments of `nearest` come before it.
                (upstream,) = args
            inside = ops.where(kept, upstream, ops.zeros_like(upstream))
            cells = ops.shape(table)[0] * centroids
            sums = ops.segment_sum(ops.reshape(inside, (-1,)), ops.reshape(places, (-1,)), cells)
            if averages:
                counts = backend.counts_at(ops.where(kept, places, cells), cells)
                sums = sums / ops.maximum(ops.cast(counts, sums.dtype), 1.0)
            return inside, ops.reshape(sums, ops.shape(table)), ops.zeros_like(numbers)

        return result, gradients

    return shared_in_traces(ops.custom_gradient(nearest))


def softly_assigned(values: Any, table: Any, numbers: Any, temperature: Any) -> Any:
    """Returns values between their nearest two centroids; zeros stay zero.

    With distances x1 <= x2 from the two, and g between them, the share of the nearest is 1 / (1 + exp((x1^2 - x2^2) /
    (temperature * g^2))): a step between two centroids, which becomes steeper as the temperature falls.

    Args:
        values: Tensor, float32.
        table: Centroids, ascending in each row, shape (codebooks, centroids).
        numbers: As for `places_of`.
        temperature: Scalar tensor, above 0.
    """
    centroids = int(table.shape[1])
    places = ops.stop_gradient(places_of(values, table, numbers, centroids, one_book=int(table.shape[0]) == 1))
    first, flat = ops.cast(numbers, "int32") * centroids, ops.reshape(table, (-1,))
    nearest = ops.take(flat, places)
    sides = [
        ops.take(flat, ops.maximum(places - 1, first)),
        ops.take(flat, ops.minimum(places + 1, first + (centroids - 1))),
    ]
    # At either end the neighbour is the centroid itself, and missing centroids are far.
    reach = [ops.where(one == nearest, float(_FAR), ops.abs(values - one)) for one in sides]
    second = ops.where(reach[0] <= reach[1], *sides)
    alone = ops.minimum(*reach) > float(_FAR) / 4
    gap = ops.where(alone, 1.0, ops.stop_gradient(second - nearest))
    second = ops.where(alone, nearest, second)
    difference = (ops.square((values - second) / gap) - ops.square((values - nearest) / gap)) / temperature
    share = ops.sigmoid(difference)
    return ops.where(values != 0, second + share * (nearest - second), 0.0)

"""Observes the inputs of layers while a model runs on calibration data, and sums their products."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.watching import watching
from prunekit.core import backend, patching
from prunekit.core.layer_products import LayerProduct
from prunekit.sparsity.array_ops import array_of, ops_for

# Most entries of the rows that are formed at once: 64 MiB in float32.
_AT_ONCE = 1 << 24


@contextlib.contextmanager
def observing_inputs(
    layers: Sequence[Any], see: Callable[[Any, tuple], None], values: Sequence[tuple[Any, Any]] = ()
) -> Iterator[None]:
    """Calls `see(layer, args)` before each call of one of the layers, with eager tensors.

    Variables in `values`, pairs (variable, tensor), have the value of their tensor inside the scope.

    Recurrent layers run step by step inside the scope, so that their cells can be observed. The layer inside a
    TimeDistributed is shown all time steps at once. The model's state stays unchanged.
    """
    wanted = {id(layer) for layer in layers}
    hidden: list[Any] = []

    def watched(original: Callable[..., Any], layer: Any, args: tuple, kwargs: dict) -> Any:
        if hidden:
            return original(layer, *args, **kwargs)
        if isinstance(layer, keras.layers.TimeDistributed):
            steps = args[0]
            if id(layer.layer) in wanted:
                see(layer.layer, (ops.reshape(steps, (-1, *steps.shape[2:])), *args[1:]))
            hidden.append(layer)
            try:
                return original(layer, *args, **kwargs)
            finally:
                hidden.clear()
        if isinstance(layer, keras.layers.RNN):
            with _step_by_step(layer):
                return original(layer, *args, **kwargs)
        if id(layer) in wanted:
            see(layer, args or tuple(kwargs.values()))
        return original(layer, *args, **kwargs)

    with watching(watched), keras.StatelessScope(state_mapping=list(values), collect_losses=True):
        yield


@contextlib.contextmanager
def _step_by_step(layer: Any) -> Iterator[None]:
    """Lets a recurrent layer call its cell for each step: neither a loop of the backend nor a fused kernel does."""
    loop = layer.inner_loop

    def masked(sequences: Any, initial_state: Any, mask: Any, training: bool = False) -> Any:
        if mask is None:
            return loop(sequences, initial_state, mask, training=training)
        # The unrolled loops of Keras 3.15 have faults under masks. Backwards, that of PyTorch fails, and that of
        # TensorFlow sets the outputs of other steps to zero; that of JAX sets none to zero.
        mask = ops.reshape(keras.tree.flatten(mask)[0], sequences.shape[:2])
        if layer.go_backwards:
            sequences, mask = ops.flip(sequences, axis=1), ops.flip(mask, axis=1)
        with patching.shadowed(layer, "go_backwards", False):
            last, outputs, states = loop(sequences, initial_state, mask, training=training)
        if layer.zero_output_for_mask:
            last = keras.tree.map_structure(lambda one: _where(mask[:, -1], one), last)
            # Without return_sequences there is one output.
            outputs = keras.tree.map_structure(lambda one: _where(mask[:, -one.shape[1] :], one), outputs)
        return last, outputs, states

    with (
        patching.shadowed(layer, "unroll", True),
        patching.shadowed(layer, "use_cudnn", False),
        patching.shadowed(layer, "inner_loop", masked),
    ):
        yield


def _where(mask: Any, values: Any) -> Any:
    """Returns the values where the mask is True, and zero elsewhere; the mask has the first axes of the values."""
    missing = len(values.shape) - len(mask.shape)
    return ops.where(ops.reshape(mask, (*mask.shape, *[1] * missing)), values, ops.zeros_like(values))


def rows_in_parts(product: LayerProduct, args: tuple) -> Iterator[Any]:
    """Yields the rows of one call in parts of at most 64 MiB, float32, as tensors or NumPy arrays.

    Entries of padded positions are zero.

    Args:
        product: The product whose rows are formed.
        args: Arguments of the layer's call.
    """
    inputs = args[0]
    if product.diagonal:
        yield product.rows(args)
        return
    mask = getattr(inputs, "_keras_mask", None)
    if mask is not None and tuple(mask.shape) == tuple(inputs.shape[: len(mask.shape)]):
        missing = len(inputs.shape) - len(mask.shape)
        inputs = inputs * ops.cast(ops.reshape(mask, (*mask.shape, *[1] * missing)), inputs.dtype)
    window = math.prod(getattr(product.target.layer, "kernel_size", ()))
    entries = math.prod(inputs.shape[1:]) * window
    step = max(_AT_ONCE // max(entries, 1), 1)
    for start in range(0, inputs.shape[0], step):
        part = slice(start, start + step)
        others = keras.tree.map_structure(lambda one, part=part: one[part], args[1:])
        rows = product.rows((inputs[part], *others))
        yield ops_for(rows).cast(rows, "float32")


class InputProducts:
    """Sums over rows of inputs: X^T X, the sums of the inputs, and the number of rows.

    Attributes:
        sums: Sum of the rows, shape (groups, inputs), float64.
        rows: Number of rows in each group.

    Memory: 12 * groups * inputs ** 2 bytes.
    """

    def __init__(self, product: LayerProduct):
        self.product = product
        groups, inputs = product.groups, product.inputs
        self._gram = np.zeros(inputs if product.diagonal else (groups, inputs, inputs))
        self._waiting: list[Any] = []
        self.sums = np.zeros((groups, inputs))
        self.rows = 0

    @property
    def gram(self) -> np.ndarray:
        """Sum of X^T X, shape (groups, inputs, inputs), float64; for an embedding its diagonal, shape (inputs,)."""
        self._multiply()
        return self._gram

    def observe(self, args: tuple) -> None:
        """Adds the rows of one call of the layer."""
        for rows in rows_in_parts(self.product, args):
            self.add(rows)

    def add(self, rows: Any) -> None:
        """Adds rows of shape (groups, rows, inputs), or the indices of an embedding."""
        if self.product.diagonal:
            counts = np.bincount(array_of(rows), minlength=self.product.inputs)
            self._gram += counts
            self.sums[0] += counts
            self.rows += int(counts.sum())
            return
        self.sums += row_sums(rows)
        self.rows += rows.shape[1]
        # A product of few rows takes less time than its addition to the sum: wait for as many rows as inputs.
        self._waiting.append(backend.on_host(rows))
        if sum(each.shape[1] for each in self._waiting) >= self.product.inputs:
            self._multiply()

    def _multiply(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            rows = waiting[0] if len(waiting) == 1 else ops_for(waiting[0]).concatenate(waiting, axis=1)
            self._gram += transposed_product(rows, rows)


def transposed_product(left: Any, right: Any) -> np.ndarray:
    """Returns left^T right for each group, from tensors of shape (groups, rows, n) and (groups, rows, m)."""
    first = backend.on_host(left)
    if isinstance(first, np.ndarray):
        # BLAS forms X^T X as a symmetric product, which takes half the time of a general one.
        second = first if right is left else array_of(right)
        if len(first) == 1:
            return (first[0].T @ second[0])[None]
        return np.matmul(first.transpose(0, 2, 1), second)
    return array_of(ops.matmul(ops.transpose(left, (0, 2, 1)), right))


def row_sums(rows: Any) -> np.ndarray:
    """Returns the sums of rows of shape (groups, rows, n): shape (groups, n)."""
    found = backend.on_host(rows)
    if isinstance(found, np.ndarray):
        # A product with ones: BLAS takes half the time of a sum along this axis.
        return np.ones(found.shape[1], found.dtype) @ found
    return array_of(ops.sum(rows, axis=1))


class LayerMoments:
    """Sums over calibration data from which a layer can be fitted to its former outputs.

    X stands for the rows that the layer receives now, Y for its outputs, without bias, before the model was changed.

    Attributes:
        inputs: Products and sums of X.
        cross: Sum of X^T Y, shape (groups, inputs, outputs).
        output_sums: Sum of Y, shape (groups, outputs).
        output_squares: Sum of the squares of Y, shape (groups, outputs).
        same: True while X also led to Y.

    Args:
        product: The layer's product.
        matrix: Its matrices before the model was changed, shape (groups, inputs, outputs), float32.
    """

    def __init__(self, product: LayerProduct, matrix: np.ndarray):
        self.inputs = InputProducts(product)
        self._matrix = matrix
        self.cross = np.zeros(matrix.shape)
        self.output_sums = np.zeros(matrix[:, 0].shape)
        self.output_squares = np.zeros(matrix[:, 0].shape)
        self.same = True

    def observe(self, before: Iterator[Any], after: Iterator[Any] | None) -> None:
        """Adds the rows of one call: of the model as it was, and as it is (None = the same rows)."""
        for former, now in zip(before, after, strict=True) if after is not None else ((rows, rows) for rows in before):
            self.inputs.add(now)
            if self.inputs.product.diagonal:
                continue
            rows = backend.on_host(former)
            outputs = ops_for(rows).matmul(rows, self._matrix)
            if now is not former:
                self.same = False
                self.cross += transposed_product(now, outputs)
            self.output_sums += row_sums(outputs)
            self.output_squares += row_sums(outputs * outputs)

    def of_outputs(self, outputs: np.ndarray) -> "LayerMoments":
        """Returns the same moments with zeros for the other outputs; `outputs`: bool, shape (groups, outputs)."""
        found = copy.copy(self)
        found.cross = np.where(outputs[:, None], self.cross, 0.0)
        found.output_sums = np.where(outputs, self.output_sums, 0.0)
        found.output_squares = np.where(outputs, self.output_squares, 0.0)
        return found

    def finish(self) -> None:
        """Completes the sums that follow from the others: where the rows are the same, X^T Y = X^T X W."""
        gram = self.inputs.gram
        if self.inputs.product.diagonal:
            self.cross = gram[:, None] * self._matrix
            self.output_sums = gram[None] @ self._matrix[0]
            self.output_squares = gram[None] @ np.square(self._matrix[0])
        elif self.same:
            self.cross = gram @ self._matrix

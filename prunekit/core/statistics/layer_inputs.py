"""Observes the inputs of layers while a model runs on calibration data, and sums their products."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.graph.watching import watching
from prunekit.core.runtime import backend, patching
from prunekit.core.statistics.layer_products import LayerProduct
from prunekit.sparsity.array_ops import array_of, ops_for

# Most entries of the rows that are formed at once: 64 MiB in float32.
_AT_ONCE = 1 << 24
# Of layers with more than twice as many rows in each example, sums are formed of a sample of so many: the larger of
# these, the second times the layer's inputs.
_SAMPLED, _SAMPLED_PER_INPUT = 1024, 2
# Outputs for each input from which on the moments of outputs follow from products of inputs: these are two products
# of the rows, one of them symmetric, in the place of two with the outputs.
_WIDE = 0.75


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
    for rows, _ in _parts_of(product, args, None):
        yield rows


def sampled_rows(product: LayerProduct, args: tuple) -> Iterator[tuple[Any, float]]:
    """Yields (rows, weight) of one call: all rows with the weight 1, or a sample of a layer with many positions.

    Layers of at most 2,048 rows in each example (of at most 4 * inputs, if these are more) have all their rows. Of
    others there is one random row of each stretch of equal length, 1,024 (2 * inputs) in an example, the same rows for
    the same shapes. Each stands for `weight` rows. A least-squares fit to n rows of K inputs has an expected squared
    error that is K / (n - K - 1) larger, relative to the smallest, than the best fit: at most 1 / (2 * examples - 1),
    0.8 % for 64 examples.

    Args:
        product: The product whose rows are formed.
        args: Arguments of the layer's call.
    """
    yield from _parts_of(product, args, max(_SAMPLED, _SAMPLED_PER_INPUT * product.inputs))


def _parts_of(product: LayerProduct, args: tuple, most: int | None) -> Iterator[tuple[Any, float]]:
    inputs = args[0]
    if product.diagonal:
        yield product.rows(args), 1.0
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
        given = inputs[part]
        sample = RowSample(None if most is None else most * given.shape[0])
        rows = product.rows((given, *others), sample)
        yield ops_for(rows).cast(rows, "float32"), sample.weight


class RowSample:
    """Chooses one row of each stretch of equal length, if there are more than twice as many rows as wanted.

    Attributes:
        weight: Number of rows that a chosen one stands for.
    """

    def __init__(self, wanted: int | None):
        self._wanted, self.weight = wanted, 1.0

    def __call__(self, count: int) -> np.ndarray | None:
        if self._wanted is None or count <= 2 * self._wanted:
            return None
        self.weight = count / self._wanted
        # Random within the stretches: at equal distances the rows would lie in a few columns of an image.
        places = np.arange(self._wanted) + np.random.default_rng(count).random(self._wanted)
        return np.minimum(places * self.weight, count - 1).astype(np.intp)


class InputProducts:
    """Sums over rows of inputs: X^T X, the sums of the inputs, and the number of rows.

    Of layers with many rows, the sums are those of a sample times the number of rows that each stands for.

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
        self._weight = 1.0
        self.sums = np.zeros((groups, inputs))
        self.rows = 0

    @property
    def gram(self) -> np.ndarray:
        """Sum of X^T X, shape (groups, inputs, inputs), float64; for an embedding its diagonal, shape (inputs,)."""
        self._multiply()
        return self._gram

    def copy(self) -> "InputProducts":
        """Returns sums of their own for the same product."""
        # A deep copy would have a layer of its own, which Keras makes by saving and loading it.
        self._multiply()
        found = copy.copy(self)
        found._gram, found.sums, found._waiting = self._gram.copy(), self.sums.copy(), []
        return found

    def observe(self, args: tuple) -> None:
        """Adds the rows of one call of the layer."""
        for rows, weight in sampled_rows(self.product, args):
            self.add(rows, weight)

    def add(self, rows: Any, weight: float = 1.0) -> None:
        """Adds rows of shape (groups, rows, inputs), or the indices of an embedding.

        Args:
            rows: The rows.
            weight: How often each counts; see `sampled_rows`.
        """
        if self.product.diagonal:
            counts = np.bincount(array_of(rows), minlength=self.product.inputs)
            self._gram += counts
            self.sums[0] += counts
            self.rows += int(counts.sum())
            return
        if weight != self._weight:
            self._multiply()
            self._weight = weight
        self.sums += weighted(row_sums(rows), weight)
        self.rows += round(rows.shape[1] * weight)
        # A product of few rows takes less time than its addition to the sum: wait for as many rows as inputs.
        self._waiting.append(backend.on_host(rows))
        if sum(each.shape[1] for each in self._waiting) >= self.product.inputs:
            self._multiply()

    def _multiply(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            rows = waiting[0] if len(waiting) == 1 else ops_for(waiting[0]).concatenate(waiting, axis=1)
            self._gram += weighted(transposed_product(rows, rows), self._weight)


def weighted(sums: np.ndarray, weight: float) -> np.ndarray:
    """Returns the sums of rows that count `weight` times each."""
    return sums if weight == 1.0 else sums * np.float64(weight)


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
        matrix: As given.
        cross: Sum of X^T Y, shape (groups, inputs, outputs); empty for an embedding, whose X^T Y is diagonal X^T X
            times its matrix.
        output_sums: Sum of Y, shape (groups, outputs).
        output_squares: Sum of the squares of Y, shape (groups, outputs).
        same: True while X also led to Y.

    Args:
        product: The layer's product.
        matrix: Its matrices before the model was changed, shape (groups, inputs, outputs), float32.
    """

    def __init__(self, product: LayerProduct, matrix: np.ndarray):
        self.inputs = InputProducts(product)
        self.matrix = matrix
        self.cross = np.zeros((0,) if product.diagonal else matrix.shape)
        self.output_sums = np.zeros(matrix[:, 0].shape)
        self.output_squares = np.zeros(matrix[:, 0].shape)
        self.same = True
        # Of layers with many outputs: products of the rows before, and of those after with those before.
        self._wide = product.outputs >= _WIDE * product.inputs
        self._former, self._mixed = self.inputs, np.zeros(())

    def observe(self, before: tuple, after: tuple | None) -> None:
        """Adds the rows of one call.

        Args:
            before: Arguments of the call in the model as it was.
            after: Those in the model as it is; None = the same.
        """
        product = self.inputs.product
        former = sampled_rows(product, before)
        # The samples are the same, since they depend on the shapes alone.
        pairs = (
            zip(former, sampled_rows(product, after), strict=True)
            if after is not None
            else ((one, one) for one in former)
        )
        for (was, weight), (now, _) in pairs:
            if now is not was and self.same and not product.diagonal:
                self._differ()
            self.inputs.add(now, weight)
            if product.diagonal:
                continue
            if not self._wide:
                self._add_outputs(was, now, weight)
            elif not self.same:
                self._former.add(was, weight)
                self._mixed = self._mixed + weighted(transposed_product(now, was), weight)

    def _differ(self) -> None:
        """Takes the rows so far, which were the same before and after, for rows of both."""
        self.same = False
        gram = self.inputs.gram
        if self._wide:
            self._former, self._mixed = self.inputs.copy(), gram.copy()
        else:
            self.cross += gram @ self.matrix

    def _add_outputs(self, was: Any, now: Any, weight: float) -> None:
        rows = backend.on_host(was)
        outputs = ops_for(rows).matmul(rows, self.matrix)
        if not self.same:
            self.cross += weighted(transposed_product(now, outputs), weight)
        self.output_sums += weighted(row_sums(outputs), weight)
        self.output_squares += weighted(row_sums(outputs * outputs), weight)

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
            # A large table has few rows that are read.
            used = np.flatnonzero(gram)
            rows = self.matrix[0, used].astype("float64")
            self.output_sums = gram[None, used] @ rows
            self.output_squares = gram[None, used] @ np.square(rows, out=rows)
            return
        if self._wide:
            curved = self._former.gram @ self.matrix
            self.output_sums = (self._former.sums[:, None] @ self.matrix)[:, 0]
            self.output_squares = np.einsum("gio,gio->go", curved, self.matrix)
            self.cross = curved if self.same else self._mixed @ self.matrix
            self._former, self._mixed = self.inputs, np.zeros(())
        elif self.same:
            self.cross = gram @ self.matrix

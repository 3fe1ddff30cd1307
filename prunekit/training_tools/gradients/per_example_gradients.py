"""Per-example gradients of the loss, their norms, and their squares."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from prunekit.anatomy.layers.model_weights import check_built
from prunekit.core.runtime import backend
from prunekit.core.runtime.losses import loss_of
from prunekit.sparsity.arguments import whole
from prunekit.training_tools.gradients.gradient_factors import Contribution
from prunekit.training_tools.gradients.layer_capture import run, tensors
from prunekit.training_tools.gradients.per_example_pass import ExamplePass


def per_example(
    model: Any, loss: Any, x: Any, y: Any, *, training: bool = False, chunk_size: int | None = None
) -> list[Any]:
    """The gradient of each example's loss: one array of shape (batch, *weight.shape) per trainable variable.

    The result equals a loop over batches of one example, but takes one forward and one backward pass. Dense,
    convolution, embedding and normalisation layers have formulas; each other layer is differentiated by itself, one
    example at a time, vectorised. Examples must lie along the first axis of every layer's inputs and outputs; if not
    (steps folded into the batch), the layer's gradients are computed through the whole model, which is slower.

    The result takes batch size times the weights' bytes. Gradients of embeddings are dense.

    Args:
        model: A built Keras model.
        loss: A Keras loss, its name, or a function (y_true, y_pred) -> one loss per example; for several outputs a list
            or dictionary of losses, structured like the outputs. Losses added by layers (regularizers) are excluded.
        x: Inputs, of shape (batch, ...), or a structure of such arrays.
        y: Targets of the loss, of shape (batch, ...).
        training: The `training` argument of the model's call. Batch statistics have no per-example gradient.
        chunk_size: Examples per pass, which bounds the memory of activations; None: all examples in one pass.

    Returns:
        Tensors in the order and the dtypes of `model.trainable_variables`.

    Raises:
        RuntimeError: Keras does not run on TensorFlow.
        TypeError: `model` is not a Keras 3 model.
        ValueError: The model is not built; x and y differ in length; the loss mixes examples; `training` is True and a
            BatchNormalization is not frozen, or a layer that must be run again has dropout.
    """
    chunks = [
        [each.gradient(variable.shape) for variable, each in found]
        for found in _chunks(model, loss, x, y, training=training, chunk_size=chunk_size)
    ]
    return joined(chunks)


def per_example_square_sums(
    model: Any, loss: Any, x: Any, y: Any, *, training: bool = False, chunk_size: int | None = None
) -> list[Any]:
    """The squared L2 norm of each example's gradient: one array of shape (batch,) per trainable variable.

    The gradients of dense layers and embeddings are never multiplied out; those of other layers where that takes less
    memory than not to, one weight at a time.

    Args:
        model: As `per_example`.
        loss: As `per_example`.
        x: As `per_example`.
        y: As `per_example`.
        training: As `per_example`.
        chunk_size: As `per_example`.

    Raises:
        RuntimeError: As `per_example`.
        TypeError: As `per_example`.
        ValueError: As `per_example`.

    Source: Goodfellow 2015, arXiv:1510.01799; Rochette et al. 2019, arXiv:1912.06015.
    """
    chunks = [
        [each.square_sum(variable.shape) for variable, each in found]
        for found in _chunks(model, loss, x, y, training=training, chunk_size=chunk_size)
    ]
    return joined(chunks)


def per_example_norms(
    model: Any,
    loss: Any,
    x: Any,
    y: Any,
    *,
    per_variable: bool = False,
    training: bool = False,
    chunk_size: int | None = None,
) -> Any:
    """The L2 norm of each example's gradient over all trainable variables, of shape (batch,).

    Args:
        model: As `per_example`.
        loss: As `per_example`.
        x: As `per_example`.
        y: As `per_example`.
        per_variable: True: returns a list with the norms per trainable variable, arrays of shape (batch,).
        training: As `per_example`.
        chunk_size: As `per_example`.

    Raises:
        RuntimeError: As `per_example`.
        TypeError: As `per_example`.
        ValueError: As `per_example`; the model has no trainable variables.
    """
    squares = per_example_square_sums(model, loss, x, y, training=training, chunk_size=chunk_size)
    if per_variable:
        return [tf.sqrt(each) for each in squares]
    if not squares:
        raise ValueError(f"Nothing in the model {model.name!r} is trainable, so there is no gradient to take norms of.")
    widest = "float64" if any(each.dtype == tf.float64 for each in squares) else squares[0].dtype
    return tf.sqrt(tf.add_n([tf.cast(each, widest) for each in squares]))


def sum_of_squares(
    model: Any, loss: Any, x: Any, y: Any, *, training: bool = False, chunk_size: int | None = None
) -> list[Any]:
    """Squared per-example gradients summed over the batch: one array of the weight's shape per trainable variable.

    Divided by the number of examples, the result is the diagonal of the empirical Fisher information matrix.

    Args:
        model: As `per_example`.
        loss: As `per_example`.
        x: As `per_example`.
        y: As `per_example`.
        training: As `per_example`.
        chunk_size: As `per_example`.

    Raises:
        RuntimeError: As `per_example`.
        TypeError: As `per_example`.
        ValueError: As `per_example`.
    """
    total: list[Any] = []
    for found in _chunks(model, loss, x, y, training=training, chunk_size=chunk_size):
        squares = [each.squares(variable.shape) for variable, each in found]
        total = [one + more for one, more in zip(total, squares, strict=True)] if total else squares
    return total


def slices(structure: Any, chunk_size: int | None) -> Iterator[Any]:
    """Yields the structure in chunks of `chunk_size` examples.

    Raises:
        ValueError: The arrays differ in length or are empty; `chunk_size` < 1, or set for an unknown batch size.
    """
    lengths: set[Any] = {leaf.shape[0] if leaf.shape.rank else None for leaf in keras.tree.flatten(structure)}
    if chunk_size is not None:
        whole("chunk_size", chunk_size, 1, wrong_type=ValueError)
    if None in lengths:
        if chunk_size is not None:
            raise ValueError("The size of this batch is not known while a function is traced. Leave chunk_size out.")
        yield structure
        return
    if len(lengths) != 1 or lengths == {0}:
        raise ValueError(f"Inputs and labels have one row per example. Received: lengths {sorted(lengths)}.")
    (length,) = lengths
    if chunk_size is None or chunk_size >= length:
        yield structure
        return
    for begin in range(0, length, chunk_size):
        yield keras.tree.map_structure(lambda leaf, begin=begin: leaf[begin : begin + chunk_size], structure)


def joined(chunks: list[list[Any]]) -> list[Any]:
    """Concatenates the lists of arrays of all chunks along the first axis; frees the chunks while it runs."""
    if len(chunks) == 1:
        return chunks[0]
    whole = []
    for place in range(len(chunks[0])):
        whole.append(tf.concat([chunk[place] for chunk in chunks], 0))
        for chunk in chunks:
            chunk[place] = None
    return whole


def _chunks(
    model: Any, loss: Any, x: Any, y: Any, *, training: bool, chunk_size: int | None
) -> Iterator[list[tuple[Any, Contribution]]]:
    """Yields, per chunk, the (variable, contribution) pairs of all trainable variables."""
    backend.require_tensorflow("pk.gradients")
    check_built(model)

    def losses(batch: Any) -> Any:
        inputs, labels = batch
        # Model and loss in one expression: Keras's cross-entropies use the logits behind a softmax.
        return loss_of(loss, labels, run(model, inputs, training=training), per_example=True)

    for batch in slices((tensors(model, x), tensors(model, y)), chunk_size):
        passed = ExamplePass(losses, model, batch, training=training)
        yield list(zip(passed.variables, passed.pull(tf.ones_like(passed.target)), strict=True))

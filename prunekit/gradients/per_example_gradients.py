"""Gradients of the loss example by example: the gradients themselves, their norms, their squares."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from prunekit.anatomy.targets import check_built
from prunekit.core import backend
from prunekit.core.losses import loss_of
from prunekit.gradients.gradient_factors import Contribution
from prunekit.gradients.layer_capture import run, tensors
from prunekit.gradients.per_example_pass import ExamplePass


def per_example(
    model: Any, loss: Any, x: Any, y: Any, *, training: bool = False, chunk_size: int | None = None
) -> list[Any]:
    """The gradient of each example's loss: one array of shape (batch, *weight.shape) per trainable variable.

    Equal to a loop over batches of one, in one forward and one backward pass: dense, convolution, embedding and
    normalisation layers have formulas; other layers are differentiated one example at a time, vectorised, and alone
    among the model's layers. Examples lie along the first axis of what every layer takes and returns; where that does
    not hold (steps folded into the batch), the weights concerned are found through the whole model, which is slower.

    The result alone takes batch times the weights' bytes. Gradients of embeddings are dense here.

    Args:
        model: A built Keras model.
        loss: A Keras loss, its name, or a function (y_true, y_pred) -> one loss per example; for several outputs a list
            or dictionary of these, shaped like the outputs. Losses that layers add (regularizers) are left out.
        x: Inputs, of shape (batch, ...), or a structure of these.
        y: What the loss compares the outputs with, of shape (batch, ...).
        training: As the model is called. Batch statistics have no per-example gradient, so it is off by default.
        chunk_size: Examples in one pass, which bounds the memory of activations; None takes all at once.

    Returns:
        Tensors in the order and the precision of `model.trainable_variables`.

    Raises:
        RuntimeError: Keras does not run on TensorFlow.
        TypeError: It is no Keras 3 model.
        ValueError: The model is not built; x and y differ in length; the loss mixes examples; training with
            BatchNormalization that is not frozen, or with dropout in a layer that has to run again.
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
        per_variable: Whether each variable has norms of its own: a list of arrays of shape (batch,).
        training: As `per_example`.
        chunk_size: As `per_example`.

    Raises:
        RuntimeError: As `per_example`.
        TypeError: As `per_example`.
        ValueError: As `per_example`; nothing is trainable.
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

    Divided by the number of examples it is the diagonal of the empirical Fisher information.

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
    """The structure in pieces of so many examples.

    Raises:
        ValueError: Arrays of different lengths; no example; a chunk without any; a batch of unknown size to be split.
    """
    lengths: set[Any] = {leaf.shape[0] if leaf.shape.rank else None for leaf in keras.tree.flatten(structure)}
    if chunk_size is not None and (isinstance(chunk_size, bool) or chunk_size < 1):
        raise ValueError(f"A chunk has at least one example. Received: chunk_size={chunk_size!r}.")
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
    """Chunk by chunk lists of arrays, put together along the first axis; the chunks are let go of on the way."""
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
    """(variable, contribution) of every trainable variable, chunk by chunk."""
    backend.require_tensorflow("pk.gradients")
    check_built(model)

    def losses(batch: Any) -> Any:
        inputs, labels = batch
        # In one go: Keras's cross-entropies look up the logits behind a softmax, past the probabilities.
        return loss_of(loss, labels, run(model, inputs, training=training), per_example=True)

    for batch in slices((tensors(model, x), tensors(model, y)), chunk_size):
        passed = ExamplePass(losses, model, batch, training=training)
        yield list(zip(passed.variables, passed.pull(tf.ones_like(passed.target)), strict=True))

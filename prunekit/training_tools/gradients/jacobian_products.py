"""Products with Jacobians and Hessians, and Jacobians, of a model's output or of any layer's activations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from prunekit.anatomy.layers.layer_names import Site, find_site
from prunekit.anatomy.layers.model_weights import check_built
from prunekit.core.runtime import backend
from prunekit.core.runtime.losses import loss_of
from prunekit.training_tools.gradients.layer_capture import exact_moments, is_differentiable, own_tensors, run, tensors
from prunekit.training_tools.gradients.per_example_gradients import joined, slices
from prunekit.training_tools.gradients.per_example_pass import ExamplePass, check_examples_are_apart


def vjp(model: Any, x: Any, cotangent: Any, of: Any = None, wrt: Any = None, *, training: bool = False) -> Any:
    """cotangent^T J, where J is the Jacobian of `of` with respect to `wrt`: one forward and one backward pass.

    Args:
        model: A built Keras model; its weights and state are not changed.
        x: Inputs, of shape (batch, ...), or a structure of such arrays.
        cotangent: The factor of each entry of `of`, in the shape and structure of `of`.
        of: None for the model's output; a layer's name or path for its output; a function of the model's output, such
            as `lambda scores: scores[:, 3]` or a loss. For a layer with several calls in a pass, give the name and the
            index of the call, from 0: ("shared", 1).
        wrt: None or "weights" for the trainable variables; "inputs"; or a layer's name for its output.
        training: The `training` argument of the model's call.

    Returns:
        A list in the order of `model.trainable_variables`, or a structure like the inputs or like the layer's output.
        Entries on which `of` does not depend are zeros.

    Raises:
        RuntimeError: Keras does not run on TensorFlow.
        TypeError: `model` is not a Keras 3 model; `of` or `wrt` is not one of the values above.
        ValueError: The model is not built; no layer or several layers have the name; the layer has several calls and
            no index is given; `wrt` is not floating-point; the cotangent has the wrong shape or structure.
    """
    target, sources, tape = _forward(model, x, of, wrt, training=training)
    return _pulled(tape, target, sources, _matched("cotangent", cotangent, target))


def jvp(model: Any, x: Any, tangents: Any, of: Any = None, wrt: Any = None, *, training: bool = False) -> Any:
    """J tangents, where J is the Jacobian of `of` with respect to `wrt`: the directional derivative of `of`.

    Args:
        model: As `vjp`.
        x: As `vjp`.
        tangents: The direction, in the shapes and the structure of `wrt`.
        of: As `vjp`.
        wrt: As `vjp`.
        training: As `vjp`.

    Returns:
        The directional derivative, of the shape and structure of `of`.

    Raises:
        RuntimeError: As `vjp`.
        TypeError: As `vjp`.
        ValueError: As `vjp`; the tangents have the wrong shapes or structure.
    """
    target, sources, tape = _forward(model, x, of, wrt, training=training)
    return _pushed(tape, target, sources, _matched("tangents", tangents, sources))


def hvp(model: Any, loss: Any, x: Any, y: Any, vectors: Sequence[Any], *, training: bool = False) -> list[Any]:
    """The Hessian of the batch's loss with respect to the trainable variables, times vectors.

    Args:
        model: As `vjp`.
        loss: A Keras loss, its name, or a function (y_true, y_pred) -> one loss per example; for several outputs a list
            or dictionary of losses. Losses added by layers (regularizers) are excluded.
        x: As `vjp`.
        y: Targets of the loss, of shape (batch, ...).
        vectors: One array per trainable variable, of the variable's shape.
        training: The `training` argument of the model's call.

    Returns:
        One array per trainable variable.

    Raises:
        RuntimeError: As `vjp`.
        TypeError: As `vjp`.
        ValueError: The model is not built; `vectors` have wrong shapes or a wrong number; as `per_example` for `loss`.
    """
    variables, vectors, x, y = _second_order(model, x, y, vectors)
    with tf.GradientTape() as outer:
        with exact_moments(), tf.GradientTape() as inner:
            value = loss_of(loss, y, run(model, x, training=training))
        first = [_dense(gradient) for gradient in inner.gradient(value, variables)]
    pairs = [(gradient, vector) for gradient, vector in zip(first, vectors, strict=True) if gradient is not None]
    return _pulled(outer, [gradient for gradient, _ in pairs], variables, [vector for _, vector in pairs])


def gauss_newton_vp(
    model: Any, loss: Any, x: Any, y: Any, vectors: Sequence[Any], *, training: bool = False
) -> list[Any]:
    """J^T H J vectors: the generalised Gauss-Newton matrix of the batch's loss, times vectors.

    J is the Jacobian of the model's output with respect to the trainable variables, H the Hessian of the loss with
    respect to that output. If the loss is convex in the output, the matrix is positive semi-definite. For the Fisher
    matrix of a classifier, the model must return logits and the loss must use `from_logits=True`.

    Args:
        model: As `vjp`.
        loss: As `hvp`.
        x: As `vjp`.
        y: As `hvp`.
        vectors: One array per trainable variable, of the variable's shape.
        training: The `training` argument of the model's call.

    Returns:
        One array per trainable variable.

    Raises:
        RuntimeError: As `vjp`.
        TypeError: As `vjp`.
        ValueError: As `hvp`.

    Source: Schraudolph 2002, Neural Computation 14(7).
    """
    variables, vectors, x, y = _second_order(model, x, y, vectors)
    with tf.GradientTape(persistent=True) as tape:
        # New tensor identities, also because Keras's cross-entropies would otherwise use the logits behind a softmax.
        prediction = own_tensors(run(model, x, training=training))
    moved = _pushed(tape, prediction, variables, vectors)
    with tf.GradientTape(watch_accessed_variables=False) as outer:
        outer.watch(keras.tree.flatten(prediction))
        with tf.GradientTape(watch_accessed_variables=False) as inner:
            inner.watch(keras.tree.flatten(prediction))
            value = loss_of(loss, y, prediction)
        slope = inner.gradient(value, prediction, unconnected_gradients="zero")
    curved = outer.gradient(slope, prediction, output_gradients=moved, unconnected_gradients="zero")
    return _pulled(tape, prediction, variables, curved)


def jacobian(
    model: Any, x: Any, of: Any = None, wrt: Any = None, *, training: bool = False, chunk_size: int | None = None
) -> Any:
    """The Jacobian of `of` with respect to `wrt`, for each example.

    Runs one forward pass and one backward pass per entry of `of` per example. Assumes that the outputs of an example do
    not depend on other examples, which holds outside training mode.

    Args:
        model: As `vjp`.
        x: As `vjp`.
        of: As `vjp`; must be one array with a row per example.
        wrt: As `vjp`.
        training: The `training` argument of the model's call.
        chunk_size: Examples per pass, which bounds the memory of activations; None: all examples in one pass.

    Returns:
        For weights a list of arrays of shape (batch, *of, *weight.shape); otherwise a structure of arrays of shape
        (batch, *of, *wrt).

    Raises:
        RuntimeError: As `vjp`.
        TypeError: As `vjp`.
        ValueError: As `vjp` and as `per_example`; `of` is not one array with a row per example.
    """
    _check(model)
    check_examples_are_apart(model, training)
    rows_of = _weight_rows if wrt is None or wrt == "weights" else _activation_rows
    chunks, like = [], None
    for part in slices(tensors(model, x), chunk_size):
        like, rows = rows_of(model, part, of, wrt, training=training)
        chunks.append(rows)
    return keras.tree.pack_sequence_as(like, joined(chunks))


def _weight_rows(model: Any, x: Any, of: Any, wrt: Any, *, training: bool) -> tuple[Any, list[Any]]:
    question = _question(model, x, of, wrt)
    passed = ExamplePass(
        lambda x: run(model, x, training=training, of=question.of), model, x, training=training, persistent=True
    )

    def pull(row: Any) -> list[Any]:
        pairs = zip(passed.pull(row), passed.variables, strict=True)
        return [contribution.gradient(variable.shape) for contribution, variable in pairs]

    return passed.variables, _rows(passed.target, _length(x), pull)


def _activation_rows(model: Any, x: Any, of: Any, wrt: Any, *, training: bool) -> tuple[Any, list[Any]]:
    target, sources, tape = _forward(model, x, of, wrt, training=training, persistent=True)
    batch = _length(x)
    if any(not leaf.shape.rank or leaf.shape[0] != batch for leaf in keras.tree.flatten(sources)):
        raise ValueError(
            f"A Jacobian is with respect to arrays with a row for each of {batch} examples. Received: wrt={wrt!r}, of "
            f"shape {_shapes(sources)}. Use vjp or jvp, which take any shape."
        )
    return sources, _rows(target, batch, lambda row: keras.tree.flatten(_pulled(tape, target, sources, row)))


def _length(x: Any) -> int | None:
    return keras.tree.flatten(x)[0].shape[0]


def _rows(target: Any, batch: int | None, pull: Callable[[Any], list[Any]]) -> list[Any]:
    """The results of `pull` for each entry of the target per example, stacked after the batch axis."""
    if not tf.is_tensor(target) or not target.shape.rank or target.shape[0] != batch:
        raise ValueError(
            f"A Jacobian is of one array with a row for each of {batch} examples. Received: `of` of shape "
            f"{_shapes(target)}. Pass a function that picks one, such as of=lambda outputs: outputs[0]."
        )
    shape = tuple(target.shape[1:])
    if None in shape:
        raise ValueError(f"The rows of a Jacobian are counted beforehand. Received: `of` of shape {target.shape}.")
    length = target.shape[1:].num_elements()
    one = tf.reshape(tf.eye(length, dtype=target.dtype), (length, 1, *shape))
    rows = [pull(tf.zeros_like(target) + one[number]) for number in range(length)]
    stacked = [tf.stack(column, 1) for column in zip(*rows, strict=True)]
    return [tf.reshape(each, (-1, *shape, *each.shape[2:])) for each in stacked]


# ---------------------------------------------------------------- parsing `of` and `wrt`


@dataclass(frozen=True, eq=False)
class _Question:
    """The parsed `of` and `wrt`; without `inputs` and `site` the derivative is with respect to the weights."""

    x: Any
    of: Any
    inputs: Any = None
    site: Site | None = None


def _check(model: Any) -> None:
    backend.require_tensorflow("pk.gradients")
    check_built(model)


def _second_order(model: Any, x: Any, y: Any, vectors: Sequence[Any]) -> tuple[list[Any], Any, Any, Any]:
    """(variables, vectors, x, y): TensorFlow's trainable variables, and the others as tensors."""
    _check(model)
    variables = [backend.native(variable) for variable in model.trainable_variables]
    return variables, _matched("vectors", list(vectors), variables), tensors(model, x), tensors(model, y)


def _question(model: Any, x: Any, of: Any, wrt: Any) -> _Question:
    _check(model)
    x = tensors(model, x)
    if of is not None and not callable(of):
        of = find_site(model, of, "of")
    if wrt is None or wrt == "weights":
        return _Question(x, of)
    if wrt == "inputs":
        return _Question(x, of, inputs=own_tensors(x))
    return _Question(x, of, site=find_site(model, wrt, "wrt"))


def _forward(
    model: Any, x: Any, of: Any, wrt: Any, *, training: bool, persistent: bool = False
) -> tuple[Any, Any, tf.GradientTape]:
    """(target, sources, tape) of one watched pass."""
    question = _question(model, x, of, wrt)
    sources: Any = [backend.native(variable) for variable in model.trainable_variables]
    options: dict[str, Any] = {"training": training, "of": question.of}
    of_weights = question.inputs is None and question.site is None
    with tf.GradientTape(persistent=persistent, watch_accessed_variables=of_weights) as tape:
        if question.site is not None:

            def through(outputs: Any) -> Any:
                nonlocal sources
                sources = own_tensors(outputs, tape.watch)
                return sources

            options |= {"at": question.site, "through": through}
        elif question.inputs is not None:
            sources = question.inputs
            tape.watch([leaf for leaf in keras.tree.flatten(sources) if is_differentiable(leaf)])
        target = run(model, question.x if question.inputs is None else sources, **options)
    _check_differentiable(sources, wrt)
    return target, sources, tape


def _check_differentiable(structure: Any, wrt: Any) -> None:
    for leaf in keras.tree.flatten(structure):
        if not leaf.dtype.is_floating:
            raise ValueError(
                f"A derivative is with respect to floating-point numbers. Received: wrt={wrt!r}, of type "
                f"{leaf.dtype.name}. Name a layer after it, such as the embedding that looks these numbers up."
            )


def _matched(name: str, given: Any, wanted: Any) -> Any:
    """`given` as tensors, each in the dtype of the corresponding tensor in `wanted`."""
    try:
        keras.tree.assert_same_structure(given, wanted)
        pairs = zip(keras.tree.flatten(given), keras.tree.flatten(wanted), strict=True)
        cast = [tf.cast(tf.convert_to_tensor(one), other.dtype) for one, other in pairs]
    except (TypeError, ValueError) as error:
        raise ValueError(_mismatch(name, given, wanted)) from error
    for one, other in zip(cast, keras.tree.flatten(wanted), strict=True):
        if not one.shape.is_compatible_with(other.shape):
            raise ValueError(_mismatch(name, given, wanted))
    return keras.tree.pack_sequence_as(wanted, cast)


def _mismatch(name: str, given: Any, wanted: Any) -> str:
    return f"`{name}` has the shapes {_shapes(wanted)}, in that structure. Received: {_shapes(given)}."


def _shapes(structure: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: str(tuple(getattr(leaf, "shape", ()))), structure)


def _pulled(tape: tf.GradientTape, target: Any, sources: Any, cotangent: Any) -> Any:
    found = tape.gradient(target, keras.tree.flatten(sources), output_gradients=cotangent, unconnected_gradients="zero")
    return keras.tree.pack_sequence_as(sources, [_dense(gradient) for gradient in found])


def _pushed(tape: tf.GradientTape, target: Any, sources: Any, tangents: Any) -> Any:
    """J tangents, as the derivative of cotangent^T J, which is linear in the cotangent, along the tangents."""
    # tf.autodiff.ForwardAccumulator cannot pass the loops of recurrent layers in a tf.function.
    zeros = [tf.zeros_like(leaf) for leaf in keras.tree.flatten(target)]
    with tf.GradientTape(watch_accessed_variables=False) as outer:
        outer.watch(zeros)
        pulled = _pulled(tape, target, sources, keras.tree.pack_sequence_as(target, zeros))
    pairs = [keras.tree.flatten(structure) for structure in (pulled, tangents)]
    moved = outer.gradient(pairs[0], zeros, output_gradients=pairs[1], unconnected_gradients="zero")
    return keras.tree.pack_sequence_as(target, moved)


def _dense(gradient: Any) -> Any:
    return None if gradient is None else tf.convert_to_tensor(gradient)

"""The teacher: a model in inference mode, which no training step changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras import ops

from prunekit.anatomy.layers.model_weights import check_built
from prunekit.core.runtime import backend, jax_state
from prunekit.core.runtime.model_copies import copied_model
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.distill.feature_maps import named_layer, recorded
from prunekit.techniques.distill.output_cache import Row
from prunekit.techniques.distill.output_kinds import OutputKind, logits_of, output_kinds

# Largest number of float16.
_HIGHEST = 65_504.0


def copy_of(model: Any) -> Any:
    """Returns a copy of a built model with weights of its own; draws no random numbers.

    Raises:
        ValueError: The model cannot be copied.
    """
    try:
        copy = copied_model(model)
        with backend.variable_scope(model):
            # The loss says whether outputs are logits.
            keras.Model.compile(copy, loss=getattr(model, "loss", None))
    except Exception as error:
        # Classes of users fail in many ways.
        raise ValueError(
            f"Without `teacher`, a copy of the model teaches it. Received: {model.name!r}, which cannot be copied "
            f"({type(error).__name__}: {' '.join(str(error).split())[:120]}). Pass the teacher, such as another model "
            "of its class, called once on a batch, after teacher.set_weights(model.get_weights())."
        ) from error
    return copy


def check_teacher(teacher: Any, model: Any) -> None:
    """Raises unless `teacher` is a built Keras model with weights of its own.

    Raises:
        TypeError: It is not a Keras model.
        ValueError: It is not built, shares weights with the model that it teaches, or has other outputs.
    """
    if not isinstance(teacher, keras.Model):
        raise TypeError(
            f"`teacher` is a Keras 3 model or None. Received: {teacher!r} of type {type(teacher).__name__}."
        )
    check_built(teacher)
    own = {id(variable) for variable in model.variables}
    shared = next((one for one in teacher.variables if id(one) in own), None)
    if shared is not None:
        raise ValueError(
            f"A teacher keeps its weights while its student trains. Received: {teacher.name!r}, which shares "
            f"{shared.path} with the model. Pass a copy, such as what keras.models.load_model returns for a saved file."
        )
    check_shapes(_sizes(teacher), _sizes(model))


def check_shapes(teacher: Sequence[tuple[Any, ...]], student: Sequence[tuple[Any, ...]]) -> None:
    """Raises unless outputs have the same shapes.

    Args:
        teacher: Shapes of the teacher's outputs without the batch, None for what is not known; () = nothing is known.
        student: Those of the student.

    Raises:
        ValueError: Outputs differ in number or size.
    """
    if not (teacher and student):
        return
    pairs = [(len(one), len(two)) for one, two in zip(teacher, student, strict=False)]
    pairs += [pair for shapes in zip(teacher, student, strict=False) for pair in zip(*shapes, strict=False)]
    if len(teacher) != len(student) or any(one != two and None not in (one, two) for one, two in pairs):
        listed = [", ".join(map(str, shapes)) for shapes in (teacher, student)]
        raise ValueError(
            f"A teacher has outputs of the same shapes as its student. Received: outputs of shapes {listed[0]}, and "
            f"{listed[1]} of the student, without the batch. Pass a model of the same task."
        )


def _sizes(model: Any) -> list[tuple[Any, ...]]:
    return [tuple(one.shape)[1:] for one in keras.tree.flatten(getattr(model, "outputs", None) or [])]


class Teacher:
    """A teacher's outputs inside the training steps of its student.

    On JAX, where a step gets its variables as arguments and may be given their memory, it gets copies of the weights.

    Args:
        model: The teacher.
        kinds: Kinds of the student's outputs.
        layers: Names of layers whose outputs are returned, too.
        cached: Whether the outputs may be kept.

    Raises:
        ValueError: A layer does not exist.
    """

    def __init__(self, model: Any, kinds: list[OutputKind], layers: Sequence[str], *, cached: bool):
        self.model = model
        self.kinds = output_kinds(model, like=kinds)
        self.layers = [named_layer(model, name, "teacher") for name in layers]
        self.row = self._row() if cached and not layers else None
        self.variables: list[Any] = []
        if jax_state.steps_are_pure():
            self.variables = [
                keras.Variable(array_of(one), dtype=one.dtype, trainable=False, autocast=False)
                for one in model.variables
            ]

    def _row(self) -> Row | None:
        """Returns shapes and dtypes of the outputs of one example; None if a shape is open."""
        shapes = []
        for kind, tensor in zip(
            self.kinds, keras.tree.flatten(getattr(self.model, "outputs", None) or []), strict=False
        ):
            shape = tuple(tensor.shape)[1:]
            if any(length is None for length in shape):
                return None
            shapes.append((*shape, 2) if kind.tells_yes_no else shape)
        if not shapes:
            return None
        values = OutputKind.VALUES
        return Row(tuple(shapes), tuple("float32" if kind is values else "float16" for kind in self.kinds))

    def outputs(self, inputs: Any) -> tuple[list[Any], list[Any]]:
        """Returns the outputs, and the outputs of the layers; no gradient flows into them.

        Outputs are logits in float16, a precision that a divergence does not notice, or values in float32: the same
        whether they are kept or calculated.
        """
        with _without_gradients(), self._values(), recorded(self.layers) as seen:
            found = keras.tree.flatten(self.model(inputs, training=False))
            outputs = [ops.stop_gradient(_kept(kind, one)) for kind, one in zip(self.kinds, found, strict=True)]
            features = [ops.stop_gradient(ops.cast(one, "float32")) for one in seen.outputs()]
        # Tensors of a trace, which would be read by the next use of the teacher.
        self.model._clear_losses()
        return outputs, features

    @contextlib.contextmanager
    def _values(self) -> Iterator[None]:
        if not self.variables:
            yield
            return
        pairs = [(one, copy.value) for one, copy in zip(self.model.variables, self.variables, strict=True)]
        # What is assigned inside, such as states of random seeds, and losses that layers add belong to no step.
        with keras.StatelessScope(state_mapping=pairs):
            yield


def _kept(kind: OutputKind, output: Any) -> Any:
    found = logits_of(kind, output)
    return found if kind is OutputKind.VALUES else ops.cast(ops.clip(found, -_HIGHEST, _HIGHEST), "float16")


@contextlib.contextmanager
def _without_gradients() -> Iterator[None]:
    """On PyTorch, nothing is kept for a backward pass inside the scope; other backends need none."""
    if keras.backend.backend() != "torch":
        yield
        return
    import torch

    with torch.no_grad():
        yield
